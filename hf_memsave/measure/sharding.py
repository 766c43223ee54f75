"""What of a step lies on each of N devices.

======== ========== ========= ======
name     parameters gradients states
======== ========== ========= ======
ddp      whole      whole     whole
zero1    whole      whole     1 / N
zero2    whole      1 / N     1 / N
fsdp     1 / N      1 / N     1 / N
======== ========== ========= ======

FSDP (and ZeRO-3) gathers the parameters of the block that runs, and of the next one beside it, and has one block's
gradients whole until they are reduced. What lies outside of blocks is gathered as one more unit.
"""

from __future__ import annotations

from dataclasses import replace

from hf_memsave.errors import MeasureError
from hf_memsave.measure.trace import Moment, Place, Trace

#: Name -> which of parameters, gradients and states are divided.
SHARDINGS = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "fsdp": (True, True, True),
}


def sharded(trace: Trace, name: str, devices: int) -> Trace:
    """The part of a step on one of N devices; MeasureError for another name or number."""
    if name not in SHARDINGS or not isinstance(devices, int) or devices < 1:
        raise MeasureError(
            f"sharding: expected {' or '.join(SHARDINGS)} over 1 device or more, got {name!r} over {devices!r}. "
            "Leave it out for one device."
        )
    if devices == 1:
        return trace
    parameters, gradients, states = (devices if is_divided else 1 for is_divided in SHARDINGS[name])
    outside = max(0, trace.parameters - sum(n * trace.of_block[stack] for stack, n in trace.blocks.items()))
    largest = max(trace.of_block.values(), default=outside)

    def moment(place: Place, whole: Moment) -> Moment:
        rest = whole.live - trace.states - trace.parameters - whole.gradients
        mine = whole.gradients // gradients
        if place.phase == "optimizer":
            rest //= states  # it updates what it has states of
        elif parameters > 1:
            rest += outside + 2 * largest
        if gradients > 1 and place.phase == "backward":
            mine = min(whole.gradients, mine + largest * trace.trained // max(1, trace.parameters))
        live = rest + mine + trace.states // states + trace.parameters // parameters
        return whole._replace(live=live, gradients=mine)

    return replace(
        trace,
        places={place: moment(place, whole) for place, whole in trace.places.items()},
        parameters=trace.parameters // parameters,
        trained=trace.trained // gradients,
        states=trace.states // states,
    )
