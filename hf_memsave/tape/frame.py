"""A frame: settings for the calls that a tape sees now, of a model's forward, a block's in it, or one operation's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from hf_memsave.tape.bits import CODERS, Coders


class Frame(NamedTuple):
    """Settings of a tape for as long as one forward, block or operation runs."""

    table: Mapping[Any, Any]  # function -> what to do when it is called, as ``handler(tape, func, args, kwargs)``
    #: What is kept of a dropout's mask: the generator's state ("seed"), a bit an element ("mask"), what is quicker
    #: ("auto") or, beside codes and recomputed linears, smaller ("small"), "stock".
    dropout: str = "auto"
    coders: Coders = CODERS  # what packs bits and codes
    #: Weights whose products are recomputed: each a dict of a module's attributes, and a name in it.
    recomputed: Sequence[tuple[dict[str, Any], str]] = ()
    head: nn.Module | None = None  # the linear whose logits may be computed later
    logits: Any = None  # ``logits(head, x, weight, bias)`` returns these
    #: Called first with each tensor that autograd asks to keep; what it returns, if anything, goes on the tape.
    coder: Callable[[Tensor], Any] | None = None
    replaces_stock: bool = False  # the operation that runs is not stock's: see as_stock.py
    is_in_attention: bool = False  # the call is SDPA, in which codecs take more bits
    is_in_loss: bool = False  # the call is a loss of probabilities, in which they do too
