"""Packed bits, codes and draws by kernels, where they run; elsewhere by PyTorch, with results of the same format.

A tape's :class:`~hf_memsave.tape.bits.Coders` say which of the two it uses; forward decides for backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_memsave.ops.fused.kernels import can_run, kernels, runs_on, seed_for
from hf_memsave.ops.sampled import estimators
from hf_memsave.ops.sampled.estimators import EAGER, Draw, Drawing
from hf_memsave.tape import bits, current, quantize


def are_wanted(*tensors: Tensor) -> bool:
    """Return whether the model that runs was patched for kernels, and they run on these tensors."""
    tape = current()
    return tape is not None and tape.frame.coders is FUSED_CODERS and can_run(*tensors)


def drawing_for(x: Tensor) -> Drawing:
    """Return the functions that draw rows of x: kernels where they are wanted, by three launches around a sort."""
    return FUSED_DRAWING if are_wanted(x) else EAGER


def _pack_bits(flags: Tensor) -> Tensor:
    return kernels().pack_bits(flags) if runs_on(flags) else bits.pack_bits(flags)


def _unpack_bits(packed: Tensor, numel: int) -> Tensor:
    return kernels().unpack_bits(packed, numel) if runs_on(packed) else bits.unpack_bits(packed, numel)


def _encode(flat: Tensor, form: quantize.Format, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    if not can_run(flat):
        return quantize.encode(flat, form, generator)
    return kernels().encode(flat, f"int{form.bits}", seed_for(flat, generator))


def _decode(codes: Tensor, bounds: Tensor, form: quantize.Format, numel: int, dtype: torch.dtype) -> Tensor:
    if dtype is torch.float64 or not runs_on(codes, bounds):
        return quantize.decode(codes, bounds, form, numel, dtype)
    return kernels().decode(codes, bounds, f"int{form.bits}", numel, dtype)


def _draw(estimator: str, p: Tensor, k: int, u: Tensor) -> Draw:
    return estimators.topk(p, k) if estimator == "topk" else Draw(*kernels().draw(p, k, u, estimator))


FUSED_CODERS = bits.Coders(_pack_bits, _unpack_bits, _encode, _decode)
FUSED_DRAWING = Drawing(lambda x: kernels().row_norms(x), lambda *norms: kernels().probabilities(*norms), _draw)
