"""A forward without gradients whose logits are many (a reference model's, an old policy's): they are lazy there too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.lazy_head import of_linear
from hf_memsave.ops.op import is_parametrized
from hf_memsave.tape.private import functions_in_forward, hooks_work
from hf_memsave.tape.tensors import tensors_in


class _OfHead(TorchFunctionMode):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = None
        if func is F.linear and len(args) > 1 and args[1] is self.head.weight:
            made = of_linear(self.head, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if made is None else made


def without_tape(
    head: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> contextlib.AbstractContextManager[Any]:
    """Where the forward of a model with this head runs under ``no_grad``, and gives logits without a loss."""
    if not isinstance(head, nn.Linear) or is_parametrized(head) or kwargs.get("labels") is not None:
        return contextlib.nullcontext()
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    tokens = max((tensor.shape[:2].numel() for tensor in tensors_in((*args, *kwargs.values()))), default=0)
    with torch.enable_grad():
        works = tokens * head.out_features * 4 > chunked_loss.CHUNK and hooks_work()
    return _OfHead(head) if works and next(functions_in_forward(), None) is None else contextlib.nullcontext()
