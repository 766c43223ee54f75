"""A row of a paper's table beside ours: what the paper says, how it is estimated here, and how far apart they are.

All is counted on the stand-in for a CUDA device, at full depth or, of text models, carried from few layers. A measure
takes a :class:`Setting` and returns a figure in the row's unit. Equal questions are answered once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.count.kept import KeptStorage
from hf_memsave.count.peak import Count
from hf_memsave.measure.depth import FROM, depths_for, trace_at_full_depth, trace_few, trace_in_full
from hf_memsave.measure.fake_device import fake_device, to_fake, without_gpus
from hf_memsave.measure.figures import Trace
from hf_memsave.measure.inputs import device_of, forward_of
from hf_memsave.measure.models import at_depth, depth_of
from hf_memsave.measure.trace import UNIT, nbytes_of, trace_step
from hf_memsave.measure.training import OPTIMIZERS, training_of

GB, GIB = 10**9, 2**30
#: How far stock may be from the paper's to agree, in %.
WITHIN = 10.0
#: How far our share of stock may be above the paper's and still count as no larger: what a rounded figure hides.
SLACK = 0.005


@dataclass(frozen=True)
class Setting:
    """How a step is run."""

    memsave: MemSaveConfig | None = None
    checkpointing: bool = False


STOCK = Setting()
#: Column -> what is estimated beside stock and the paper's method.
COLUMNS: dict[str, Setting] = {
    "exact": Setting(MemSaveConfig()),
    "gate": Setting(MemSaveConfig(checkpoint="gate")),
    "block": Setting(MemSaveConfig(checkpoint="block")),
    "tiles": Setting(MemSaveConfig(checkpoint="tiles")),
    "checkpointing": Setting(checkpointing=True),
}
#: A partial: equal ones are one, which a cache knows by its identity.
made = functools.cache(functools.partial)
Measure = Callable[[Setting], float]
#: The inputs of a step, on a device.
Inputs = Callable[[torch.device], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of a paper, with stock and with its method, and how both are estimated here."""

    table: str  # its name in the paper
    work: str  # the model, its sizes and the batch
    unit: str = "GB"  # of all figures
    stock: float | None = None  # the paper's; None where it gives none
    method: str = ""  # the paper's, by its name there
    figure: float | None = None  # the paper's, with its method
    measure: Measure | None = None  # None: the paper does not say enough
    measure_stock: Callable[[], float] | None = None  # of stock, where it is another training than the rest of the row
    here: Setting | None = None  # the paper's method as hf_memsave has it; None: it has none
    columns: tuple[str, ...] = tuple(COLUMNS)  # what there is of COLUMNS
    share: float | None = None  # the paper's method's, of stock, where there are no figures
    then: Callable[[], float] | None = None  # stock with what the libraries of the paper's time kept besides
    rung: str = "exact"  # the column that is to be no worse than the method
    more_is_better: bool = False  # of batches and lengths
    note: str = ""  # what is missing, or why the figures differ


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row, and our figures by column; "stock" and "method" among them."""

    row: Row
    ours: Mapping[str, float] = field(default_factory=dict)

    @property
    def distance(self) -> float | None:
        """Of our stock from the paper's, in %."""
        stock = self.ours.get("stock")
        return None if stock is None or not self.row.stock else 100 * (stock / self.row.stock - 1)

    @property
    def distance_then(self) -> float | None:
        """Of stock with the libraries of the paper's time, where that was asked for; else :attr:`distance`."""
        then = self.ours.get("then")
        return self.distance if then is None or not self.row.stock else 100 * (then / self.row.stock - 1)

    @property
    def share(self) -> float | None:
        """The paper's method's figure over the paper's stock."""
        row = self.row
        return row.figure / row.stock if row.figure is not None and row.stock else row.share

    @property
    def behind(self) -> list[str]:
        """By what of the paper's the row's exact setting is beaten: its published share of stock, its method here."""
        row, stock, rung = self.row, self.ours.get("stock"), self.ours.get(self.row.rung)
        if not stock or rung is None or not row.method:
            return []
        sign = -1 if row.more_is_better else 1
        rivals = {"the paper's": self.share}
        rivals |= {"the method here": self.ours["method"] / stock} if "method" in self.ours else {}
        return [name for name, share in rivals.items() if share is not None and sign * (rung / stock - share) > SLACK]


def result_of(row: Row) -> Result:
    """Our figures of a row."""
    if row.measure is None:
        return Result(row=row)
    ours = {"stock": row.measure_stock() if row.measure_stock else row.measure(STOCK)}
    if row.then is not None:
        ours["then"] = row.then()
    if row.here is not None:
        ours["method"] = row.measure(row.here)
    for name in row.columns:
        ours[name] = row.measure(COLUMNS[name])
        gc.collect()
    return Result(row=row, ours=ours)


@functools.cache
@without_gpus
def forward_peak(build: Callable[[], nn.Module], inputs: Inputs, setting: Setting = STOCK) -> int:
    """The peak of a forward in bytes, with what backward needs, weights and inputs.

    ``build`` runs on the meta device; it and ``inputs`` are functions of a module, or partials by :data:`made`.
    """
    with _prepared(build, inputs, setting) as (model, batch):
        forward, device = forward_of(model, None), device_of(model)
        before = nbytes_of([*model.parameters(), *model.buffers(), *batch.values()], device)
        count = Count(device, UNIT)
        with count:
            output = forward(**batch)
        del output
        count.made.clear()
        return before + count.peak


@without_gpus
def deep_trace(
    config: PreTrainedConfig, build: Callable[[PreTrainedConfig], nn.Module], inputs: Inputs, setting: Setting = STOCK,
    in_full: bool = False,
) -> Trace:  # fmt: skip
    """A step at full depth: run ``in_full``, or carried from few layers, where all blocks are alike from there on."""
    full = depth_of(config)
    depths = depths_for(config, full, max(full.values()) if in_full else FROM, 1)
    traces = []
    for at in depths.run:
        with _prepared(functools.partial(build, at_depth(config, at)), inputs, setting) as (model, batch):
            trained = (p for p in model.parameters() if p.requires_grad)
            traces.append(trace_step(model, batch, OPTIMIZERS["adamw_fused"](trained), forward_of(model, None)))
    return trace_at_full_depth(traces, depths)


@contextlib.contextmanager
def _prepared(
    build: Callable[[], nn.Module], inputs: Inputs, setting: Setting, padded: bool = True
) -> Iterator[tuple[Any, dict[str, Tensor]]]:
    """The model and its batch on the stand-in, as a setting has them."""
    with torch.device("meta"):
        model: Any = build()
    if setting.checkpointing:
        enable_checkpointing(model)
    with fake_device("flash", padded) as device:
        to_fake(model, device)
        batch = inputs(device)
        if setting.memsave is not None:
            patch(model, setting.memsave)
        yield model, batch


@functools.cache
@without_gpus
def step_kept(
    build: Callable[[], nn.Module], inputs: Inputs, setting: Setting = STOCK, *, padded: bool = True,
    old_softmax: bool = False, only: Callable[[KeptStorage], bool] | None = None,
) -> int:  # fmt: skip
    """The bytes kept between forward and backward, of ``only`` some: activations alone, without weights and inputs."""
    with _prepared(build, inputs, setting, padded=padded) as (model, batch), softmax_before_1_11(old_softmax):
        kept = measure_kept(model, batch, forward_of(model, None)).storages
    return sum(one.nbytes for one in kept if only is None or only(one))


def text_trace(
    config: PreTrainedConfig, setting: Setting, *, batch: int, tokens: int, old_softmax: bool = False, **training: Any
) -> Trace:
    """A step of a text model on ``batch`` x ``tokens``, as ``hf_memsave.estimate`` has it.

    ``training`` takes its fields: dtype, autocast, optimizer, lora, quantized, attention, padded.
    """
    fields = training_of(batch_size=batch, seq_len=tokens, checkpointing=setting.checkpointing, **training)
    trace = trace_few if old_softmax else trace_in_full  # which remembers
    with softmax_before_1_11(old_softmax):
        return trace(config, depth_of(config), fields, setting.memsave)


class _Softmax(torch.autograd.Function):
    """A softmax that keeps its input, which its backward does not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        y = torch._softmax(x, dim, False)
        ctx.save_for_backward(x, y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return torch._softmax_backward_data(gradients[0], y, ctx.dim, x.dtype), None


@contextlib.contextmanager
def softmax_before_1_11(is_old: bool = True) -> Iterator[None]:
    """Have ``F.softmax`` keep its input besides its output, as PyTorch did before 1.11."""

    def softmax(input: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
        x = input if dtype is None else input.to(dtype)
        return _Softmax.apply(x, dim)  # type: ignore[no-untyped-call]

    with mock.patch.object(F, "softmax", softmax) if is_old else contextlib.nullcontext():
        yield
