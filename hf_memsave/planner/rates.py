"""What a setting costs: operations and bytes over what a device does of them in a second.

A step's time is that of its matrix products and of attention; forward takes a third of it, of frozen products half.
Products that run again add theirs. Offloaded bytes cross
the bus in forward, and back in backward, beside the products, but for those that are still on their way as forward ends
(:mod:`~hf_memsave.tape.offload`): what they take longer than the products is added, and their pass through the device's
own memory twice. What the floor computes again costs the same in each setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from hf_memsave.arch import RUN_AGAIN, is_run_again, path_of
from hf_memsave.errors import PlanError
from hf_memsave.measure.models import build_empty
from hf_memsave.measure.training import Training
from hf_memsave.patching.blocks import block_at, block_numbers
from hf_memsave.tape.offload import IN_FLIGHT


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device sustains, in a second."""

    flops: float  # floating-point operations of matrix products in 16 bits
    memory: float  # bytes of its own memory, read or written
    bus: float  # bytes from or to pinned main memory, each way

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, (int, float)) and value > 0):
                raise PlanError(f"Rates.{name}: expected a number above 0, got {value!r}. Give it by the second.")


#: Half of the operations and four fifths of the bytes in the makers' data sheets (dense bf16, SXM where there is one).
RATES = {
    "a100": Rates(flops=156e12, memory=1.6e12, bus=25e9),
    "h100": Rates(flops=495e12, memory=2.7e12, bus=50e9),
    "rtx4090": Rates(flops=82e12, memory=0.8e12, bus=25e9),
}


def rates_of(rates: Rates | str) -> Rates:
    """The rates of a device's name; PlanError if there is no such device."""
    if isinstance(rates, Rates):
        return rates
    if rates in RATES:
        return RATES[rates]
    raise PlanError(f"rates: expected one of {', '.join(RATES)}, got {rates!r}. Give another device's as Rates(...).")


@dataclass(frozen=True, kw_only=True)
class Work:
    """The operations of one training step."""

    forward: float
    backward: float
    again: dict[str, float]  # rung -> those that a layer adds which runs so far again
    widest: int  # bytes of the widest input or output of a linear in a block

    def held(self, away: float) -> float:
        """Of bytes ``away`` that are offloaded, those that may still be on the device as forward ends."""
        return min(away, max(2 * self.widest, IN_FLIGHT))

    def cost(self, rates: Rates, again: float, away: float) -> float:
        """What a step takes longer, as a part of stock's step; for bytes ``away``."""
        away -= self.held(away)
        forward, backward, bus = self.forward / rates.flops, (self.backward + again) / rates.flops, away / rates.bus
        waits = max(0.0, bus - forward) + max(0.0, bus - backward)
        seconds = again / rates.flops + waits + 2 * away / rates.memory
        return seconds / ((self.forward + self.backward) / rates.flops)


def work_of(config: PreTrainedConfig, training: Training) -> Work:
    """The operations of a step of the model of a configuration."""
    model = build_empty(config)
    numbers = block_numbers(model)
    tokens = training.batch_size * training.seq_len
    of_all = in_blocks = gate = widest = 0
    for name, module in model.named_modules():
        if path_of(type(module)) in RUN_AGAIN:
            weight: Any = module.weight
            of_all += (n := weight.numel())
            if block_at(name, numbers) is not None:
                in_blocks += n
                gate += n * is_run_again(name, "gate")
                widest = max(widest, *weight.shape)
    layers = max(1, len(numbers))
    attention = 4 * tokens * training.seq_len * getattr(config, "hidden_size", 0)
    again = {"gate": gate, "block": gate, "tiles": in_blocks}
    return Work(
        forward=2 * tokens * of_all + layers * attention,
        backward=2 * tokens * of_all * (1 if training.lora else 2) + 2 * layers * attention,
        again={rung: 2 * tokens * n / layers + attention * (rung != "gate") for rung, n in again.items()},
        widest=tokens * widest * training.u_dtype.itemsize,
    )
