r"""Figures of a model at its full depth, from shallow ones.

The layers of a stack are alike, after p of them at the latest. So whatever is counted of a model (kept bytes of a kind,
parameters, the bytes alive at one moment of a block counted from the first one, or from the last one) is affine in the
depth L, and two depths tell it::

    n(L) = n(d) + (L - d) / p * (n(d + p) - n(d))

An encoder and a decoder have a term each. Of the blocks between the first ones and the last ones, each has a number of
bytes between those of its neighbours: the highest moment of a step is found among the first and the last ones.
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

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.sizes import GIB
from hf_memsave.errors import MeasureError
from hf_memsave.measure.inputs import forward_of, make_batch
from hf_memsave.measure.layers import at_depth, depth_fields, period
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.models import choose_head
from hf_memsave.measure.skip_values import SkipValues
from hf_memsave.measure.trace import Moment, Place, Trace
from hf_memsave.measure.training import Training, build, trace_at
from hf_memsave.measure.without_gpus import without_gpus
from hf_memsave.patching.patch import patch
from hf_memsave.tape import measure_kept
from hf_memsave.tape.price import SPAN

#: From which layer on those of a tape are alike, and after how many they repeat themselves: under autocast it keeps a
#: residual sum after every SPAN-th or next block, and recomputes those between.
FROM, REPEATS = SPAN + 2, SPAN * (SPAN + 1)
#: From which on those of stock are alike.
_FROM_STOCK = 3
# What the memory check expects: the most that stock keeps in a layer of any family, plain and with adapters (DoRA in
# fp32), and for the logits of a token.
_MOST_U, _MOST_U_ADAPTED, _LOGIT_BYTES = 50, 160, 14


@dataclass(frozen=True)
class Depths:
    """The depths that tell of the full one. All are numbers of layers, by field of the configuration."""

    full: dict[str, int]  # what is wanted
    first: dict[str, int]  # the first to run
    every: dict[str, int]  # how many more of each stack in turn the deeper ones have, after which layers repeat

    @property
    def run(self) -> tuple[dict[str, int], ...]:
        """The first depth, and one with more layers of each stack in turn."""
        return (self.first, *(self.first | {field: self.first[field] + n} for field, n in self.every.items()))

    def carried(self, points: Sequence[Any]) -> Any:
        """A number, or a dict of numbers, at full depth; ``points`` are what it is at each of :attr:`run`."""
        first, *deeper = points
        if isinstance(first, Mapping):
            return {n: self.carried([p.get(n, 0) for p in points]) for n in {n: 0 for point in points for n in point}}
        times = [(self.full[field] - self.first[field]) // n for field, n in self.every.items()]
        return first + sum(n * (other - first) for other, n in zip(deeper, times, strict=True))


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
        return cls(depths.carried(points), per_layer)


def depths_of(
    config: PreTrainedConfig, full: dict[str, int], training: Training, memsave: MemSaveConfig | None
) -> Depths:
    """The depths to trace for a full one: that itself as the first, where it has too few layers to tell of more."""
    own = _periods(config, full)
    # Where an fp32 residual sum runs beside products in 16 bits; elsewhere each layer keeps as much as the others.
    has_sums = memsave is not None and bool(training.autocast or training.quantized)
    every = {field: math.lcm(REPEATS if has_sums else 1, n) for field, n in own.items()}
    least = {field: max(_FROM_STOCK if memsave is None else FROM, n) for field, n in own.items()}
    first = {f: n if n < least[f] else least[f] + (n - least[f]) % every[f] for f, n in full.items()}
    return Depths(full, first, every)


def _periods(config: PreTrainedConfig, full: Mapping[str, int]) -> dict[str, int]:
    """After how many layers the types in each stack repeat themselves; only the first stack may have several."""
    return {field: period(config) if i == 0 else 1 for i, field in enumerate(full)}


@without_gpus
def trace_in_full(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None,
    keeps: bool = True, on_cpu: bool = False,
) -> tuple[Trace, dict[str, dict[str, float]]]:  # fmt: skip
    """A step at full depth, from steps of few layers as :func:`trace_at` runs them.

    Returns:
        The step, and by field of the configuration the bytes that a layer adds: "kept", alive "at_loss", and "away".
    """
    depths = depths_of(config, depth, training, memsave)
    traces = [trace_at(config, at, training, memsave, keeps, on_cpu) for at in depths.run]
    points = [{"kept": sum(t.by_kind.values()), "at_loss": t.at_loss, "away": t.away} for t in traces]
    return trace_at_full_depth(traces, depths), Affine.of(points, depths).per_layer


def trace_at_full_depth(traces: Sequence[Trace], depths: Depths) -> Trace:
    """The step at full depth, its first and its last blocks, from those at ``depths.run``; MeasureError if unlike."""
    first = traces[0]
    blocks = depths.carried([trace.blocks for trace in traces])
    places: dict[Place, Moment] = {}
    for place in first.places:
        for is_from_end in _ends(place, first.blocks):
            try:
                moments = [t.places[_same(place, first.blocks, t.blocks, is_from_end)] for t in traces]
            except KeyError as error:
                raise MeasureError(
                    f"the blocks of {place.stack or 'the model'} are not alike: a deeper one has no {error}. Measure "
                    "the model as it is, with hf_memsave.measure.peak.count_peak."
                ) from error
            found = depths.carried([moment._asdict() | {"op": 0} for moment in moments])
            places[_same(place, first.blocks, blocks, is_from_end)] = Moment(**found | {"op": moments[0].op})
    names = ("parameters", "trained", "states", "numbers", "by_kind", "by_module")
    figures = {name: depths.carried([getattr(trace, name) for trace in traces]) for name in names}
    return replace(first, places=places, blocks=blocks, **figures)


def _ends(place: Place, blocks: Mapping[str, int]) -> list[bool]:
    """From which ends to count: the last block may be unlike the others, counted from the first, and the reverse."""
    if not place.stack:
        return [False]
    is_last = place.block == blocks[place.stack] - 1
    is_late = place.block >= max(1, blocks[place.stack] // 2)  # what an early one builds on is not there yet
    return [*([] if is_last else [False]), *([True] if is_last or is_late else [])]


def _same(place: Place, mine: Mapping[str, int], theirs: Mapping[str, int], is_from_end: bool) -> Place:
    more = theirs[place.stack] - mine[place.stack] if is_from_end else 0
    return place._replace(block=place.block + more)


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


@dataclass(frozen=True, kw_only=True)
class FullDepth:
    """Kept bytes by kind of op, stock and patched, and how they were found."""

    cls: str  # the model's class
    parameters: int  # their number
    sites: dict[tuple[str, ...], int]  # (status, op, class, reason) -> how many sites there are
    depth: dict[str, int]  # field of the configuration -> number of layers
    measured: dict[str, tuple[dict[str, int], ...]]  # the depths that were run, "stock" and "patched"
    changes: tuple[str, ...]  # what was changed in the model for that
    u: int  # bytes of one activation ``[batch, seq, hidden]``
    stock: Affine  # kept bytes by kind of op
    patched: Affine  # the patched model's


def measure_full_depth(config: PreTrainedConfig, setting: Setting, layers: int | None = None) -> FullDepth:
    """Measure what the model of a configuration keeps, stock and patched, in steps on the CPU.

    Returns:
        Every figure at full depth.

    Raises:
        MeasureError: The model cannot be run, does not fit the machine's free memory, or its layers are not alike.
    """
    full = {field: layers or getattr(config, field) for field in depth_fields(config)}
    own = _periods(config, full)
    every = {field: math.lcm(REPEATS, n) for field, n in own.items()}
    few = Depths(full, {field: own[field] + n % own[field] for field, n in full.items()}, own)
    more = Depths(full, {field: min(n, FROM + (n - FROM) % every[field]) for field, n in full.items()}, every)

    with torch.device("meta"):
        whole, changes = _build(config, full, setting)
    _check_memory(config, setting, max(few.run, key=_sum))
    stock = [_point(config, depth, setting, None) for depth in few.run]
    kept = [point["kept"] for point in stock]
    deepest = max(more.run, key=_sum)
    _check_memory(config, setting, deepest, _sum(replace(few, full=deepest).carried(kept)))
    patched = [_point(config, depth, setting, setting.memsave) for depth in more.run]

    if (expected := more.carried([point["parameters"] for point in patched])) != whole.num_parameters():
        raise MeasureError(
            f"the layers of {type(whole).__name__} are not alike: expected {expected:,.0f} parameters at full depth, "
            f"got {whole.num_parameters():,}. Measure it as it is, with hf_memsave.measure_kept(model, batch)."
        )
    return FullDepth(
        cls=type(whole).__name__,
        parameters=whole.num_parameters(),
        sites=more.carried([point["sites"] for point in patched]),
        depth=full,
        measured={"stock": few.run, "patched": more.run},
        changes=changes,
        u=setting.batch_size * setting.seq_len * config.hidden_size * setting.u_dtype.itemsize,
        stock=Affine.of(kept, few),
        patched=Affine.of([point["kept"] for point in patched], more),
    )


def _sum(amounts: Mapping[Any, int]) -> int:
    return sum(amounts.values())


def _build(
    config: PreTrainedConfig, depth: dict[str, int], setting: Setting
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model at a depth, and what had to be changed in it."""
    config = at_depth(config, depth)
    changes = set()
    for name in ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout", "attn_dropout"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)
            changes.add("attention has no dropout")
    size = setting.batch_size, setting.seq_len
    with SkipValues(shares=True):
        model = build(config, Training(batch_size=size[0], seq_len=size[1], dtype=setting.dtype, lora=setting.lora))
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float) and "Attention" in type(module).__name__:
            module.dropout = 0.0
            changes.add("attention has no dropout")
        if (bias := getattr(module, "relative_attention_bias", None)) is not None:
            bias.requires_grad_(False)
            changes.add("the position bias is frozen")
    return model, tuple(sorted(changes))


def _point(
    config: PreTrainedConfig, depth: dict[str, int], setting: Setting, memsave: MemSaveConfig | None
) -> dict[str, Any]:
    """The model at a depth: bytes "kept" by kind of op, how many "parameters", and "sites" that were patched or not."""
    model, _ = _build(config, depth, setting)
    found: dict[str, Any] = {"parameters": model.num_parameters()}
    if memsave is not None:
        report = patch(model, memsave)
        found["sites"] = Counter((site.status, site.op, site.cls, site.reason) for site in report.sites)
    batch = make_batch(choose_head(config), model.config, setting.batch_size, setting.seq_len)
    forward = forward_of(model, torch.bfloat16 if setting.autocast else None)
    try:
        with SkipValues():
            return found | {"kept": measure_kept(model, batch, forward).by_kind}
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise MeasureError(
            f"{type(model).__name__} cannot be trained on {setting.batch_size} x {setting.seq_len} token ids: "
            f"{type(error).__name__}: {error}. Lower seq_len if it is beyond the model's positions, or try fp32 "
            "weights; other inputs need hf_memsave.measure_kept(model, batch)."
        ) from error


def _check_memory(config: PreTrainedConfig, setting: Setting, depth: dict[str, int], kept: int | None = None) -> None:
    """Refuse what would not fit, before the system ends the process for it; ``kept`` is what stock keeps, if known."""
    with torch.device("meta"):
        model, _ = _build(config, depth, replace(setting, lora=None))
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
