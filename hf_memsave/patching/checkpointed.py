"""What runs again in backward: linears as the classes that they are, and whole blocks.

A chosen linear carries a mark, which copies, pickles and replicas carry too. A tape knows it by its weight, looked up
while its block runs: moved, sharded or gathered, it is another tensor. Blocks run again by Transformers' own gradient
checkpointing of one layer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import PreTrainedModel

from hf_memsave.arch.versions import cache_in
from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.tape import current
from hf_memsave.tape.as_stock import in_place_of_stock
from hf_memsave.tape.private import all_subclasses, asks_classes, innermost_hooks
from hf_memsave.tape.tensors import is_asked

#: On a linear that runs again.
AGAIN = "_memsave_again"
#: Such linears in each block, or model, that has run.
_known: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
#: How ``gradient_checkpointing_enable`` tells a layer, too.
_NAMES = ("gradient_checkpointing", "_gradient_checkpointing_func")
#: Kinds of PEFT's adapters that are a cache.
_BRING_A_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
#: What a layer of PEFT's keeps of which adapters it uses, and how.
OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
#: Where a block finds what it was told before.
BEFORE = "_memsave_checkpointed"


def choose_again(model: nn.Module, linears: Collection[nn.Module]) -> None:
    """Have tapes run ``linears`` of ``model`` again, and no others."""
    for module in model.modules():
        if module in linears:
            module.__dict__[AGAIN] = True
        else:
            module.__dict__.pop(AGAIN, None)
    _known.clear()


def weights_in(module: nn.Module) -> list[dict[str, Any]]:
    """Where to find the weights of linears in ``module`` that run again: FSDP1 and replicas have them as attributes."""
    refs = _known.get(module)
    if refs is None:
        refs = _known[module] = [weakref.ref(m) for m in module.modules() if AGAIN in m.__dict__]
    return [own for ref in refs if (m := ref()) is not None for own in (m._parameters, m.__dict__)]


class _Ours(partial[Any]):
    """The function by which a block checkpoints itself, to be told from what others set since."""


class _Flag:
    """True where a block is to run again: a cache is neither read nor written then, as in ``generate``."""

    def __bool__(self) -> bool:
        return torch.is_grad_enabled() and not getattr(_caches, "is_asked_for", False)


_caches = threading.local()


def checkpoint_block(function: Any, *args: Any) -> Any:
    """``checkpoint`` of a block's forward, or of its ``__call__``, which raises in backward where it would differ."""
    # Transformers has made ``partial(forward, block)`` of it, or one of its bound ``__call__``.
    given = *getattr(function, "args", ()), getattr(getattr(function, "func", None), "__self__", None)
    block = next((one for one in given if isinstance(one, nn.Module)), None)
    if torch.compiler.is_compiling() or block is None:
        with in_place_of_stock(current()):
            return checkpoint(function, *args, use_reentrant=False)
    before: dict[str, Any] = {}
    is_asking = asks_classes()
    kinds = [type(a) if isinstance(a, Tensor) and is_asked(type(a)) else None for a in args]

    def run(*args: Any) -> Any:
        if before:
            changed = [what for what, now in state_of(function, block).items() if now != before[what]]
            if changed:
                raise run_differs(block, changed[0])
            # As in the forward: PyTorch's hooks give tensors back as plain ones, and a loss asks no class in backward.
            with all_subclasses() if is_asking else contextlib.nullcontext():
                return function(*[a.as_subclass(k) if k else a for a, k in zip(args, kinds, strict=True)])
        before.update(state_of(function, block))
        if (hooks := innermost_hooks()) is None:
            return function(*args)
        pack, unpack = hooks  # by which ``checkpoint`` runs this again

        def unpack_or_say_why(packed: Any) -> Any:
            try:
                return unpack(packed)
            except CheckpointError as error:
                raise run_differs(block, f"something else ({str(error).splitlines()[0]})") from error

        with saved_tensors_hooks(pack, unpack_or_say_why):
            return function(*args)

    with in_place_of_stock(current()):
        return checkpoint(run, *args, use_reentrant=False)


def runs_again(block: nn.Module) -> bool:
    """Whether a block runs again by this module, and not as its user asked for."""
    return isinstance(block.__dict__.get(_NAMES[1]), _Ours)


def state_of(function: Any, block: nn.Module) -> dict[str, Any]:
    """What is to be equal when ``block`` runs again by ``function``, each by what to say of it where it is not."""
    modules = [block]
    for module in modules:  # which grows: ``block.modules()`` takes ten times as long
        modules += [child for child in module._modules.values() if child is not None]
    runs_hooks_of = modules[1:] if block in getattr(function, "args", ()) else modules  # or those of its ``__call__``
    hooked = [m for m in runs_hooks_of if m._forward_pre_hooks or m._forward_hooks]
    layers = [m for m in modules if hasattr(type(m), "_active_adapter")] if "peft" in sys.modules else []
    return {
        "other hooks on its modules (by hooks X-LoRA, Poly and others hand on what goes with a batch)": [
            (m, {_hook(*item) for hooks in (m._forward_pre_hooks, m._forward_hooks) for item in hooks.items()})
            for m in hooked
        ],
        "modules that were switched by train() or eval()": [m for m in modules if not m.training],
        "adapters that were switched, scaled, merged or disabled": [
            repr([getattr(layer, name, None) for name in OF_ADAPTERS]) for layer in layers
        ],
    }


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


def with_wanted_input(call: Any) -> Any:
    """``__call__`` of a checkpointed block, whose full backward hooks are to run after it has run again."""
    # PyTorch runs them before where no input wants a gradient, as that of frozen embeddings; and by such a hook
    # activated LoRA takes away what the block needs. So a copy of the input wants one, as Transformers has it for PEFT.

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._backward_hooks and runs_again(self) and self.training and self.gradient_checkpointing:
            floats = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
            if floats and not any(args[i].requires_grad for i in floats):
                first = floats[0]
                args = *args[:first], args[first].detach().requires_grad_(), *args[first + 1 :]
        return call(self, *args, **kwargs)

    return __call__


@contextlib.contextmanager
def with_cache(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Run no block again while ``model`` is called with these, if they ask for a cache or bring one (a prefix)."""
    cache = cache_in(arguments)
    is_filled = cache is not None and (not hasattr(cache, "get_seq_length") or cache.get_seq_length() > 0)
    is_prefix = getattr(getattr(model, "active_peft_config", None), "peft_type", None) in _BRING_A_CACHE
    if not (is_filled or is_prefix or arguments.get("use_cache")):
        yield
        return
    before, _caches.is_asked_for = getattr(_caches, "is_asked_for", False), True
    try:
        yield
    finally:
        _caches.is_asked_for = before


def checkpoint_blocks(
    model: nn.Module, blocks: Collection[nn.Module], function: Callable[..., Any] = checkpoint_block
) -> None:
    """Have ``blocks`` of ``model`` keep their input alone, by ``function``; all others what they kept without us."""
    for module in model.modules():
        before: dict[str, Any] | None = module.__dict__.pop(BEFORE, None)
        if before is not None and runs_again(module):
            for name in _NAMES:
                module.__dict__.pop(name)
            module.__dict__.update(before)
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, _NAMES[0])]
    for module in [*blocks, *models] if blocks else ():  # a model asks its own flag whether to build a cache
        own = module.__dict__
        if not getattr(module, _NAMES[0], False):  # else the whole model is checkpointed already
            own[BEFORE] = {name: own[name] for name in _NAMES if name in own}
            own.update(zip(_NAMES, (_Flag(), _Ours(function)), strict=True))
