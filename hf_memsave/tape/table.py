"""The table of functions that a tape handles, and tables without what a configuration leaves to stock."""

from __future__ import annotations

import sys
from functools import cache
from types import MappingProxyType

import torch
import torch.nn.functional as F

from hf_memsave.tape import applied
from hf_memsave.tape.attention import ATTENTION
from hf_memsave.tape.dropout import DROPOUTS
from hf_memsave.tape.functions import ACTIVATIONS, CHEAP, NORMS, may_write, unrecorded
from hf_memsave.tape.products import SPECIAL
from hf_memsave.tape.selective import RECTIFIERS, SELECTIVE, statistics_alone
from hf_memsave.tape.tape import Handler, new

TABLE: dict[object, Handler] = {**CHEAP, **SPECIAL, **ATTENTION, **DROPOUTS, **SELECTIVE}
#: The functions of each kind that a configuration can leave to stock.
FUNCTIONS_OF = {
    "activation": ACTIVATIONS,
    "norm": NORMS,
    "dropout": frozenset(DROPOUTS),
    "attention": frozenset({F.scaled_dot_product_attention}),
    "frozen": frozenset(SELECTIVE),
}
#: Batch norms: writes to their statistics are seen, whatever a configuration leaves out.
_STATISTICS: dict[object, Handler] = {F.batch_norm: statistics_alone, torch.batch_norm: statistics_alone}
#: Functions that can write to their argument, which is seen too.
_MAY_WRITE = {func for func, handler in TABLE.items() if handler is may_write} | {*DROPOUTS, *RECTIFIERS}
#: Tables by which nothing is recorded, but writes are seen; the second one handles dropouts too.
UNRECORDED = MappingProxyType(
    {func: handler for func, handler in TABLE.items() if getattr(handler, "is_write", False)}
    | dict.fromkeys(_MAY_WRITE, unrecorded)
    | _STATISTICS
)
UNRECORDED_BUT_DROPOUTS = MappingProxyType({**UNRECORDED, **DROPOUTS})


def table_without(*kinds: str) -> MappingProxyType[object, Handler]:
    """Return the table without the functions of these kinds (see :data:`FUNCTIONS_OF`)."""
    return _table_without(kinds, "bitsandbytes" in sys.modules, len(applied.APPLIED))


@cache
def _table_without(kinds: tuple[str, ...], has_quantized: bool, _: int) -> MappingProxyType[object, Handler]:
    left_out = frozenset().union(*(FUNCTIONS_OF.get(kind, frozenset()) for kind in kinds))
    rest = {func: handler for func, handler in TABLE.items() if func not in left_out}
    if has_quantized:  # a base weight in full precision is recomputed, as DoRA needs it
        ops = torch.ops.bitsandbytes
        rest |= dict.fromkeys((ops.dequantize_4bit.default, ops.dequantize_blockwise.default), new)
    rest |= {apply: handler for apply, (kind, handler) in applied.APPLIED.items() if kind not in kinds}
    rest |= {func: handler for func, handler in _STATISTICS.items() if func in left_out}
    return MappingProxyType(rest | dict.fromkeys(left_out & _MAY_WRITE, unrecorded))
