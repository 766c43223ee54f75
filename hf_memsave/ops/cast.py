r"""``cast``: a dtype conversion that can be done again.

Kept for backward::

    eager    y, in every op that wants its input in the new dtype (under autocast, one private copy per consumer)
    here     nothing but x                             (y is promised)

Exact. A conversion keeps nothing itself; what costs memory is the converted copy. Each call makes an autograd node of
its own, as stock's does: sharing one between consumers would add their gradients in another dtype.
"""

from functools import partial

import torch
from torch import Tensor

from hf_memsave.ops.op import KeptBytes
from hf_memsave.tape import promise


def cast_reference(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tests' ground truth."""
    return x.to(dtype)


def kept_bytes(shape: tuple[int, ...], itemsize: int) -> KeptBytes:
    """For a consumer that keeps its input; ``itemsize`` is that of the new dtype."""
    return KeptBytes(torch.Size(shape).numel() * itemsize, 0)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, promised; ``x`` itself where it has that dtype."""
    if x.dtype == dtype:
        return x
    return promise(x.to(dtype), partial(_to, dtype=dtype), x)


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on where ``x`` lies."""
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def autocast_low(x: Tensor) -> Tensor:
    """``x`` as autocast would hand it to a matrix product: an explicit, promised cast instead of one hidden in C++."""
    if not is_autocast(x) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return cast(x, torch.get_autocast_dtype(x.device.type))


def autocast_fp32(x: Tensor) -> Tensor:
    """``x`` as CUDA's autocast would hand it to an op that it runs in fp32 (``pow``, ``layer_norm``; not on CPU)."""
    is_widened = x.is_cuda and is_autocast(x) and x.dtype in (torch.float16, torch.bfloat16)
    return cast(x, torch.float32) if is_widened else x


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)
