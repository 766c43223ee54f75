"""The memory figures of one training step: the highest moment of each part of it, and what follows from these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy

from hf_memsave.config.sizes import MIB
from hf_memsave.errors import MeasureError

#: The kind of op under which bytes kept in main memory are counted.
AWAY = "in main memory"
#: Bytes of a process's CUDA context, outside of the allocator; they depend on device and driver.
CONTEXT = 500 * MIB
#: cuBLAS's workspaces for the forward's thread and the backward's: 32 MiB each on Hopper, 8.1 MiB before it.
WORKSPACES = 2 * 32 * MIB
#: Bytes that no trace counts.
OWN = WORKSPACES + CONTEXT
#: The figures in :meth:`Trace.to_dict`, beside the timeline and what each layer adds.
FIGURES = (
    "peak", "where", "parameters", "gradients", "states", "activations", "kept", "away", "by_kind", "by_module",
    "depths", "trained", "in_passes", "in_optimizer", "temporaries", "needed",
)  # fmt: skip
#: Name -> whether parameters, gradients and states are divided by the number of devices. FSDP (and ZeRO-3) gathers
#: the parameters of the block that runs and of the next one, and has one block's gradients whole until they are
#: reduced. Parameters outside of blocks are gathered as one more unit.
SHARDINGS = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "fsdp": (True, True, True),
}


class Place(NamedTuple):
    """A place in a step: its phase, the path of a stack, and the number of a block in it ("" and 0 outside blocks)."""

    phase: str  # "forward", "backward" or "optimizer"
    stack: str = ""
    block: int = 0
    is_after: bool = False  # between the end of a block's forward and the next block

    @property
    def where(self) -> str:
        """The block and its stack, in words."""
        if not self.stack:
            return "" if self.phase == "optimizer" else "outside of the blocks"
        return f"{'after' if self.is_after else 'of'} block {self.block} of {self.stack}"


class Moment(NamedTuple):
    """The bytes alive after an op, and the bytes of gradients among them."""

    live: int
    gradients: int
    op: str = ""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One training step of a model on one device: its memory in bytes, and its operations."""

    places: Mapping[Place, Moment]  # place -> its highest moment
    blocks: Mapping[str, int]  # path of a stack -> its number of blocks
    parameters: int  # bytes of parameters and buffers
    trained: int  # bytes of all gradients
    states: int  # bytes of the optimizer's states
    of_block: Mapping[str, int]  # path of a stack -> the most bytes of parameters and buffers that a block adds
    in_flight: int  # the most bytes still on the device that offload is copying to main memory
    flops: int  # of matrix products, convolutions and attention, as torch.utils.flop_counter has them
    by_kind: dict[str, int]  # kept bytes by kind of op, or AWAY if offloaded
    by_module: dict[str, int]  # kept bytes by module, with "*" for the number of a block
    numbers: dict[str, int] = field(default_factory=dict)  # how many "parameters" there are, and how many are "trained"
    per_layer: dict[str, dict[str, float]] = field(default_factory=dict)  # by field: what a layer adds to some figures
    depths: tuple[dict[str, int], ...] = ()  # those that were traced
    model: str = ""  # the name of its class
    has_loss: bool = True  # whether the model returned one
    sites: Mapping[tuple[str, str, str, str], int] = field(default_factory=dict)  # status, op, class, reason -> number
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)  # name -> shape

    @property
    def kept(self) -> int:
        """Bytes kept between forward and backward."""
        return sum(self.by_kind.values())

    @property
    def away(self) -> int:
        """Bytes of the kept ones that are in main memory."""
        return self.by_kind.get(AWAY, 0)

    @property
    def fixed(self) -> int:
        """Bytes that no batch size changes: parameters, gradients and states."""
        return self.parameters + self.trained + self.states

    @property
    def peak(self) -> int:
        """The most bytes alive at once, which is the most that PyTorch's allocator gives out."""
        return self._highest[1].live

    @property
    def needed(self) -> int:
        """Bytes that a GPU must have: the peak, and what CUDA and cuBLAS take."""
        return self.peak + OWN

    @property
    def where(self) -> str:
        """The place and the op of the peak, in words."""
        place, moment = self._highest
        part = "'s step" if place.phase == "optimizer" else f" {place.where}" if place.stack else ""
        return f"in the {place.phase}{part}, in {moment.op.removeprefix('aten.').partition('.')[0]}"

    @property
    def gradients(self) -> int:
        """Bytes of gradients at the peak."""
        return self._highest[1].gradients

    @property
    def activations(self) -> int:
        """Bytes of everything else that is alive at the peak: kept tensors, and transients."""
        return self.peak - self.parameters - self.states - self.gradients

    @property
    def in_passes(self) -> int:
        """The most bytes alive in forward and backward."""
        return max(moment.live for place, moment in self.places.items() if place.phase != "optimizer")

    @property
    def in_optimizer(self) -> int:
        """The most bytes alive in the optimizer's step."""
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
        """The highest moment of each block in forward and in backward, and of the rest of each phase, in order."""
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
        """Return the step of one of ``devices`` under a sharding; MeasureError for an unknown name or number."""
        if name not in SHARDINGS or not isinstance(devices, int) or devices < 1:
            expected = f"sharding: expected {' or '.join(SHARDINGS)} over 1 device or more"
            raise MeasureError(f"{expected}, got {name!r} over {devices!r}. Leave it out for one device.")
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
            self, places={place: moment(place, whole) for place, whole in self.places.items()},
            parameters=self.parameters // parameters, trained=self.trained // gradients, states=self.states // states,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of :data:`FIGURES`, the timeline, and the bytes that each layer keeps, as plain data."""
        kept = {field: added["kept"] for field, added in self.per_layer.items()}
        timeline = [
            {"phase": place.phase, "where": place.where, "live": moment.live, "gradients": moment.gradients}
            for place, moment in self.timeline.items()
        ]
        return {name: getattr(self, name) for name in FIGURES} | {"timeline": timeline, "per_layer": kept}
