"""Which models take our attention function, and pointing their configs to it and back."""

from __future__ import annotations

import copy
import functools
import inspect
import sys

from torch import nn
from transformers import PreTrainedModel

from hf_memsave.collect import SiteReport
from hf_memsave.ops import attention
from hf_memsave.swap import stock_class

_NAMES = (attention.STOCK_NAME, attention.NAME)


def attention_sites(model: nn.Module, stays: str | None = None) -> list[SiteReport]:
    """A line for each Transformers model inside ``model`` that attends by SDPA: patched, or skipped and why.

    Args:
        model: Stock or patched.
        stays: Why all of them are skipped; None if they are not.

    Returns:
        The lines.
    """
    sites = []
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation in _NAMES:
            cls = stock_class(module)
            reason = stays or _reason_against(cls.__module__)
            status = "skipped" if reason else "patched"
            sites.append(SiteReport(name, cls.__name__, "attention", status, reason))
    return sites


def use_ours(model: nn.Module) -> None:
    """Name our function in the configs that name SDPA; the model gets its own copies of them."""
    attention.register()
    wanted = {site.name for site in attention_sites(model) if site.status == "patched"}
    stock = [m.config for name, m in model.named_modules() if name in wanted]
    copies = {id(c): copy.copy(c) for c in stock if c._attn_implementation == attention.STOCK_NAME}
    for own in copies.values():
        own._attn_implementation_internal = attention.NAME
    for module in model.modules():
        if (own := copies.get(id(module.__dict__.get("config")))) is not None:
            module.config = own


def use_stock(model: nn.Module) -> None:
    """Name SDPA in the configs that name our function: they are the model's own already."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation == attention.NAME:
            module.config._attn_implementation_internal = attention.STOCK_NAME


@functools.cache
def _reason_against(source: str) -> str:
    """Why the models defined in module ``source`` cannot take another attention name; empty if they can."""
    module = sys.modules.get(source)
    if module is None or not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return "it does not choose its attention by Transformers' registry"
    try:
        text = inspect.getsource(module)
    except (OSError, TypeError):
        return "its source cannot be read, and it may ask for its attention by name"
    if any(f"{quote}{attention.STOCK_NAME}{quote}" in text for quote in "\"'"):
        return f"its source asks for attention {attention.STOCK_NAME!r} by name"
    return ""
