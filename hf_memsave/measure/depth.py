r"""Kept memory of a model at its full depth, measured at smaller ones.

With layers that repeat after p of them, the bytes kept by each kind of op are affine in the depth L, so two depths give
them all::

    kept(L) = kept(d) + (L - d) / p * (kept(d + p) - kept(d)),      d = p + L mod p

Patched, p is a multiple of s (s + 1), and d at least s + 2, where s is :data:`~hf_memsave.tape.price.SPAN`: under
autocast a tape keeps a residual sum after every s-th or next block, and remakes those between.

An encoder-decoder model has such a term for each of its two stacks. That the layers do repeat is checked: the number of
parameters at full depth (a model on the meta device has no bytes) must follow from the small models' in the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import MeasureError
from hf_memsave.measure.extrapolate import FROM, REPEATS, Depths, extrapolated, periods
from hf_memsave.measure.inputs import forward_of, make_batch
from hf_memsave.measure.layers import at_depth, depth_fields
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.models import build, choose_head
from hf_memsave.measure.skip_values import SkipValues
from hf_memsave.patching.patch import patch
from hf_memsave.sizes import GIB
from hf_memsave.tape import measure_kept

# What the memory check expects: the most that stock keeps in a layer of any family, plain and with adapters (DoRA in
# fp32), and for the logits of a token.
_MOST_U, _MOST_U_ADAPTED = 50, 160
_LOGIT_BYTES = 14


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What to measure: a batch ``[batch_size, seq_len]``, weights in ``dtype``, autocast and adapters if asked for."""

    batch_size: int
    seq_len: int
    dtype: torch.dtype
    autocast: bool
    memsave: MemSaveConfig
    lora: Lora | None = None

    @property
    def u_dtype(self) -> torch.dtype:
        """The dtype that linear layers compute in, and in which u is counted."""
        return torch.bfloat16 if self.autocast else self.dtype


@dataclass(frozen=True)
class Affine:
    """Named amounts at full depth, and the part of them that each layer of a stack adds."""

    total: dict[Any, int]
    per_layer: dict[str, dict[Any, float]]

    @classmethod
    def of(cls, points: Sequence[Mapping[Any, int]], depths: Depths) -> Affine:
        """All that the points name, each of which is what was found at one of ``depths.run``."""
        first, *deeper = points
        per_layer = {
            field: {name: (point.get(name, 0) - first.get(name, 0)) / n for name in {**first, **point}}
            for (field, n), point in zip(depths.every.items(), deeper, strict=True)
        }
        return cls(extrapolated(first, deeper, depths.times), per_layer)


@dataclass(frozen=True, kw_only=True)
class FullDepth:
    """Kept bytes by kind of op, stock and patched, and how they were found.

    Attributes:
        cls: The model's class.
        parameters: Their number.
        sites: (status, op, class, reason) -> how many sites there are.
        depth: Field of the configuration -> number of layers.
        measured: The depths that were run, "stock" and "patched".
        changes: What was changed in the model for that.
        u: Bytes of one activation ``[batch, seq, hidden]``.
        stock: Kept bytes by kind of op.
        patched: The patched model's.
    """

    cls: str
    parameters: int
    sites: dict[tuple[str, ...], int]
    depth: dict[str, int]
    measured: dict[str, tuple[dict[str, int], ...]]
    changes: tuple[str, ...]
    u: int
    stock: Affine
    patched: Affine


def measure_full_depth(config: PreTrainedConfig, setting: Setting, layers: int | None = None) -> FullDepth:
    """Measure the model of a configuration, stock and patched.

    Returns:
        Every figure at full depth.

    Raises:
        MeasureError: The model cannot be run, does not fit the machine's free memory, or its layers do not repeat.
    """
    head = choose_head(config)
    full = {field: layers or getattr(config, field) for field in depth_fields(config)}
    own = periods(config, full)
    few = Depths(full, {field: own[field] + n % own[field] for field, n in full.items()}, own)
    every = {field: math.lcm(REPEATS, n) for field, n in own.items()}
    more = Depths(full, {field: min(n, FROM + (n - FROM) % every[field]) for field, n in full.items()}, every)

    with torch.device("meta"):
        whole, changes = _build(head, at_depth(config, full), setting)
    _check_memory(config, setting, max(few.run, key=_sum))
    stock = [_kept_stock(head, config, depth, setting) for depth in few.run]
    deepest = max(more.run, key=_sum)
    _check_memory(config, setting, deepest, _sum(Affine.of(stock, replace(few, full=deepest)).total))
    counts, sites, patched = [], [], []
    for depth in more.run:
        model, _ = _build(head, at_depth(config, depth), setting)
        counts.append({"parameters": model.num_parameters()})
        report = patch(model, setting.memsave)
        sites.append(Counter((site.status, site.op, site.cls, site.reason) for site in report.sites))
        patched.append(_kept(model, head, setting))

    expected = Affine.of(counts, more).total["parameters"]
    if expected != whole.num_parameters():
        raise MeasureError(
            f"the layers of {type(whole).__name__} are not alike: expected {expected:,.0f} parameters at full depth, "
            f"got {whole.num_parameters():,}. Measure it as it is, with hf_memsave.measure_kept(model, batch)."
        )
    return FullDepth(
        cls=type(whole).__name__,
        parameters=whole.num_parameters(),
        sites=Affine.of(sites, more).total,
        depth=full,
        measured={"stock": few.run, "patched": more.run},
        changes=changes,
        u=setting.batch_size * setting.seq_len * config.hidden_size * setting.u_dtype.itemsize,
        stock=Affine.of(stock, few),
        patched=Affine.of(patched, more),
    )


def _sum(amounts: Mapping[Any, int]) -> int:
    return sum(amounts.values())


def _build(head: Any, config: PreTrainedConfig, setting: Setting) -> tuple[PreTrainedModel, tuple[str, ...]]:
    model, changes = build(head, config, setting.dtype)
    if setting.lora is not None:
        with SkipValues():
            setting.lora.add_to(model)
    return model, changes


def _kept_stock(head: Any, config: PreTrainedConfig, depth: dict[str, int], setting: Setting) -> dict[str, int]:
    model, _ = _build(head, at_depth(config, depth), setting)
    try:
        return _kept(model, head, setting)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise MeasureError(
            f"{type(model).__name__} cannot be trained on {setting.batch_size} x {setting.seq_len} token ids: "
            f"{type(error).__name__}: {error}. Lower seq_len if it is beyond the model's positions, or try fp32 "
            "weights; other inputs need hf_memsave.measure_kept(model, batch)."
        ) from error


def _kept(model: PreTrainedModel, head: Any, setting: Setting) -> dict[str, int]:
    batch = make_batch(head, model.config, setting.batch_size, setting.seq_len)
    forward = forward_of(model, torch.bfloat16 if setting.autocast else None)
    with SkipValues():
        return measure_kept(model, batch, forward).by_kind


def _check_memory(config: PreTrainedConfig, setting: Setting, depth: dict[str, int], kept: int | None = None) -> None:
    """Refuse what would not fit, before the system ends the process for it; ``kept`` is what stock keeps, if known."""
    with torch.device("meta"):
        model, _ = build(choose_head(config), at_depth(config, depth), setting.dtype)
    parameters = sum(p.numel() for p in {p.shape: p for p in model.parameters()}.values())  # equal ones share memory
    if kept is None:
        most = _MOST_U_ADAPTED if setting.lora else _MOST_U
        per_token = _sum(depth) * most * config.hidden_size * setting.dtype.itemsize + _LOGIT_BYTES * config.vocab_size
        kept = setting.batch_size * setting.seq_len * per_token
    weights = parameters * setting.dtype.itemsize + 2 * setting.autocast * model.num_parameters()
    needed = weights + kept
    if needed > (free := psutil.virtual_memory().available):
        raise MeasureError(
            f"{' + '.join(map(str, depth.values()))} layers with a batch of {setting.batch_size} x {setting.seq_len} "
            f"tokens need about {needed / GIB:.1f} GiB ({weights / GIB:.1f} GiB of weights), and "
            f"{free / GIB:.1f} GiB are free. Lower batch_size (kept memory grows in proportion to it) or seq_len, "
            "or use a larger machine."
        )
