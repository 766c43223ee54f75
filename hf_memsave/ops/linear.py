r"""``linear``: ``nn.Linear`` and GPT-2's ``Conv1D`` under autocast.

Under autocast a matrix product converts its input and its weight inside C++, where no hook sees the source: every
consumer keeps a private half-precision copy of its input, and every weight one of itself. Here both conversions are
explicit, each through its own autograd node as in stock, and promised. Where there is no tape, as in the head of a
model whose forward another tool has replaced, one is made for the weight: x may have nobody else to keep it.

Kept for backward under autocast with fp32 weights ``[out, in]``::

    eager    x in half precision, and the weight in half precision
    here     nothing but x and the weight as they are

Without autocast the stock forward runs: a linear keeps its input, which others may have promised.
Exact. Stock's bits are missed, for the more accurate, where autocast's cache would have shared one cast and so added
gradients in half precision: a module called twice in one autocast forward, and a leaf that feeds several linears.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.ops.cast import autocast_low, is_autocast
from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import Tape, is_available


def kept_bytes(rows: int, in_features: int, out_features: int, itemsize: int) -> KeptBytes:
    """Under autocast to ``itemsize`` bytes, with an fp32 input that is kept anyway."""
    return KeptBytes((rows + out_features) * in_features * itemsize, 0)


def _linear(module: nn.Linear, binding: Binding, input: Tensor) -> Tensor:
    if not is_autocast(input) or not is_available():
        return binding.stock.forward(module, input)
    low = autocast_low(input)
    with Tape():
        return F.linear(low, autocast_low(module.weight), module.bias)


def _conv1d(module: nn.Module, binding: Binding, x: Tensor) -> Tensor:
    if not is_autocast(x) or not is_available():
        return binding.stock.forward(module, x)
    flat = autocast_low(x.view(-1, x.size(-1)))
    with Tape():
        product = torch.addmm(module.bias, flat, autocast_low(module.weight))
    return product.view(*x.shape[:-1], module.nf)


_CONV1D = """
def forward(self, x):
    size_out = x.size()[:-1] + (self.nf,)
    x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
    x = x.view(size_out)
    return x
"""

CONV1D = Op("conv1d", None, _conv1d, expressions=(_CONV1D,), opens_tape=True)
LINEAR = Op("linear", None, _linear, opens_tape=True)
