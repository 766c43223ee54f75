"""CUDA's autocast on the stand-in device: which functions it runs in low precision, which in fp32, which in the widest.

The lists say how, as ``aten/src/ATen/autocast_mode.h`` of PyTorch 2.14 does; whether CUDA's autocast has a function at
all, the dispatcher of the PyTorch at hand is asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_memsave.device import STAND_IN
from hf_memsave.measure.private import library, overloads, without_autocast
from hf_memsave.tape.private import autocast_cache

LOW = """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu
addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
scaled_dot_product_attention _scaled_dot_product_flash_attention cudnn_convolution cudnn_convolution_transpose
lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell""".split()
FP32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
rms_norm native_layer_norm group_norm linalg_matrix_sqrth nuclear_norm frobenius_norm cosine_similarity poisson_nll_loss
cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
margin_ranking_loss soft_margin_loss multilabel_margin_loss triplet_margin_loss multi_margin_loss
binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""".split()
FP32_RESULT = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm".split()
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()


def register_autocast() -> None:
    """Have the stand-in device do as CUDA does under autocast. Once per process."""
    library("_").fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = library("aten")
    for names, rule in ((LOW, _low), (FP32, _fp32), (FP32_RESULT, _fp32_result), (WIDEST, _widest)):
        for name in names:
            for func in overloads(name):
                aten.impl(func.name(), partial(_under, rule, func), "AutocastPrivateUse1")  # type: ignore[attr-defined]


class _Cache:
    """The conversions of weights that autocast shares, until it lets go of all of them."""

    def __init__(self) -> None:
        self.casts: dict[Any, tuple[Tensor, Tensor]] = {}
        self.alive: Callable[[], Any] = lambda: None

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        is_shared = x.requires_grad and x.is_leaf and x.dtype == torch.float32 and not x._is_view()
        if not is_shared or not torch.is_autocast_cache_enabled():
            return x.to(dtype)
        if (token := self.alive()) is None:
            self.casts.clear()
            self.alive = autocast_cache()
            token = self.alive()
            weakref.finalize(token, self.casts.clear)
        key = id(x), dtype
        if key not in self.casts:
            self.casts[key] = x.to(dtype), x
        return self.casts[key][0]


_cache = _Cache()


def _under(rule: Callable[..., Any], func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with without_autocast():
        return rule(func, args, kwargs)


def _is_eligible(x: Tensor) -> bool:
    return x.is_floating_point() and x.device.type == STAND_IN and x.dtype != torch.float64


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return _cache.cast(x, dtype) if _is_eligible(x) and x.dtype != dtype else x


def _all_cast(values: Any, dtype: torch.dtype) -> Any:
    if isinstance(values, dict):
        return {name: _all_cast(value, dtype) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)([_all_cast(value, dtype) for value in values])
    return _cast(values, dtype) if isinstance(values, Tensor) else values


def _low(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    args, kwargs = _all_cast((args, kwargs), torch.get_autocast_dtype(STAND_IN))
    return func(*args, **kwargs)


def _fp32(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    args, kwargs = _all_cast((args, kwargs), torch.float32)
    return func(*args, **kwargs)


def _fp32_result(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    arguments = func._schema.arguments  # type: ignore[attr-defined]
    names = [a.name for a in arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("dtype") is None and _is_eligible(args[0]):
        if "dtype" not in names:  # of norm, another overload has it
            packet = func.overloadpacket  # type: ignore[attr-defined]
            return packet(*[given.get(a.name, a.default_value) for a in arguments], dtype=torch.float32)
        return func(**(given | {"dtype": torch.float32}))
    return func(*args, **kwargs)


def _widest(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    found = [x.dtype for x in args if isinstance(x, Tensor) and _is_eligible(x)]
    if torch.float32 in found:
        args, kwargs = _all_cast((args, kwargs), torch.float32)
    return func(*args, **kwargs)
