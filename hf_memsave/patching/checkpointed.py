"""What runs again in backward: linears as the classes that they are, and whole blocks.

A chosen linear carries a mark, which copies, pickles and replicas carry too. A tape knows it by its weight, looked up
while its block runs: moved, sharded or gathered, it is another tensor. Blocks run again by Transformers' own gradient
checkpointing of one layer: the class of a block answers what that asks for, and only while the block is called. So what
the user has turned on, or off, stays the user's, and counts first.
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

#: On a linear that runs again.
AGAIN = "_memsave_again"
#: Such linears in each block, or model, that has run.
_known: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
#: How ``gradient_checkpointing_enable`` tells a layer.
_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
#: Kinds of PEFT's adapters that are a cache.
_BRING_A_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
#: What to say of hooks that a block had in its forward, and has not as it runs again, or the other way round.
HOOKS = "other hooks on its modules (by hooks X-LoRA, Poly and others hand on what goes with a batch)"
#: What a layer of PEFT's keeps of which adapters it uses, and how.
OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
#: Where a class of blocks that run again finds the function by which they do.
_RUNS_BY = "_memsave_runs_by"


def choose_again(model: nn.Module, linears: Collection[nn.Module]) -> None:
    """Have tapes run ``linears`` of ``model`` again, and the first products of experts among them, and no others."""
    for module in model.modules():
        if module in linears:
            module.__dict__[AGAIN] = [n for n in module._parameters if "down" not in n and n != "bias"] or ["weight"]
        else:
            module.__dict__.pop(AGAIN, None)
    _known.clear()


def weights_in(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where to find the weights in ``module`` that run again, by name: FSDP1 and replicas have them as attributes."""
    refs = _known.get(module)
    if refs is None:
        refs = _known[module] = [weakref.ref(m) for m in module.modules() if AGAIN in m.__dict__]
    found = [m for ref in refs if (m := ref()) is not None]
    return [(own, name) for m in found for own in (m._parameters, m.__dict__) for name in m.__dict__[AGAIN]]


class _Now(threading.local):
    block: nn.Module | None = None  # that runs again, and is being called
    is_inside = False  # a model with such blocks: PEFT's activated LoRA asks them there
    is_cache_asked_for = False  # which is neither read nor written where a block runs again, as in ``generate``


_now = _Now()


def runs_again(block: nn.Module) -> bool:
    """Whether a block runs again by this module, and not as its user asked for."""
    return hasattr(type(block), _RUNS_BY) and not block.__dict__.get(_FLAG)


def running_by(function: Callable[..., Any], call: Any) -> dict[str, Any]:
    """What a class has whose blocks run again by ``function``, as ``checkpoint`` would run them; with its ``call``."""

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
            if is_on(self):  # Transformers takes a cache away among the named arguments alone
                args = tuple([None if isinstance(a, Cache) else a for a in args])
                args = _with_wanted_input(args) if self._backward_hooks else args
            return call(self, *args, **kwargs)
        finally:
            _now.block, _now.is_cache_asked_for = before

    flag = property(is_on, lambda self, value: self.__dict__.update({_FLAG: value}))
    asked = property(function_of, lambda self, value: self.__dict__.update({_FUNCTION: value}))
    return {_FLAG: flag, _FUNCTION: asked, _RUNS_BY: function, "__call__": __call__}


def _with_wanted_input(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` of a block whose full backward hooks are to run after it has run again."""
    # PyTorch runs them before where no input wants a gradient, as that of frozen embeddings; and by such a hook
    # activated LoRA takes away what the block needs. So a copy of the input wants one, as Transformers has it for PEFT.
    floats = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
    if floats and not any(args[i].requires_grad for i in floats):
        first = floats[0]
        return *args[:first], args[first].detach().requires_grad_(), *args[first + 1 :]
    return args


def checkpoint_block(function: Any, *args: Any) -> Any:
    """``checkpoint`` of a block's forward, or of its ``__call__``, which raises in backward where it would differ."""
    # Transformers has made ``partial(forward, block)`` of it, or one of its bound ``__call__``.
    given = *getattr(function, "args", ()), getattr(getattr(function, "func", None), "__self__", None)
    block = next((one for one in given if isinstance(one, nn.Module)), None)
    if torch.compiler.is_compiling() or block is None:
        with replacing_stock(current()):
            return checkpoint(function, *args, use_reentrant=False)
    before: dict[str, Any] = {}
    sums: list[Tensor] = []  # one, of the bits of what was kept, and of what it gave
    is_asking = asks_classes()
    kinds = [type(a) if isinstance(a, Tensor) and is_asked(type(a)) else None for a in args]

    def run_again(*args: Any) -> Any:
        changed = [what for what, now in state_of(function, block).items() if now != before[what]]
        if changed and (changed != [HOOKS] or not sums):
            raise run_differs(block, changed[0])
        # As in the forward: PyTorch's hooks give tensors back as plain ones, and a loss asks no class in backward.
        args = tuple([a.as_subclass(k) if k else a for a, k in zip(args, kinds, strict=True)])
        with all_subclasses() if is_asking else contextlib.nullcontext():
            if not changed:
                return function(*args)
            checkpoint_frame()[0].early_stop = False  # hooks may only have observed: that is told by all that it makes
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
        pack, unpack = hooks  # by which ``checkpoint`` runs this again

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
    """What is to be equal when ``block`` runs again by ``function``, each by what to say of it where it is not."""
    modules = [block]
    for module in modules:  # which grows: ``block.modules()`` takes ten times as long
        modules += [child for child in module._modules.values() if child is not None]
    runs_hooks_of = modules[1:] if block in getattr(function, "args", ()) else modules  # or those of its ``__call__``
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
    """``function(*args)`` under ``hooks``; what tells the bits of all that they keep, and of the output, is noted."""
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
    """What tells a tensor, and those ``before``, from others: also from its negative, and from one in another order."""
    with no_modes():
        for x in parts_of(tensor):
            bits = x.contiguous().flatten().view(torch.int16 if x.itemsize > 1 else torch.uint8)
            sums = [part.sum() for part in (bits, bits[::2], bits[::3], bits[: len(bits) // 2])]
            before = torch.stack(sums) + torch.as_tensor(before, device=x.device) * 1_000_003
        return torch.as_tensor(before)


def _hook(number: int, hook: Any) -> Any:
    """What tells a hook: its number, but of activated LoRA's, which is put on once more for the second run."""
    offsets = getattr(hook, "keywords", {}).get("alora_offsets")
    return number if offsets is None else repr(offsets)


def run_differs(block: nn.Module, found: str) -> KeptTensorChangedError:
    """The error for a block that would not run again as it ran; ``found`` says what is other now."""
    return KeptTensorChangedError(
        f"a checkpointed {type(block).__name__} runs again in backward: expected all as in its forward, got {found}. "
        "Change nothing that it reads before backward() is over, or use checkpoint='gate' or None."
    )


@contextlib.contextmanager
def with_cache(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Run no block again while ``model`` is called with these, if they ask for a cache or bring one (a prefix)."""
    cache = cache_in(arguments)
    is_filled = cache is not None and (not hasattr(cache, "get_seq_length") or cache.get_seq_length() > 0)
    is_prefix = getattr(getattr(model, "active_peft_config", None), "peft_type", None) in _BRING_A_CACHE
    before = _now.is_inside, _now.is_cache_asked_for
    _now.is_inside, _now.is_cache_asked_for = True, is_filled or is_prefix or bool(arguments.get("use_cache"))
    try:
        yield
    finally:
        _now.is_inside, _now.is_cache_asked_for = before
