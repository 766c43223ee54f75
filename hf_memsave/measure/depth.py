r"""Kept memory of a model at its full depth, measured at smaller ones.

With layers that repeat after p of them, the bytes kept by each kind of op are affine in the depth L, so two depths give
them all::

    kept(L) = kept(d) + (L - d) / p * (kept(d + p) - kept(d)),      d = p + L mod p

Patched, p is a multiple of s (s + 1), and d at least s + 2, where s is :data:`~hf_memsave.tape.prices.SPAN`: under
autocast a tape keeps a residual sum after every s-th or next block, and remakes those between.

An encoder-decoder model has such a term for each of its two stacks. That the layers do repeat is checked: the number of
parameters at full depth (a model on the meta device has no bytes) must follow from the small models' in the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import MeasureError
from hf_memsave.measure.inputs import make_batch
from hf_memsave.measure.layers import at_depth, depth_fields, period
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.models import build, choose_head
from hf_memsave.measure.skip_values import SkipValues
from hf_memsave.patching.patch import patch
from hf_memsave.tape import measure_kept
from hf_memsave.tape.prices import SPAN

# What the memory check expects: the most that stock keeps in a layer of any family, plain and with adapters (DoRA in
# fp32), and for the logits of a token.
_MOST_U, _MOST_U_ADAPTED = 50, 160
_LOGIT_BYTES = 14
_GIB = 2**30
# After how many blocks what a tape keeps of one repeats itself, and from which on.
_REPEATS, _FROM = SPAN * (SPAN + 1), SPAN + 2


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
        patched: The same, patched.
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

    Args:
        config: Its widths and vocabulary are kept.
        setting: What to measure.
        layers: The depth wanted, instead of the configuration's own.

    Returns:
        Every figure at full depth.

    Raises:
        MeasureError: The model cannot be run, does not fit the machine's free memory, or its layers do not repeat.
    """
    head = choose_head(config)
    fields = depth_fields(config)
    full = {field: layers or getattr(config, field) for field in fields}
    own = {field: period(config) if field == fields[0] else 1 for field in fields}
    depths = _depths({field: own[field] + n % own[field] for field, n in full.items()}, own)
    every = {field: math.lcm(_REPEATS, n) for field, n in own.items()}
    deeper = _depths({field: min(n, _FROM + (n - _FROM) % every[field]) for field, n in full.items()}, every)

    with torch.device("meta"):
        whole, changes = _build(head, at_depth(config, full), setting)
    _check_memory(config, setting, max(depths, key=_sum))
    stock = [_kept_stock(head, config, depth, setting) for depth in depths]
    deepest = max(deeper, key=_sum)
    _check_memory(config, setting, deepest, _sum(extrapolate(stock, depths, deepest).total))
    counts, sites, patched = [], [], []
    for depth in deeper:
        model, _ = _build(head, at_depth(config, depth), setting)
        counts.append({"parameters": model.num_parameters()})
        report = patch(model, setting.memsave)
        sites.append(Counter((site.status, site.op, site.cls, site.reason) for site in report.sites))
        patched.append(_kept(model, head, setting))

    expected = extrapolate(counts, deeper, full).total["parameters"]
    if expected != whole.num_parameters():
        raise MeasureError(
            f"the layers of {type(whole).__name__} are not alike: expected {expected:,.0f} parameters at full depth, "
            f"got {whole.num_parameters():,}. Measure it as it is, with hf_memsave.measure_kept(model, batch)."
        )
    return FullDepth(
        cls=type(whole).__name__,
        parameters=whole.num_parameters(),
        sites=extrapolate(sites, deeper, full).total,
        depth=full,
        measured={"stock": depths, "patched": deeper},
        changes=changes,
        u=setting.batch_size * setting.seq_len * config.hidden_size * setting.u_dtype.itemsize,
        stock=extrapolate(stock, depths, full),
        patched=extrapolate(patched, deeper, full),
    )


def _depths(first: dict[str, int], every: dict[str, int]) -> tuple[dict[str, int], ...]:
    """The first depth, and one with more layers of each stack in turn."""
    return (first, *(first | {field: first[field] + every[field]} for field in first))


def _sum(amounts: Mapping[Any, int]) -> int:
    return sum(amounts.values())


def extrapolate(
    points: Sequence[Mapping[Any, int]], depths: tuple[dict[str, int], ...], full: dict[str, int]
) -> Affine:
    """The amounts at full depth, from one point at the first depth and one with more layers of each stack in turn.

    Args:
        points: Name -> amount, for each of ``depths``.
        depths: Field -> number of layers: the first, then with one field raised.
        full: The depth wanted; its fields are raised in its order.

    Returns:
        All that the points name.
    """
    first = points[0]
    total = dict(first)
    per_layer = {}
    for field, point, depth in zip(full, points[1:], depths[1:], strict=True):
        step = depth[field] - depths[0][field]
        added = {name: point.get(name, 0) - first.get(name, 0) for name in {**first, **point}}
        for name, amount in added.items():
            total[name] = total.get(name, 0) + amount * ((full[field] - depths[0][field]) // step)
        per_layer[field] = {name: amount / step for name, amount in added.items()}
    return Affine(total, per_layer)


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
    def forward(**batch: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setting.autocast):
            return model(**batch)

    batch = make_batch(head, model.config, setting.batch_size, setting.seq_len)
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
            f"tokens need about {needed / _GIB:.1f} GiB ({weights / _GIB:.1f} GiB of weights), and "
            f"{free / _GIB:.1f} GiB are free. Lower batch_size (kept memory grows in proportion to it) or seq_len, "
            "or use a larger machine."
        )
