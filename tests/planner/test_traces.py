"""A step with a block fewer, told by one step alone: what a trace of its own counts, in every place of it."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig

from hf_memsave import MemSaveConfig
from hf_memsave.measure.extrapolate import depths_of, with_a_block_less
from hf_memsave.measure.layers import depth_fields
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.optimizers import OPTIMIZERS, TEMPORARIES
from hf_memsave.measure.training import Training, trace_at
from hf_memsave.planner import traces
from hf_memsave.planner.traces import trace_of
from support.helpers import MATRIX, on_stand_in

pytestmark = [
    on_stand_in,
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]

WIDE = dict(hidden_size=128, num_attention_heads=4, vocab_size=256)
CONFIGS = {
    "bert": BertConfig(**WIDE, intermediate_size=512, attention_probs_dropout_prob=0.0),
    "gpt2": GPT2Config(n_embd=128, n_head=4, vocab_size=256, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0),
    "llama": LlamaConfig(**WIDE, intermediate_size=352, num_key_value_heads=2, pad_token_id=0),
}
ADAPTERS = {"full": None, "LoRA": Lora(dropout=0.05)}
SETTINGS = {
    "the floor": MemSaveConfig(),
    "gate": MemSaveConfig(checkpoint="gate"),
    "block": MemSaveConfig(checkpoint="block"),
    "int8": MemSaveConfig(storage="int8"),
    "offload": MemSaveConfig(offload=True),
    "gate, offload": MemSaveConfig(checkpoint="gate", offload=True),
    "block, offload": MemSaveConfig(checkpoint="block", offload=True),
}
STEP = Training(batch_size=4, seq_len=128)
OFTEN = [("llama", "LoRA", setting) for setting in ("the floor", "gate", "block, offload")]
OFTEN += [("llama", "full", "int8"), ("bert", "full", "block"), ("gpt2", "LoRA", "offload")]
MORE = itertools.product(CONFIGS, ADAPTERS, SETTINGS)


def both(config, training, memsave):
    """With a block fewer than the deeper of the two depths that a plan traces: told by it, and traced."""
    (field,) = depth_fields(config)
    first = depths_of(config, {field: 32}, training, memsave).first
    deeper, own = (trace_at(config, {field: first[field] + n}, training, memsave, keeps=False).trace for n in (1, 0))
    return with_a_block_less(deeper, TEMPORARIES[training.optimizer]), own


def assert_same(told, own):
    assert told.places == {place: m._replace(op=told.places[place].op) for place, m in own.places.items()}
    names = ("blocks", "parameters", "trained", "states")
    assert [getattr(told, name) for name in names] == [getattr(own, name) for name in names]


@pytest.mark.parametrize(
    ("family", "adapters", "setting"),
    [*OFTEN, *(pytest.param(*one, marks=MATRIX) for one in MORE if one not in OFTEN)],
)
def test_one_step_tells_of_a_block_fewer(family, adapters, setting):
    assert_same(*both(CONFIGS[family], replace(STEP, lora=ADAPTERS[adapters]), SETTINGS[setting]))


@pytest.mark.parametrize("optimizer", [name for name in TEMPORARIES if name != "adamw"])
def test_with_every_optimizer_that_is_said_to(optimizer):
    assert_same(*both(CONFIGS["bert"], replace(STEP, optimizer=optimizer), MemSaveConfig()))


def test_where_it_does_not_two_steps_are_traced(monkeypatch):
    traced = []
    monkeypatch.setattr(traces, "with_a_block_less", lambda *_: pytest.fail("one step does not tell"))
    monkeypatch.setattr(traces, "trace_at", lambda *args, **kwargs: traced.append(args) or trace_at(*args, **kwargs))
    others = [name for name in OPTIMIZERS if name not in TEMPORARIES]
    assert others
    for changes in (
        {"autocast": torch.bfloat16, "dtype": torch.float32}, {"accumulation": 2}, *({"optimizer": o} for o in others)
    ):  # fmt: skip
        traced.clear()
        trace_of(CONFIGS["llama"], replace(STEP, **changes), MemSaveConfig())
        assert len(traced) == 2
    for training, memsave in (
        (replace(STEP, holds_output=True), MemSaveConfig()),
        (replace(STEP, lora=Lora(), quantized="nf4"), MemSaveConfig()),
        (STEP, MemSaveConfig(layers={"activation": 3})),
    ):
        traced.clear()
        trace_of(CONFIGS["llama"], training, memsave)
        assert len(traced) == 2
    traced.clear()
    trace_of(LlamaConfig(**CONFIGS["llama"].to_dict() | {"num_hidden_layers": 2}), STEP, MemSaveConfig())
    assert len(traced) == 2


def test_nor_does_one_step_where_a_block_is_unlike_the_others():
    (field,) = depth_fields(CONFIGS["bert"])
    trace = trace_at(CONFIGS["bert"], {field: 5}, STEP, MemSaveConfig(), keeps=False).trace
    assert traces._is_told_by_one([trace], {field: 1}, STEP, MemSaveConfig())
    assert not traces._is_told_by_one([trace], {field: 2}, STEP, MemSaveConfig())
    for block, may_differ in ((0, True), (1, False), (4, False)):
        owned = {of: (o._replace(parameters=1) if of[1] == block else o) for of, o in trace.owned.items()}
        assert traces._is_told_by_one([replace(trace, owned=owned)], {field: 1}, STEP, MemSaveConfig()) == may_differ


@pytest.mark.parametrize("layers", [9, *(pytest.param(n, marks=MATRIX) for n in (8, 11))])
@pytest.mark.parametrize("changes", [{"lora": Lora(), "quantized": "nf4"}, {"autocast": torch.bfloat16}], ids=str)
def test_where_fp32_sums_run_beside_16_bits_a_deep_model_keeps_what_a_plan_says(changes, layers):
    config = LlamaConfig(**CONFIGS["llama"].to_dict() | {"num_hidden_layers": layers})
    (field,) = depth_fields(config)
    training = replace(STEP, **changes)
    told = trace_of(config, training, MemSaveConfig()).trace
    own = trace_at(config, {field: layers}, training, MemSaveConfig(), keeps=False).trace
    assert max(m.live for m in told.places.values()) == max(m.live for m in own.places.values())
    assert traces._kept(told) == traces._kept(own)
