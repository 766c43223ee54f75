"""The timeline: every moment of a deep model's step, in order, from steps of few layers."""

import pytest
from transformers import BertConfig, LlamaConfig, T5Config

from hf_memsave import MemSaveConfig
from hf_memsave.measure.estimate import trace_in_full
from hf_memsave.measure.layers import depth_fields
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.timeline import timeline
from hf_memsave.measure.training import Training, trace_at
from support.helpers import halved, on_stand_in

pytestmark = on_stand_in
WIDE = dict(hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=99, pad_token_id=0)
CONFIGS = {
    "bert": BertConfig(**WIDE),
    "llama": LlamaConfig(**WIDE),
    "t5": T5Config(d_model=64, d_kv=16, d_ff=128, num_heads=4, vocab_size=99),
}


OF = [("bert", {}), ("t5", {}), ("llama", {"checkpointing": True}), ("llama", {"lora": Lora(r=2)})]


@pytest.mark.long
@pytest.mark.parametrize(("of", "memsave"), halved(OF, [None, MemSaveConfig()]))
def test_every_moment_follows_from_few_layers(of, memsave):
    family, fields = of
    config, training = CONFIGS[family], Training(batch_size=2, seq_len=64, **fields)
    depth = dict.fromkeys(depth_fields(config), 9)
    full, _ = trace_in_full(config, depth, training, memsave, keeps=False)
    points = timeline(full.trace)
    true = timeline(trace_at(config, depth, training, memsave, keeps=False).trace)
    assert [(p.phase, p.where) for p in points] == [(p.phase, p.where) for p in true]
    assert len(points) >= 9 * 2 * len(depth) + 3
    assert [p.live for p in points] == pytest.approx([p.live for p in true], rel=0.005)
    assert [p.gradients for p in points] == pytest.approx([p.gradients for p in true], rel=0.01)
    assert max(p.live for p in points) == full.trace.peak


def test_blocks_come_in_order_and_back():
    config, training = CONFIGS["t5"], Training(batch_size=1, seq_len=8)
    points = timeline(trace_at(config, dict.fromkeys(depth_fields(config), 2), training, None, keeps=False).trace)
    words = [f"{p.phase} {p.where}".strip() for p in points]
    assert words == [
        "forward outside of the blocks",
        "forward of block 0 of encoder.block", "forward of block 1 of encoder.block",
        "forward after block 1 of encoder.block",
        "forward of block 0 of decoder.block", "forward of block 1 of decoder.block",
        "forward after block 1 of decoder.block",
        "backward outside of the blocks",
        "backward of block 1 of decoder.block", "backward of block 0 of decoder.block",
        "backward of block 1 of encoder.block", "backward of block 0 of encoder.block",
        "optimizer",
    ]  # fmt: skip
