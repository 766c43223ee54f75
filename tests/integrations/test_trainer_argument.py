"""``Trainer(..., memsave=...)``: every trainer takes it once hf_memsave is imported, and that can be taken back."""

import dataclasses
import functools
import pickle
import subprocess
import sys

import pytest
import torch
import trl
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

import hf_memsave
from hf_memsave import ConfigError, MemSaveCallback, MemSaveConfig
from hf_memsave.patching.swap import patch_of
from support import rows
from support.helpers import only_on_cpu
from support.rows import Rows, logged
from support.steps import assert_same, patched_classes
from support.zoo import build


class Lists(Trainer):
    def __init__(self, model=None, args=None, train_dataset=None):
        super().__init__(model, args, train_dataset=train_dataset)


class ListsBelow(Lists):
    def __init__(self, model, args, train_dataset):
        super().__init__(model=model, args=args, train_dataset=train_dataset)


class Drops(Trainer):
    def __init__(self, model=None, args=None, train_dataset=None, **kwargs):
        super().__init__(model, args, train_dataset=train_dataset)


class Says(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs | {"memsave": {"norm": "stock"}})


class DropsAllBut(Trainer):
    def __init__(self, model, args, callbacks=None, **kwargs):
        super().__init__(model, args, callbacks=callbacks)


class Mixed(hf_memsave.MemSaveMixin, Lists):
    pass


@pytest.fixture
def arguments(tmp_path, device):
    only_on_cpu(device)
    return lambda: rows.arguments(tmp_path, Seq2SeqTrainingArguments, max_steps=2)


def callbacks(trainer):
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, MemSaveCallback)]


def test_the_stock_trainer_takes_every_form_of_the_argument(arguments, tmp_path):
    gate, file = MemSaveConfig(checkpoint="gate"), str(tmp_path / "gate.json")
    gate.to_file(file)
    for value, config in ((True, MemSaveConfig()), ("exact", MemSaveConfig()), (file, gate), (gate, gate)):
        assert patch_of(Trainer(build("llama"), arguments(), memsave=value).model).config == config
    for value in (False, None):
        trainer = Trainer(build("llama"), arguments(), memsave=value)
        assert patched_classes(trainer.model) == {} and callbacks(trainer) == []
    ours = Trainer(build("llama"), arguments(), train_dataset=Rows("llama"), memsave={"checkpoint": "gate"})
    stock = Trainer(build("llama"), arguments(), train_dataset=Rows("llama"))
    assert patch_of(ours.model).config == gate and patched_classes(stock.model) == {}
    for trainer in (ours, stock):
        torch.manual_seed(5)
        trainer.train()
    assert logged(ours) == logged(stock) and len(set(logged(stock))) == 2
    assert_same(dict(ours.model.named_parameters()), dict(stock.model.named_parameters()))
    assert ours.state.log_history[0]["memsave/freed_fraction"] > 0.1


@pytest.mark.parametrize("cls", [Trainer, ListsBelow, Drops, Mixed], ids=lambda c: c.__name__)
def test_false_trains_stock_what_was_patched_before(cls, arguments, caplog):
    model, stock = build("llama"), build("llama")
    hf_memsave.patch(model, "gate")
    with caplog.at_level("INFO", "hf_memsave"):
        trainers = [cls(one, arguments(), train_dataset=Rows("llama"), memsave=False) for one in (model, stock)]
    assert [record.getMessage() for record in caplog.records if record.name == "hf_memsave"] == [
        "memsave=False: the model was patched, and is stock again. hf_memsave.patch(model) patches it."
    ]
    for trainer in trainers:
        trainer.train()
        assert patched_classes(trainer.model) == {} and "memsave" not in str(trainer.state.log_history)
    assert logged(trainers[0]) == logged(trainers[1])
    hf_memsave.patch(model, "gate")
    assert patch_of(cls(model, arguments(), train_dataset=Rows("llama")).model).config.checkpoint == "gate"


def test_false_makes_a_model_stock_of_which_swap_alone_is_imported(arguments, monkeypatch):
    """As by a pickle."""
    hf_memsave.patch(model := build("llama"))
    monkeypatch.delitem(sys.modules, "hf_memsave.patching.patch")
    Trainer(model, arguments(), train_dataset=Rows("llama"), memsave=False)
    assert patched_classes(model) == {}


def test_false_leaves_a_callback_of_the_callers_own(arguments):
    trainer = Trainer(build("llama"), arguments(), callbacks=[MemSaveCallback({"norm": "stock"})], memsave=False)
    assert patch_of(trainer.model).config == MemSaveConfig(norm="stock")
    trainer = Says(build("llama"), arguments(), train_dataset=Rows("llama"), memsave=False)
    assert patch_of(trainer.model).config == MemSaveConfig(norm="stock")


@pytest.mark.parametrize("cls", [Seq2SeqTrainer, ListsBelow, Drops, Mixed], ids=lambda c: c.__name__)
def test_a_subclass_takes_it_whatever_its_own_signature(cls, arguments):
    trainer = cls(build("llama"), arguments(), train_dataset=Rows("llama"), memsave={"norm": "stock"})
    assert patch_of(trainer.model).config == MemSaveConfig(norm="stock") and len(callbacks(trainer)) == 1
    if cls is not Mixed:
        assert patched_classes(cls(model=build("llama"), args=arguments(), train_dataset=Rows("llama")).model) == {}


@pytest.mark.parametrize("value", ["exact", None])
def test_a_subclass_that_says_what_it_is_decides(value, arguments):
    trainer = Says(build("llama"), arguments(), train_dataset=Rows("llama"), memsave=value)
    assert patch_of(trainer.model).config == MemSaveConfig(norm="stock") and len(callbacks(trainer)) == 1


@pytest.mark.parametrize("cls", [Trainer, DropsAllBut, hf_memsave.MemSaveTrainer], ids=lambda c: c.__name__)
def test_there_is_one_callback_and_it_comes_first(cls, arguments):
    given = MemSaveCallback("exact"), MemSaveCallback()
    for callback in given:
        trainer = cls(build("llama"), arguments(), callbacks=[callback], memsave=True)
        assert callbacks(trainer) == trainer.callback_handler.callbacks[:1] == [callback]
    with pytest.raises(ConfigError, match="has MemSaveCallback.*checkpoint='gate'.*got memsave=.*one of the two"):
        cls(build("llama"), arguments(), callbacks=[MemSaveCallback({"checkpoint": "gate"})], memsave=True)


def test_a_wrong_value_is_told_before_anything_is_made(arguments, monkeypatch):
    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", lambda *_: pytest.fail("it was made"))
    for cls in (Trainer, Lists):
        with pytest.raises(ConfigError, match="unknown preset 'exakt'"):
            cls(build("llama"), arguments(), memsave="exakt")


@dataclasses.dataclass
class Extended(TrainingArguments):
    """With a field of that name, which is the user's own."""

    memsave: str = ""


def test_the_trainers_config_says_where_it_goes(tmp_path):
    assert issubclass(trl.SFTTrainer, Trainer)  # imported with its config, as in users' scripts
    for cls in (TrainingArguments, Seq2SeqTrainingArguments, trl.SFTConfig):
        with pytest.raises(
            TypeError, match=rf"Use (SFT|Seq2Seq)?Trainer\(model, {cls.__name__}\(\.\.\.\), memsave='gate'\)"
        ):
            cls(str(tmp_path), memsave="gate")
    assert Extended(str(tmp_path), memsave="gate").memsave == "gate"
    arguments = TrainingArguments(str(tmp_path), max_steps=3)
    assert pickle.loads(pickle.dumps(arguments)).max_steps == dataclasses.replace(arguments).max_steps == 3


def test_a_model_of_model_init_is_patched_once(arguments):
    trainer = Trainer(
        args=arguments(), model_init=lambda: build("llama"), train_dataset=Rows("llama"), memsave="wta-crs"
    )
    trainer.train()
    assert patch_of(trainer.model).config == MemSaveConfig.preset("wta-crs") and len(callbacks(trainer)) == 1


# What import changes, and the way back.

#: The order of every recipe, and the config alone: no trainer is imported.
FIRST = """
import hf_memsave
from trl import SFTConfig
try:
    SFTConfig("out", memsave=True)
except TypeError as error:
    print(error)
"""


@pytest.mark.long
def test_trls_config_says_it_where_hf_memsave_comes_first(tmp_path):
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, cwd=tmp_path)
    assert "Use SFTTrainer(model, SFTConfig(...), memsave=True)." in done.stdout, done.stderr[-2000:]


#: Nothing of Transformers is imported yet: hooks wait for it, and no longer once taken back.
WAITING = """
import sys, hf_memsave
from hf_memsave.integrations.hooks import _WhenImported
assert not {"torch", "transformers", "peft"} & set(sys.modules)
def waiting():
    return sorted(f.name for f in sys.meta_path if isinstance(f, _WhenImported))
own = ["peft.mixed_model", "peft.peft_model", "peft.tuners.tuners_utils"]
own += [f"transformers.{name}" for name in ("modeling_utils", "trainer", "training_args", "training_args_seq2seq")]
own += ["trl.trainer.sft_config"]
"""
#: What all of it changes, and that it can be taken back.
CHANGED = """
assert waiting() == own
hf_memsave.uninstall()
assert waiting() == []
hf_memsave.install()
assert waiting() == own
import transformers.trainer, transformers.training_args_seq2seq, peft, trl.trainer.sft_config
from transformers.trainer_callback import CallbackHandler
assert waiting() == []
class Earlier(transformers.Trainer):
    def __init__(self, model, args):
        super().__init__(model, args)
classes = [transformers.PreTrainedModel, transformers.Trainer, Earlier, transformers.Seq2SeqTrainer,
           peft.tuners.tuners_utils.BaseTuner, peft.PeftModel, CallbackHandler, transformers.TrainingArguments,
           transformers.Seq2SeqTrainingArguments]
def state():
    return [dict(vars(c)) for c in classes], list(sys.meta_path)
def changed():
    found = ((c, n, getattr(f, "__func__", f)) for c in classes for n, f in vars(c).items())
    return {f"{c.__name__}.{n}" for c, n, function in found if hasattr(function, "_memsave_stock")}
EXPECTED = {"PreTrainedModel.from_pretrained", "PreTrainedModel._from_config", "Trainer.__init__", "Earlier.__init__",
            "BaseTuner.inject_adapter", "PeftModel.from_pretrained", "Trainer.__init_subclass__",
            "CallbackHandler.add_callback", "TrainingArguments.__init__", "Seq2SeqTrainingArguments.__init__"}
assert EXPECTED <= changed()
hf_memsave.uninstall(), hf_memsave.uninstall()
assert changed() == set() and "__init_subclass__" not in vars(transformers.Trainer)
before = state()
hf_memsave.install(), hf_memsave.install()
class Later(transformers.Trainer):
    def __init__(self, model):
        super().__init__(model)
assert vars(Later)["__init__"].__wrapped__
hf_memsave.MemSaveLoraConfig(), hf_memsave.MemSaveCallback(), hf_memsave.MemSaveTrainer
assert EXPECTED <= changed()
hf_memsave.uninstall()
assert state() == before and not hasattr(Later.__init__, "__wrapped__")
"""


@pytest.mark.long
def test_what_import_changes_in_other_libraries(monkeypatch):
    for code, switch in ((CHANGED, "0"), ("assert waiting() == []", "1")):
        monkeypatch.setenv("HF_MEMSAVE_NO_HOOKS", switch)
        done = subprocess.run([sys.executable, "-c", WAITING + code], capture_output=True, text=True)
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
    assert callbacks(trainer) == trainer.callback_handler.callbacks[:1]
    behind = Trainer(build("llama"), arguments(), callbacks=[MemSaveCallback()])
    assert callbacks(behind) == behind.callback_handler.callbacks[-2:-1]  # before what prints the logs


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
