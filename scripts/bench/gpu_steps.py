"""Steps on this machine's device, for the benches of a GPU: what they give, keep and wait for; planted faults."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import publish  # noqa: F401 - has support found
from hf_memsave import measure_kept
from support.helpers import bits
from support.steps import gradients

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FIXED, DEFAULT = "deterministic", "default"
Results = dict[str, Tensor]


class Row(NamedTuple):
    """Of the table; whether it is wrong is in its verdict."""

    expected: str
    got: str
    verdict: str = ""
    kept: str = ""


def judged(stock: list[Results], ours: list[Results], kernels: str) -> Row:
    """The worst tensor of ours, beside how far stock's steps are from each other there."""
    if any(run.keys() != stock[0].keys() for run in stock + ours):
        return Row("", "", "WRONG: other gradients")
    if not all(tensor.isfinite().all() for tensor in stock[0].values()):
        is_chosen = kernels == DEFAULT  # by PyTorch, and cuDNN's attention gives NaN for some lengths and a mask
        return Row("", "", f"{'left out' if is_chosen else 'WRONG'}: stock is not finite, so nothing was compared")
    own = {n: max(distance(a[n], b[n]) for a, b in itertools.combinations(stock, 2)) for n in stock[0]}
    got = {n: max(min(distance(run[n], theirs[n]) for theirs in stock) for run in ours) for n in own}
    noise = statistics.median(own.values()) if kernels == DEFAULT else 0.0
    limits = {n: 2 * max(own[n], noise) for n in own}
    worst = max(own, key=lambda n: (got[n] > limits[n], got[n]))
    count = sum(got[n] > limits[n] for n in own)
    return Row(f"{own[worst]:.1e}", f"{got[worst]:.1e}", f"WRONG: {worst}, {count} of {len(own)}" if count else "")


def distance(one: Tensor, other: Tensor) -> float:
    """Of two tensors, relative to the other one: 0 only for the same bits."""
    if torch.equal(bits(one), bits(other)):
        return 0.0
    far = float((one.double() - other.double()).norm() / other.double().norm())
    return max(far, 1e-300) if far < float("inf") else float("inf")  # NaN is not


def step(model: nn.Module, batch: dict[str, Tensor], mode: str) -> Results:
    """The loss and every gradient."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = forward(model, batch, mode)
    loss.backward()
    return {"loss": loss.detach().clone(), **gradients(model)}


def forward(model: nn.Module, batch: dict[str, Tensor], mode: str) -> Tensor:
    """The loss; autocast ends with the forward."""
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=mode == "autocast"):
        return model(**batch).loss


def kept(model: nn.Module, batch: dict[str, Tensor], mode: str) -> int:
    """Bytes on the device between forward and backward: on CUDA by its allocator, on CPU counted."""
    if DEVICE.type == "cpu":
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            return measure_kept(model, batch).total
    model.zero_grad(set_to_none=True)
    return kept_on_gpu(partial(forward, model, batch, mode))


def kept_on_gpu(loss_of: Callable[[], Tensor]) -> int:
    """Bytes that the allocator has given out between a forward and its backward, beyond those before."""
    release()
    before = torch.cuda.memory_allocated()
    loss = loss_of()
    synchronize()
    found = torch.cuda.memory_allocated() - before
    loss.backward()  # some things are let go only then
    return found


def release() -> None:
    """Give back what nothing holds."""
    gc.collect()
    synchronize()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def under(kernels: str) -> Iterator[None]:
    """Kernels of PyTorch's choice, or deterministic ones alone."""
    torch.use_deterministic_algorithms(kernels == FIXED, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH) if kernels == FIXED else contextlib.nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def waits(call: Callable[[], Any]) -> int:
    """How often the host waits for the device in a third call."""
    call(), call()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            if DEVICE.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    for warning in found:
        print(f"waits at {warning.filename}:{warning.lineno}", file=sys.stderr)
    return len(found)


def plant(model: nn.Module, fault: str | None, kernels: str) -> None:
    """Have the last weight's gradient wrong by one bit or, under default kernels, 1%; or the host wait in a forward."""
    *_, weight = (p for p in model.parameters() if p.requires_grad and p.dim() == 2)

    def wrong_bit(gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        bits(gradient).view(-1)[:1].bitwise_xor_(1)
        return gradient

    def wait(*_: Any) -> None:
        if weight.is_cuda:
            weight[0, 0].item()
        else:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    if fault == "bit":
        weight.register_hook(wrong_bit)
    elif fault == "error" and kernels == DEFAULT:
        weight.register_hook(lambda gradient: 1.01 * gradient)
    elif fault == "sync":
        model.register_forward_pre_hook(wait)
