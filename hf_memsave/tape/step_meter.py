"""What one real training step keeps and frees, without a run of its own.

:func:`~hf_memsave.measure_kept` runs a forward to measure it. Inside somebody's training loop that could change what
follows (running statistics, counters, first-batch initialisations). So this meter watches a forward that happens
anyway: hooks on the module switch a dispatch mode on and off, and the count is taken as its backward begins.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_memsave.tape import hooks
from hf_memsave.tape.meter import _Watch


class StepMeter:
    """Watches the next training forward of ``model``, then leaves.

    Attributes:
        kept: Bytes alive as the backward of that forward began, that it had made; None before.
        freed: Bytes that autograd would have kept then without promises, less what is kept only for promises; None
            before. Leaves out the KV cache that patched models do not build.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kept: int | None = None
        self.freed: int | None = None
        self._watch: _Watch | None = None
        self._tally = hooks.Tally()
        self._handles = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Stop watching; does nothing if it has left already."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._watch is not None and hooks.tally is self._tally:
            self._stop(self._watch)

    def _begin(self, model: nn.Module, args: Any) -> None:
        if hooks.tally is None and model.training and torch.is_grad_enabled():
            self._watch = _Watch({})
            hooks.tally = self._tally
            self._watch.__enter__()

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if (watch := self._watch) is None or hooks.tally is not self._tally:
            return  # an evaluation, or another meter watches
        self._stop(watch)
        self.remove()
        for tensor in tree_leaves(dict(output) if isinstance(output, dict) else output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:  # whichever backward comes to first
                tensor.register_hook(lambda grad: self._count(watch))

    def _stop(self, watch: _Watch) -> None:
        hooks.tally = None
        watch.__exit__(None, None, None)

    def _count(self, watch: _Watch) -> None:
        if self.kept is not None:
            return
        gc.collect()
        alive = {key: record.nbytes for key, (ref, record) in watch.made.items() if not ref.expired()}
        made = {key: record.nbytes for key, (ref, record) in watch.made.items()}
        self.kept = sum(alive.values())
        promised = sum(made.get(key, 0) for key in self._tally.promised if key not in alive)
        self.freed = promised - sum(alive.get(key, 0) for key in self._tally.sources - self._tally.kept)
        watch.made.clear()
