"""One training step, its bytes counted: where in it they are highest, block by block.

A step is cut into *places*: a phase ("forward", "backward", "optimizer"), a stack of repeated blocks, and the number of
the block in it that runs. Of each place the highest moment is kept: with it the step of a deeper model is known too
(:mod:`~hf_memsave.measure.extrapolate`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.measure.inputs import device_of
from hf_memsave.measure.kernels import workspace
from hf_memsave.measure.loss import loss_of
from hf_memsave.measure.peak import Count, collector_off, rounded, storages
from hf_memsave.tape.offload import Away

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


class Moment(NamedTuple):
    """The bytes alive after an op, those of gradients among them, and what was moved to main memory until then."""

    live: int
    gradients: int
    op: str
    away: int = 0


class Owned(NamedTuple):
    """Bytes of a block's parameters and buffers, of the gradients of all of them, and of the optimizer's states."""

    parameters: int
    trained: int
    states: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One step of a model as it is.

    Attributes:
        places: Where, and the highest moment there.
        blocks: Path of a stack -> its number of blocks.
        parameters: Bytes of parameters and buffers.
        trained: Bytes of the gradients of all.
        states: Bytes of the optimizer's states.
        owned: Path of a stack, number of a block in it -> what it has that no block before it has.
    """

    places: Mapping[Place, Moment]
    blocks: Mapping[str, int]
    parameters: int
    trained: int
    states: int
    owned: Mapping[tuple[str, int], Owned]

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max(moment.live for moment in self.places.values())


def trace_step(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    forward: Callable[..., Any] | None = None,
    accumulation: int = 1,
    holds_output: bool = False,
) -> Trace:
    """Run a training step, with the optimizer's states there as from the second step on, and count.

    Args:
        model: On one device, in training mode, stock or patched; it has no gradients afterwards.
        batch: Keyword arguments.
        optimizer: Makes one of the parameters that are trained.
        forward: Called instead of the model.
        accumulation: Batches a step. From the second one on, the gradients are there already.
        holds_output: Whether an output is alive until there is the next one, which may be in the next step.

    Returns:
        The highest moments, with what was there before the step.
    """
    forward = model if forward is None else forward
    device = device_of(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    made = optimizer(trained)
    for p in trained:
        p.grad = torch.zeros_like(p)  # numbers, for weights that stay as they are on a CPU
    made.step()
    made.zero_grad(set_to_none=True)
    parameters = _nbytes([*model.parameters(), *model.buffers()], device)
    states = _nbytes([dict(state) for state in made.state.values()], device)
    count = _Places(model, device, parameters + states + _nbytes(dict(batch), device))
    torch.clear_autocast_cache()
    held: list[Any] = []
    with collector_off(), count.watching_resizes(), count.watching_blocks(), count:
        if holds_output:
            with torch.no_grad():  # the one before
                held.append(forward(**batch))
        for _ in range(min(accumulation, 2)):
            count.begin("forward")
            output = forward(**batch)
            loss = loss_of(output, model, batch)
            held[:] = [output] if holds_output else []
            del output
            count.begin("backward")
            loss.backward()
            del loss
        count.begin("optimizer")
        made.step()
    made.zero_grad(set_to_none=True)
    return Trace(
        places=count.places,
        blocks=dict(Counter(stack for stack, _ in count.blocks.values())),
        parameters=parameters,
        trained=_nbytes(trained, device),
        states=states,
        owned=_owned(count.blocks, model, made.state, device),
    )


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
        for p in self.model.parameters():
            if p.requires_grad:
                handles.append(p.register_post_accumulate_grad_hook(self._accumulated()))
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

    def _accumulated(self) -> Callable[[Tensor], None]:
        seen: list[int] = []

        def note(p: Tensor) -> None:
            if not seen and p.grad is not None:
                seen.append(mine := rounded(p.grad.untyped_storage().nbytes(), UNIT))
                self.gradients += mine

        return note


def _owned(
    blocks: Mapping[int, tuple[str, int]], model: nn.Module, states: Mapping[Any, Any], device: str
) -> dict[tuple[str, int], Owned]:
    owned, seen = {}, set[int]()
    for module in model.modules():
        if id(module) in blocks:
            mine = {id(t): t for t in (*module.parameters(), *module.buffers()) if id(t) not in seen}
            trained = [t for t in mine.values() if t.requires_grad]
            seen |= mine.keys()
            owned[blocks[id(module)]] = Owned(
                _nbytes(list(mine.values()), device),
                _nbytes(trained, device),
                _nbytes([dict(states[t]) for t in trained if t in states], device),
            )
    return owned


def _nbytes(tensors: Any, device: str) -> int:
    return sum(rounded(s.nbytes(), UNIT) for s in {s._cdata: s for s in storages(tensors, device)}.values())
