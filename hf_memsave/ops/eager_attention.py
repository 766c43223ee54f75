r"""``eager_attention``: the model's own eager attention, keeping one tensor of attention weights instead of up to four.

Forward, with s the scale, M the masks and biases, D dropout, and D' its mask::

    P = softmax(Q Kᵀ s + M)         fp32 in most models, whatever the dtype of Q, K and V
    O = D(P.to(V.dtype)) V

Kept for backward, each ``[batch, heads, seq, kv_seq]``, beside Q, K and V::

    stock    P, D', and D(P) in V's dtype (without dropout: P, and its copy if V has another dtype)
    here     P, and the generator's state       (the copy, D' and D(P) are promised)

Softmax needs no help: its backward reads its output, and nothing here reads the scores. K and V, where repeated for
every query head, are promised from what they were before. The module's own forward runs, and the eager function it
calls: no code is copied, and the config goes on saying "eager", so masks and returned weights are stock's. A function
mode hands a few of the functions of PyTorch that they call to ops that promise.

Exact. Where attention is sampled (``WTACRS(attention=True)``), both products are :mod:`~hf_memsave.ops.wta_matmul`.
Source: Tempo, arXiv:2210.10246, sections 3.3 and 3.4.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_memsave.ops.cast import autocast_low
from hf_memsave.ops.dropout import dropout
from hf_memsave.ops.dropout import kept_bytes as kept_by_dropout
from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.ops.wta_crs import LAYER
from hf_memsave.ops.wta_matmul import wta_matmul
from hf_memsave.sampling.sampler import Layer
from hf_memsave.tape import Tape, current, is_available, promise
from hf_memsave.tape.storage import as_activation

#: The implementation that this op is for, and the function that stands for it in each modeling file.
NAME = "eager"
_FUNCTION = "eager_attention_forward"

_CASTS = frozenset({Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16})
_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})


def kept_bytes(
    shape: tuple[int, ...], itemsize: int, softmax_itemsize: int = 4, has_dropout: bool = True, device: str = "cpu"
) -> KeptBytes:
    """Of weights ``[batch, heads, seq, kv_seq]`` in V's dtype, and softmax's output in its own."""
    n = torch.Size(shape).numel()
    of_softmax = n * softmax_itemsize
    if has_dropout:
        eager, here = kept_by_dropout(shape, itemsize, device=device)
        return KeptBytes(of_softmax + eager, of_softmax + here)
    return KeptBytes(of_softmax + (0 if itemsize == softmax_itemsize else n * itemsize), of_softmax)


def is_attention(cls: type[nn.Module]) -> bool:
    """Whether modules of the stock class ``cls`` choose their attention by its name, with eager as the default."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and _FUNCTION in code.co_names


def implementation(module: nn.Module) -> str | None:
    """The attention that the config of an attention module names; None if it has no config, or that names none."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


class _Promising(TorchFunctionMode):
    """Runs an attention's forward; what it calls on heads, tensors of four dimensions or more, is promised.

    Args:
        how: What dropout keeps: "seed", "mask" or "stock".
        layer: Names the products and their sampler, where they are sampled.
    """

    def __init__(self, how: str, layer: Layer | None) -> None:
        super().__init__()
        self.how, self.layer, self.products = how, layer, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args or type(args[0]) is not Tensor or args[0].dim() < 4:
            return func(*args, **kwargs)
        x = args[0]
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func in _PRODUCTS and len(args) == 2 and not kwargs and type(args[1]) is Tensor:
            return self._product(func, *args)
        y = func(*args, **kwargs)
        if func in _CASTS and x.is_floating_point() and y.dtype != x.dtype and y.device == x.device:
            return promise(y, partial(_to, dtype=y.dtype), x)
        if func is Tensor.reshape and 0 in x.stride():  # what repeat_kv has expanded
            return promise(
                y, partial(_repeated, expanded=x.shape, shape=y.shape), as_activation(_unrepeated(x.detach()))
            )
        return y

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or inplace or self.how == "stock":
            return F.dropout(input, p, training, inplace)
        return dropout(input, p, self.how)

    def _product(self, func: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
        a, b = autocast_low(a), autocast_low(b)
        if self.layer is None:
            return func(a, b)
        self.products += 1
        return wta_matmul(a, b, self.layer, f"product {self.products}")


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def _unrepeated(x: Tensor) -> Tensor:
    """``x`` before ``expand``; a copy where it is a part of a fused projection that nobody keeps (Phi-3's v)."""
    once = x[tuple(slice(None, 1) if stride == 0 else slice(None) for stride in x.stride())]
    tape = current()
    return once.contiguous() if tape is not None and tape.cost(once) > once.numel() * once.itemsize else once


def _repeated(once: Tensor, expanded: torch.Size, shape: torch.Size) -> Tensor:
    return once.expand(expanded).reshape(shape)


def _eager_attention(module: nn.Module, binding: Binding, *args: Any, **kwargs: Any) -> Any:
    if not is_available():
        return binding.stock.forward(module, *args, **kwargs)
    layer = module.__dict__.get(LAYER) if module.training else None
    with Tape(), _Promising(binding.value.dropout, layer):
        return binding.stock.forward(module, *args, **kwargs)


EAGER_ATTENTION = Op("eager_attention", "attention", _eager_attention, opens_tape=True, takes_config=True)
