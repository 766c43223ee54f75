"""CUDA's attention, fused RMSNorm and autocast for the stand-in device, where the CPU runs something else.

Each attention kernel keeps q, k, v, its output, a number for each query and head, and its random state. "flash" takes
16 bits and no mask; "efficient" any mask, expanded to all heads, and as many heads of k and v as of q; "cudnn" 16 bits
and any mask. The first that can run is taken, the preferred one first; else math, which keeps the probabilities.

Autocast's lists are those of ``aten/src/ATen/autocast_mode.h`` of PyTorch 2.14, as far as the PyTorch at hand has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from hf_memsave.device import HALVES, STAND_IN, mask_multiple
from hf_memsave.measure.private import library, overloads, without_autocast
from hf_memsave.tape.private import autocast_cache, tree_map

aten = torch.ops.aten
#: Names of kernels, in PyTorch's order of preference (on Hopper, cuDNN may come first).
ATTENTION = ("flash", "efficient", "cudnn")
BACKENDS = {name: getattr(SDPBackend, f"{name.upper()}_ATTENTION") for name in ATTENTION} | {"math": SDPBackend.MATH}
_BACKWARDS = [getattr(aten, f"_scaled_dot_product_{name}_attention_backward").default for name in ATTENTION[:2]]

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
#: The object that stands for autocast's cache while that is in use -> the casts of weights that it shares.
_casts: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()
#: The name of the preferred attention kernel.
preferred = SimpleNamespace(name=ATTENTION[0])


def register_kernels() -> None:
    """Register CUDA's attention, RMSNorm and autocast rules for the stand-in device. Once per process."""
    lib = library("aten")
    lib.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    lib.impl("_fused_sdp_choice", choice, "AutogradPrivateUse1")
    rms_norm = lambda x, shape, weight=None, eps=None: aten._fused_rms_norm(x, shape, weight, eps)[0]  # noqa: E731
    lib.impl("rms_norm", rms_norm, "AutogradPrivateUse1")  # one kernel, which keeps its input and a number a row
    library("_").fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    low, fp32 = partial(_in, None), partial(_in, torch.float32)
    for names, rule in ((LOW, low), (FP32, fp32), (FP32_RESULT, _fp32_result), (WIDEST, _widest)):
        for func in (func for name in names for func in overloads(name)):
            lib.impl(func.name(), partial(_under, rule, func), "AutocastPrivateUse1")


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run ``F.scaled_dot_product_attention`` on the stand-in device as CUDA does."""
    name, width = chosen(q, k, v, mask, enable_gqa), q.shape[-1]
    if mask is not None and mask.dtype == torch.bool:  # -65504 takes as many bytes
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    if name == "math":
        run = aten._scaled_dot_product_attention_math
        return run(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    if name == "flash":
        if width % 8:
            scale = width**-0.5 if scale is None else scale
            q, k, v = (F.pad(x, (0, -width % 8)) for x in (q, k, v))
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0][..., :width]
    wants = any(x.requires_grad for x in (q, k, v)) and torch.is_grad_enabled()
    if name == "cudnn":
        run = aten._scaled_dot_product_cudnn_attention
        return run(q, k, v, mask, wants, dropout_p, is_causal, False, scale=scale)[0]
    if mask is not None:
        length, multiple = mask.shape[-1], mask_multiple(mask)
        if mask.stride(-1) != 1 or any(stride % multiple for stride in mask.stride()[:-1]):
            mask = F.pad(mask, (0, multiple - length % multiple))[..., :length]
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, wants, dropout_p, is_causal, scale=scale)[0]


def chosen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool) -> str:
    """Return the name of the attention kernel that CUDA takes for these arguments."""
    width = q.shape[-1]
    is_narrow_half = q.dtype in HALVES and width <= 256
    can = {
        "flash": is_narrow_half and mask is None and width == v.shape[-1],
        "efficient": not enable_gqa or q.shape[-3] == k.shape[-3],
        "cudnn": is_narrow_half and width % 8 == 0,
    }
    return next((name for name in (preferred.name, *ATTENTION[:2]) if can[name] and q.dim() == 4), "math")


def choice(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *_: Any, enable_gqa: bool = False, **__: Any) -> int:
    """Return the chosen kernel's number in ``torch.nn.attention.SDPBackend``."""
    return BACKENDS[chosen(q, k, v, mask, enable_gqa)].value


def workspace(func: Any, args: Any) -> int:
    """Return the bytes of a kernel's workspace: attention's backward sums dq in fp32, and flash's dk and dv by head."""
    if func not in _BACKWARDS or args[1].dtype not in HALVES:
        return 0
    q, k = args[1:3]
    repeated = 2 * q.numel() * q.itemsize if func is _BACKWARDS[0] and k.shape[1] != q.shape[1] else 0
    return 4 * q.numel() + repeated


def _under(rule: Callable[..., Any], func: Any, *args: Any, **kwargs: Any) -> Any:
    with without_autocast():
        return rule(func, args, kwargs)


def _is_eligible(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == STAND_IN and x.is_floating_point() and x.dtype != torch.float64


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if not _is_eligible(x) or x.dtype == dtype:
        return x
    is_shared = x.requires_grad and x.is_leaf and x.dtype == torch.float32 and not x._is_view()
    if not is_shared or not torch.is_autocast_cache_enabled():
        return x.to(dtype)
    if (cache := next(iter(_casts), None)) is None:
        _casts[cache := autocast_cache()()] = {}
    shared = _casts[cache]
    if (id(x), dtype) not in shared:
        shared[id(x), dtype] = x.to(dtype), x
    return shared[id(x), dtype][0]


def _in(dtype: torch.dtype | None, func: Any, args: Any, kwargs: Any) -> Any:
    dtype = dtype or torch.get_autocast_dtype(STAND_IN)
    args, kwargs = tree_map(partial(_cast, dtype=dtype), (args, kwargs))
    return func(*args, **kwargs)


def _fp32_result(func: Any, args: Any, kwargs: Any) -> Any:
    arguments = func._schema.arguments
    given = dict(zip([a.name for a in arguments], args, strict=False)) | kwargs
    if given.get("dtype") is not None or not _is_eligible(args[0]):
        return func(*args, **kwargs)
    if any(a.name == "dtype" for a in arguments):
        return func(**(given | {"dtype": torch.float32}))
    return func.overloadpacket(*[given.get(a.name, a.default_value) for a in arguments], dtype=torch.float32)  # of norm


def _widest(func: Any, args: Any, kwargs: Any) -> Any:
    is_wide = any(_is_eligible(x) and x.dtype == torch.float32 for x in args)
    return _in(torch.float32, func, args, kwargs) if is_wide else func(*args, **kwargs)
