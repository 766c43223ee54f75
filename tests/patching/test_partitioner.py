"""A compiled layer keeps eager's floor and its rungs; attention runs again by "block" alone."""

import pickle
from dataclasses import replace

import pytest
import torch

from hf_memsave import MemSaveConfig, patch
from hf_memsave.count.peak import count_peak
from hf_memsave.patching.partitioner import Floor
from support.compiled import Graphs, by_blocks, compiled_layer, whole
from support.helpers import MATRIX, on_cpu_alone
from support.lora import RANK, adapted
from support.zoo import QUOTED, Size, batch_for, build

SIZE = replace(QUOTED, layers=4)
#: Eager's floor in u a layer, and how many linears adapters are put on.
FLOOR = {
    "llama": (10.5, 7), "gpt2": (10, 4), "phi": (9, 6), "t5-encoder": (10, 6), "t5-decoder": (15, 10), "bert": (10, 6),
}  # fmt: skip
#: BERT's blocks end with a norm, whose both sides are kept where each block is a graph; under autocast one is fp32.
BOTH_SIDES = {"full": 1, "autocast": 1.5, "lora": 1}
#: By rungs.
U = {
    "llama": {"o_proj": 9.5, "qkv": 7.5, "up": 4.75, "gate": 2, "block": 1},
    "t5-encoder": {"o_proj": 9, "qkv": 6, "up": 2, "gate": 2, "block": 1},
}
on_cpu = on_cpu_alone("a figure")


def assert_keeps(family, mode, floor, more=0, rung=None, compile=by_blocks):
    """In u, within 8% of the floor and what comes to it; and that attention runs again by the last rung alone."""
    model = adapted(family, "fp32", size=SIZE) if mode == "lora" else build(family, SIZE)
    is_autocast = mode == "autocast"
    found, graphs = compiled_layer(model, batch_for(model, SIZE), Floor(rung), compile, is_autocast)
    u = SIZE.u(2 if is_autocast else 4)
    assert floor <= 1.001 * found / u <= 1.08 * (floor + more)
    assert (graphs.run_again("scaled_dot_product") > 0) == (rung == "block")


@pytest.mark.long
@pytest.mark.parametrize("compile", [by_blocks, pytest.param(whole, marks=MATRIX)])
@pytest.mark.parametrize(
    ("family", "mode"),
    [("llama", "lora"), ("t5-encoder", "full"), ("bert", "autocast"), ("phi", "autocast"),
     *(pytest.param(family, mode, marks=MATRIX) for family, mode in (
         ("llama", "full"), ("llama", "autocast"), ("gpt2", "full"), ("gpt2", "autocast"), ("gpt2", "lora"),
         ("phi", "full"), ("phi", "lora"), ("bert", "full"), ("bert", "lora"), ("t5-encoder", "autocast"),
         ("t5-encoder", "lora"), ("t5-decoder", "full"), ("t5-decoder", "autocast"), ("t5-decoder", "lora"),
     ))],
)  # fmt: skip
def test_a_compiled_layer_keeps_its_floor(family, mode, compile):
    floor, targets = FLOOR[family]
    if family == "bert" and compile is by_blocks:
        floor += BOTH_SIDES[mode]
    more = {"full": 0, "autocast": 0.5, "lora": targets * RANK / SIZE.hidden}[mode]
    assert_keeps(family, mode, floor, more, compile=compile)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "rung", "compile"),
    [("llama", "qkv", by_blocks), ("t5-encoder", "qkv", by_blocks), ("llama", "block", whole),
     *(pytest.param(family, rung, by_blocks, marks=MATRIX) for family in U for rung in U[family])],
)  # fmt: skip
def test_a_compiled_layer_keeps_its_rung(family, rung, compile):
    assert_keeps(family, "full", U[family][rung], rung=rung, compile=compile)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "rung"),
    [("llama", None), *(pytest.param("gpt2", rung, marks=MATRIX) for rung in (None, "gate", "block"))],
)
def test_compiled_blocks_peak_about_as_high_as_the_tape(family, rung):
    """Run op by op, where Inductor's fused kernels hold less in between."""
    size, peaks = Size(hidden=64, heads=4, layers=3, batch=8, seq=64), []
    ids = batch_for(build(family, size), size)["input_ids"]
    for partitioner in (Floor(rung), None):
        model, graphs = build(family, size).base_model, Graphs(partitioner)
        torch._dynamo.reset()
        by_blocks(model, graphs)
        for _ in range(2):  # the first compiles, and makes the gradients
            graphs.count.peak = 0
            model(ids, use_cache=False).last_hidden_state.sum().backward()
        peaks.append(graphs.count.peak)
    torch._dynamo.reset()
    model = build(family, size).base_model
    patch(model, MemSaveConfig(checkpoint=rung))
    model(ids, use_cache=False).last_hidden_state.sum().backward()
    of_tape = count_peak(lambda: model(ids, use_cache=False).last_hidden_state.sum().backward()).peak
    assert peaks[0] <= 1.1 * of_tape and peaks[0] <= 0.85 * peaks[1]


def test_a_cache_takes_equal_partitioners_for_one_and_others_apart():
    one = Floor("qkv")
    other = pickle.loads(pickle.dumps(one))
    assert one == other and hash(one) == hash(other) and one.uuid() == other.uuid()
    assert one != Floor() != Floor("up") and one.uuid() != Floor().uuid()
