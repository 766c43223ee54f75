"""What stock's operation would ask autograd to keep, where another one stands in for it.

An approximate, sampled, fused or chunked operation asks for other tensors than the stock one, or for none. So in the
one forward that a ledger counts, the stock one runs beside it on tensors without bytes: it computes and draws nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from hf_memsave.device import has_numbers
from hf_memsave.tape.private import FakeTensor, FakeTensorMode, Note, no_modes
from hf_memsave.tape.recomputed import AutocastState
from hf_memsave.tape.tape import Tape
from hf_memsave.tape.tensors import leaves


def replacing_stock(tape: Tape | None) -> contextlib.AbstractContextManager[None]:
    """Enter a context in which what autograd asks ``tape`` to keep does not count as stock's."""
    return contextlib.nullcontext() if tape is None else tape.using(replaces_stock=True)


def run_counted(
    tape: Tape | None, name: str, run: Callable[[], Any], stock: Callable[..., Any], args: Sequence[Any],
    module: nn.Module | None = None,
) -> Any:  # fmt: skip
    """Return ``run()``, and tell the ledger of ``tape`` what ``stock(*args)``, which stock runs instead, asks to keep.

    ``stock`` is called at most once, with tensors without bytes, and may read the parameters of ``module``.
    """
    if tape is None or tape.ledger is None or tape.frame.replaces_stock:
        return run()
    known = tape.ledger.asked
    with no_modes():  # which would see every shape that is asked for
        key = _key(stock, args) if module is None else object()  # whose parts and what they read may differ
    if key not in known:
        known[key] = _asked(stock, args, [] if module is None else list(module.modules()))
    if (asked := known[key]) is None:
        tape.ledger.note_missing(name if module is None else type(module).__name__)
        return run()
    are_asked, nbytes, is_out_asked = asked
    with replacing_stock(tape):
        out = run()
    with no_modes():  # ``by`` lives as long as the graph; for good, where the output does not tell
        by = run_counted if type(out) is not Tensor or out.grad_fn is None else Note.of(out.grad_fn)
        for x in (*compress(args, are_asked), *([out] if is_out_asked else [])):
            tape.note(x, tape.content_of(x), by)
        tape.ledger.note_stock(name, nbytes, by)
    return out


def _asked(stock: Any, args: Sequence[Any], within: list[nn.Module]) -> tuple[list[bool], int, bool] | None:
    """Return which ``args`` stock keeps, bytes it makes and keeps, and if its result is kept; None if unknown."""
    if not all(type(x) in (Tensor, nn.Parameter) and has_numbers(x) for x in leaves(args, None)):
        return None
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
            weights = [mode.from_tensor(p) for m in within for p in m.parameters(recurse=False)]
            is_out = isinstance(out, Tensor) and _place(out) in found
            mine = {_place(x) for x in (*fakes, *weights, *([out] if is_out else [])) if isinstance(x, Tensor)}
            nbytes = sum(storage.nbytes() for place, storage in found.items() if place not in mine)
            return [isinstance(f, Tensor) and _place(f) in found for f in fakes], nbytes, is_out
    except Exception:  # what cannot run without bytes is counted as what stands for it
        return None
    finally:
        torch.set_autocast_cache_enabled(is_cached)
        log.disabled = was_disabled


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _key(stock: Any, args: Sequence[Any]) -> Any:
    """Return what is equal where ``stock``, which reads ``args`` alone, asks for the same, as in two blocks."""
    kinds = [(x.shape, x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in args]
    return stock, *kinds, AutocastState.now(args[0].device.type), args[0].device


def _without_bytes(x: Tensor) -> Tensor:
    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return fake.requires_grad_(x.requires_grad) if x.is_floating_point() else fake
