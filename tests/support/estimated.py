"""Small models whose estimates are compared with a step that is counted."""

from transformers import AutoConfig

from hf_memsave import measure_kept, patch
from hf_memsave.count.peak import count_peak
from hf_memsave.measure.inputs import forward_of, make_batch
from hf_memsave.measure.models import choose_head


def configs(key_value_heads=2):
    """One of each family, hidden 128, without dropout in attention: CPU's kernels have none."""
    wide = dict(hidden_size=128, num_attention_heads=4, vocab_size=256)
    gated = dict(wide, intermediate_size=352, num_key_value_heads=key_value_heads, pad_token_id=0)
    fields = {
        "bert": dict(wide, intermediate_size=512, attention_probs_dropout_prob=0.0),
        "gpt2": dict(n_embd=128, n_head=4, vocab_size=256, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0),
        "opt": dict(wide, ffn_dim=512, word_embed_proj_dim=128),
        "llama": gated,
        "gemma": dict(gated, head_dim=32),
        "phi": dict(wide, intermediate_size=512),
        "phi3": gated,
        "t5": dict(d_model=128, d_kv=32, d_ff=512, num_heads=4, vocab_size=256),
    }
    return {family: AutoConfig.for_model(family, **of_family) for family, of_family in fields.items()}


def count_step(model, config, of, memsave):
    """What a real step keeps, and the peak of both passes, by two meters that know nothing of the estimate."""
    batch = make_batch(choose_head(config), config, of.batch_size, of.seq_len)
    if memsave is not None:
        patch(model, memsave)
    forward = forward_of(model, of.autocast)
    return measure_kept(model, batch, forward), count_peak(lambda: forward(**batch).loss.backward()).peak
