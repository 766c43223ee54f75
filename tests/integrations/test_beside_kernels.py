"""Models with the kernels of Liger-Kernel or of the Hub: loss and gradients are theirs as they stand, less is kept."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments, modeling_utils
from trl.models import enable_selective_activation_checkpointing

from hf_memsave import MemSaveTrainer, PatchError, estimate, measure_kept, patch, unpatch
from hf_memsave.errors import MeasureError
from hf_memsave.ops.loss import chunked_loss
from support.helpers import CopiesAsOnCuda
from support.kernels import interpreted
from support.libraries import built_for_hub, kernelized, with_liger
from support.lora import adapted
from support.steps import assert_same, backward, patched_copy, step
from support.zoo import Size, batch_for, build

pytestmark = interpreted
SIZE = Size(hidden=16, heads=2, layers=2, batch=1, seq=6)
RUNGS = {"exact": {}, **{rung: {"checkpoint": rung} for rung in ("o_proj", "qkv", "up", "gate", "block", "tiles")}}
NO_LOSS = {"fused_linear_cross_entropy": False}
ROPE_ALONE = {"rms_norm": False, "swiglu": False, **NO_LOSS}


@pytest.fixture
def liger(monkeypatch):
    """Has Liger-Kernel change a model: all that it can, or as its options say."""
    return partial(with_liger, monkeypatch)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return built_for_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture
def kernelize(monkeypatch, repository):
    return lambda model, family: kernelized(monkeypatch, model, repository)


@pytest.fixture(params=["full", "lora"])
def make(request):
    """Makes a small model, whole or with PEFT's adapters and dropout on all linears."""
    return build if request.param == "full" else lambda family, size: adapted(family, "fp32", size=size)


def inner(model):
    """The model below adapters and head."""
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model


def assert_bits(stock, seeds=(7,), **config):
    ours, batch = patched_copy(stock, **config), batch_for(stock, SIZE)
    for seed in seeds:
        assert_same(step(ours, batch, seed), step(stock, batch, seed))
    return ours


@pytest.mark.parametrize("family", "llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi3 olmo2 glm4".split())
def test_beside_liger_gradients_are_those_of_the_model_as_it_stands(family, make, liger):
    assert_bits(liger(make(family, SIZE), family))


@pytest.mark.parametrize("family", "llama mistral qwen2 qwen3 gemma gemma2 gemma3 olmo2".split())
def test_beside_kernelized_modules_too(family, make, kernelize):
    stock = kernelize(make(family, SIZE), family)
    assert any("memsave_kernels" in module.forward.__func__.__globals__["__name__"] for module in stock.modules())
    assert_bits(stock)


#: Transformers marks its classes as it is imported, if it likes the version of ``kernels``: it wants one not out yet.
MARKED = """
import transformers.utils.import_utils as utils
utils.is_kernels_available = lambda *_: True
import kernels, sys
from pathlib import Path
from hf_memsave import patch
from support.steps import assert_same, step
from support.zoo import Size, batch_for, build

layer, found = kernels.LocalLayerRepository(Path(sys.argv[1]), layer_name="RMSNorm"), []
for order in ("kernels", "kernels memsave", "memsave kernels"):
    model = build("llama", Size(hidden=16, heads=2, layers=2, batch=1, seq=6))
    for what in order.split():
        if what == "memsave":
            patch(model)
            continue
        with kernels.use_kernel_mapping({"RMSNorm": {model.device.type: layer}}, inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING, device=model.device.type)
    assert "memsave_kernels" in model.model.norm.forward.__func__.__globals__["__name__"]
    assert model.model.layers[0].self_attn._kernel_funcs
    found.append(step(model, batch_for(model, Size(batch=1, seq=6))))
assert_same(found[1], found[0])
assert_same(found[2], found[0])
"""


def test_in_the_slots_that_transformers_marks(repository):
    paths = [str(Path(__file__).parents[up]) for up in (1, 2)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", MARKED, str(repository)]
    assert subprocess.run(command, env=environment, check=False).returncode == 0


@pytest.mark.parametrize("rung", RUNGS)
def test_at_every_rung(rung, make, liger):
    assert_bits(liger(make("llama", SIZE), "llama"), (7, 8), **RUNGS[rung])  # the second step records less


@pytest.mark.parametrize(("family", "rung"), [("qwen3", "exact"), ("llama", "qkv")])
def test_what_the_rotary_kernel_writes_over_is_not_computed_again(family, rung, liger):
    """Queries and keys: a norm of Qwen3 makes them, and a linear."""
    assert_bits(liger(build(family, SIZE), family, **ROPE_ALONE), **RUNGS[rung])


def test_a_model_built_of_ligers_classes_is_taken_too(liger):
    liger(build("llama", SIZE), "llama")  # which swaps classes of the file
    stock = build("llama", SIZE)
    assert type(stock.model.norm).__name__ == "LigerRMSNorm"
    assert_bits(stock, checkpoint="gate")


@pytest.mark.parametrize("rung", ["exact", "qkv"])
@pytest.mark.parametrize("library", ["liger", "kernelize"])
def test_a_library_may_come_after_the_patch(library, rung, request):
    stock, ours = (build("llama", SIZE) for _ in range(2))
    patch(ours, **RUNGS[rung])
    for model in (stock, ours):
        request.getfixturevalue(library)(model, "llama")
    assert_same(step(ours, batch_for(ours, SIZE)), step(stock, batch_for(stock, SIZE)))


@pytest.mark.parametrize(("config", "floor"), [({}, 1.03), ({"checkpoint": "gate"}, 1.2)])
@pytest.mark.parametrize("library", ["liger", "kernelize"])
def test_together_they_keep_as_little_as_ours_alone(library, config, floor, make, request):
    """But for numbers of rows, and at "gate" for what the rotary kernel has written over."""
    size = replace(SIZE, hidden=64)
    stock = make("llama", size)
    theirs = request.getfixturevalue(library)(copy.deepcopy(stock), "llama")
    ids, ours, both = batch_for(stock, size)["input_ids"], patched_copy(stock, **config), patched_copy(theirs, **config)
    kept = [measure_kept(m, {}, lambda m=m: inner(m)(input_ids=ids)).total for m in (stock, theirs, ours, both)]
    assert kept[3] < min(floor * kept[2], 0.8 * kept[1]) and kept[1] < kept[0]


def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**10)


def test_ligers_loss_stays_where_ours_would_be_in_chunks(liger, monkeypatch):
    small_chunks(monkeypatch)
    ours = assert_bits(liger(build("llama", SIZE), "llama"))
    assert ours(**batch_for(ours, SIZE)).logits is None


@pytest.mark.parametrize("rung", ["exact", "gate"])
def test_a_second_backward_finds_what_the_first_has_written_over(rung, liger, monkeypatch):
    """Liger's norm writes over the gradient that it is given, and its gated product over what it has kept."""
    small_chunks(monkeypatch)
    stock = liger(build("llama", SIZE), "llama", **NO_LOSS)
    ours, batch = patched_copy(stock, **RUNGS[rung]), batch_for(stock, SIZE)
    loss, expected = ours(**batch).loss, step(stock, batch)
    first, second = (backward(ours, loss, retain_graph=True) for _ in range(2))
    assert_same(first, second)
    for name, tensor in expected.items():
        torch.testing.assert_close(first[name], tensor, msg=name)


@pytest.mark.parametrize("rung", ["exact", "up", "gate"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_what_was_made_before_from_what_a_backward_writes_over_is_stocks(family, rung, liger):
    """Gate and up, which the gated product keeps, and losses beside the model's."""
    stock, found = liger(build(family, SIZE), family), []
    for model in (patched_copy(stock, **RUNGS[rung]), stock):
        beside = []
        for name, module in model.named_modules():
            if name.endswith("gate_proj"):
                module.register_forward_hook(lambda _, __, y, to=beside: to.append((2 * y).relu().square().mean()))
            elif name.endswith("up_proj"):
                module.register_forward_hook(lambda _, __, y, to=beside: to.append(y.tanh().square().mean()))
        found.append(backward(model, sum(beside, model(**batch_for(model, SIZE)).loss)))
    assert_same(*found)


def test_a_function_of_ones_own_that_extends_ligers_runs_its_own_forward(liger):
    patch(liger(build("llama", SIZE), "llama"))
    theirs = sys.modules["liger_kernel.ops"].LigerSiLUMulFunction

    class Mine(theirs):
        @staticmethod
        def forward(ctx, a, b):
            return a * 3

    x = torch.ones(2, 4)
    assert torch.equal(Mine.apply(x, x), 3 * x) and not torch.equal(theirs.apply(x, x), 3 * x)


def test_where_liger_has_replaced_classes_measuring_says_so(liger, monkeypatch):
    model = liger(build("llama", SIZE), "llama")
    monkeypatch.setitem(sys.modules, "liger_kernel.not_there", None)
    patch(model)
    with pytest.raises(MeasureError, match=r"expected Transformers' classes, got Liger.*memsave plan MODEL --out"):
        estimate(model.config, batch_size=1, seq_len=8)


@pytest.mark.parametrize("door", ["trainer", "model"])
def test_a_trainer_switches_both_on(door, liger, tmp_path, caplog):
    models = [build("llama", SIZE) for _ in range(2)]
    liger(build("llama", SIZE), "llama")  # so that what the trainer has it change is put back
    options = {"use_liger_kernel": True, "max_steps": 1, "use_cpu": True, "report_to": [], "learning_rate": 1e-2}
    trained = []
    for model, memsave in zip(models, (False, True), strict=True):
        if memsave and door == "model":
            patch(model)
        cls, asked = (MemSaveTrainer, {"memsave": memsave}) if door == "trainer" else (Trainer, {})
        rows = [{name: x[0] for name, x in batch_for(model, SIZE).items()}]
        trainer = cls(model, TrainingArguments(tmp_path, **options), train_dataset=rows, **asked)
        trainer.train()
        trained.append(dict(trainer.model.named_parameters()))
    assert_same(*trained[::-1])
    assert "liger_kernel" in model.forward.__func__.__globals__["__name__"]
    assert "the first step keeps" in caplog.text
    unpatch(model)
    assert "liger_kernel" in model.forward.__func__.__globals__["__name__"]


def test_an_approximation_that_ligers_forward_hides_is_refused_as_training_begins(liger, tmp_path):
    model = build("llama", SIZE)
    liger(build("llama", SIZE), "llama")  # so that what the trainer has it change is put back
    patch(model, norm="output")
    kernels = {"rms_norm": True, "rope": False, "swiglu": False, **NO_LOSS}
    options = {"use_liger_kernel": True, "liger_kernel_config": kernels, "use_cpu": True, "report_to": []}
    rows = [{name: x[0] for name, x in batch_for(model, SIZE).items()}]
    with pytest.raises(PatchError, match="has a forward of its own.*use_liger_kernel=False"):
        Trainer(model, TrainingArguments(tmp_path, **options), train_dataset=rows).train()


def test_an_activation_that_a_kernel_computes_is_said_to_be_skipped(liger):
    report = patch(liger(build("llama", SIZE), "llama"), activation="few_bit")
    assert {site.status for site in report.sites if site.op == "activation"} == {"skipped"}
    assert "activation         SiLUActivation: a kernel around it computes it" in str(report)


def checkpointed(model, family, **options):
    model.activation_checkpointing_enable({"use_reentrant": False}, **options)
    return model


def selective(model, family):
    enable_selective_activation_checkpointing(checkpointed(model, family))
    return model


#: How a model is changed before it is patched: by others' kernels, others' checkpointing, or both.
OTHERS = {
    "liger, every second layer": (["liger"], partial(checkpointed, every_n_layers=2)),
    "liger, offload": (["liger"], partial(checkpointed, offload=True)),
    "liger, selective": (["liger"], selective),
    "kernelize, every second layer": (["kernelize"], partial(checkpointed, every_n_layers=2)),
    "kernelize, offload": (["kernelize"], partial(checkpointed, offload=True)),
    "kernelize, selective": (["kernelize"], selective),
    "liger, kernelize": (["liger's MLPs", "kernelize"], lambda model, family: model),
}


@pytest.mark.parametrize("rung", ["exact", "gate", "block"])
@pytest.mark.parametrize("others", OTHERS)
def test_others_together(others, rung, request, monkeypatch):
    monkeypatch.setattr(modeling_utils, "save_on_cpu", CopiesAsOnCuda)
    libraries, checkpoint = OTHERS[others]
    stock = build("llama", SIZE)
    for library in libraries:
        name, _, part = library.partition("'s ")
        stock = request.getfixturevalue(name)(stock, "llama", **{"rms_norm": False} if part else {})
    assert_bits(checkpoint(stock, "llama"), **RUNGS[rung])
