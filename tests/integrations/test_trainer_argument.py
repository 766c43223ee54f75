"""``Trainer(..., memsave=...)``: every trainer takes it once hf_memsave is imported, and that can be taken back."""

import functools
import subprocess
import sys
from typing import Protocol

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

import hf_memsave
from hf_memsave import ConfigError, MemSaveCallback, MemSaveConfig
from hf_memsave.patching.swap import patch_of
from support.families import build
from support.helpers import only_on_cpu
from support.rows import Rows
from support.steps import assert_same, patched_classes


class Forwards(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Lists(Trainer):
    def __init__(self, model=None, args=None, train_dataset=None):
        super().__init__(model, args, train_dataset=train_dataset)


class ListsBelow(Lists):
    def __init__(self, model, args, train_dataset):
        super().__init__(model=model, args=args, train_dataset=train_dataset)


class TakesItself(Trainer):
    def __init__(self, model, args, train_dataset, memsave=None):
        super().__init__(model, args, train_dataset=train_dataset, memsave={"norm": "stock"} if memsave else None)


class Drops(Trainer):
    def __init__(self, model=None, args=None, train_dataset=None, **kwargs):
        super().__init__(model, args, train_dataset=train_dataset)


class Says(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs | {"memsave": {"norm": "stock"}})


class DropsAllBut(Trainer):
    def __init__(self, model, args, callbacks=None, **kwargs):
        super().__init__(model, args, callbacks=callbacks)


class HasScore(Protocol):
    score: float


class Scores(HasScore, Trainer):  # its ``__init__`` is the Trainer's, by what typing puts into a protocol
    pass


class Mixed(hf_memsave.MemSaveMixin, Lists):
    pass


@pytest.fixture
def arguments(tmp_path, device):
    only_on_cpu(device)
    fixed = dict(report_to=[], use_cpu=True, disable_tqdm=True, per_device_train_batch_size=4, logging_steps=1, seed=3)
    fixed |= dict(max_steps=2, save_strategy="no")
    return lambda **options: Seq2SeqTrainingArguments(tmp_path, **fixed | options)


def callbacks(trainer):
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, MemSaveCallback)]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_stock_trainer_takes_every_form_of_the_argument(arguments, tmp_path):
    gate, file = MemSaveConfig(checkpoint="gate"), str(tmp_path / "gate.json")
    gate.to_file(file)
    for value, config in ((True, MemSaveConfig()), ("exact", MemSaveConfig()), (file, gate), (gate, gate)):
        assert patch_of(Trainer(build("llama"), arguments(), memsave=value).model).config == config
    ours = Trainer(build("llama"), arguments(), train_dataset=Rows("llama"), memsave={"checkpoint": "gate"})
    stock = Trainer(build("llama"), arguments(), train_dataset=Rows("llama"))
    assert patch_of(ours.model).config == gate and patched_classes(stock.model) == {}
    for trainer in (ours, stock):
        torch.manual_seed(5)
        trainer.train()
    assert losses(ours) == losses(stock) and len(set(losses(stock))) == 2
    assert_same(dict(ours.model.named_parameters()), dict(stock.model.named_parameters()))
    assert ours.state.log_history[0]["memsave/freed_mib"] > 0


def test_no_is_no(arguments):
    for value in (False, None):
        trainer = Trainer(build("llama"), arguments(), memsave=value)
        assert patched_classes(trainer.model) == {} and callbacks(trainer) == []


@pytest.mark.parametrize(
    "cls", [Seq2SeqTrainer, Forwards, Lists, ListsBelow, Drops, Scores, Mixed], ids=lambda c: c.__name__
)
def test_a_subclass_takes_it_whatever_its_own_signature(cls, arguments):
    trainer = cls(build("llama"), arguments(), train_dataset=Rows("llama"), memsave={"norm": "stock"})
    assert patch_of(trainer.model).config == MemSaveConfig(norm="stock") and len(callbacks(trainer)) == 1
    if cls is not Mixed:
        assert patched_classes(cls(model=build("llama"), args=arguments(), train_dataset=Rows("llama")).model) == {}


@pytest.mark.parametrize(("cls", "value"), [(TakesItself, "anything"), (Says, "exact"), (Says, None)])
def test_a_subclass_that_says_what_it_is_decides(cls, value, arguments):
    trainer = cls(build("llama"), arguments(), train_dataset=Rows("llama"), memsave=value)
    assert patch_of(trainer.model).config == MemSaveConfig(norm="stock") and len(callbacks(trainer)) == 1


@pytest.mark.parametrize("cls", [Trainer, Forwards, DropsAllBut, hf_memsave.MemSaveTrainer], ids=lambda c: c.__name__)
def test_there_is_one_callback_and_it_comes_first(cls, arguments):
    given = MemSaveCallback("exact"), MemSaveCallback()
    for callback in given:
        trainer = cls(build("llama"), arguments(), callbacks=[callback], memsave=True)
        assert callbacks(trainer) == trainer.callback_handler.callbacks[:1] == [callback]
    with pytest.raises(ConfigError, match="has a MemSaveCallback of .*checkpoint='gate'.*got memsave=.*one of the two"):
        cls(build("llama"), arguments(), callbacks=[MemSaveCallback({"checkpoint": "gate"})], memsave=True)


@pytest.mark.parametrize("cls", [Trainer, Lists], ids=lambda c: c.__name__)
def test_a_wrong_value_is_told_before_anything_is_made(cls, arguments, monkeypatch):
    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", lambda *_: pytest.fail("it was made"))
    with pytest.raises(ConfigError, match="unknown preset 'exakt'"):
        cls(build("llama"), arguments(), memsave="exakt")


def test_a_model_of_model_init_is_patched_and_a_resumed_run_ends_as_one_that_never_stopped(arguments, tmp_path):
    options = dict(max_steps=4, save_strategy="steps", save_steps=2)

    def trainer(**more):
        return Trainer(
            args=arguments(**options | more), model_init=lambda: build("llama"), train_dataset=Rows("llama"),
            memsave="wta-crs",
        )  # fmt: skip

    whole = trainer()
    whole.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for found in (whole, resumed):
        assert patch_of(found.model).config == MemSaveConfig.preset("wta-crs") and len(callbacks(found)) == 1
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 4
    assert_same(dict(resumed.model.named_parameters()), dict(whole.model.named_parameters()))


def test_a_config_gives_its_callback():
    callback = MemSaveConfig(norm="stock").callback(undo=True)
    assert type(callback) is MemSaveCallback and (callback.config, callback.undo) == (MemSaveConfig(norm="stock"), True)


# What import changes, and the way back.

CHANGED = """
import sys
from transformers.models.auto import modeling_auto
import peft, transformers, transformers.trainer
class Earlier(transformers.Trainer):
    def __init__(self, model, args):
        super().__init__(model, args)
def state():
    autos = [c for c in vars(modeling_auto).values() if isinstance(c, type) and hasattr(c, "from_config")]
    classes = [transformers.PreTrainedModel, *autos, *autos[0].__mro__[1:-1], transformers.Trainer, Earlier,
               transformers.Seq2SeqTrainer, peft.tuners.tuners_utils.BaseTuner]
    return [dict(vars(c)) for c in classes], list(sys.meta_path)
before = state()
import hf_memsave
first = state()
hf_memsave.MemSaveConfig(), hf_memsave.MemSaveCallback(), hf_memsave.MemSaveTrainer
"""
ALL = """
class Later(transformers.Trainer):
    def __init__(self, model):
        super().__init__(model)
assert first != before and vars(Later)["__init__"].__wrapped__
hf_memsave.MemSaveLoraConfig()
taught = state()
hf_memsave.uninstall(), hf_memsave.uninstall()
assert state() == before and not hasattr(Later.__init__, "__wrapped__")
hf_memsave.install(), hf_memsave.install()
assert {n: f.__qualname__ for n, f in vars(Earlier).items() if n == "__init__"} and state() != before
hf_memsave.uninstall()
assert state() == before
"""
NONE = "assert first == before == state()\n"
#: Nothing of Transformers is imported yet: hooks wait for it, and no longer once taken back.
WAITING = """
import sys, hf_memsave
from hf_memsave.integrations.hooks import _WhenImported
assert not {"torch", "transformers", "peft"} & set(sys.modules)
def waiting():
    return sorted(f.name for f in sys.meta_path if isinstance(f, _WhenImported))
own = ["hf_memsave.patching.patch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto",
       "transformers.trainer"]
assert waiting() == own
if not TAKE_BACK:
    hf_memsave.patch
    from hf_memsave.integrations import adapters
    from hf_memsave.patching.patch import LISTENERS
    assert LISTENERS == [adapters._when_patched]
    adapters.watch()
    assert set(waiting()) <= {"peft.tuners.tuners_utils", *own[1:]}
    assert {"peft.tuners.tuners_utils", "transformers.trainer"} <= set(waiting())
else:
    hf_memsave.uninstall()
import transformers.trainer, peft
from transformers import AutoModel, PreTrainedModel
assert waiting() == []
for f in (transformers.Trainer.__init__, AutoModel.from_pretrained, PreTrainedModel.from_pretrained):
    assert hasattr(f, "_memsave_stock") != TAKE_BACK, f
assert hasattr(peft.tuners.tuners_utils.BaseTuner.inject_adapter, "_memsave_stock") != TAKE_BACK
"""

#: What LoRA needs is the first thing loaded, as in a process that unpickles a config.
LORA_FIRST = "import transformers.modeling_utils, peft, hf_memsave; hf_memsave.MemSaveLoraConfig(r=4)"
#: A zip file has one loader for all modules of a folder.
ZIPPED = """
import sys, zipfile, pathlib, hf_memsave
folder = pathlib.Path(hf_memsave.__file__).parent
with zipfile.ZipFile(PLACE, "w") as file:
    for path in (p for p in folder.rglob("*") if p.is_file() and p.suffix in (".py", ".yaml", ".json")):
        file.write(path, path.relative_to(folder.parent))
hf_memsave.uninstall()
for name in [n for n in sys.modules if n.startswith("hf_memsave")]:
    del sys.modules[name]
sys.path.insert(0, PLACE)
import hf_memsave
assert PLACE in hf_memsave.__file__
hf_memsave.patch
assert len(sys.modules["hf_memsave.patching.patch"].LISTENERS) == 1
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "switch"),
    [
        (CHANGED + ALL, {"HF_MEMSAVE_NO_HOOKS": "0"}),
        (CHANGED + NONE, {"HF_MEMSAVE_NO_HOOKS": "1"}),
        (WAITING.replace("TAKE_BACK", "False"), {}),
        (WAITING.replace("TAKE_BACK", "True"), {}),
        (LORA_FIRST, {}),
        (ZIPPED, {}),
    ],
    ids=["taken back, and 0 is no", "never", "waiting", "waiting no longer", "LoRA first", "zipped"],
)
def test_what_import_changes_in_other_libraries(code, switch, monkeypatch, tmp_path):
    for name, value in switch.items():
        monkeypatch.setenv(name, value)
    code = code.replace("PLACE", repr(str(tmp_path / "hf_memsave.zip")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def uninstalled():
    hf_memsave.uninstall()
    yield
    hf_memsave.install()


def test_without_hooks_the_argument_goes_to_the_library_as_it_is(uninstalled, arguments, tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    for load in (
        lambda: Trainer(model, arguments(), memsave=True),
        lambda: LlamaForCausalLM.from_pretrained(tmp_path, memsave=True),
        lambda: LlamaForCausalLM._from_config(model.config, memsave=True),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument 'memsave'"):
            load()
    trainer = hf_memsave.MemSaveTrainer(model, arguments(), train_dataset=Rows("llama"), memsave={"checkpoint": "gate"})
    trainer.train()
    assert patch_of(model).config == MemSaveConfig(checkpoint="gate")


def test_what_another_library_put_over_ours_is_left(caplog):
    found = vars(PreTrainedModel)["from_pretrained"]

    @functools.wraps(found.__func__)
    def theirs(cls, *args, **kwargs):
        return found.__func__(cls, *args, **kwargs)

    PreTrainedModel.from_pretrained = classmethod(theirs)
    try:
        hf_memsave.uninstall()
        assert PreTrainedModel.from_pretrained.__func__ is theirs
    finally:
        PreTrainedModel.from_pretrained = found.__func__._memsave_stock[1]
        hf_memsave.install()
    assert not hasattr(found.__func__._memsave_stock[1].__func__, "_memsave_stock")
