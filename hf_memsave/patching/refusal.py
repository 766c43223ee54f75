"""A forward in which saved-tensor hooks are refused: there the model runs as stock.

``torch.func.grad`` and its like, and ``disable_saved_tensors_hooks``, refuse to begin under any hook, and so under a
tape. It is too late then: the hooks cannot be taken off from within. So the first forward of a module under a tape of
its own, when it is refused, starts again as stock, where it has changed nothing that stays, and draws the same random
numbers. From then on the module lays no tape; the repeated blocks inside of it do, by the same rule.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.parameter import is_lazy
from transformers.utils import logging

from hf_memsave.errors import PatchError
from hf_memsave.tape.hooks import tensors_in
from hf_memsave.tape.private import innermost_hooks

logger = logging.get_logger(__name__)

#: The function that every refusal comes from.
_REFUSES: Any = disable_saved_tensors_hooks.__wrapped__.__code__
#: Whether the forward of a module takes hooks, once it was tried.
_takes_hooks: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def taped_or_stock(
    module: nn.Module, given: tuple[Any, ...], taped: Callable[[], Any], stock: Callable[[], Any]
) -> Any:
    """Run the forward of a module.

    Args:
        module: Whose forward it is.
        given: What it is called with.
        taped: Runs it under hooks.
        stock: Runs it without.

    Returns:
        What it returns.

    Raises:
        PatchError: It refuses hooks, and cannot start again.
        RuntimeError: As stock does.
    """
    takes_hooks = _takes_hooks.get(module)
    if takes_hooks is False:
        return stock()
    start = _Start(module, given) if takes_hooks is None and innermost_hooks() is None else None
    try:
        out = taped()
    except RuntimeError as error:
        if not _is_refusal(error) or innermost_hooks() is not None:  # under other hooks, stock is refused as well
            raise
        if start is None or not start.is_as_it_was():
            raise PatchError(
                f"the forward of {type(module).__name__} refuses saved-tensor hooks, by which hf_memsave works, where "
                "it cannot start again as stock: later than in its first forward, given more than tensors, or after it "
                "has written to them, to parameters or to buffers. unpatch(model) trains without hf_memsave."
            ) from error
    else:
        if start is not None:
            _takes_hooks[module] = True
        return out
    _takes_hooks[module] = False
    start.draw_again()
    logger.warning(
        "The forward of %s refuses saved-tensor hooks, as torch.func.grad and its like do: hf_memsave leaves it to "
        "stock, but for the repeated blocks in it that take them.", type(module).__name__,
    )  # fmt: skip
    return stock()


def _is_refusal(error: RuntimeError) -> bool:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_code is _REFUSES


class _Start:
    """What a forward finds when it begins, and may change: random states, parameters, buffers and arguments."""

    def __init__(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        self.module, self.given = module, given
        self.tensors = _versions(module, given)
        self.random, self.numpy = random.getstate(), numpy.random.get_state()
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def is_as_it_was(self) -> bool:
        """Whether the same tensors are there, nobody has written to them, and nothing else can have changed."""
        now = _versions(self.module, self.given)
        pairs = zip(now, self.tensors, strict=False)
        is_same = len(now) == len(self.tensors) and all(a is b and v == w for (a, v), (b, w) in pairs)
        return is_same and _is_plain(self.given)

    def draw_again(self) -> None:
        """Whoever draws, draws what was drawn since."""
        random.setstate(self.random)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def _is_plain(given: Any) -> bool:
    """Whether there are tensors, numbers and text alone; a cache, say, would grow twice."""
    if isinstance(given, (list, tuple, Mapping)):
        return all(map(_is_plain, given.values() if isinstance(given, Mapping) else given))
    return given is None or isinstance(given, (Tensor, bool, int, float, str, torch.dtype, torch.device))


def _versions(module: nn.Module, given: tuple[Any, ...]) -> list[tuple[Tensor, int]]:
    tensors = (*module.parameters(), *module.buffers(), *tensors_in(given))
    return [(t, -1 if is_lazy(t) or t.is_inference() else t._version) for t in tensors]
