"""``MemSaveCallback``, ``MemSaveTrainer`` and the mixin: patched at the right moment, reported, logged, undone."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_memsave
from hf_memsave import ConfigError, MemSaveCallback, MemSaveConfig, MemSaveTrainer, PatchError, measure_kept, unpatch
from hf_memsave.patching.swap import is_patched, patch_of
from support.families import build
from support.helpers import only_on_cpu
from support.rows import Rows
from support.steps import assert_same, patched_classes

MIB = 2**20


class Reporter(TrainerCallback):
    """Stands where those of ``report_to`` stand: before the user's callbacks."""

    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged.append(dict(logs))


@pytest.fixture
def make(tmp_path, device):
    only_on_cpu(device)

    def make(model="llama", cls=Trainer, callbacks=(), model_init=None, trainer=None, **options):
        options = {"max_steps": 3, "bf16": False, "save_strategy": "no", **options}
        arguments = TrainingArguments(
            tmp_path / "out", per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True,
            disable_tqdm=True, learning_rate=1e-2, **options,
        )  # fmt: skip
        if model_init is None:
            model = build(model) if isinstance(model, str) else model
        else:
            model = None
        return cls(
            model, arguments, train_dataset=Rows("llama"), callbacks=list(callbacks), model_init=model_init,
            **(trainer or {}),
        )  # fmt: skip

    return make


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_report_is_printed_once_and_the_model_is_patched_from_the_start(make, capsys):
    callback = MemSaveCallback()
    trainer = make(callbacks=[callback])
    assert "LlamaDecoderLayer" in patched_classes(trainer.model).values()
    trainer.train()
    trainer.train()
    assert capsys.readouterr().out.count("repeated blocks covered") == 1
    assert callback.report.config == MemSaveConfig()


@pytest.mark.parametrize("bf16", [False, True])
def test_every_reporter_gets_what_the_first_step_kept_and_freed(make, bf16):
    reporter = Reporter()
    trainer = make(callbacks=[reporter], bf16=bf16)
    MemSaveCallback().add_to(trainer)
    trainer.train()
    with_loss = [logs for logs in reporter.logged if "loss" in logs]
    assert len(with_loss) == 3
    batch = {k: torch.stack([row[k] for row in Rows("llama")][:4]) for k in ("input_ids", "attention_mask", "labels")}
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        ours = measure_kept(trainer.model, batch).total
        unpatch(trainer.model)
        stock = measure_kept(trainer.model, batch).total
    for logs in with_loss:
        assert logs["memsave/kept_mib"] * MIB == pytest.approx(ours, rel=0.02)  # a batch with other padding
        assert logs["memsave/freed_mib"] * MIB == pytest.approx(stock - ours, rel=0.05)
        assert "memsave/peak_mib" not in logs
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["memsave/kept_mib"] for entry in history] == [logs["memsave/kept_mib"] for logs in with_loss]


def test_watching_the_first_step_changes_no_bit_and_saved_models_are_stocks(make, tmp_path):
    runs, saved = [], []
    for number, callbacks in enumerate(([], [MemSaveCallback()])):
        trainer = make(callbacks=callbacks, seed=3)
        trainer.train()
        runs.append((losses(trainer), dict(trainer.model.named_parameters())))
        trainer.save_model(tmp_path / str(number))
        saved.append({p.name: p.read_bytes() for p in sorted((tmp_path / str(number)).iterdir())})
    assert runs[0][0] == runs[1][0] and len(set(runs[0][0])) == 3
    assert_same(runs[0][1], runs[1][1])
    assert saved[0].keys() == saved[1].keys() >= {"config.json", "model.safetensors"}
    assert all(saved[0][name] == saved[1][name] for name in saved[0] if name != "training_args.bin")
    assert patched_classes(trainer.model)


def test_training_ends_stock_where_asked(make):
    trainer = make(callbacks=[MemSaveCallback(undo=True)])
    assert patched_classes(trainer.model)
    trainer.train()
    assert not patched_classes(trainer.model)


@pytest.mark.parametrize(("cls", "bf16"), [(Trainer, True), (MemSaveTrainer, False)])
def test_a_model_built_by_model_init_is_patched_each_time(make, cls, bf16):
    runs = []
    for patched in (True, False):
        callbacks = {"callbacks": [MemSaveCallback()] * patched}
        given = {"trainer": {"memsave": patched}} if cls is MemSaveTrainer else callbacks
        trainer = make(cls=cls, model_init=lambda: build("llama"), bf16=bf16, **given)
        trainer.train()
        first = trainer.model
        trainer.train()
        assert trainer.model is not first
        assert ("LlamaDecoderLayer" in patched_classes(trainer.model).values()) == patched
        runs.append(losses(trainer))
    assert runs[0] == runs[1]


def test_hyperparameter_search_finds_what_stock_finds(make):
    optuna = pytest.importorskip("optuna")
    found = []
    for callbacks in ([], [MemSaveCallback()]):
        trainer = make(
            model_init=lambda trial: build("llama"), callbacks=callbacks, trainer={"eval_dataset": Rows("llama")}
        )
        best = trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e-3, 1e-2])},
            compute_objective=lambda metrics: metrics["eval_loss"], n_trials=3, direction="minimize", backend="optuna",
            sampler=optuna.samplers.RandomSampler(seed=0),
        )  # fmt: skip
        found.append((best.objective, best.hyperparameters))
    assert found[0] == found[1]
    assert callbacks[0].metrics["memsave/freed_mib"] > 0


def test_a_head_under_a_forward_wrapped_by_accelerate_keeps_no_cast_of_its_weight(make):
    trainer = make(model_init=lambda: build("llama"), callbacks=[callback := MemSaveCallback()], bf16=True)
    trainer.train()
    assert callback.report.skipped == () and "_original_forward" in vars(trainer.model)
    plain = make(callbacks=[plain_callback := MemSaveCallback()], bf16=True)
    plain.train()
    kept, plain_kept = (c.metrics["memsave/kept_mib"] * MIB for c in (callback, plain_callback))
    head_input = 4 * 12 * 32
    assert kept <= plain_kept + head_input * 2  # in bf16, as stock keeps it


def test_adapters_and_gradient_accumulation_after_an_evaluation(make):
    model = get_peft_model(build("llama"), LoraConfig(target_modules="all-linear", lora_dropout=0.05))
    trainer = make(
        model, callbacks=[callback := MemSaveCallback()], gradient_accumulation_steps=2, eval_on_start=True,
        trainer={"eval_dataset": Rows("llama")},
    )  # fmt: skip
    trainer.train()
    assert {site.op for site in callback.report.patched} == {"model", "block"}
    assert callback.metrics["memsave/freed_mib"] > 0.5 * callback.metrics["memsave/kept_mib"] > 0


def test_checkpointing_is_not_counted_as_freed(make):
    freed = []
    for checkpointing in (True, False):
        trainer = make(callbacks=[callback := MemSaveCallback()], gradient_checkpointing=checkpointing)
        trainer.train()
        freed.append(callback.metrics["memsave/freed_mib"])
    assert freed[0] < 0.1 * freed[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_first_step_leaves_no_watch_behind(make, error):
    def fail(*_):
        raise error

    trainer = make(callbacks=[MemSaveCallback()])
    handle = trainer.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(error):
        trainer.train()
    handle.remove()
    assert "forward" not in vars(trainer.model)
    assert len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) == 0
    again = make(callbacks=[callback := MemSaveCallback()])
    again.train()
    assert callback.metrics["memsave/kept_mib"] > 0


def test_a_step_that_fails_before_its_forward_hides_nothing(make, monkeypatch):
    trainer = make(callbacks=[MemSaveCallback()])
    with monkeypatch.context() as patches, pytest.raises(ValueError):
        patches.setattr(trainer, "_prepare_inputs", lambda inputs: int("no batch"))
        trainer.train()
    again = make(trainer.model, callbacks=[callback := MemSaveCallback()])
    assert callback.report.skipped == ()
    again.train()
    assert callback.metrics["memsave/kept_mib"] > 0 and "forward" not in vars(trainer.model)


# The trainer of our own, and the mixin.


def test_the_trainer_of_our_own_equals_the_callback(make):
    runs = []
    for trainer in (make(callbacks=[MemSaveCallback("exact")], seed=3), make(cls=MemSaveTrainer, seed=3)):
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        runs.append([{k: v for k, v in e.items() if "runtime" not in k and "second" not in k} for e in entries])
    assert runs[0] == runs[1] and "memsave/kept_mib" in runs[0][0]


def test_the_mixin_serves_any_trainer(make):
    class Mine(hf_memsave.MemSaveMixin, Trainer):
        pass

    trainer = make(cls=Mine, trainer={"memsave": {"norm": "stock"}})
    quiet = {type(m).__name__ for m in trainer.model.modules() if is_patched(m) and patch_of(m).op == "quiet"}
    assert quiet == {"LlamaRMSNorm"}
    assert not patched_classes(make(cls=Mine, trainer={"memsave": False}).model)


# Mistakes.


def test_two_callbacks_must_agree(make):
    trainer = make(callbacks=[MemSaveCallback(), MemSaveCallback("exact")])
    trainer.train()
    assert len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) == 0
    another = MemSaveCallback(MemSaveConfig(norm="stock"))
    with pytest.raises(PatchError, match=r"is patched with MemSaveConfig\(\), .* got MemSaveConfig\(norm='stock'\)"):
        make(callbacks=[MemSaveCallback(), another])
    trainer.add_callback(another)  # which tells as training begins
    with pytest.raises(PatchError, match="got MemSaveConfig.norm='stock'"):
        trainer.train()


@pytest.mark.parametrize("door", ["callback", "add_to", "argument", "trainer", "mixin"])
def test_another_config_than_the_models_is_refused(make, door):
    model = build("llama")
    hf_memsave.patch(model, "wta-crs")
    before = {name: patch_of(module) for name, module in model.named_modules()}
    mine = type("Mine", (hf_memsave.MemSaveMixin, Trainer), {})
    doors = {
        "callback": lambda: make(model, callbacks=[MemSaveCallback("exact")]),
        "add_to": lambda: MemSaveCallback("exact").add_to(make(model)),
        "argument": lambda: make(model, trainer={"memsave": True}),
        "trainer": lambda: make(model, MemSaveTrainer, trainer={"memsave": True}),
        "mixin": lambda: make(model, mine, trainer={"memsave": MemSaveConfig()}),
    }
    with pytest.raises(PatchError, match=r"with MemSaveConfig\(linear=WTACRS.*got MemSaveConfig\(\), the exact"):
        doors[door]()
    assert {name: patch_of(module) for name, module in model.named_modules()} == before


def test_liger_is_refused(make):
    trainer = make()
    trainer.args.use_liger_kernel = True
    with pytest.raises(PatchError, match="Set use_liger_kernel=False"):
        MemSaveCallback().add_to(trainer)


def test_asking_for_nothing_or_for_what_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="asks for nothing"):
        MemSaveCallback(False)
    with pytest.raises(ConfigError, match="unknown preset 'nope'"):
        MemSaveCallback("nope")


# What is avoided, by function; and where that is little.


class Linears(torch.nn.Module):
    """Keeps the input of each linear, which cannot be had for less."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(512, 64)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def forward(self, input_ids, attention_mask=None, labels=None):
        return {"loss": self.layers(self.embed(input_ids)).sum()}


def test_one_line_says_what_was_avoided_by_function(make, capsys):
    reporter = Reporter()
    trainer = make(callbacks=[callback := MemSaveCallback(), reporter])
    for _ in range(2):
        trainer.train()
        (line,) = [text for text in capsys.readouterr().out.splitlines() if "the first step kept" in text]
        step = callback.report.step
        assert f"kept {step.nbytes_kept / MIB:.3g} MiB and avoided {step.nbytes_avoided / MIB:.3g}: " in line
        avoided = step.by_function("avoided")
        name, most = next(iter(avoided.items()))
        assert f": {name} {most / MIB:.3g}" in line
        of_functions = [
            {k: v for k, v in logs.items() if "avoided_mib" in k} for logs in reporter.logged if "loss" in logs
        ]
        expected = {f"memsave/avoided_mib/{name}": n / MIB for name, n in list(avoided.items())[:8]}
        assert of_functions[-3:] == [expected, {}, {}]


@pytest.mark.parametrize(("model", "warnings"), [("llama", 0), (Linears, 1)])
def test_a_model_where_little_is_avoided_trains_and_gets_one_warning_a_run(make, model, warnings, caplog):
    trainer = make(model if isinstance(model, str) else model(), callbacks=[callback := MemSaveCallback()])
    for runs in (1, 2):
        with caplog.at_level(logging.WARNING, "hf_memsave"):
            trainer.train()
        found = [record.getMessage() for record in caplog.records if "hf_memsave freed" in record.getMessage()]
        assert len(found) == runs * warnings and len(set(losses(trainer))) == 3
    for message in found:
        assert "Linears" in message and next(iter(callback.report.step.by_function("kept"))) in message


@pytest.mark.parametrize("cls", [Trainer, MemSaveTrainer])
def test_without_an_argument_a_model_keeps_what_it_was_patched_with(make, cls):
    model = build("llama")
    hf_memsave.patch(model, "wta-crs")
    before = {name: patch_of(module) for name, module in model.named_modules()}
    trainer = make(model, cls, callbacks=[MemSaveCallback()] if cls is Trainer else [])
    trainer.train()
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, MemSaveCallback))
    assert callback.config == MemSaveConfig.preset("wta-crs")
    assert {name: patch_of(module) for name, module in model.named_modules()} == before
