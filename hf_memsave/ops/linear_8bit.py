r"""``linear_8bit``: bitsandbytes' ``Linear8bitLt``, whose autograd node hides its input where no hook sees it.

Eager keeps x ``[*, in]``, which only the weight's gradient needs; for a frozen int8 weight nothing is kept here. Exact:
the module's own forward runs; what its node will not read is removed from the node afterwards.
Source: Dettmers et al. (2022), arXiv:2208.07339; ``MatMul8bitLt`` and ``MatMul8bitFp`` of bitsandbytes.
"""

from typing import Any

from torch import Tensor, nn

from hf_memsave.ops.op import Op
from hf_memsave.tape import current
from hf_memsave.tape.private import Note

#: The node's class -> the attribute that holds its input, alone or as the last of several.
_HIDDEN = {"MatMul8bitLtBackward": "tensors", "MatMul8bitFpBackward": "A"}


def _linear_8bit(module: nn.Module, patch: Any, x: Tensor) -> Tensor:
    y = patch.stock.forward(module, x)
    name, tape = _HIDDEN.get(type(y.grad_fn).__name__), current()
    if name is None or module.weight.requires_grad:
        return y
    held = getattr(y.grad_fn, name)
    of_many = held if isinstance(held, (list, tuple)) else None
    x = held if of_many is None else of_many[-1]
    if tape is not None and x is not None:
        tape.note(x, tape.content_of(x), Note.of(y.grad_fn))
    setattr(y.grad_fn, name, None if of_many is None else (None,) * len(of_many))
    return y


LINEAR_8BIT = Op("linear_8bit", _linear_8bit)
