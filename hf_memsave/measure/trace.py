"""One training step, its bytes counted: where in it they are highest, block by block.

A step is cut into *places*: a phase ("forward", "backward", "optimizer"), a stack of repeated blocks, and the number of
the block in it that runs. Of each place the highest moment is kept: with it the step of a deeper model is known too
(:mod:`~hf_memsave.measure.depth`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.count.kept import storages
from hf_memsave.count.peak import Count, rounded
from hf_memsave.measure.inputs import device_of, loss_of
from hf_memsave.measure.kernels import workspace
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
    def kept(self) -> int:
        """Bytes kept between forward and backward."""
        return sum(self.by_kind.values())

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
    model: nn.Module, batch: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, forward: Callable[..., Any],
    accumulation: int = 1, holds_output: bool = False,
) -> Trace:  # fmt: skip
    """Run a step, with the optimizer's states there as from the second on, and count; it leaves no gradients."""
    device = device_of(model)
    make_states(optimizer)
    parameters = nbytes_of([*model.parameters(), *model.buffers()], device)
    states = nbytes_of([dict(state) for state in optimizer.state.values()], device)
    count = _Places(model, device, parameters + states + nbytes_of(dict(batch), device))
    held: list[Any] = []
    with count:
        if holds_output:  # until there is the next one, which may be in the next step
            with torch.no_grad():
                held.append(forward(**batch))
        for _ in range(min(accumulation, 2)):  # from the second batch on, gradients are there already
            run_passes(model, batch, forward, held if holds_output else None, count.begin)
        count.begin("optimizer")
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    of_block: dict[str, int] = {}
    seen: set[int] = set()
    for module, (stack, _) in count.blocks.items():
        own = [x for x in (*module.parameters(), *module.buffers()) if id(x) not in seen]
        seen.update(map(id, own))
        nbytes = nbytes_of(own, device)
        of_block[stack] = max(of_block.get(stack, 0), nbytes)
    return Trace(
        places=count.places,
        blocks=Counter(stack for stack, _ in count.blocks.values()),
        parameters=parameters,
        trained=nbytes_of([p for p in model.parameters() if p.requires_grad], device),
        states=states,
        of_block=of_block,
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
    """Counts what is alive in each place, beside ``base`` bytes that are there all the time.

    Where a step is, calls of blocks tell in forward, and gradients of their outputs in backward.
    """

    def __init__(self, model: nn.Module, device: str, base: int) -> None:
        super().__init__(device, UNIT)
        self.live, self.gradients, self.moved = base, 0, Away.moved
        self.place = Place("forward")
        self.places: dict[Place, Moment] = {}
        self.blocks: dict[nn.Module, tuple[str, int]] = {}
        self.waiting: set[Tensor] = {p for p in model.parameters() if p.requires_grad}  # for a gradient
        numbers: Counter[str] = Counter()
        for name, module in model.named_modules():
            if isinstance(module, GradientCheckpointingLayer):
                stack = name.rpartition(".")[0]
                self.blocks[module] = stack, numbers[stack]
                numbers[stack] += 1

    def begin(self, phase: str) -> None:
        """The next phase begins."""
        self.place = Place(phase)

    def note(self, func: Any, args: Any) -> None:
        """Remember the highest moment of a place."""
        live = self.live + workspace(func, args)
        known = self.places.get(self.place)
        if known is None or live > known.live:
            self.places[self.place] = Moment(live, self.gradients, str(func), Away.moved - self.moved)

    def __enter__(self) -> Any:
        handles: list[Any] = [
            global_hooks.register_module_forward_pre_hook(self._enter_block),
            global_hooks.register_module_forward_hook(self._leave_block),
            *(p.register_post_accumulate_grad_hook(self._accumulated) for p in self.waiting),
        ]
        for handle in handles:
            self._undo.callback(handle.remove)
        return super().__enter__()

    def _enter_block(self, module: nn.Module, args: Any) -> None:
        if self.place.phase == "forward" and module in self.blocks:
            self.place = Place("forward", *self.blocks[module])

    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.place.phase != "forward" or module not in self.blocks:
            return
        self.place = self.place._replace(is_after=True)
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(partial(self._differentiate, Place("backward", *self.blocks[module])))

    def _differentiate(self, place: Place, gradient: Tensor) -> None:
        self.place = place

    def _accumulated(self, p: Tensor) -> None:
        if p in self.waiting and p.grad is not None:
            self.waiting.remove(p)
            self.gradients += rounded(p.grad.untyped_storage().nbytes(), UNIT)


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
        last = trace.blocks.get(stack, 1) - 1
        end = Place(phase, stack, last, is_after=True)
        known: dict[int, Moment] = {}
        for place, moment in trace.places.items():
            if (place.phase, place.stack) == (phase, stack) and place != end:
                known[place.block] = max(moment, known.get(place.block, moment))
        blocks = sorted(known)
        figures = zip(*[(known[block].live, known[block].gradients) for block in blocks], strict=True)
        # Blocks between the first ones and the last ones are taken to lie on a line.
        live, gradients = (numpy.interp(range(last + 1), blocks, figure).round() for figure in figures)
        places = [(Place(phase, stack, block), int(live[block]), int(gradients[block])) for block in range(last + 1)]
        places = places if phase == "forward" else places[::-1]
        if end in trace.places:
            places.append((end, *trace.places[end][:2]))
        found += [Point(phase=phase, where=place.where, live=n, gradients=of) for place, n, of in places]
    return tuple(found)
