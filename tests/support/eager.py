"""Models with eager attention, with dropout in it, and what was patched in them."""

import torch
from torch import nn

from hf_memsave.ops.sampled.eager_attention import NAME, is_attention
from hf_memsave.patching.swap import stock_class
from support.zoo import Size, build

SMALL = Size()
_DROPOUTS = ("dropout", "attn_dropout", "attention_dropout")


def attentions(model):
    return [module for module in model.modules() if is_attention(stock_class(module))]


def eager(family, dropout=0.1, dtype=torch.float32, size=SMALL, device="cpu"):
    """A model with eager attention, and with dropout in it."""
    model = build(family, size, dtype)
    for module in model.modules():  # in older Transformers T5's stacks have configs of their own
        if "config" in vars(module):
            module.config._attn_implementation = NAME
    for module in attentions(model):
        (name,) = (n for n in _DROPOUTS if hasattr(module, n))
        if isinstance(getattr(module, name), nn.Dropout):
            getattr(module, name).p = dropout
        else:
            setattr(module, name, dropout)
    return model.to(device)


def ops_of(report, status="patched"):
    return {site.op for site in report.sites if site.status == status}
