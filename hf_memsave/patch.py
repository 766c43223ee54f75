"""``patch(model)``: collect every site, check every one, then swap; ``unpatch(model)``: stock again."""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memsave.arch import ARCHS
from hf_memsave.collect import SiteReport, collect, model_types, refuse_foreign_patches
from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import PatchError
from hf_memsave.ops import OPS, attention
from hf_memsave.swap import binding_of, is_patched, stock_class, swap_in, swap_out
from hf_memsave.tape import Kept, measure_kept


@dataclass(frozen=True)
class Comparison:
    """Kept memory of one batch, stock beside patched."""

    stock: Kept
    patched: Kept

    @property
    def freed(self) -> int:
        """Bytes that stock keeps and we do not."""
        return self.stock.total - self.patched.total


class PatchReport:
    """Returned by :func:`patch`; prints as one line per kind of site.

    Attributes:
        config: What was asked for.
        sites: Every site found.
        unknown: Model types that no table knows; their sites were found by module class.
    """

    def __init__(self, model: nn.Module, config: MemSaveConfig, sites: Sequence[SiteReport]) -> None:
        self._model = weakref.ref(model)
        self.config, self.sites = config, tuple(sites)
        self.unknown = tuple(sorted(model_types(model) - ARCHS.keys()))

    @property
    def patched(self) -> tuple[SiteReport, ...]:
        """The sites that changed."""
        return tuple(site for site in self.sites if site.status == "patched")

    @property
    def skipped(self) -> tuple[SiteReport, ...]:
        """The sites that stayed stock; each has a reason."""
        return tuple(site for site in self.sites if site.status == "skipped")

    def undo(self) -> None:
        """Make the model stock again; see :func:`unpatch`."""
        if (model := self._model()) is not None:
            unpatch(model)

    def compare(self, batch: Mapping[str, Any] | Sequence[Any] | Tensor) -> Comparison:
        """Measure what ``batch`` keeps, stock and patched; the model ends up patched, as it was.

        Args:
            batch: As for :func:`hf_memsave.measure_kept`.

        Returns:
            Both measurements, and the bytes freed.

        Raises:
            ReferenceError: The model is gone.
        """
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this report no longer exists. Patch the new one for a new report.")
        unpatch(model)
        try:
            stock = measure_kept(model, batch)
        finally:
            patch(model, self.config)
        return Comparison(stock, measure_kept(model, batch))

    def __str__(self) -> str:
        counts = Counter((site.status, site.op, site.cls, site.reason) for site in self.sites)
        lines = [f"hf_memsave: {len(self.patched)} sites patched, {len(self.skipped)} skipped"]
        for (status, op, cls, reason), count in sorted(counts.items()):
            lines.append(f"  {status:<8} {count:>4} x {op:<18} {cls}{': ' + reason if reason else ''}")
        lines += [f"  no table for model type {kind!r}: sites were found by module class" for kind in self.unknown]
        return "\n".join(lines)


def patch(model: nn.Module, config: MemSaveConfig | str | bool | dict[str, Any] = True) -> PatchReport:
    """Make fine-tuning ``model`` keep less memory, in place.

    Idempotent; another config replaces the one before. Parameters, buffers, state dict and class names stay as they
    are, and a model that cannot be patched is left untouched.

    Args:
        model: Any module; models of Transformers, and any module that contains known ones.
        config: True for the exact default, a preset's name, a dict of fields or a :class:`MemSaveConfig`.

    Returns:
        Every site, patched or skipped and why. Print it; ``report.undo()`` takes everything back.

    Raises:
        PatchError: Nothing in the model can be patched, another tool has patched it already, or a module of a known
            architecture is not what its table says.
        ConfigError: ``config`` names a preset, field or value that does not exist.
    """
    resolved = MemSaveConfig.resolve(config)
    if resolved is None:
        raise PatchError(f"patch(model, {config!r}) asks for nothing. Use patch(model), or unpatch(model) to undo.")
    refuse_foreign_patches(model)
    sites, plan = collect(model, resolved)
    if not any(site.status == "patched" and OPS[site.op].setting for site in sites):
        raise PatchError(
            f"nothing to patch in {type(model).__name__}: no norm, activation, gated MLP or dropout that hf_memsave "
            f"knows{_reasons(sites)}. Expected a model of Transformers, or one built of torch.nn.LayerNorm, GELU, SiLU "
            "or Dropout; for another one, add a table under hf_memsave/arch."
        )
    for module, site, value in plan:
        swap_in(module, site.op, site.names, value)
    planned = {id(p.module) for p in plan}
    for name, module in model.named_modules():
        if is_patched(module) and id(module) not in planned:
            swap_out(module, name)  # patched by an earlier config, stock in this one
    if resolved.attention == "recompute":
        sites += _rename_attention(model, attention.STOCK_NAME, attention.NAME)
    else:
        _rename_attention(model, attention.NAME, attention.STOCK_NAME)
    return PatchReport(model, resolved, sites)


def unpatch(model: nn.Module) -> None:
    """Give every patched module of ``model`` its stock class back; does nothing to a stock model.

    Raises:
        PatchError: Another tool has wrapped a patched class since; the model is left as it is.
    """
    patched = [(name, m) for name, m in model.named_modules() if is_patched(m)]
    for name, module in sorted(patched, key=lambda item: binding_of(item[1]) is not None):
        swap_out(module, name)  # those that must be refused come first
    _rename_attention(model, attention.NAME, attention.STOCK_NAME)


def _reasons(sites: list[SiteReport]) -> str:
    reasons = sorted({f"{site.cls}: {site.reason}" for site in sites if site.status == "skipped"})
    return f" (skipped: {'; '.join(reasons)})" if reasons else ""


def _rename_attention(model: nn.Module, old: str, new: str) -> list[SiteReport]:
    """Point the configs of ``model`` that name attention ``old`` to ``new``; each model gets its own copy of them."""
    attention.register()
    copies: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation == old:
            # Models that choose their attention in any other way would take an unknown name for no name.
            if hasattr(sys.modules.get(stock_class(module).__module__), "ALL_ATTENTION_FUNCTIONS"):
                copies.setdefault(id(module.config), copy.copy(module.config))
    for module in model.modules():
        mine = module.__dict__.get("config")
        if id(mine) in copies:
            module.config = copies[id(mine)]
    for config in copies.values():
        config._attn_implementation_internal = new
    return [
        SiteReport(name, stock_class(m).__name__, "attention", "patched")
        for name, m in model.named_modules()
        if isinstance(m, PreTrainedModel) and m.config._attn_implementation == attention.NAME
    ]
