"""Under ``torch.compile`` no tape is laid: the compiler's own partitioner decides, and is told to keep the floor."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.callback import callback_handler
from torch._functorch import config

#: Below 1 the partitioner recomputes what costs less than a product; at 1, what costs nothing.
BUDGET = 0.99


# So that it is called where a graph is traced, and leaves nothing in the graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def keep_the_floor() -> int:
    """Give the partitioner of what is compiled now a budget, unless the user did, until that is done; returns 0."""
    # Asked here, as Dynamo of PyTorch 2.11 takes it for true; an export tells of no end.
    if config.activation_memory_budget == 1.0 and not torch.compiler.is_exporting():
        config.activation_memory_budget = BUDGET
        callback_handler.register_end_callback(_restore)
    return 0


def _restore(*_: Any) -> None:
    config.activation_memory_budget = 1.0
    callback_handler.remove_end_callback(_restore)
