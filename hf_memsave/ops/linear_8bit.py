r"""``linear_8bit``: bitsandbytes' ``Linear8bitLt``, whose autograd node hides its input.

Kept for backward, with x ``[*, in]`` and a frozen int8 weight::

    eager    x, on the node itself (not through autograd, so no hook sees it), though only a weight's gradient needs it
    here     nothing

Exact: the module's own forward runs; what its node will not read is taken off it afterwards.
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
    node = y.grad_fn
    hidden = _HIDDEN.get(type(node).__name__)
    if hidden is not None and not module.weight.requires_grad:
        setattr(node, *hidden)
    return y


LINEAR_8BIT = Op("linear_8bit", _linear_8bit)
