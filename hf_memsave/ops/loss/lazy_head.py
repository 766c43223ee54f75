"""Heads of language models, which return :class:`.unread.Unread` where logits are many.

Where all logits fit in one chunk, and where no tape is laid (evaluation, ``generate``, ``torch.compile``), stock's own
product runs. A plain linear is known by its weight when it is called, and its class stays; one that adapters wrap, or
that is quantized, is replaced by the op ``lazy_head``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_memsave.device import HALVES
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.head import HeadCall, draws
from hf_memsave.ops.loss.unread import unread_logits
from hf_memsave.ops.op import Op, is_parametrized, not_parametrized
from hf_memsave.tape import current
from hf_memsave.tape.private import FakeTensor, functions_in_forward, hooks_work
from hf_memsave.tape.recomputed import AutocastState
from hf_memsave.tape.tensors import tensors_in

#: Adapters whose result for a row depends on other rows, or is random.
_NOT_BY_ROW = ("peft.tuners.lily", "peft.tuners.xlora", "peft.tuners.lora.monteclora")


def logits_of(
    module: nn.Module, forward: Callable[[Tensor], Tensor], hidden: Tensor, *, is_plain: bool = False, **of_head: Any
) -> Tensor | None:
    """Return logits ``[..., V]`` of ``[..., H]``, not computed yet; None where they must be computed at once."""
    tape, is_reference, words = current(), is_plain and not torch.is_grad_enabled(), _words(module)
    count = hidden.shape[:-1].numel() * words
    if (tape is None and not is_reference) or not _is_long(module, hidden, count):
        return None
    autocast = AutocastState.now(hidden.device.type)
    dtype = autocast.dtype if autocast.dtype and hidden.dtype != torch.float64 else hidden.dtype
    if dtype == torch.float16:  # whose gradients a loss scale of the caller's keeps in range, and it comes too late
        return None
    if not (is_plain and dtype in HALVES) and not is_reference and 2 * _wanted(module) > 3 * count:
        return None  # sums, or gradients of logits in fp32, may take more than logits
    if tape is not None and tape.ledger is not None:
        tape.ledger.is_loss_chunked = True
    return unread_logits(HeadCall(module, forward, hidden, words, **of_head), hidden, dtype)


def of_linear(
    module: nn.Module, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, fuses_loss: bool = False
) -> Tensor | None:
    """Return :func:`logits_of` for the head's ``F.linear(hidden, weight, bias)``; None if it has other parameters."""
    own, given = list(module.parameters()), [weight] if bias is None else [weight, bias]
    if [id(p) for p in own] != [id(p) for p in given] or any(type(p) not in (nn.Parameter, FakeTensor) for p in own):
        return None  # computed, or with a linear of its own
    forward = partial(F.linear, weight=weight, bias=bias)
    return logits_of(module, forward, hidden, is_plain=True, fuses_loss=fuses_loss)


def _is_long(module: nn.Module, hidden: Tensor, count: int) -> bool:
    """Return whether the ``count`` logits of ``hidden`` exceed a chunk, and chunks change only the order of sums."""
    is_constant = torch.is_grad_enabled() and not (hidden.requires_grad or _wanted(module))
    if is_constant or count * 4 <= chunked_loss.CHUNK or count < 2 * hidden.numel():  # kept of hidden states is more
        return False
    if not all(parameter.is_leaf for parameter in module.parameters()):  # hooks on them would run in every chunk
        return False
    # A dropout would draw other masks for chunks; a hook may look at logits, or take the weights away (FSDP2, ZeRO-3,
    # Accelerate's offload); some adapters look at all rows.
    bad = (draws(m) or _has_hooks(m) or type(m).__module__.startswith(_NOT_BY_ROW) for m in module.modules())
    return not any(bad)


def _words(module: nn.Module) -> int:
    """Return the vocabulary's size, by the weight (PEFT's copy of a tied head swaps its features) unless quantized."""
    tokens, parts = _trained_tokens(module), cast("Any", module)
    weight: Any = getattr(parts if tokens is None else tokens.base_layer, "weight", None)
    is_plain = isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2
    return int(weight.shape[0] if is_plain else parts.out_features)


def _trained_tokens(module: nn.Module) -> Any:
    """Return PEFT's layer that trains some rows of a weight (``trainable_token_indices``), if there is one."""
    layer = getattr(module, "token_adapter", module)
    return layer if hasattr(layer, "trainable_tokens_delta") else None


def _with_columns(tokens: Any, hidden: Tensor) -> Tensor:
    """Compute logits ``[..., V]`` and replace the trained words', where PEFT copies the whole weight."""
    weight = tokens.base_layer.weight
    logits = F.linear(hidden, weight)
    for name in tokens.active_adapters:
        index = torch.tensor(tokens.token_indices[name], device=hidden.device)
        logits = logits.index_copy(-1, index, F.linear(hidden, tokens.trainable_tokens_delta[name].to(weight)))
    return logits


def _wanted(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _has_hooks(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    is_fetched = any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False))
    return bool(hooks) or is_fetched or "_hf_hook" in module.__dict__


def _lazy_head(module: nn.Module, patch: Any, *args: Any, **kwargs: Any) -> Any:
    made, forward = None, partial(patch.stock.forward, module)
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        tokens = _trained_tokens(module)
        is_trained = tokens is not None and tokens.active_adapters and not (tokens.disable_adapters or tokens.merged)
        made = logits_of(module, forward, args[0], of_rows=partial(_with_columns, tokens) if is_trained else None)
    return forward(*args, **kwargs) if made is None else made


def _check(module: nn.Module, value: Any) -> str:
    tokens = _trained_tokens(module)
    is_linear = isinstance(getattr(module, "out_features", None), int)
    if not (is_linear if tokens is None else type(tokens.base_layer) is nn.Linear):
        return f"expected a linear, got {type(module).__name__}"
    return not_parametrized(module, value)


LAZY_HEAD = Op("lazy_head", _lazy_head, _check, is_implied=True)


class _Intercepted(TorchFunctionMode):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = None
        if func is F.linear and len(args) > 1 and args[1] is self.head.weight:
            made = of_linear(self.head, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if made is None else made


def without_tape(head: nn.Module | None, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a model's forward under ``no_grad``, without labels, gets unread logits of ``head``."""
    is_asked = not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()) and kwargs.get("labels") is None
    if not is_asked or not isinstance(head, nn.Linear) or is_parametrized(head):
        return contextlib.nullcontext()
    tokens = max((tensor.shape[:2].numel() for tensor in tensors_in((*args, *kwargs.values()))), default=0)
    with torch.enable_grad():
        works = tokens * head.out_features * 4 > chunked_loss.CHUNK and hooks_work()
    return _Intercepted(head) if works and next(functions_in_forward(), None) is None else contextlib.nullcontext()
