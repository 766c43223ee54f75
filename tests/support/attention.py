"""SDPA as Transformers calls it, and what to call it with."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from support.helpers import random

BATCH, HEADS, SEQ, DIM = 2, 4, 6, 8
MASKS = ("none", "bool", "causal-bool", "float")
LAYOUTS = {
    "projected": lambda x: x.transpose(1, 2),  # a view of a linear's output
    "rotated": lambda x: x.transpose(1, 2).contiguous(),  # after rotary embeddings
}


def inputs(device, dtype=torch.float32, kv_heads=HEADS, seq=SEQ, kv_seq=None, dim=DIM, batch=BATCH):
    """q, k and v as projections make them, ``[batch, seq, heads, dim]``."""
    kv_seq = seq if kv_seq is None else kv_seq
    shapes = [(batch, seq, HEADS, dim), (batch, kv_seq, kv_heads, dim), (batch, kv_seq, kv_heads, dim)]
    return [random(*shape, dtype=dtype, device=device, seed=10 + i) for i, shape in enumerate(shapes)]


def mask_of(kind, device, dtype=torch.float32, seq=SEQ, kv_seq=None):
    """A mask ``[batch, 1, seq, kv_seq]`` as Transformers makes it, with padding at the end of the second sequence."""
    kv_seq = seq if kv_seq is None else kv_seq
    if kind == "none":
        return None
    mask = torch.ones(BATCH, 1, seq, kv_seq, dtype=torch.bool, device=device)
    mask[1, :, :, kv_seq - 2 :] = False
    if kind == "causal-bool":
        mask &= torch.ones(seq, kv_seq, dtype=torch.bool, device=device).tril()
    if kind == "float":
        return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, torch.finfo(dtype).min)
    return mask


def attention(mask=None, layout="projected", groups=1, is_causal=False, **options):
    """A function of q, k, v and perhaps a position bias."""
    module, view = SimpleNamespace(is_causal=is_causal, num_key_value_groups=groups), LAYOUTS[layout]

    def attend(q, k, v, bias=None):
        return sdpa_attention_forward(module, view(q), view(k), view(v), mask, position_bias=bias, **options)[0]

    return attend


def bias_of(device, dtype=torch.float32, seq=SEQ, kv_seq=None):
    return random(1, HEADS, seq, seq if kv_seq is None else kv_seq, dtype=dtype, device=device, seed=20)


def sdpa(*given, p=0.3, **options):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in given), dropout_p=p, **options)
