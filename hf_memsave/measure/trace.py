"""One training step, its bytes counted: where in it they are highest, block by block.

A step is cut into *places*: a phase ("forward", "backward", "optimizer"), a stack of repeated blocks, and the number of
the block in it that runs. Of each place the highest moment is kept: with it the step of a deeper model is known too
(:mod:`~hf_memsave.measure.depth`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.measure.inputs import device_of, loss_of
from hf_memsave.measure.kernels import workspace
from hf_memsave.measure.peak import Count, collector_off, rounded
from hf_memsave.tape.meter import storages
from hf_memsave.tape.offload import Away
from hf_memsave.tape.private import tree_leaves

#: What CUDA's allocator rounds up to.
UNIT = 512


class Place(NamedTuple):
    """Where in a step: its phase, the path of a stack, and the number of a block in it; outside of blocks, "" and 0.

    ``is_after`` is set between the end of a block's forward and whatever block comes next.
    """

    phase: str
    stack: str = ""
    block: int = 0
    is_after: bool = False

    @property
    def where(self) -> str:
        """The part of the phase, in words."""
        if not self.stack:
            return "" if self.phase == "optimizer" else "outside of the blocks"
        return f"{'after' if self.is_after else 'of'} block {self.block} of {self.stack}"


class Moment(NamedTuple):
    """The bytes alive after an op, those of gradients among them, and what was moved to main memory until then."""

    live: int
    gradients: int
    op: str
    away: int = 0


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One step of a model as it is."""

    places: Mapping[Place, Moment]  # where, and the highest moment there
    blocks: Mapping[str, int]  # path of a stack -> its number of blocks
    parameters: int  # bytes of parameters and buffers
    trained: int  # bytes of the gradients of all
    states: int  # bytes of the optimizer's states
    of_block: Mapping[str, int]  # path of a stack -> the most bytes of parameters and buffers that a block adds
    numbers: dict[str, int] = field(default_factory=dict)  # how many "parameters" there are, and how many are "trained"
    by_kind: dict[str, int] = field(default_factory=dict)  # kept bytes by kind of op; empty where they were not counted
    by_module: dict[str, int] = field(default_factory=dict)  # kept bytes by module, with "*" for the number of a block

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max(moment.live for moment in self.places.values())

    @property
    def at_loss(self) -> int:
        """Bytes alive as the loss is computed, without parameters and states; 0 for a model without known blocks."""
        ends = [self.places.get(Place("forward", stack, n - 1, True)) for stack, n in self.blocks.items()]
        return ends[-1].live - self.parameters - self.states if ends and ends[-1] else 0

    @property
    def away(self) -> int:
        """Bytes that were moved to main memory."""
        return max(moment.away for moment in self.places.values())


def trace_step(
    model: nn.Module, batch: Mapping[str, Tensor], optimizer: Callable[[Any], torch.optim.Optimizer],
    forward: Callable[..., Any], accumulation: int = 1, holds_output: bool = False,
) -> Trace:  # fmt: skip
    """Run a training step, with the optimizer's states there as from the second step on, and count.

    Args:
        model: On one device, in training mode, stock or patched; it has no gradients afterwards.
        batch: Keyword arguments.
        optimizer: Makes one of the parameters that are trained.
        forward: Runs the model.
        accumulation: Batches a step. From the second one on, the gradients are there already.
        holds_output: Whether an output is alive until there is the next one, which may be in the next step.

    Returns:
        The highest moments, with what was there before the step.
    """
    device = device_of(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    made = optimizer(trained)
    make_states(made)
    parameters = nbytes_of([*model.parameters(), *model.buffers()], device)
    states = nbytes_of([dict(state) for state in made.state.values()], device)
    count = _Places(model, device, parameters + states + nbytes_of(dict(batch), device))
    torch.clear_autocast_cache()
    held: list[Any] = []
    with collector_off(), count.watching_resizes(), count.watching_blocks(), count:
        if holds_output:
            with torch.no_grad():  # the one before
                held.append(forward(**batch))
        for _ in range(min(accumulation, 2)):
            run_passes(model, batch, forward, held if holds_output else None, count.begin)
        count.begin("optimizer")
        made.step()
    made.zero_grad(set_to_none=True)
    return Trace(
        places=count.places,
        blocks=dict(Counter(stack for stack, _ in count.blocks.values())),
        parameters=parameters,
        trained=nbytes_of(trained, device),
        states=states,
        of_block=_largest_blocks(count.blocks, model, device),
    )


def run_passes(
    model: nn.Module, batch: Mapping[str, Tensor], forward: Callable[..., Any], held: list[Any] | None,
    begin: Callable[[str], None] = lambda phase: None,
) -> None:  # fmt: skip
    """Forward and backward of a training step, whose output a list holds where there is one; each is announced."""
    begin("forward")
    output = forward(**batch)
    loss = loss_of(output, model, batch)
    if held is not None:
        held[:] = [output]
    del output
    begin("backward")
    loss.backward()


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its states, by a step with gradients of zero."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class _Places(Count):
    """Counts what is alive in each place, beside ``base`` bytes that are there all the time."""

    def __init__(self, model: nn.Module, device: str, base: int) -> None:
        super().__init__(device, UNIT)
        self.model, self.base, self.gradients = model, base, 0
        self.place = Place("forward")
        self.places: dict[Place, Moment] = {}
        self.blocks: dict[int, tuple[str, int]] = {}
        self.moved = Away.moved
        numbers: Counter[str] = Counter()
        for name, module in model.named_modules():
            if isinstance(module, GradientCheckpointingLayer):
                stack = name.rpartition(".")[0]
                self.blocks[id(module)] = stack, numbers[stack]
                numbers[stack] += 1

    def begin(self, phase: str) -> None:
        """The next phase begins."""
        self.place = Place(phase)

    def note(self, func: Any, args: Any) -> None:
        """Remember the highest moment of a place."""
        live = self.base + self.live + workspace(func, args)
        known = self.places.get(self.place)
        if known is None or live > known.live:
            self.places[self.place] = Moment(live, self.gradients, str(func), Away.moved - self.moved)

    @contextlib.contextmanager
    def watching_blocks(self) -> Iterator[None]:
        """Tell where a step is: by calls of blocks in forward, by gradients of their outputs in backward."""
        handles: list[Any] = [
            global_hooks.register_module_forward_pre_hook(self._enter),
            global_hooks.register_module_forward_hook(self._leave),
        ]
        seen: set[int] = set()
        for p in self.model.parameters():
            if p.requires_grad:
                handles.append(p.register_post_accumulate_grad_hook(partial(self._accumulated, seen)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.place.phase == "forward" and id(module) in self.blocks:
            self.place = Place("forward", *self.blocks[id(module)])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.place.phase != "forward" or id(module) not in self.blocks:
            return
        self.place = self.place._replace(is_after=True)
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(partial(self._differentiate, Place("backward", *self.blocks[id(module)])))

    def _differentiate(self, place: Place, gradient: Tensor) -> None:
        self.place = place

    def _accumulated(self, seen: set[int], p: Tensor) -> None:
        if id(p) not in seen and p.grad is not None:
            seen.add(id(p))
            self.gradients += rounded(p.grad.untyped_storage().nbytes(), UNIT)


def _largest_blocks(blocks: Mapping[int, tuple[str, int]], model: nn.Module, device: str) -> dict[str, int]:
    largest: dict[str, int] = {}
    seen: set[int] = set()
    for module in model.modules():
        if id(module) in blocks:
            mine = {id(t): t for t in (*module.parameters(), *module.buffers()) if id(t) not in seen}
            seen |= mine.keys()
            stack, _ = blocks[id(module)]
            largest[stack] = max(largest.get(stack, 0), nbytes_of(list(mine.values()), device))
    return largest


def nbytes_of(tensors: Any, device: str) -> int:
    """Bytes of the storages of all tensors in ``tensors`` on a type of device, each rounded up."""
    found = {s._cdata: s for s in storages(tree_leaves(tensors), lambda kind: kind == device)}
    return sum(rounded(s.nbytes(), UNIT) for s in found.values())


@dataclass(frozen=True, kw_only=True)
class Point:
    """The highest moment in a part of a step."""

    phase: str  # "forward", "backward" or "optimizer"
    where: str  # in words, such as "block 3 of model.layers"
    live: int  # bytes alive
    gradients: int  # bytes of gradients among them


def timeline(trace: Trace) -> tuple[Point, ...]:
    """One point for each block in forward and in backward, and for what comes before and after them, in order."""
    found: list[Point] = []
    for phase, stack in dict.fromkeys((place.phase, place.stack) for place in trace.places):
        count = trace.blocks.get(stack, 1)
        places = [Place(phase, stack, block) for block in range(count)]
        moments = _filled({place: _highest(trace, place, count) for place in places})
        order = places if phase == "forward" else places[::-1]
        end = Place(phase, stack, count - 1, is_after=True)
        if end in trace.places:
            moments[end] = trace.places[end]
            order = [*order, end]
        for place in order:
            live, gradients, *_ = moments[place]
            found.append(Point(phase=phase, where=place.where, live=live, gradients=gradients))
    return tuple(found)


def _highest(trace: Trace, place: Place, count: int) -> Moment | None:
    """Of a block, and of what comes between it and the next one."""
    at = [place] if place.block == count - 1 else [place, place._replace(is_after=True)]
    return max((trace.places[p] for p in at if p in trace.places), key=lambda moment: moment.live, default=None)


def _filled(moments: Mapping[Place, Moment | None]) -> dict[Place, Moment]:
    """The moments, with those between the first blocks and the last ones on a line."""
    known = {place: moment for place, moment in moments.items() if moment is not None}
    filled = dict(known)
    for (low, a), (high, b) in itertools.pairwise(known.items()):
        for block in range(low.block + 1, high.block):
            share = (block - low.block) / (high.block - low.block)
            live, gradients = (round(x + share * (y - x)) for x, y in zip(a[:2], b[:2], strict=True))
            filled[low._replace(block=block)] = Moment(live, gradients, b.op)
    return filled
