"""``compile=True``: repeated blocks are compiled one by one, and the tape lies around them."""

import copy
import functools
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor.exc import InvalidCxxCompiler
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import WTACRS, ConfigError, KeptTensorChangedError, MemSaveConfig, PatchError, logs, patch, unpatch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.integrations.trainer import MemSaveTrainer
from hf_memsave.patching import compiled
from hf_memsave.patching.partitioner import Floor
from support.attacks import WIDTH, Block
from support.compiled import libraries as libraries
from support.compiled import saved
from support.lora import adapted, quantized
from support.rows import Rows, arguments, logged
from support.steps import assert_same, gradients, patched, patched_copy, state_of, step
from support.zoo import Size, batch_for, build

pytestmark = pytest.mark.usefixtures("afresh")
SIZE = Size(hidden=32, heads=2, layers=2, batch=2, seq=16)
DEEPER = replace(SIZE, layers=3)


def said(caplog):
    """The package's lines, but for the one that blocks are compiled."""
    found = [record.getMessage() for record in caplog.records if record.name == "hf_memsave"]
    return [line for line in found if not line.startswith("compile=True: the repeated blocks are compiled")]


def graphs():
    return counters["stats"]["unique_graphs"]


def blocks_of(model):
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_stock(model):
    """Compile the blocks' forward as users would, all of a class as one function."""
    for block in blocks_of(model):
        block.forward = functools.partial(torch.compile(type(block).forward), block)


def without_cache(model):
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.use_cache = False
    return model


def steps(model, batches, is_autocast=False, stance="default"):
    """The losses of all batches and the gradients that they add up to; evaluated in between, as ``stance`` says."""
    losses = {}
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = model(**batch).loss
        (loss / len(batches)).backward()
        losses[f"loss {number}"] = loss.detach()
        model.eval()
        with torch.no_grad(), torch.compiler.set_stance(stance):
            losses[f"evaluated {number}"] = model(**batch).loss
        model.train()
    return losses | gradients(model)


#: A model, whether it trains under autocast, whether its two batches are padded, and how many graphs that takes.
MODELS = {
    "bert under autocast": (lambda: build("bert", SIZE), True, (True, False), 2),
    "gpt2": (lambda: build("gpt2", SIZE), False, (True, False), 2),
    "t5": (lambda: build("t5-decoder", SIZE, torch.bfloat16), False, (True, True), 4),  # the first blocks have a bias
    "llama, LoRA under autocast": (lambda: adapted("llama", "autocast", size=DEEPER), True, (True,), 1),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_compiled_stock(name, no_codegen):
    """With dropout, a padded batch and one of no padding, gradients that are added up, and evaluation in between."""
    make, is_autocast, paddings, expected = MODELS[name]
    stock = without_cache(make())
    ours = patched_copy(stock, compile=True)
    batches = [batch_for(ours, SIZE, padded=padded, seed=seed) for seed, padded in enumerate(paddings)]
    got = steps(ours, batches, is_autocast)
    assert graphs() == expected
    assert not counters["graph_break"]
    compile_stock(stock)
    assert_same(got, steps(stock, batches, is_autocast, "force_eager"))


@pytest.mark.long
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_draws_the_masks_of_its_forward(use_reentrant, no_codegen):
    """Trainer's gradient checkpointing: the compiled block runs in it, both times."""
    ours = build("bert", SIZE)
    batch = batch_for(ours, SIZE)
    patch(ours, compile=True)
    expected = step(ours, batch)
    enable_checkpointing(ours, use_reentrant=use_reentrant)
    assert_same(step(ours, batch), expected)
    assert graphs() == 2 + use_reentrant  # which the block is told by an attribute, and has a forward without gradients


@pytest.mark.long
def test_a_checkpointed_block_is_never_compiled_in_one_run_alone(no_codegen):
    """Else its masks are others in backward."""
    ours = patched(build("bert", SIZE), compile=True)
    enable_checkpointing(ours)
    loss = ours(**batch_for(ours, SIZE)).loss
    blocks = type(blocks_of(ours)[0])._memsave_compiled
    blocks.why_not = "has no compiler any more"
    with pytest.raises(KeptTensorChangedError, match=r"checkpointed BertLayer .* expected it compiled"):
        loss.backward()
    step(ours, batch_for(ours, SIZE))
    blocks.why_not = ""


@pytest.mark.long
def test_trainer_pads_to_other_lengths_and_compiles_twice_more(no_codegen, tmp_path, caplog):
    """Once for lengths, and once for the last batch, which has fewer rows."""
    rows, counts = [], []

    class Count(TrainerCallback):
        def on_step_end(self, *_, **__):
            counts.append(graphs())

    for number, row in enumerate(Rows("llama")[:-2]):
        cut = {name: x[: 8 + number // 4 % 3] for name, x in row.items() if torch.is_tensor(x)}
        rows.append(cut | {"attention_mask": (torch.arange(len(cut["input_ids"])) > number % 2).long()})
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=2, train_sampling_strategy="sequential")
    options = {"memsave": {"compile": True}, "callbacks": [Count()]}
    trainer = MemSaveTrainer(build("llama", SIZE), args, train_dataset=rows, **options)
    trainer.train()
    assert counts[:2] == [1, 2] and set(counts[1:-1]) <= {2, 3}, counts
    losses = logged(trainer)
    assert losses[-1] < losses[0]
    assert "memsave/kept_gib" not in str(trainer.state.log_history)  # nor is anything said of what it frees
    assert not said(caplog)


@pytest.mark.long
def test_adapters_on_four_bits_train_compiled(no_codegen, tmp_path):
    build("llama", SIZE, torch.bfloat16).save_pretrained(tmp_path)
    results = []
    for fields in ({}, {"compile": True}):
        model = without_cache(quantized(tmp_path, 4))
        report = patch(model, **fields)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        results.append(step(model, batch_for(model, SIZE)))
    assert "graph" in str(report) and not counters["graph_break"]
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=0.05, atol=0.01)


@pytest.mark.long
def test_a_patched_model_is_copied_pickled_and_undone(no_codegen, tmp_path):
    model = build("llama", SIZE)
    before, keys = state_of(model), list(model.state_dict())
    report = patch(model, compile=True)
    expected = step(model, batch_for(model, SIZE), use_cache=False)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(step(made, batch_for(model, SIZE), use_cache=False), expected)
    assert graphs() == 1
    assert "not stock's bits" in str(report) and f"{SIZE.layers} x LlamaDecoderLayer: 1 graph" in str(report)
    assert str(patch(model, compile=True)) == str(report)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    with pytest.raises(PatchError, match="compile=True"):
        patch(model)
    assert "graph" not in str(patch(model, replace=True))
    patch(model, compile=True, replace=True)
    unpatch(model)
    assert state_of(model) == before


@pytest.mark.parametrize(
    "fields",
    [{"activation": "invert"}, {"norm": "output"}, {"storage": "int8"}, {"linear": WTACRS()}, {"offload": True},
     {"budget": "24GiB"}, {"dropout": "stock"}, {"attention": "stock"}, {"backend": "triton"}, {"layers": {"norm": 1}}],
    ids=str,
)  # fmt: skip
def test_what_a_compiled_block_cannot_do_is_refused(fields):
    with pytest.raises(ConfigError, match=rf"compile=True .* got {next(iter(fields))}"):
        MemSaveConfig(compile=True, **fields)


def test_a_compiler_that_is_set_otherwise_is_refused():
    model = build("llama", SIZE)
    for config, name, value in (
        (inductor, "custom_partitioner_fn", Floor()), (inductor, "fallback_random", True),
        (functorch, "activation_memory_budget", 0.5),
    ):  # fmt: skip
        with config.patch({name: value}), pytest.raises(PatchError, match=name):
            patch(model, compile=True)
    with pytest.raises(PatchError, match="expected repeated blocks"):
        patch(nn.Sequential(nn.Linear(4, 4)), compile=True)
    patch(model)


@pytest.mark.long
def test_rungs_are_those_of_each_block(no_codegen):
    """The first block keeps less than the last, which runs nothing again."""
    model, kept = patched(build("llama", SIZE), compile=True, checkpoint="gate", layers={"checkpoint": 0.5}), []
    x = torch.randn(SIZE.batch, SIZE.seq, SIZE.hidden, requires_grad=True)
    cos_sin = model.model.rotary_emb(x, torch.arange(SIZE.seq)[None])
    for block in blocks_of(model):
        with saved(block, {}) as sizes:
            block(x, position_embeddings=cos_sin)
        kept.append(sum(sizes))
    assert kept[0] < 0.6 * kept[1]


class Layer(GradientCheckpointingLayer):
    """Each has a graph of its own, as its number is in the graph."""

    def __init__(self, number, breaks=False):
        nn.Module.__init__(self)
        self.linear, self.number, self.breaks = nn.Linear(8, 8), number, breaks

    def forward(self, x):
        if self.breaks:
            torch._dynamo.graph_break()
        return self.linear(x).sin() * (self.number + 2)


def stack(count, **options):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(number, **options) for number in range(count)))


def trained(model):
    model(torch.ones(3, 8)).sum().backward()
    return gradients(model)


@pytest.mark.long
def test_blocks_stay_compiled_past_dynamos_limit_and_say_so_past_ours(no_codegen, caplog, monkeypatch):
    count = torch._dynamo.config.recompile_limit + 2
    model = stack(count)
    report = patch(model, compile=True)
    assert_same(trained(model), trained(stack(count)))
    assert f"{count} x Layer: {count} graphs" in str(report) and not said(caplog)
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "MOST", count - 1)
    model.zero_grad()
    assert_same(trained(model), trained(stack(count)))
    assert said(caplog) == [
        f"hf_memsave: compile=True, but Layer runs op by op, under the tape: it takes more than {count - 1} graphs, "
        "one for each layer or step (TORCH_LOGS=recompiles tells why)."
    ]


def test_a_first_blocks_input_is_taken_as_a_blocks_output_and_gets_no_gradient(no_codegen):
    model, x = patched(nn.Sequential(*(stack(1)[0] for _ in range(2))), compile=True), torch.randn(3, 8)
    loss = model(x).sum()
    loss.backward()
    nodes = [loss.grad_fn]
    for node in nodes:  # which grows
        nodes += {before for before, _ in node.next_functions if before is not None} - {*nodes}
    leaves = [node.variable for node in nodes if node.name().endswith("AccumulateGrad")]
    (own,) = (leaf for leaf in leaves if leaf.data_ptr() == x.data_ptr())
    assert graphs() == 1 and not x.requires_grad
    assert own.grad is None and all(leaf.grad is not None for leaf in leaves if leaf is not own)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_hook_within_a_block_is_called_in_that_block_alone(is_early, no_codegen):
    """Though its graph would do for all blocks, or was made before."""
    model = nn.Sequential(*(stack(1)[0] for _ in range(3)))
    stock = copy.deepcopy(model)
    patch(model, compile=True)
    if not is_early:
        trained(model)
        model.zero_grad()
    for made in (model, stock):
        made[2].linear.register_forward_hook(lambda module, inputs, out: out * 2)
    assert_same(trained(model), trained(stock))
    assert graphs() == 2
    assert torch._dynamo.config.skip_nnmodule_hook_guards


@pytest.mark.parametrize(
    "off", [lambda: torch._dynamo.config.patch(disable=True), lambda: torch.compiler.set_stance("force_eager")]
)
def test_where_compiling_is_off_blocks_run_under_the_tape_and_say_so(off, caplog):
    logs.warn_once.cache_clear()
    models = stack(2), stack(2)
    patch(models[0])
    patch(models[1], compile=True)
    found = []
    for model in models:
        with off(), saved(model, {}) as sizes:
            out = model(torch.ones(3, 8))
        out.sum().backward()
        found.append(gradients(model) | {"kept": torch.tensor(sizes)})
    assert_same(*found)
    assert sum("Layer runs op by op, under the tape: torch.compile is off" in line for line in said(caplog)) == 1


@pytest.mark.parametrize("why", ["there is no compiler. Install g++", "Unsupported", "KV cache"])
def test_what_cannot_be_compiled_runs_under_the_tape_and_says_so(why, caplog, monkeypatch):
    logs.warn_once.cache_clear()
    model = build("llama", SIZE) if why == "KV cache" else stack(2, breaks=why == "Unsupported")
    stock = copy.deepcopy(model)
    if why.startswith("there is"):

        def compile_fx(*args, **kwargs):
            raise InvalidCxxCompiler

        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    report = patch(model, compile=True)
    if why == "KV cache":
        assert_same(step(model, batch_for(model, SIZE)), step(stock, batch_for(model, SIZE)))
    else:
        for _ in range(2):
            got = trained(model)
        trained(stock)
        assert_same(got, trained(stock))
        assert why in str(report)
    (line,) = said(caplog)
    assert caplog.text.count("compile=True: the repeated blocks are compiled") == 1
    assert why in line and type(blocks_of(model)[0]).__name__ in line


def drops(block, x):
    return x + F.dropout(F.gelu(block.f(F.dropout(x, 0.3))), 0.5)


@pytest.mark.long
def test_inductors_own_masks_are_those_of_compiled_stock(libraries):
    """Which are kept there, and drawn again here: by real kernels, forward and backward."""
    results, kept = [], []
    for compile in (lambda model: patch(model, compile=True), compile_stock):
        torch.manual_seed(0)
        model, x = nn.Sequential(Block(drops), Block(drops)), torch.randn(32, WIDTH, requires_grad=True)
        compile(model)
        torch.manual_seed(1)
        kept.append([])
        with saved_tensors_hooks(lambda x: (kept[-1].append(x.dtype), x)[1], lambda x: x):
            out = model[0](x)
        out.square().sum().backward()
        results.append({"out": out.detach(), "x": x.grad, **gradients(model)})
    assert_same(*results)
    assert torch.bool not in kept[0] and torch.bool in kept[1]
