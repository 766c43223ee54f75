"""Small models whose estimates are compared with a step that is counted."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    BertConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    T5Config,
)

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.measure.inputs import forward_of, make_batch
from hf_memsave.measure.models import choose_head
from hf_memsave.measure.peak import count_peak
from hf_memsave.measure.training import Training
from hf_memsave.tape.meter import Kept


def configs(key_value_heads: int = 2) -> dict[str, PreTrainedConfig]:
    """One of each family, hidden 128, without dropout in attention: CPU's kernels have none."""
    wide: dict[str, Any] = dict(hidden_size=128, num_attention_heads=4, vocab_size=256)
    gated: dict[str, Any] = dict(wide, intermediate_size=352, num_key_value_heads=key_value_heads, pad_token_id=0)
    return {
        "bert": BertConfig(**wide, intermediate_size=512, attention_probs_dropout_prob=0.0),
        "gpt2": GPT2Config(n_embd=128, n_head=4, vocab_size=256, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0),
        "opt": OPTConfig(**wide, ffn_dim=512, word_embed_proj_dim=128),
        "llama": LlamaConfig(**gated),
        "gemma": GemmaConfig(**gated, head_dim=32),
        "phi": PhiConfig(**wide, intermediate_size=512),
        "phi3": Phi3Config(**gated),
        "t5": T5Config(d_model=128, d_kv=32, d_ff=512, num_heads=4, vocab_size=256),
    }


def count_step(
    model: nn.Module, config: PreTrainedConfig, of: Training, memsave: MemSaveConfig | None
) -> tuple[Kept, int]:
    """What a real step keeps, and the peak of both passes, by two meters that know nothing of the estimate."""
    batch = make_batch(choose_head(config), config, of.batch_size, of.seq_len)
    if memsave is not None:
        patch(model, memsave)
    forward: Any = forward_of(model, of.autocast)
    return measure_kept(model, batch, forward), count_peak(lambda: forward(**batch).loss.backward()).peak
