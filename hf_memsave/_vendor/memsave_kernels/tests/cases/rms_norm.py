"""RMSNorm in its four styles."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import memsave_kernels as ours

from .case import Case, Make, gradients, leaves


def _inputs(make: Make, rows: int, columns: int, wide_weight: bool = False) -> tuple[Any, ...]:
    weight = make(columns, dtype=torch.float32) if wide_weight else make(columns)
    return make(rows, columns, scale=3.0), weight, make(rows, columns)


def _ours(x: Tensor, w: Tensor, dy: Tensor, style: str) -> tuple[Tensor, ...]:
    x, w = leaves(x, w)
    y = ours.rms_norm(x, w, 1e-6, style)
    dx, dw = gradients(y, (x, w), dy)
    x, w = x.detach(), w.detach()
    same, rstd = ours.rms_norm_forward(x, w, 1e-6, style)
    again = ours.rms_norm_again(x, w, rstd, style)
    dx_only, none, in_backward = ours.rms_norm_backward(dy.to(y.dtype), x, w, rstd, style, has_dw=False, again=True)
    assert none is None
    assert torch.equal(y, same) and torch.equal(y, again) and torch.equal(y, in_backward) and torch.equal(dx, dx_only)
    return y, dx, dw


def _eager(wide: torch.dtype, x: Tensor, w: Tensor, dy: Tensor, style: str) -> tuple[Tensor, ...]:
    x, w = leaves(x, w)
    rstd = torch.rsqrt(x.to(wide).pow(2).mean(-1, keepdim=True) + 1e-6)
    if style == "llama":
        y = w * (x.to(wide) * rstd).to(x.dtype)
    elif style == "gemma":
        y = (x.to(wide) * rstd * (1.0 + w.to(wide))).to(x.dtype)
    elif style == "t5":
        y = w * (x * rstd).to(w.dtype)
    else:
        y = (x.to(wide) * rstd * w.to(wide)).to(x.dtype)
    return y, *gradients(y, (x, w), dy)


BYTES = {"rms_norm_forward_kernel": 4, "rms_norm_backward_kernel": 8}
CASES = (
    *(
        Case(f"rms_norm {style}", _inputs, partial(_ours, style=style), partial(_eager, style=style), BYTES)
        for style in ("llama", "gemma", "t5", "torch")
    ),
    *(
        Case(
            f"rms_norm {style}, float32 weight", partial(_inputs, wide_weight=True), partial(_ours, style=style),
            partial(_eager, style=style), {}, (torch.bfloat16,),
        )
        for style in ("llama", "t5")
    ),
)  # fmt: skip
