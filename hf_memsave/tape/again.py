"""Below the floor: linears that run again in backward too."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_memsave.tape.private import AutocastState

#: Functions that remaking one tensor may run, where products may be among them: those of a block, and some twice.
MOST_WORK_OF_A_BLOCK = 2048


class LinearAgain:
    """A linear's own forward, of whatever class (quantized or not), under the autocast that it ran under.

    Its parameters are arguments as well, so that one that is written to before backward raises, as in stock.
    """

    __slots__ = ("forward", "autocast")

    def __init__(self, forward: Callable[[Tensor], Tensor], device: str) -> None:
        self.forward, self.autocast = forward, AutocastState(device)

    def __call__(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """The linear's output.

        Returns:
            A new tensor.
        """
        with self.autocast:
            return self.forward(x)
