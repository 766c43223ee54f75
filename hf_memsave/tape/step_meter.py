"""What one real training step keeps and frees, without a run of its own.

:func:`~hf_memsave.measure_kept` runs a forward to measure it. Inside somebody's training loop that could change what
follows (running statistics, counters, first-batch initialisations). So this meter watches a forward that happens
anyway, under a dispatch mode, and counts as its backward begins.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_memsave.tape import hooks
from hf_memsave.tape.ledger import Ledger
from hf_memsave.tape.meter import _Watch


class StepMeter:
    """Watches the next forward of ``model``, then leaves.

    It stands in for the instance's ``forward`` until then (a module hook would not see a ``KeyboardInterrupt`` end the
    forward, and the dispatch mode would stay on): make it just before the step.

    Attributes:
        kept: Bytes alive as the backward of that forward began, that it had made; None before.
        freed: Bytes that autograd would have kept then in stock, less what is kept only to remake others; None before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kept: int | None = None
        self.freed: int | None = None
        self._model: nn.Module | None = model
        self._own = vars(model).get("forward")
        stock = model.forward

        @functools.wraps(stock)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.remove()
            return self._watched(stock, args, kwargs)

        forward._memsave_watches = stock  # type: ignore[attr-defined]
        model.forward = forward

    def remove(self) -> None:
        """Leave; does nothing if it has left already."""
        if self._model is not None:
            del self._model.forward
            if self._own is not None:
                self._model.forward = self._own
            self._model = self._own = None

    def _watched(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if hooks.meter is not None or not torch.is_grad_enabled():  # another meter watches, or nothing is kept
            return forward(*args, **kwargs)
        watch, hooks.meter = _Watch({}), (ledger := Ledger())
        try:
            with watch:
                output = forward(*args, **kwargs)
        finally:
            hooks.meter = None
        for tensor in tree_leaves(dict(output) if isinstance(output, dict) else output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:  # whichever backward comes to first
                tensor.register_hook(lambda grad: self._count(watch, ledger))
        return output

    def _count(self, watch: _Watch, ledger: Ledger) -> None:
        if self.kept is not None:
            return
        gc.collect()
        made = {key: record.nbytes for key, (_, record) in watch.made.items()}
        alive = {key for key, (ref, _) in watch.made.items() if not ref.expired()}
        self.kept = sum(made[key] for key in alive)
        self.freed = sum(made[key] for key in (ledger.addresses - alive) & made.keys())
        self.freed -= sum(made[key] for key in (ledger.sources - ledger.addresses) & alive)
        watch.made.clear()
