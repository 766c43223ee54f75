"""A product of 16-bit matrices, given in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_memsave.device import has_wide_products


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in ``dtype``, rounded once.

    Args:
        a: ``[M, K]``.
        b: ``[K, N]``, of the same dtype.
        dtype: That, or a wider one.

    Returns:
        ``[M, N]``.
    """
    if a.dtype == dtype:
        return a @ b
    if dtype == torch.float32 and has_wide_products(a):
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)
