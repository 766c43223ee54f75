"""What the model of a configuration keeps, stock and patched: measured on the CPU at a few layers, without weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.sizes import GIB
from hf_memsave.count.kept import measure_kept
from hf_memsave.errors import MeasureError
from hf_memsave.measure.depth import FROM, REPEATS, Affine, depths_for
from hf_memsave.measure.inputs import forward_of, make_batch
from hf_memsave.measure.models import at_depth, choose_head, depth_of
from hf_memsave.measure.training import Training, build, refusing_untrainable
from hf_memsave.patching.patch import patch

# What the memory check expects: the most that stock keeps in a layer of any family, plain and with adapters (DoRA in
# fp32), and for the logits of a token.
_MOST_U, _MOST_U_ADAPTED, _LOGIT_BYTES = 50, 160, 14
aten = torch.ops.aten
_DRAWN = 2**16
#: Matrix products, and which argument is the first factor.
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten._grouped_mm: 0, aten.addmm: 1, aten.baddbmm: 1}


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


def measure_full_depth(
    config: PreTrainedConfig, training: Training, memsave: MemSaveConfig, layers: int | None = None
) -> FullDepth:
    """Run a few layers; MeasureError if they fail, do not fit the machine's free memory, or are not alike."""
    full = depth_of(config, layers)
    few, more = depths_for(config, full, 1, 1), depths_for(config, full, FROM, REPEATS)
    with torch.device("meta"):
        whole, changes = _build(config, full, training)
    tokens, deepest = training.batch_size * training.seq_len, max(few.run, key=_sum)
    per_layer = (_MOST_U_ADAPTED if training.lora else _MOST_U) * config.hidden_size * training.dtype.itemsize
    at_most = tokens * (_sum(deepest) * per_layer + _LOGIT_BYTES * config.vocab_size)
    _check_memory(config, training, deepest, at_most)
    stock = [_point(config, depth, training, None) for depth in few.run]
    kept = [point["kept"] for point in stock]
    deepest = max(more.run, key=_sum)
    _check_memory(config, training, deepest, _sum(replace(few, full=deepest).carried(kept)))
    patched = [_point(config, depth, training, memsave) for depth in more.run]

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
        u=tokens * config.hidden_size * training.u_dtype.itemsize,
        stock=Affine.of(kept, few),
        patched=Affine.of([point["kept"] for point in patched], more),
    )


def _sum(amounts: Mapping[Any, int]) -> int:
    return sum(amounts.values())


def _build(
    config: PreTrainedConfig, depth: dict[str, int], training: Training
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model at a depth, and what had to be changed in it."""
    config, changes = at_depth(config, depth), set()
    for name in ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout", "attn_dropout"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)
            changes.add("attention has no dropout")
    with SkipValues(shares=True):
        model = build(config, training)
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float) and "Attention" in type(module).__name__:
            module.dropout = 0.0
            changes.add("attention has no dropout")
        if (bias := getattr(module, "relative_attention_bias", None)) is not None:
            bias.requires_grad_(False)
            changes.add("the position bias is frozen")
    return model, tuple(sorted(changes))


def _point(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None
) -> dict[str, Any]:
    """The model at a depth: bytes "kept" by kind of op, how many "parameters", and "sites" that were patched or not."""
    model, _ = _build(config, depth, training)
    found: dict[str, Any] = {"parameters": model.num_parameters()}
    if memsave is not None:
        report = patch(model, memsave)
        found["sites"] = Counter((site.status, site.op, site.cls, site.reason) for site in report.sites)
    batch = make_batch(choose_head(config), model.config, training.batch_size, training.seq_len)
    with refusing_untrainable(config, training), SkipValues():
        return found | {"kept": measure_kept(model, batch, forward_of(model, training.autocast)).by_kind}


def _check_memory(config: PreTrainedConfig, training: Training, depth: dict[str, int], kept: int) -> None:
    """Refuse what would not fit, before the system ends the process for it."""
    with torch.device("meta"):
        model, _ = _build(config, depth, replace(training, lora=None))
    parameters = sum(p.numel() for p in {p.shape: p for p in model.parameters()}.values())  # equal ones share memory
    weights = parameters * training.dtype.itemsize + 2 * bool(training.autocast) * model.num_parameters()
    if weights + kept > (free := psutil.virtual_memory().available):
        raise MeasureError(
            f"{' + '.join(map(str, depth.values()))} layers with a batch of {training.batch_size} x {training.seq_len} "
            f"tokens need about {(weights + kept) / GIB:.1f} GiB ({weights / GIB:.1f} GiB of weights), and "
            f"{free / GIB:.1f} GiB are free. Lower batch_size (kept memory grows in proportion to it) or seq_len, "
            "or use a larger machine."
        )


class SkipValues(TorchDispatchMode):
    """Random weights repeat a few numbers, and matrix products are zeros: no kept byte depends on a value."""

    def __init__(self, shares: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # To build a model, whose weights do not count, large tensors of one shape lie in the same memory, as it is.
        self.shared: dict[Any, torch.Tensor] | None = {} if shares else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.empty.memory_format and self.shared is not None:
            return self._shared(func(*args, **(kwargs or {})), self.shared)
        is_drawn = func.overloadpacket in (aten.normal_, aten.uniform_)
        if is_drawn and args[0].numel() > _DRAWN and args[0].is_contiguous():
            if self.shared is not None:
                return args[0]
            few = func(args[0].new_empty(_DRAWN), *args[1:], **(kwargs or {}))
            for part in args[0].view(-1).split(_DRAWN):
                part.copy_(few[: len(part)])
            return args[0]
        if func.overloadpacket in _PRODUCTS:
            left, right = args[_PRODUCTS[func.overloadpacket] :][:2]
            return left.new_zeros(*left.shape[:-1], right.shape[-1])
        return func(*args, **(kwargs or {}))

    def _shared(self, made: torch.Tensor, shared: dict[Any, torch.Tensor]) -> torch.Tensor:
        if made.numel() <= _DRAWN or not made.is_floating_point():
            return made
        known = shared.setdefault((made.shape, made.dtype, made.device), made)
        return made.new_empty(0).set_(known.untyped_storage(), 0, made.shape, made.stride())
