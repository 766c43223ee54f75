"""What stock's operation would ask autograd to keep, where another one stands in for it.

An approximate, sampled, fused or chunked operation asks for other tensors than the stock one, or for none. So in the
one forward that a ledger counts, the stock one runs beside it on tensors without bytes: it computes and draws nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from hf_memsave.device import has_numbers
from hf_memsave.tape.private import FakeTensor, FakeTensorMode, Note, no_modes
from hf_memsave.tape.tape import Tape
from hf_memsave.tape.tensors import leaves


def replacing_stock(tape: Tape | None) -> contextlib.AbstractContextManager[None]:
    """Enter a context in which what autograd asks ``tape`` to keep does not count as stock's."""
    return contextlib.nullcontext() if tape is None else tape.using(replaces_stock=True)


def run_counted(
    tape: Tape | None,
    name: str,
    run: Callable[[], Any],
    stock: Callable[..., Any],
    args: Sequence[Any],
    module: nn.Module | None = None,
) -> Any:
    """Return ``run()``, and tell the ledger of ``tape`` what ``stock(*args)``, which stock runs instead, asks to keep.

    ``stock`` is called at most once, with tensors without bytes, and may read the parameters of ``module``.
    """
    if tape is None or tape.ledger is None or tape.frame.replaces_stock:
        return run()
    if (asked := _asked(stock, args, module)) is None:
        tape.ledger.note_missing(name if module is None else type(module).__name__)
        return run()
    inputs, nbytes, is_out_asked = asked
    with replacing_stock(tape):
        out = run()
    by = _graph_of(out)
    for x in (*inputs, *([out] if is_out_asked else [])):
        tape.note(x, tape.content_of(x), by)
    tape.ledger.note_stock(name, nbytes, by)
    return out


def _asked(
    stock: Callable[..., Any], args: Sequence[Any], module: nn.Module | None
) -> tuple[list[Tensor], int, bool] | None:
    """Return the ``args`` that stock keeps, bytes it makes and keeps, and if its result is kept; None if unknown."""
    if not all(type(x) in (Tensor, nn.Parameter) and has_numbers(x) for x in leaves(args, None)):
        return None
    within = [] if module is None else list(module.modules())
    if any(m._forward_hooks or m._forward_pre_hooks or "_hf_hook" in m.__dict__ for m in within):
        return None  # which would see tensors without bytes
    found: dict[int, Any] = {}

    def pack(tensor: Tensor) -> None:
        if isinstance(tensor, FakeTensor):  # else a parameter, or of the batch
            found[_place(tensor)] = tensor.untyped_storage()

    is_cached = torch.is_autocast_cache_enabled()
    log = logging.getLogger("torch._subclasses.fake_tensor")  # tells of what cannot run without bytes
    was_disabled, log.disabled = log.disabled, True
    try:
        with no_modes(), _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            torch.set_autocast_cache_enabled(False)  # where casts of weights, without bytes, would stay
            fakes = [_without_bytes(a) if isinstance(a, Tensor) else a for a in args]
            with torch.enable_grad(), saved_tensors_hooks(pack, Tensor.detach):  # which no backward asks
                out = stock(*fakes)
            weights = [mode.from_tensor(p) for p in (() if module is None else module.parameters())]
            given = [(a, _place(f)) for a, f in zip(args, fakes, strict=True) if isinstance(f, Tensor)]
            is_out = isinstance(out, Tensor) and _place(out) in found
            mine = {place for _, place in given} | {_place(w) for w in weights} | ({_place(out)} if is_out else set())
            nbytes = sum(storage.nbytes() for place, storage in found.items() if place not in mine)
            return [a for a, place in given if place in found], nbytes, is_out
    except Exception:  # what cannot run without bytes is counted as what stands for it
        return None
    finally:
        torch.set_autocast_cache_enabled(is_cached)
        log.disabled = was_disabled


def _graph_of(out: Any) -> Any:
    """Return an object that lives as long as the graph that made ``out``; or for good, where ``out`` does not tell."""
    if type(out) is not Tensor or out.grad_fn is None:
        return _graph_of
    return Note.of(out.grad_fn)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _without_bytes(x: Tensor) -> Tensor:
    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return fake.requires_grad_(x.requires_grad) if x.is_floating_point() else fake
