"""What ``checkpoint=`` runs again in backward: linears, whose classes stay stock, and whole blocks.

A chosen linear has the attribute :data:`AGAIN`, as have its copies, pickles and replicas. A tape knows it by its
weight, which is read whenever its block runs, as moving, sharding or gathering replaces that tensor. Blocks run again
by Transformers' own gradient checkpointing of a layer: its flag and its function are properties of our class of block,
on only while a block is called. Gradient checkpointing that the user turns on takes precedence.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import Cache

from hf_memsave.arch.versions import cache_in
from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.tape import current
from hf_memsave.tape.as_stock import replacing_stock
from hf_memsave.tape.private import all_subclasses, asks_classes, checkpoint_frame, innermost_hooks, no_modes
from hf_memsave.tape.tensors import is_asked, tensors_in
from hf_memsave.tape.wrappers import parts_of

#: Attribute of a linear, or of experts, that run again: the names of their weights.
AGAIN = "_memsave_again"
#: Block, or model, that has run -> the modules with this attribute in it.
_known: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
#: Attributes that ``gradient_checkpointing_enable`` sets on a layer.
_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
#: Kinds of PEFT's adapters that pass a KV cache to the model.
_BRING_A_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
#: How an error names the hooks of a block, where they differ between its forward and its rerun.
HOOKS = "other hooks on its modules (X-LoRA, Poly and others pass on by hooks what goes with a batch)"
#: Attributes of a PEFT layer that decide which adapters it uses, and how.
OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
#: Attribute of a class of blocks that run again: the function that checkpoints them.
_RUNS_BY = "_memsave_runs_by"


def choose_again(model: nn.Module, linears: Collection[nn.Module]) -> None:
    """Mark ``linears`` of ``model`` (of experts, all weights but down projections) to run again, and no others."""
    for module in model.modules():
        if module in linears:
            module.__dict__[AGAIN] = [n for n in module._parameters if "down" not in n and n != "bias"] or ["weight"]
        else:
            module.__dict__.pop(AGAIN, None)
    _known.clear()


def weights_in(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return (dict, name) of weights in ``module`` that run again; FSDP1 and replicas have them as attributes."""
    refs = _known.get(module)
    if refs is None:
        refs = _known[module] = [weakref.ref(m) for m in module.modules() if AGAIN in m.__dict__]
    found = [m for ref in refs if (m := ref()) is not None]
    return [(own, name) for m in found for own in (m._parameters, m.__dict__) for name in m.__dict__[AGAIN]]


class _Now(threading.local):
    block: nn.Module | None = None  # the block that is being called, and runs again
    is_inside = False  # a model with such blocks is being called: PEFT's activated LoRA reads their flags there
    is_cache_asked_for = False  # then no block runs again: it would leave the KV cache out


_now = _Now()


def runs_again(block: nn.Module) -> bool:
    """Return whether ``block`` runs again by its patch, and not by the user's own gradient checkpointing."""
    return hasattr(type(block), _RUNS_BY) and not block.__dict__.get(_FLAG)


def running_by(function: Callable[..., Any], call: Any) -> dict[str, Any]:
    """Return class attributes by which Transformers checkpoints blocks with ``function``; ``call`` is ``__call__``."""

    def is_on(self: Any) -> bool:
        is_called = torch.compiler.is_compiling() or _now.is_inside or _now.block is self
        return bool(self.__dict__.get(_FLAG)) or (is_called and torch.is_grad_enabled() and not _now.is_cache_asked_for)

    def function_of(self: Any) -> Any:
        return function if runs_again(self) else self.__dict__.get(_FUNCTION, function)

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (self.training and runs_again(self)):
            return call(self, *args, **kwargs)
        before = _now.block, _now.is_cache_asked_for
        is_filled = any(isinstance(a, Cache) and a.get_seq_length() > 0 for a in (*args, *kwargs.values()))
        _now.block, _now.is_cache_asked_for = self, _now.is_cache_asked_for or is_filled
        try:
            if is_on(self):  # Transformers itself drops a cache only from keyword arguments
                args = tuple([None if isinstance(a, Cache) else a for a in args])
                args = _with_wanted_input(args) if self._backward_hooks else args
            return call(self, *args, **kwargs)
        finally:
            _now.block, _now.is_cache_asked_for = before

    flag = property(is_on, lambda self, value: self.__dict__.update({_FLAG: value}))
    asked = property(function_of, lambda self, value: self.__dict__.update({_FUNCTION: value}))
    return {_FLAG: flag, _FUNCTION: asked, _RUNS_BY: function, "__call__": __call__}


def _with_wanted_input(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with a float tensor that requires a gradient, for a block with full backward hooks."""
    # Where no input requires one (frozen embeddings), PyTorch runs these hooks before the block runs again; and by such
    # a hook activated LoRA removes what the block needs. So a detached input requires one, as Transformers' for PEFT.
    floats = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
    if floats and not any(args[i].requires_grad for i in floats):
        first = floats[0]
        return *args[:first], args[first].detach().requires_grad_(), *args[first + 1 :]
    return args


def checkpoint_block(function: Any, *args: Any) -> Any:
    """Checkpoint ``function``, a block's forward or ``__call__``: raise in backward if it would run differently."""
    # Transformers passes ``partial(forward, block)``, or a partial of the bound ``__call__``.
    given = *getattr(function, "args", ()), getattr(getattr(function, "func", None), "__self__", None)
    block = next((one for one in given if isinstance(one, nn.Module)), None)
    if torch.compiler.is_compiling() or block is None:
        with replacing_stock(current()):
            return checkpoint(function, *args, use_reentrant=False)
    before: dict[str, Any] = {}
    sums: list[Tensor] = []  # one checksum of the bits that the forward kept and returned
    is_asking = asks_classes()
    kinds = [type(a) if isinstance(a, Tensor) and is_asked(type(a)) else None for a in args]

    def run_again(*args: Any) -> Any:
        changed = [what for what, now in state_of(function, block).items() if now != before[what]]
        if changed and (changed != [HOOKS] or not sums):
            raise run_differs(block, changed[0])
        # As in the forward: hooks unpack plain tensors, and a subclass's ``backward`` calls no ``__torch_function__``.
        args = tuple([a.as_subclass(k) if k else a for a, k in zip(args, kinds, strict=True)])
        with all_subclasses() if is_asking else contextlib.nullcontext():
            if not changed:
                return function(*args)
            checkpoint_frame()[0].early_stop = False  # hooks may only observe: all of the rerun tells
            found: list[Tensor] = []
            try:
                out = _noting(function, args, innermost_hooks(), found)
            except Exception as error:
                raise run_differs(block, HOOKS) from error
        if not found or not torch.equal(sums[0], found[0]):
            raise run_differs(block, HOOKS)
        return out

    def run(*args: Any) -> Any:
        if before:
            return run_again(*args)
        before.update(state_of(function, block))
        if (hooks := innermost_hooks()) is None:
            return function(*args)
        pack, unpack = hooks  # of ``checkpoint``; the second runs this again

        def unpack_or_say_why(packed: Any) -> Any:
            try:
                return unpack(packed)
            except CheckpointError as error:
                raise run_differs(block, f"something else ({str(error).splitlines()[0]})") from error

        hooks = pack, unpack_or_say_why
        if before[HOOKS]:
            return _noting(function, args, hooks, sums)
        with saved_tensors_hooks(*hooks):
            return function(*args)

    with replacing_stock(current()):
        return checkpoint(run, *args, use_reentrant=False)


def state_of(function: Any, block: nn.Module) -> dict[str, Any]:
    """Return what must be equal when ``function`` runs ``block`` again: its name in an error -> its state now."""
    modules = [block]
    for module in modules:  # which grows: ``block.modules()`` takes ten times as long
        modules += [child for child in module._modules.values() if child is not None]
    runs_hooks_of = modules[1:] if block in getattr(function, "args", ()) else modules  # ``__call__`` runs its own
    hooked = [m for m in runs_hooks_of if m._forward_pre_hooks or m._forward_hooks]
    layers = [m for m in modules if hasattr(type(m), "_active_adapter")] if "peft" in sys.modules else []
    return {
        HOOKS: [
            (m, {_hook(*item) for hooks in (m._forward_pre_hooks, m._forward_hooks) for item in hooks.items()})
            for m in hooked
        ],
        "modules that were switched by train() or eval()": [m for m in modules if not m.training],
        "adapters that were switched, scaled, merged or disabled": [
            repr([getattr(layer, name, None) for name in OF_ADAPTERS]) for layer in layers
        ],
    }


def _noting(function: Any, args: tuple[Any, ...], hooks: Any, sums: list[Tensor]) -> Any:
    """Run ``function(*args)`` under ``hooks``; set ``sums`` to a checksum of all that they keep and of the output."""
    pack, unpack = hooks

    def note(tensor: Tensor) -> None:
        sums[:] = [_sums_of_bits(tensor, *sums)]

    @functools.wraps(pack)
    def noted(tensor: Tensor) -> Any:
        note(tensor)
        return pack(tensor)

    with saved_tensors_hooks(noted, unpack):
        out = function(*args)
    for tensor in tensors_in(out if isinstance(out, tuple) else (out,)):
        note(tensor)
    return out


@torch.no_grad()
def _sums_of_bits(tensor: Tensor, before: Tensor | int = 0) -> Tensor:
    """Compute a checksum of the bits of ``tensor``, in which order and sign count, on top of the one ``before``."""
    with no_modes():
        for x in parts_of(tensor):
            bits = x.contiguous().flatten().view(torch.int16 if x.itemsize > 1 else torch.uint8)
            sums = [part.sum() for part in (bits, bits[::2], bits[::3], bits[: len(bits) // 2])]
            before = torch.stack(sums) + torch.as_tensor(before, device=x.device) * 1_000_003
        return torch.as_tensor(before)


def _hook(number: int, hook: Any) -> Any:
    """Return what identifies a hook: its number, or the offsets of activated LoRA's, which a rerun registers again."""
    offsets = getattr(hook, "keywords", {}).get("alora_offsets")
    return number if offsets is None else repr(offsets)


def run_differs(block: nn.Module, found: str) -> KeptTensorChangedError:
    """Return the error for a block that would not run again as in its forward; ``found`` says what differs."""
    return KeptTensorChangedError(
        f"a checkpointed {type(block).__name__} runs again in backward: expected all as in its forward, got {found}. "
        "Change nothing that it reads before backward() is over, or use checkpoint='gate' or None."
    )


@contextlib.contextmanager
def with_cache(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Run no block again in a call of ``model`` that asks for a KV cache, or brings a filled one (a PEFT prefix)."""
    cache = cache_in(arguments)
    is_filled = cache is not None and (not hasattr(cache, "get_seq_length") or cache.get_seq_length() > 0)
    is_prefix = getattr(getattr(model, "active_peft_config", None), "peft_type", None) in _BRING_A_CACHE
    before = _now.is_inside, _now.is_cache_asked_for
    _now.is_inside, _now.is_cache_asked_for = True, is_filled or is_prefix or bool(arguments.get("use_cache"))
    try:
        yield
    finally:
        _now.is_inside, _now.is_cache_asked_for = before
