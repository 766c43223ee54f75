"""``patch(model)``: collect every site, check every one, then swap; ``unpatch(model)``: stock again."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.adapters import watch
from hf_memsave.arch import ARCHS
from hf_memsave.attention_name import attention_sites, use_ours, use_stock
from hf_memsave.blocks import left_out
from hf_memsave.collect import SiteReport, collect, model_types, refuse_foreign_patches
from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import PatchError
from hf_memsave.ops.block import CODEC
from hf_memsave.sampled_layers import attach, sampler_of
from hf_memsave.sampling.sampler import MOST
from hf_memsave.swap import (
    binding_of,
    is_patched,
    is_wrapped,
    patched_class,
    refuse_wrapped,
    set_class,
    stock_class,
)
from hf_memsave.tape import Kept, measure_kept
from hf_memsave.tape.booleans import leave_buffers
from hf_memsave.tape.quantize import FORMATS
from hf_memsave.tape.storage import Codec

_NO_GAIN_ALONE = {"block", "linear", "conv1d"}
#: Caches of gradient norms that need a model's batch.
_BY_BATCH = ("sample_idx", "content")


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

    @property
    def added(self) -> tuple[str, ...]:
        """Paths of sites that came since, such as adapters: the next :func:`patch` of the model covers them."""
        model = self._model()
        if model is None or not any(is_patched(module) for module in model.modules()):
            return ()
        names = {id(module): name for name, module in model.named_modules()}
        return tuple(names[id(p.module)] for p in collect(model, self.config)[1] if not is_patched(p.module))

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

    def _sampling(self) -> list[str]:
        model, config = self._model(), self.config.linear
        sampler = None if model is None else sampler_of(model)
        if config is None or sampler is None or config.budget > MOST:
            return []
        unbiased = "biased" if config.estimator == "topk" else "unbiased"
        what = "weight gradients, and those of attention's products," if config.attention else "weight gradients"
        line = f"  {what} from {config.budget:.0%} of the tokens: noisy, and {unbiased}"
        size = sampler.cache.nbytes
        return [line + (f"; their norms take up to {size / 2**20:.1f} MiB of main memory" if size else "")]

    def _alone(self) -> list[str]:
        model = self._model()
        binding = None if model is None else binding_of(model)
        if binding is None or binding.alone is None:
            return []
        return ["  patched by itself: what the layers after it keep of its output, they keep as in stock"]

    def __str__(self) -> str:
        counts = Counter((site.status, site.op, site.cls, site.reason) for site in self.sites)
        lines = [f"hf_memsave: {len(self.patched)} sites patched, {len(self.skipped)} skipped"]
        for (status, op, cls, reason), count in sorted(counts.items()):
            lines.append(f"  {status:<8} {count:>4} x {op:<18} {cls}{': ' + reason if reason else ''}")
        lines += self._sampling() + self._alone()
        if self.config.storage is not None:
            bits = FORMATS[self.config.storage].bits
            lines.append(f"  activations that have to be kept are kept in {bits} bits: gradients are approximate")
        lines += [f"  no table for model type {kind!r}: sites were found by module class" for kind in self.unknown]
        if added := self.added:
            lines.append(f"  {len(added)} sites were added since ({added[0]}, ...): call hf_memsave.patch(model) again")
        return "\n".join(lines)


def patch(model: nn.Module, config: MemSaveConfig | str | bool | dict[str, Any] = True) -> PatchReport:
    """Make fine-tuning ``model`` keep less memory, in place.

    Idempotent; another config replaces the one before. Parameters, buffers, state dict and class names stay as they
    are, and a model that cannot be patched is left untouched.

    A single layer (a norm, activation, MLP, eager attention, dropout, convolution, or with ``linear`` a linear) is
    patched as well, and can then stand in any model that is not: it frees what it keeps itself. What it would promise
    to the layer after it ends with it: one GELU or LayerNorm that is recomputed exactly keeps what stock does, and a
    ReLU its bits beside what a layer after it keeps. There "tempo" frees memory, or a model that is patched around
    both.

    Args:
        model: Any module; models of Transformers, any module that contains known ones, and a known one itself.
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
    stays = left_out(resolved, "attention", 0)
    if resolved.attention == "recompute":
        sites += attention_sites(model, stays)
    no_gain = _NO_GAIN_ALONE if resolved.storage is None else set()
    if not any(site.status == "patched" and site.op not in no_gain for site in sites):
        raise PatchError(f"nothing to patch in {type(model).__name__}: {_why_nothing(sites)}")
    sees_no_batch = isinstance(model, GradientCheckpointingLayer) or any(p.lays_tape for p in plan)
    if sees_no_batch and resolved.linear is not None and resolved.linear.cache in _BY_BATCH:
        raise PatchError(
            f"WTACRS(cache={resolved.linear.cache!r}) tells samples apart by a model's batch, which a "
            f"{type(model).__name__} patched by itself does not see. Use cache='position' or None, or patch the model "
            "around it."
        )
    classes = {
        id(p.module): patched_class(
            stock_class(p.module), p.site.op, p.site.names, p.value, resolved if p.lays_tape else None
        )
        for p in plan
    }
    for name, module in model.named_modules():
        if is_wrapped(module) and classes.get(id(module)) not in type(module).__mro__:
            refuse_wrapped(name, module)
    for module in model.modules():
        if not is_wrapped(module):  # else it is patched as planned already
            set_class(module, classes.get(id(module), stock_class(module)))
    (use_ours if resolved.attention == "recompute" and stays is None else use_stock)(model)
    attach(model)
    _attach_codecs(model, resolved.storage)
    leave_buffers(model)
    watch_peft()
    return PatchReport(model, resolved, sites)


def unpatch(model: nn.Module) -> None:
    """Give every patched module of ``model`` its stock class back; does nothing to a stock model.

    Raises:
        PatchError: Another tool has wrapped a patched class since; the model is left as it is.
    """
    for name, module in model.named_modules():
        refuse_wrapped(name, module)
    for module in model.modules():
        set_class(module, stock_class(module))
    use_stock(model)
    attach(model)
    _attach_codecs(model, None)


def watch_peft() -> None:
    """Have adapters patched as they are added: to a patched model, or by a config with a ``memsave`` field of ours."""
    watch(patch)


def _attach_codecs(model: nn.Module, kind: str | None) -> None:
    """Give every patched block a codec of this kind (it stays if it was there); take away all others."""
    for index, module in enumerate(model.modules()):
        before = module.__dict__.pop(CODEC, None)
        binding = binding_of(module)
        if kind is not None and binding is not None and binding.tape_config is not None:
            module.__dict__[CODEC] = before if before is not None and before.kind == kind else Codec(kind, index)


def _why_nothing(sites: list[SiteReport]) -> str:
    reasons = sorted({f"{site.cls}: {site.reason}" for site in sites if site.status == "skipped"})
    skipped = f" (skipped: {'; '.join(reasons)})" if reasons else ""
    if any(site.reason.endswith(" was asked for") for site in sites):
        return (
            f"the config leaves out all that hf_memsave could patch there{skipped}. Choose one of these fields, or "
            "patch(model) for the exact default."
        )
    return (
        f"no norm, activation, gated MLP or dropout that hf_memsave knows{skipped}. Expected a model of Transformers, "
        "or one built of torch.nn.LayerNorm, GELU, SiLU or Dropout; for another one, add a table under hf_memsave/arch."
    )
