"""A product of 16-bit matrices, given in fp32 or added to what is there."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_memsave.device import adds_wide_products, has_wide_products


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` of ``[M, K]`` and ``[K, N]`` of one dtype, in ``dtype``, that or a wider one; rounded once."""
    if a.dtype == dtype:
        return a @ b
    if dtype == torch.float32 and has_wide_products(a):
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add ``a @ b`` of ``[M, K]`` and ``[K, N]``, bf16 or fp16, to ``total``, fp32, in place by the product itself."""
    if adds_wide_products(a):
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.add_(wide_product(a, b, total.dtype))
