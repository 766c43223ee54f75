"""Which functions a tape sees, and what it does when they are called; less of them, by configuration."""

from __future__ import annotations

import sys
from functools import cache
from types import MappingProxyType

import torch
import torch.nn.functional as F

from hf_memsave.tape.attention import ATTENTION
from hf_memsave.tape.dropout import DROPOUTS
from hf_memsave.tape.functions import ACTIVATIONS, CHEAP, NORMS, Handler, may_write, new, unrecorded
from hf_memsave.tape.products import SPECIAL
from hf_memsave.tape.selective import RECTIFIERS, SELECTIVE, statistics_alone

TABLE: dict[object, Handler] = {**CHEAP, **SPECIAL, **ATTENTION, **DROPOUTS, **SELECTIVE}
#: The functions of each kind that a configuration can leave to stock.
FUNCTIONS_OF = {
    "activation": ACTIVATIONS,
    "norm": NORMS,
    "dropout": frozenset(DROPOUTS),
    "attention": frozenset({F.scaled_dot_product_attention}),
    "frozen": frozenset(SELECTIVE),
}
#: What they write to is seen, whatever a configuration leaves out.
_STATISTICS: dict[object, Handler] = {F.batch_norm: statistics_alone, torch.batch_norm: statistics_alone}
#: Functions that can write to their argument, likewise.
_MAY_WRITE = {func for func, handler in TABLE.items() if handler is may_write} | {*DROPOUTS, *RECTIFIERS}
#: Nothing is recorded, but writes are seen; the same with dropouts as they are.
UNRECORDED = MappingProxyType(
    {func: handler for func, handler in TABLE.items() if getattr(handler, "is_write", False)}
    | dict.fromkeys(_MAY_WRITE, unrecorded)
    | _STATISTICS
)
UNRECORDED_BUT_DROPOUTS = MappingProxyType({**UNRECORDED, **DROPOUTS})


def table_without(*kinds: str) -> MappingProxyType[object, Handler]:
    """The table, less what belongs to these kinds."""
    return _table_without(kinds, "bitsandbytes" in sys.modules)


@cache
def _table_without(kinds: tuple[str, ...], has_quantized: bool) -> MappingProxyType[object, Handler]:
    left_out = frozenset().union(*(FUNCTIONS_OF.get(kind, frozenset()) for kind in kinds))
    rest = {func: handler for func, handler in TABLE.items() if func not in left_out}
    if has_quantized:  # a base weight in full precision is made again, as DoRA needs it
        ops = torch.ops.bitsandbytes
        rest |= dict.fromkeys((ops.dequantize_4bit.default, ops.dequantize_blockwise.default), new)
    rest |= {func: handler for func, handler in _STATISTICS.items() if func in left_out}
    return MappingProxyType(rest | dict.fromkeys(left_out & _MAY_WRITE, unrecorded))
