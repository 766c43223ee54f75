"""``MemSaveCallback``, ``MemSaveTrainer`` and the mixin: patched at the right moment, reported, logged, undone."""

import re

import pytest
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback

import hf_memsave
from hf_memsave import ConfigError, MemSaveCallback, MemSaveConfig, MemSaveTrainer, PatchError, measure_kept, unpatch
from hf_memsave.patching.swap import patch_of
from support.helpers import only_on_cpu
from support.rows import Rows, arguments, logged
from support.steps import assert_same, patched_classes
from support.zoo import build

GIB = 2**30


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
        model = build(model) if isinstance(model, str) else model
        given = {"model": model} if model_init is None else {"model_init": model_init}
        args, callbacks = arguments(tmp_path / "out", **options), list(callbacks)
        return cls(args=args, train_dataset=Rows("llama"), callbacks=callbacks, **given, **(trainer or {}))

    return make


def test_a_run_prints_nothing_and_logs_with_its_first_loss_what_is_freed_by_kind(make, capsys):
    trainer = make(callbacks=[callback := MemSaveCallback(undo=True), reporter := Reporter()])
    assert "LlamaDecoderLayer" in patched_classes(trainer.model).values()
    trainer.remove_callback(PrinterCallback)
    for _ in range(2):
        trainer.train()
        assert not patched_classes(trainer.model)
        with_loss = [logs for logs in reporter.logged if "loss" in logs][-3:]
        first, *later = ({k: v * GIB for k, v in logs.items() if "freed_gib" in k} for logs in with_loss)
        assert later == [{}, {}] and all(re.fullmatch(r"memsave/freed_gib/[a-z_]+", name) for name in first)
        assert list(first.values()) == list(callback.report.step.by_kind("avoided").values())
    assert "memsave" not in capsys.readouterr().out


class Adds(TrainerCallback):
    """Adds ours as training begins, while callbacks are called one after the other."""

    def on_train_begin(self, args, state, control, **kwargs):
        assert not any(isinstance(c, MemSaveCallback) for c in self.trainer.callback_handler.callbacks)
        self.trainer.add_callback(MemSaveCallback)


@pytest.mark.parametrize(("cls", "bf16"), [(MemSaveCallback, False), (Adds, True)])
def test_every_reporter_gets_what_the_first_step_kept_and_freed(make, cls, bf16):
    reporter, callback = Reporter(), cls()
    trainer = callback.trainer = make(callbacks=[reporter, callback], bf16=bf16)
    trainer.train()
    with_loss = [logs for logs in reporter.logged if "loss" in logs]
    assert len(with_loss) == 3
    batch = {k: torch.stack([row[k] for row in Rows("llama")][:4]) for k in ("input_ids", "attention_mask", "labels")}
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        kept = measure_kept(trainer.model, batch).total
        unpatch(trainer.model)
        stock = measure_kept(trainer.model, batch).total
    for logs in with_loss:
        assert logs["memsave/kept_gib"] * GIB == pytest.approx(kept, rel=0.02)  # a batch with other padding
        assert logs["memsave/freed_fraction"] == pytest.approx(1 - kept / stock, rel=0.05)
        assert "memsave/peak_gib" not in logs
    assert logged(trainer, "memsave/kept_gib") == [(logs["memsave/kept_gib"],) for logs in with_loss]


def test_a_share_that_is_not_counted_is_not_logged(make):
    trainer = make(callbacks=[MemSaveCallback({"activation": "few_bit"})])
    for module in trainer.model.modules():
        if type(module).__name__ == "SiLUActivation":
            module.register_forward_hook(lambda *_: None)  # which would see what stock has, without bytes
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["memsave/kept_gib"] > 0 and not [name for name in first if "freed" in name]


def test_tensorboard_gets_them_once_with_each_loss(make, tmp_path):
    protos = pytest.importorskip("tensorboardX.proto.event_pb2")
    make(callbacks=[MemSaveCallback({"offload": True})], report_to=["tensorboard"]).train()
    (file,) = tmp_path.rglob("events.out.*")
    data, found = file.read_bytes(), []
    while data:  # records: a length, its checksum, the event, its checksum
        event = protos.Event.FromString(data[12 : (end := 12 + int.from_bytes(data[:8], "little"))])
        found += [(value.tag, event.step) for value in event.summary.value]
        data = data[end + 4 :]
    for name in ("loss", "memsave/kept_gib", "memsave/freed_fraction", "memsave/offloaded_gib"):
        assert [step for tag, step in found if tag == f"train/{name}"] == [1, 2, 3]
    kinds = [(tag, step) for tag, step in found if tag.startswith("train/memsave/freed_gib/")]
    assert len(set(kinds)) == len(kinds) > 1 and {step for _, step in kinds} == {1}


def test_watching_the_first_step_changes_no_bit_and_saved_models_are_stocks(make, tmp_path):
    runs, saved = [], []
    for name, cls in (("stock", Trainer), ("callback", Trainer), ("trainer", MemSaveTrainer)):
        trainer = make(cls=cls, callbacks=[MemSaveCallback("exact")] if name == "callback" else [])
        trainer.train()
        runs.append((logged(trainer), dict(trainer.model.named_parameters())))
        trainer.save_model(tmp_path / name)
        saved.append({p.name: p.read_bytes() for p in sorted((tmp_path / name).iterdir())})
        assert bool(patched_classes(trainer.model)) == (name != "stock")
    assert len(set(runs[0][0])) == 3 and saved[0].keys() >= {"config.json", "model.safetensors"}
    for run, files in zip(runs[1:], saved[1:], strict=True):
        assert run[0] == runs[0][0] and files.keys() == saved[0].keys()
        assert_same(run[1], runs[0][1])
        assert all(files[name] == saved[0][name] for name in files if name != "training_args.bin")


def test_a_model_built_by_model_init_is_patched_each_time(make):
    """And the head, under a forward that Accelerate has wrapped, keeps no cast of its weight."""
    runs = []
    for patched in (True, False):
        callback = MemSaveCallback()
        trainer = make(model_init=lambda: build("llama"), bf16=True, callbacks=[callback] * patched)
        trainer.train()
        first = trainer.model
        trainer.train()
        assert trainer.model is not first and "_original_forward" in vars(trainer.model)
        assert ("LlamaDecoderLayer" in patched_classes(trainer.model).values()) == patched
        runs.append((logged(trainer), callback))
    assert runs[0][0] == runs[1][0]
    callback = runs[0][1]
    make(callbacks=[plain := MemSaveCallback()], bf16=True).train()
    assert callback.report.skipped == ()
    kept, plain_kept = (c.metrics["memsave/kept_gib"] * GIB for c in (callback, plain))
    assert kept <= plain_kept + 4 * 12 * 32 * 2  # the head's input in bf16, as stock keeps it


def test_hyperparameter_search_finds_what_stock_finds(make):
    optuna, found = pytest.importorskip("optuna"), []
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
    assert callbacks[0].metrics["memsave/freed_fraction"] > 0.1


@pytest.mark.parametrize("place", ["a layer", "what prepares the batch"])
def test_a_step_that_fails_leaves_nothing_behind(make, place, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    trainer = make(callbacks=[MemSaveCallback()])
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        if place == "a layer":
            handle = trainer.model.model.layers[1].register_forward_pre_hook(fail)
        else:
            patches.setattr(trainer, "_prepare_inputs", fail)
        trainer.train()
    if place == "a layer":
        handle.remove()
    assert len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) == 0
    again = make(trainer.model, callbacks=[callback := MemSaveCallback()])
    assert callback.report.skipped == ()
    again.train()
    assert callback.metrics["memsave/kept_gib"] > 0 and "forward" not in vars(trainer.model)


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


def test_another_config_than_the_models_is_refused_by_every_door(make):
    model = build("llama")
    hf_memsave.patch(model, "wta-crs")
    before = {name: patch_of(module) for name, module in model.named_modules()}
    mine = type("Mine", (hf_memsave.MemSaveMixin, Trainer), {})
    for door in (
        lambda: make(model, callbacks=[MemSaveCallback("exact")]),
        lambda: MemSaveCallback("exact").add_to(make(model)),
        lambda: make(model, trainer={"memsave": True}),
        lambda: make(model, MemSaveTrainer, trainer={"memsave": True}),
        lambda: make(model, mine, trainer={"memsave": MemSaveConfig()}),
    ):
        with pytest.raises(PatchError, match=r"with MemSaveConfig\(linear=WTACRS.*got MemSaveConfig\(\), the exact"):
            door()
    assert {name: patch_of(module) for name, module in model.named_modules()} == before


def test_asking_for_nothing_and_for_what_there_is_not_are_refused():
    with pytest.raises(ConfigError, match="asks for nothing"):
        MemSaveCallback(False)
    with pytest.raises(ConfigError, match="unknown preset 'nope'"):
        MemSaveCallback("nope")


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
