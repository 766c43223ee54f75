"""What the model of a configuration keeps, stock and patched: measured on the CPU, at a few layers where that tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.sizes import MIB
from hf_memsave.count.kept import measure_kept
from hf_memsave.device import free_main_memory
from hf_memsave.errors import MeasureError, MemSaveError
from hf_memsave.measure.depth import FROM, REPEATS, Affine, depths_for
from hf_memsave.measure.inputs import cannot_run, fitted, forward_of, make_batch
from hf_memsave.measure.models import AS_IT_IS, DepthError, at_depth, class_of, depth_of, text_head
from hf_memsave.measure.training import Training, build
from hf_memsave.patching.patch import patch

#: From what size on a tensor may be the one that fills the memory, and how much stays free, in bytes.
_LARGE, _RESERVE = 2**20, 2**28
EVERY_LAYER = "every layer runs"
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
    inputs: dict[str, list[int]]  # name -> shape
    depth: dict[str, int]  # field of the configuration -> number of layers; of a model that was run whole, none
    measured: dict[str, tuple[dict[str, int], ...]]  # the depths that were run, "stock" and "patched"
    changes: tuple[str, ...]  # what was changed in the model for that
    has_loss: bool  # whether the model gives one for these inputs: else the whole output was held
    u: int | None  # bytes of one activation ``[batch, seq, hidden]``, where few layers were run
    stock: Affine  # kept bytes by kind of op
    patched: Affine  # the patched model's


def measure_full_depth(
    config: PreTrainedConfig, training: Training, memsave: MemSaveConfig, layers: int | None = None,
    batch: dict[str, torch.Tensor] | None = None,
) -> FullDepth:  # fmt: skip
    """Run a few layers of a text model, any other model whole; on a batch that is made where none is given."""
    head = class_of(config, batch is not None)
    if batch is None:
        batch = make_batch(head, config, training.batch_size, training.seq_len)
    if text_head(config) is not None:
        try:
            return _measure(head, config, training, memsave, depth_of(config, layers), batch)
        except DepthError:
            if layers:
                raise
    if layers:
        config = at_depth(config, depth_of(config, layers))
    return _measure(head, config, training, memsave, {}, batch)


def _measure(
    head: Any, config: PreTrainedConfig, training: Training, memsave: MemSaveConfig, full: dict[str, int],
    batch: dict[str, torch.Tensor],
) -> FullDepth:  # fmt: skip
    """At full depth from a few layers; without ``full``, of the model as it is."""
    few, more = depths_for(config, full, 1, 1), depths_for(config, full, FROM, REPEATS)
    with torch.device("meta"):
        whole, changes = _build(head, config, full, training)
    u, tokens = None, batch.get("input_ids", batch.get("inputs_embeds"))
    if full and tokens is not None and tokens.dim() > 1:
        u = tokens.shape[0] * tokens.shape[1] * config.hidden_size * training.u_dtype.itemsize
    stock = [_point(head, config, depth, training, None, batch) for depth in few.run]
    patched = [_point(head, config, depth, training, memsave, batch) for depth in more.run]

    if (expected := more.carried([point["parameters"] for point in patched])) != whole.num_parameters():
        raise DepthError(
            f"the layers of {type(whole).__name__} are not alike: expected {expected:,.0f} parameters at full depth, "
            f"got {whole.num_parameters():,}.",
            *AS_IT_IS,
        )
    return FullDepth(
        cls=type(whole).__name__,
        parameters=whole.num_parameters(),
        sites=more.carried([point["sites"] for point in patched]),
        inputs={name: list(value.shape) for name, value in batch.items()},
        depth=full,
        measured={"stock": few.run, "patched": more.run},
        changes=changes,
        has_loss=stock[0]["has_loss"],
        u=u,
        stock=Affine.of([point["kept"] for point in stock], few),
        patched=Affine.of([point["kept"] for point in patched], more),
    )


def _build(
    head: Any, config: PreTrainedConfig, depth: dict[str, int], training: Training
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model at a depth, and what had to be changed in it."""
    config, changes = at_depth(config, depth), set()
    for name in ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout", "attn_dropout"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)
            changes.add("attention has no dropout")
    if getattr(config, "layerdrop", None):
        config.layerdrop = 0.0
        changes.add(EVERY_LAYER)
    with SkipValues(shares=True):
        model = build(config, training, head)
    for module in model.modules():
        rate = getattr(module, "dropout", None)
        if isinstance(rate, float) and rate and "Attention" in type(module).__name__:
            module.dropout = 0.0
            changes.add("attention has no dropout")
        if (bias := getattr(module, "relative_attention_bias", None)) is not None:
            bias.requires_grad_(False)
            changes.add("the position bias is frozen")
    return model, tuple(sorted(changes))


def _point(
    head: Any, config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None,
    batch: dict[str, torch.Tensor],
) -> dict[str, Any]:  # fmt: skip
    """The model at a depth: bytes "kept" by kind of op, how many "parameters", "sites" that were patched or not."""
    model, _ = _build(head, config, depth, training)
    found: dict[str, Any] = {"parameters": model.num_parameters()}
    if memsave is not None:
        report = patch(model, memsave)
        found["sites"] = Counter((site.status, site.op, site.cls, site.reason) for site in report.sites)
    call = forward_of(model, training.autocast)

    def forward(**inputs: Any) -> Any:
        output = call(**inputs)
        found["has_loss"] = isinstance(output, Mapping) and output.get("loss") is not None
        return output

    try:
        with SkipValues():
            return found | {"kept": measure_kept(model, fitted(batch, model), forward).by_kind}
    except MemSaveError:
        raise
    except Exception as error:
        raise MeasureError(
            cannot_run(model, batch, error), "Give such a batch, or try fp32 weights.",
            "Lower --seq-len if it is beyond the model's positions, give a batch with --batch, or try --dtype fp32.",
        ) from error  # fmt: skip


class SkipValues(TorchDispatchMode):
    """Random weights repeat a few numbers, and matrix products are zeros: no kept byte depends on a value."""

    def __init__(self, shares: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # To build a model, whose weights do not count, large tensors of one shape lie in the same memory, as it is.
        self.shared: dict[Any, torch.Tensor] | None = {} if shares else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.empty.memory_format and self.shared is not None:
            made = func(*args, **(kwargs or {}))
            if made.numel() <= _DRAWN or not made.is_floating_point():
                return made
            known = self.shared.setdefault((made.shape, made.dtype, made.device), made)
            return made.new_empty(0).set_(known.untyped_storage(), 0, made.shape, made.stride())
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
            output = left.new_zeros(*left.shape[:-1], right.shape[-1])
        else:
            output = func(*args, **(kwargs or {}))
        is_large = isinstance(output, torch.Tensor) and not output.is_meta and output.nbytes >= _LARGE
        if is_large and (free := free_main_memory()) < _RESERVE:
            raise MeasureError(
                f"the forward fills the memory: {free / MIB:,.0f} MiB are free, expected {_RESERVE / MIB:,.0f}.",
                "Use a smaller batch, shorter sequences, or a larger machine.",
                option="Lower --batch-size or --seq-len, or use a larger machine.",
            )
        return output
