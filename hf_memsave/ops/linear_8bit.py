r"""``linear_8bit``: bitsandbytes' ``Linear8bitLt``, whose autograd node hides its input where no hook sees it.

Of a frozen int8 weight, only whose gradient needs x ``[*, in]``, nothing is kept where eager keeps x. Exact: the
module's own forward runs; what its node will not read is taken off it afterwards.
Source: Dettmers et al. (2022), arXiv:2208.07339; ``MatMul8bitLt`` and ``MatMul8bitFp`` of bitsandbytes.
"""

from typing import Any

from torch import Tensor, nn

from hf_memsave.ops.op import Op

#: The node's class -> the attribute that holds its input, and what to leave there.
_HIDDEN: dict[str, tuple[str, Any]] = {
    "MatMul8bitLtBackward": ("tensors", (None, None, None)),
    "MatMul8bitFpBackward": ("A", None),
}


def _linear_8bit(module: nn.Module, patch: Any, x: Tensor) -> Tensor:
    y = patch.stock.forward(module, x)
    hidden = _HIDDEN.get(type(y.grad_fn).__name__)
    if hidden is not None and not module.weight.requires_grad:
        setattr(y.grad_fn, *hidden)
    return y


LINEAR_8BIT = Op("linear_8bit", _linear_8bit)
