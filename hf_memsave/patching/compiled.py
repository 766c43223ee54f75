"""Compiled models: inside a graph there is no tape, and the graph's partitioner, ``Floor``, keeps the floor instead.

With ``compile=True`` each repeated block is compiled alone, and the model's tape is around all of them. Users, Trainer
and Accelerate may also compile a patched model, as a whole or in parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from transformers import Cache

from hf_memsave.errors import KeptTensorChangedError, PatchError
from hf_memsave.logs import logger, warn_once
from hf_memsave.patching.partitioner import Floor
from hf_memsave.tape import Tape, private

#: Most graphs of one class of blocks: each kind of mask, length, attention and mode takes a graph of its own.
MOST = 64


class _OpByOpError(Exception):
    """Dynamo runs the function op by op instead of tracing it, as it was told to compile nothing."""


class CompiledBlocks:
    """The compiled forward of one class of repeated blocks; ``why_not`` says why they run op by op, or is empty."""

    def __init__(self, cls: Any, rung: str | None) -> None:
        forward = cls.forward

        def run(block: nn.Module, args: Any, kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                raise _OpByOpError
            _see_hooks()
            return forward(block, *args, **kwargs)

        # Dynamo counts graphs, limits them and remembers lengths by code: these blocks have one of their own.
        self._code = run.__code__ = run.__code__.replace(co_name=f"{cls.__name__}_{rung}_of_hf_memsave")
        self._run = torch.compile(run, fullgraph=True, options={"custom_partitioner_fn": Floor(rung)})
        self.name, self.why_not = cls.__name__, ""

    @property
    def graphs(self) -> int:
        """The number of graphs that these blocks have taken so far."""
        return len(_debug_get_cache_entry_list(self._code))

    def run(self, block: nn.Module, tape: Tape | None, args: Any, kwargs: Any) -> Any:
        """Run ``block`` compiled, without the tape's hooks and mode; return NotImplemented if it is to run op by op."""
        if tape is not None and private.backward_id() < 0:
            return self._try(block, True, args, kwargs)
        call = private.checkpointed_call()
        if call is None and tape is None and not private.hooks_work():  # evaluation: lengths and caches of all kinds
            return NotImplemented
        # Op by op a block draws other dropout masks: it runs again as it ran in its forward, which the call remembers.
        ran: dict[int, bool] = {} if call is None else vars(call).setdefault("_memsave_compiled", {})
        before = ran.get(id(block))
        out = NotImplemented if before is False else self._try(block, tape is not None, args, kwargs)
        ran[id(block)] = out is not NotImplemented
        if before and out is NotImplemented:
            expected, got = "expected it compiled, as in its forward", self.why_not or "a cache or a dispatch mode"
            reason = f"a checkpointed {self.name} runs again in backward: {expected}, got {got}."
            raise KeptTensorChangedError(reason, "Leave compile=True or gradient checkpointing out.")
        return out

    def _try(self, block: nn.Module, has_hooks: bool, args: Any, kwargs: Any) -> Any:
        if self.why_not or private.dispatch_modes():  # which see ops, and no compiled graph
            return NotImplemented
        if any(isinstance(x, Cache) for x in (*args, *kwargs.values())):
            warn_once(
                f"hf_memsave: {self.name} got a KV cache, by which each layer would take a graph, and runs op by op. "
                "Call the model with use_cache=False, as Trainer does, to have it compiled."
            )
            return NotImplemented
        with private.without(isinstance(private.innermost_mode(), Tape), has_hooks):
            if args and torch.is_grad_enabled():
                args = _as_of_a_block(args[0], block), *args[1:]
            try:
                try:
                    return self._run(block, args, kwargs)
                except FailOnRecompileLimitHit:  # the user's limit; ours is higher
                    with dynamo.patch(recompile_limit=MOST):
                        return self._run(block, args, kwargs)
            except _OpByOpError:
                warn_once(
                    f"hf_memsave: compile=True, but {self.name} runs op by op, under the tape: torch.compile is off "
                    "(TORCH_COMPILE_DISABLE, or a stance), or busy in another thread."
                )
            except (FailOnRecompileLimitHit, TorchDynamoException) as error:
                self.why_not = f"runs op by op, under the tape: {_in_a_line(error)}"
                logger.warning("hf_memsave: compile=True, but %s %s", self.name, self.why_not)
        return NotImplemented


def _as_of_a_block(x: Any, block: nn.Module) -> Any:
    """Return a first block's input as one that a block has made: it needs no gradient beside LoRA, and took a graph."""
    if not isinstance(x, Tensor) or x.requires_grad or not x.is_floating_point():
        return x
    if not any(p.requires_grad for p in block.parameters()):
        return x
    leaf = x.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
    return leaf


def _in_a_line(error: BaseException) -> str:
    if isinstance(error, FailOnRecompileLimitHit):
        return f"it takes more than {MOST} graphs, one for each layer or step (TORCH_LOGS=recompiles tells why)."
    if type(getattr(error, "inner_exception", None)).__name__ in ("InvalidCxxCompiler", "TritonMissing"):
        return "there is no compiler. Install g++ for a CPU, Triton for a GPU."
    return f"{type(error).__name__}, {str(error).strip().splitlines()[0]}"


def refuse_other_settings() -> None:
    """Raise if settings of the compiler would change what compiled blocks keep, or the masks that they draw again."""
    names = {"custom_partitioner_fn": None, "fallback_random": False, "activation_memory_budget": 1.0}
    for name, expected in names.items():
        config: Any = inductor if hasattr(inductor, name) else functorch
        if (value := getattr(config, name)) != expected:
            name = f"{config.__name__}.{name}"
            raise PatchError(f"compile=True: expected {name} = {expected}, got {value}. Set it back, or leave it out.")


# Dynamo calls a function of a constant result as it traces, and the call leaves nothing in the graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def keep_the_floor(rung: str | None) -> int:
    """Set ``Floor`` as partitioner until this graph is compiled, unless the user has one or a budget; return 0."""
    # ``is_exporting`` is asked here, as PyTorch 2.11 traces it as true; an export calls nothing when it ends.
    is_free = inductor.custom_partitioner_fn is None and functorch.activation_memory_budget == 1.0
    if is_free and not torch.compiler.is_exporting():
        _until_compiled(inductor, "custom_partitioner_fn", Floor(rung))
    return 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _see_hooks() -> int:
    """Have Dynamo guard on hooks, or a block with hooks inside would run the graph of one without; return 0."""
    _until_compiled(dynamo, "skip_nnmodule_hook_guards", False)
    return 0


_before: list[tuple[Any, str, Any]] = []  # settings changed until compilation ends, with their values before


def _until_compiled(config: Any, name: str, value: Any) -> None:
    if not _before:
        callback_handler.register_end_callback(_restore)
    _before.append((config, name, getattr(config, name)))
    setattr(config, name, value)


def _restore(*_: Any) -> None:
    while _before:
        setattr(*_before.pop())
    callback_handler.remove_end_callback(_restore)
