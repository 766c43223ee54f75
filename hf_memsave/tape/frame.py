"""A frame: settings for the calls that a tape sees now, of a model's forward, a block's in it, or one operation's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from hf_memsave.tape.bits import CODERS, Coders


class Frame(NamedTuple):
    """Settings of a tape for as long as one forward, block or operation runs.

    Attributes:
        table: Function -> what to do when it is called, as ``handler(tape, func, args, kwargs)``.
        dropout: What is kept of a dropout's mask: the generator's state ("seed"), a bit an element ("mask"), what is
            quicker ("auto") or, beside codes and recomputed linears, smaller ("small"), "stock".
        coders: What packs bits and codes.
        recomputed: Weights whose products are recomputed: each a dict of a module's attributes, and a name in it.
        head: The linear whose logits may be computed later; ``logits(head, x, weight, bias)`` returns them.
        coder: Called first with each tensor that autograd asks to keep; what it returns, if anything, goes on the tape.
        replaces_stock: The operation that runs is not stock's (:mod:`~hf_memsave.tape.as_stock`).
        is_in_attention: The call is SDPA; ``is_in_loss``: a loss of probabilities. Codecs take more bits there.
    """

    table: Mapping[Any, Any]
    dropout: str = "auto"
    coders: Coders = CODERS
    recomputed: Sequence[tuple[dict[str, Any], str]] = ()
    head: nn.Module | None = None
    logits: Any = None
    coder: Callable[[Tensor], Any] | None = None
    replaces_stock: bool = False
    is_in_attention: bool = False
    is_in_loss: bool = False
