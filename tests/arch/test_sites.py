"""Which rung runs which linear again, by the spellings in Transformers."""

import pytest

from hf_memsave.arch.sites import is_run_again

RUNGS = ("o_proj", "qkv", "up", "gate")
#: A model that has it, the path in its block, and the first rung that runs the linear again; None: its output is a
#: residual's, or small.
SPELLINGS = [
    ("llama", "self_attn.o_proj", "o_proj"), ("llama", "self_attn.k_proj", "qkv"), ("llama", "mlp.up_proj", "up"),
    ("llama", "mlp.gate_proj", "gate"), ("llama", "mlp.down_proj", None), ("phi3", "mlp.gate_up_proj", "gate"),
    ("bert", "attention.output.dense", "o_proj"), ("bert", "attention.self.value", "qkv"),
    ("bert", "intermediate.dense", "up"), ("bert", "output.dense", None),
    ("blip", "crossattention.output.dense", "o_proj"), ("blip", "self_attn.projection", "o_proj"),
    ("internvl", "attention.projection_layer", "o_proj"), ("timesformer", "temporal_attention.output.dense", "o_proj"),
    ("lilt", "attention.layout_output.dense", "o_proj"), ("lilt", "attention.self.layout_query", "qkv"),
    ("lilt", "layout_intermediate.dense", "up"), ("lilt", "layout_output.dense", None),
    ("gpt2", "attn.c_proj", "o_proj"), ("gpt2", "attn.c_attn", "qkv"), ("gpt2", "mlp.c_fc", "up"),
    ("gpt2", "mlp.c_proj", None), ("gptj", "mlp.fc_in", "up"), ("gptj", "mlp.fc_out", None),
    ("t5", "layer.0.SelfAttention.o", "o_proj"), ("t5", "layer.0.SelfAttention.q", "qkv"),
    ("t5", "layer.1.EncDecAttention.k", "qkv"), ("longt5", "layer.0.LocalSelfAttention.v", "qkv"),
    ("t5", "layer.1.DenseReluDense.wi", "up"), ("mt5", "layer.1.DenseReluDense.wi_1", "up"),
    ("mt5", "layer.1.DenseReluDense.wi_0", "gate"), ("t5", "layer.1.DenseReluDense.wo", None),
    ("bart", "self_attn.out_proj", "o_proj"), ("bart", "encoder_attn.q_proj", "qkv"), ("bart", "fc1", "up"),
    ("bart", "fc2", None), ("led", "self_attn.output", "o_proj"), ("longformer", "attention.self.key_global", "qkv"),
    ("bloom", "self_attention.dense", "o_proj"), ("bloom", "self_attention.query_key_value", "qkv"),
    ("bloom", "mlp.dense_h_to_4h", "up"), ("bloom", "mlp.dense_4h_to_h", None),
    ("modernbert", "attn.Wo", "o_proj"), ("modernbert", "attn.Wqkv", "qkv"), ("modernbert", "mlp.Wi", "up"),
    ("modernbert", "mlp.Wo", None), ("vit", "attn.qkv", "qkv"), ("vit", "attn.proj", "o_proj"),
    ("distilbert", "attention.out_lin", "o_proj"), ("distilbert", "attention.v_lin", "qkv"),
    ("distilbert", "ffn.lin1", "up"), ("distilbert", "ffn.lin2", None),
    ("deberta-v2", "attention.self.query_proj", "qkv"), ("deberta", "attention.self.in_proj", "qkv"),
    ("deepseek_v3", "self_attn.kv_a_proj_with_mqa", "qkv"), ("deepseek_v3", "self_attn.q_b_proj", "qkv"),
    ("deepseek_v32", "self_attn.indexer.wq_b", "qkv"), ("deepseek_v4", "self_attn.o_b_proj", "o_proj"),
    ("detr", "self_attn.output_proj", "o_proj"), ("dab-detr", "cross_attn.cross_attn_key_pos_proj", "qkv"),
    ("qwen3_next", "linear_attn.in_proj_qkvz", "qkv"), ("mamba", "mixer.in_proj", "qkv"),
    ("wav2vec2", "feed_forward.intermediate_dense", "up"), ("wav2vec2", "feed_forward.output_dense", None),
    ("wav2vec2-bert", "self_attn.linear_out", "o_proj"), ("wav2vec2-bert", "self_attn.linear_k", "qkv"),
    ("parakeet", "feed_forward1.linear1", "up"), ("parakeet", "feed_forward1.linear2", None),
    ("prophetnet", "feed_forward.intermediate", "up"), ("prophetnet", "feed_forward.output", None),
    ("qwen3_5", "mlp.linear_fc1", "up"), ("qwen3_5", "mlp.linear_fc2", None), ("pvt_v2", "mlp.dense1", "up"),
    ("lfm2", "feed_forward.w1", "gate"), ("lfm2", "feed_forward.w3", "up"), ("lfm2", "feed_forward.w2", None),
    ("granitemoe", "shared_mlp.input_linear", "up"), ("xlstm", "ffn.proj_up", "up"), ("xlstm", "mlstm_layer.k", "qkv"),
    ("xlstm", "ffn.proj_up_gate", "gate"), ("xlstm", "ffn.proj_down", None), ("rwkv", "feed_forward.value", None),
    ("swiftformer", "attn.to_key", "qkv"), ("swiftformer", "attn.final", "o_proj"),
    ("gemma4", "self_attn.q_proj.linear", "qkv"), ("gemma4", "mlp.down_proj.linear", None),
    ("nllb-moe", "ffn.experts.expert_0.fc1", "up"), ("nllb-moe", "ffn.router.classifier", None),
    ("qwen2_moe", "mlp.shared_expert.up_proj", "up"), ("qwen2_moe", "mlp.shared_expert_gate", None),
]  # fmt: skip


@pytest.mark.parametrize(("family", "path", "first"), SPELLINGS)
def test_a_linear_runs_again_from_its_rung_on(family, path, first):
    expected = [first is not None and RUNGS.index(rung) >= RUNGS.index(first) for rung in RUNGS]
    for of_model in (path, f"model.layers.3.{path}", f"layers.3.{path}.base_layer"):
        assert [is_run_again(of_model, rung) for rung in RUNGS] == expected
    assert not is_run_again(f"{path}.lora_A.default", "gate")
