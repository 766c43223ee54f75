"""What one training step takes: the highest moment of each part of it, and what follows from them.

A step is cut into *places*: a phase ("forward", "backward", "optimizer"), a stack of repeated blocks, and the number of
the block in it that runs. Of each place the highest moment is kept: with it the step of a deeper model is known too
(:mod:`~hf_memsave.measure.depth`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy

from hf_memsave.config.sizes import MIB
from hf_memsave.errors import MeasureError

#: What is kept in main memory, among the kinds of op.
AWAY = "in main memory"
#: What CUDA takes for itself in each process, in no allocator; it depends on device and driver.
CONTEXT = 500 * MIB
#: What cuBLAS takes for the thread of the forward, and for that of the backward: on Hopper 32 MiB each, before it 8.1.
WORKSPACES = 2 * 32 * MIB
#: What there is in no trace.
OWN = WORKSPACES + CONTEXT
#: What :meth:`Trace.to_dict` tells, beside the timeline and what each layer adds.
FIGURES = (
    "peak", "where", "parameters", "gradients", "states", "activations", "kept", "away", "by_kind", "by_module",
    "depths", "trained", "in_passes", "in_optimizer", "temporaries", "needed",
)  # fmt: skip
#: Name -> which of parameters, gradients and states are divided by the number of devices. FSDP (and ZeRO-3) gathers
#: the parameters of the block that runs, and of the next one beside it, and has one block's gradients whole until they
#: are reduced. What lies outside of blocks is gathered as one more unit.
SHARDINGS = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "fsdp": (True, True, True),
}


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
    """The bytes alive after an op, and those of gradients among them."""

    live: int
    gradients: int
    op: str = ""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One step of a model on one device: what it takes, in bytes and in operations."""

    places: Mapping[Place, Moment]  # where, and the highest moment there
    blocks: Mapping[str, int]  # path of a stack -> its number of blocks
    parameters: int  # bytes of parameters and buffers
    trained: int  # bytes of the gradients of all
    states: int  # bytes of the optimizer's states
    of_block: Mapping[str, int]  # path of a stack -> the most bytes of parameters and buffers that a block adds
    in_flight: int  # the most bytes that offload has on their way to main memory, and still on the device
    flops: int  # of matrix products, convolutions and attention, as torch.utils.flop_counter has them
    by_kind: dict[str, int]  # kept bytes by kind of op; of those that were offloaded, by AWAY
    by_module: dict[str, int]  # kept bytes by module, with "*" for the number of a block
    numbers: dict[str, int] = field(default_factory=dict)  # how many "parameters" there are, and how many are "trained"
    per_layer: dict[str, dict[str, float]] = field(default_factory=dict)  # by field: what a layer adds of some figures
    depths: tuple[dict[str, int], ...] = ()  # that were run
    model: str = ""  # the class
    has_loss: bool = True  # whether the model gave one
    sites: Mapping[tuple[str, str, str, str], int] = field(
        default_factory=dict
    )  # (status, op, class, reason) -> number
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)  # name -> shape

    @property
    def kept(self) -> int:
        """Bytes kept between forward and backward."""
        return sum(self.by_kind.values())

    @property
    def away(self) -> int:
        """Bytes of them in main memory."""
        return self.by_kind.get(AWAY, 0)

    @property
    def fixed(self) -> int:
        """Bytes at any size of the batch: parameters, gradients and states."""
        return self.parameters + self.trained + self.states

    @property
    def peak(self) -> int:
        """The most bytes alive at once, which is the most that PyTorch's allocator has given out."""
        return self._highest[1].live

    @property
    def needed(self) -> int:
        """Bytes that a GPU must have: the peak, and what CUDA and cuBLAS take."""
        return self.peak + OWN

    @property
    def where(self) -> str:
        """The moment of the peak, in words."""
        place, moment = self._highest
        part = "'s step" if place.phase == "optimizer" else f" {place.where}" if place.stack else ""
        return f"in the {place.phase}{part}, in {moment.op.removeprefix('aten.').partition('.')[0]}"

    @property
    def gradients(self) -> int:
        """Bytes of gradients at the peak."""
        return self._highest[1].gradients

    @property
    def activations(self) -> int:
        """Bytes of whatever else is alive at the peak: what is kept, and transients."""
        return self.peak - self.parameters - self.states - self.gradients

    @property
    def in_passes(self) -> int:
        """The most bytes that are alive in forward and backward."""
        return max(moment.live for place, moment in self.places.items() if place.phase != "optimizer")

    @property
    def in_optimizer(self) -> int:
        """The most bytes that are alive in the optimizer's step."""
        return self._in_optimizer.live

    @property
    def temporaries(self) -> int:
        """Bytes of the optimizer's step, at its highest moment, beside parameters, states and gradients."""
        return max(0, self.in_optimizer - self.parameters - self.states - self._in_optimizer.gradients)

    @property
    def at_loss(self) -> int:
        """Bytes alive as the loss is computed, without parameters and states; 0 for a model without known blocks."""
        ends = [self.places.get(Place("forward", stack, n - 1, True)) for stack, n in self.blocks.items()]
        return ends[-1].live - self.parameters - self.states if ends and ends[-1] else 0

    @property
    def _highest(self) -> tuple[Place, Moment]:
        return max(self.places.items(), key=lambda item: item[1].live)

    @property
    def _in_optimizer(self) -> Moment:
        return self.places.get(Place("optimizer"), Moment(self.fixed, self.trained))

    @property
    def timeline(self) -> dict[Place, Moment]:
        """The highest moment of each block in forward and in backward, and of what is outside of blocks, in order."""
        found: dict[Place, Moment] = {}
        for phase, stack in dict.fromkeys((place.phase, place.stack) for place in self.places):
            last = self.blocks.get(stack, 1) - 1
            end = Place(phase, stack, last, is_after=True)
            known: dict[int, Moment] = {}
            for place, moment in self.places.items():
                if (place.phase, place.stack) == (phase, stack) and place != end:
                    known[place.block] = max(moment, known.get(place.block, moment))
            order, blocks = range(last + 1)[:: 1 if phase == "forward" else -1], sorted(known)
            # Blocks between the first ones and the last ones are taken to lie on a line.
            figures = zip(*[(known[n].live, known[n].gradients) for n in blocks], strict=True)
            live, gradients = (numpy.interp(order, blocks, of).round().astype(int).tolist() for of in figures)
            found |= {Place(phase, stack, n): Moment(*of) for n, *of in zip(order, live, gradients, strict=True)}
            if end in self.places:
                found[end] = self.places[end]
        return found

    def sharded(self, name: str, devices: int) -> Trace:
        """The part of a step on one of N devices; MeasureError for another name or number."""
        if name not in SHARDINGS or not isinstance(devices, int) or devices < 1:
            raise MeasureError(
                f"sharding: expected {' or '.join(SHARDINGS)} over 1 device or more, got {name!r} over {devices!r}. "
                "Leave it out for one device."
            )
        if devices == 1:
            return self
        parameters, gradients, states = (devices if is_divided else 1 for is_divided in SHARDINGS[name])
        outside = max(0, self.parameters - sum(n * self.of_block[stack] for stack, n in self.blocks.items()))
        largest = max(self.of_block.values(), default=outside)

        def moment(place: Place, whole: Moment) -> Moment:
            rest = whole.live - self.states - self.parameters - whole.gradients
            mine = whole.gradients // gradients
            if place.phase == "optimizer":
                rest //= states  # it updates what it has states of
            elif parameters > 1:
                rest += outside + 2 * largest
            if gradients > 1 and place.phase == "backward":
                mine = min(whole.gradients, mine + largest * self.trained // max(1, self.parameters))
            live = rest + mine + self.states // states + self.parameters // parameters
            return whole._replace(live=live, gradients=mine)

        return replace(
            self,
            places={place: moment(place, whole) for place, whole in self.places.items()},
            parameters=self.parameters // parameters,
            trained=self.trained // gradients,
            states=self.states // states,
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures of :data:`FIGURES`, as plain data."""
        kept = {field: added["kept"] for field, added in self.per_layer.items()}
        timeline = [
            {"phase": place.phase, "where": place.where, "live": moment.live, "gradients": moment.gradients}
            for place, moment in self.timeline.items()
        ]
        return {name: getattr(self, name) for name in FIGURES} | {"timeline": timeline, "per_layer": kept}
