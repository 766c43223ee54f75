"""The call of a patched model or block: its own forward, under a tape.

The outermost module makes the tape; in it, a repeated block tells the tape where it ends. Under gradient checkpointing
a checkpoint's hooks are between model and block, and the block makes a tape too. The sampler is told which batch runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.config.config import WHOLE, MemSaveConfig
from hf_memsave.errors import PatchError
from hf_memsave.logs import is_measuring
from hf_memsave.ops.fused import linear as fused_linear
from hf_memsave.ops.fused.codes import FUSED_CODERS
from hf_memsave.ops.loss.chunked_loss import divided_by
from hf_memsave.ops.loss.lazy_head import of_linear, without_tape
from hf_memsave.ops.op import is_parametrized
from hf_memsave.ops.sampled.sampler import INDEX, Sampler
from hf_memsave.patching.blocks import head_of
from hf_memsave.patching.checkpointed import runs_again, weights_in, with_cache
from hf_memsave.patching.first_step import FIRST, LEDGER, tell, trained_in, waiting
from hf_memsave.patching.sharded import frees_after_forward, mark_of
from hf_memsave.tape import Tape, clear_leftovers, current, has_leftovers, hooks_work, private, table_without
from hf_memsave.tape.applied import APPLIED
from hf_memsave.tape.bits import CODERS, Coders
from hf_memsave.tape.calls import Calls
from hf_memsave.tape.codecs import Encoder, leave_alone
from hf_memsave.tape.content import BUFFER, MARK
from hf_memsave.tape.frame import Frame
from hf_memsave.tape.ledger import Ledger
from hf_memsave.tape.offload import Offload
from hf_memsave.tape.tensors import is_plain, tensors_in

#: Attribute of a model or block: the :class:`~hf_memsave.ops.sampled.sampler.Sampler` of its sampled linears.
SAMPLER = "_memsave_sampler"
#: Attribute of a model: the owner and the name of each of its buffers.
BUFFERS = "_memsave_buffers"
#: Attribute of a module whose activations are coded: its number, and how many forwards it has coded.
CODED = "_memsave_coded"
#: Attribute of a class of blocks: its :class:`~hf_memsave.patching.compiled.CompiledBlocks`.
COMPILED = "_memsave_compiled"
#: Keyword argument by which a block that gradient checkpointing runs again gets the batch of its forward.
BATCH = "_memsave_batch"
Forward = Callable[..., Any]
BlockSettings = tuple[Mapping[Any, Any], str, Coders]
_ALONE = contextlib.nullcontext()
#: Module -> the calls of its earlier forwards (:class:`~hf_memsave.tape.calls.Calls`).
CALLS: weakref.WeakKeyDictionary[nn.Module, dict[int, dict[int, int]]] = weakref.WeakKeyDictionary()


@functools.lru_cache(1024)
def settings_of(config: MemSaveConfig, block: int, has_quantized: bool, applied: int) -> BlockSettings:
    """Return a tape's settings for block number ``block``: the table, what is kept of dropouts, what packs bits."""
    stock = [kind for kind in ("activation", "norm", "dropout", "attention") if not config.converts(kind, block)]
    stock += [] if config.frozen else ["frozen"]
    is_below = config.checkpoint is not None or config.storage is not None  # the floor, where bits are much
    dropout = "small" if config.dropout == "auto" and is_below else config.dropout
    if config.backend == "torch":
        return table_without(*stock), dropout, CODERS
    return _fused_table(tuple(stock), has_quantized, applied), dropout, FUSED_CODERS


@functools.cache
def _fused_table(stock: tuple[str, ...], has_quantized: bool, applied: int) -> Mapping[Any, Any]:
    """Return the table with fused linears: some 1000 entries, shared by all that leave the same kinds to stock."""
    return table_without(*stock) | fused_linear.FUNCTIONS


def run_taped(module: nn.Module, config: MemSaveConfig, block: int, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Run ``forward(module, *args, **kwargs)`` under the tape around it, or else a new one, if hooks work here."""
    given = kwargs.pop(BATCH, None)
    index = kwargs.pop(INDEX, None) if asks_for_index(config) else None
    sampler: Sampler | None = module.__dict__.get(SAMPLER)
    if FIRST in module.__dict__ and has_leftovers() and not private.is_running(_lay):
        clear_leftovers()
    tape = current()
    if (blocks := getattr(type(module), COMPILED, None)) is not None:
        if (out := blocks.run(module, tape, args, kwargs)) is not NotImplemented:
            if tape is not None:
                tape.end_block(*(out if isinstance(out, tuple) else (out,)))
            return out
    if tape is None and not hooks_work():
        if sampler is not None and module.training and not torch.is_grad_enabled():
            sampler.remember(private.functions_in_forward(), private.function_in_backward())
        is_model = isinstance(module, PreTrainedModel) and config.loss == "chunked"
        with without_tape(_head_below(module), args, kwargs) if is_model else _ALONE:
            return forward(module, *args, **kwargs)
    settings = settings_of(config, block, "bitsandbytes" in sys.modules, len(APPLIED))
    entering: contextlib.AbstractContextManager[Any] = _ALONE
    if sampler is not None and module.training:
        cls: Any = type(module)
        arguments = dict(zip(_parameters(cls), args, strict=False)) | kwargs
        arguments |= {} if index is None else {INDEX: index}
        entering = sampler.entering(arguments, given, private.checkpoint_frame(), private.function_in_backward())
    with entering:
        if tape is None:
            leave_alone((args, kwargs))  # a caller of one's own, or a checkpoint, may hold the masks of the batch
            return _lay(module, settings, config, forward, args, kwargs)
        is_block = isinstance(module, GradientCheckpointingLayer)
        if is_block:
            tape.blocks.begin(tape, (*args, *kwargs.values()))
        before, (table, dropout, coders) = tape.frame, settings
        recomputed = weights_in(module) if config.checkpoint else ()
        tape.frame = before._replace(table=table, dropout=dropout, coders=coders, recomputed=recomputed)
        try:
            out = forward(module, *args, **kwargs)
        finally:
            tape.frame = before
        if is_block:
            tape.end_block(*(out if isinstance(out, tuple) else (out,)))
        return out


def _lay(
    module: nn.Module, settings: BlockSettings, config: MemSaveConfig, forward: Forward, args: Any, kwargs: Any
) -> Any:  # fmt: skip
    """Run the forward of ``module`` under a tape of its own."""
    codec = None
    if config.storage is not None:
        index, forward_number = module.__dict__.get(CODED, (0, 0))
        module.__dict__[CODED] = index, forward_number + 1
        codec = Encoder(config.storage, index, forward_number)
    # Hooks outside are a checkpoint's, which holds the arguments of the block. A batch is not held: Trainer lets go of
    # it before backward, and a collator may fill the same tensors again.
    given = list(tensors_in((*args, *kwargs.values())))
    is_alone = private.innermost_hooks() is None
    held = [] if is_alone else given
    trained, calls = trained_in(module) if is_alone or FIRST in module.__dict__ else 0, None
    if is_alone:  # else all is recorded, each time
        sizes = [x.numel() for x in given if is_plain(x)]
        calls = Calls(CALLS.setdefault(module, {}), config, module.training, trained, sizes=sizes)
    ledger = _before_forward(module, given, trained)
    told, is_within = ledger, False
    if ledger is None and not is_alone:
        told, is_within = _told_within(module, kwargs)
    cached = with_cache(module, kwargs) if config.checkpoint in WHOLE else contextlib.nullcontext()
    offload = Offload() if config.offload and is_alone else None  # where no hooks are outside
    frame = Frame(*settings, recomputed=weights_in(module) if config.checkpoint else ())
    head = _head_below(module) if config.loss == "chunked" else None
    if isinstance(head, nn.Linear) and not is_parametrized(head):  # a parametrized weight is computed at each read
        frame = frame._replace(head=head, logits=functools.partial(of_linear, fuses_loss=config.backend != "torch"))
    new = Tape(frame, codec, held, told, calls, mark_of(module, config.checkpoint), offload)
    try:
        with cached, divided_by(kwargs.get("num_items_in_batch")), new as tape:
            tape.is_within = is_within
            out = forward(module, *args, **kwargs)
    except BaseException as error:
        if ledger is not None:  # the next forward is counted
            ledger.forget()
            module.__dict__[LEDGER] = ledger
        if private.innermost_hooks() is None and private.refuses_hooks(error):
            raise PatchError(
                f"the forward of {type(module).__name__} calls what refuses saved-tensor hooks, such as "
                "torch.func.grad, and hf_memsave works by those hooks. Patch the parts of the model that do not: "
                "patch(model.part). unpatch(model) trains without hf_memsave."
            ) from error
        raise
    if ledger is not None:
        ledger.close(out)
        tell(module, ledger, config)
    return out


def _head_below(module: nn.Module) -> nn.Module | None:
    """Return the head of the model that ``module`` is or wraps; None if FSDP2 frees it after the forward."""
    if frees_after_forward(module):
        return None
    return head_of(next((m for m in module.modules() if isinstance(m, PreTrainedModel)), module))


def _before_forward(module: nn.Module, given: Iterable[Tensor], trained: int) -> Ledger | None:
    """Mark buffers that ``.to()`` has replaced; return the ledger that counts this forward, of ``given`` tensors."""
    own = module.__dict__
    for owner, name in own.get(BUFFERS, ())[:1]:
        buffer = owner._buffers.get(name)
        if buffer is not None and getattr(buffer.untyped_storage(), MARK, None) is not BUFFER:
            mark_buffers(module)
    if (ledger := waiting(module, trained)) is None:
        return None
    if private.checkpoint_frame()[0] is not None or private.function_in_backward() is not None:
        ledger.uncounted = "it runs within gradient checkpointing, which keeps its arguments alone until it runs again"
        return None
    is_step = module.training and not is_measuring()
    if ledger.is_counted and not is_step:  # another forward counts until there is one of a training step
        return None
    if is_step:
        own.pop(LEDGER, None)  # or another thread has
        ledger.is_counted &= not ledger.is_trial
    ledger.is_trial = not is_step
    ledger.leave_out(given)
    return ledger


def _told_within(module: nn.Module, kwargs: Mapping[str, Any]) -> tuple[Ledger | None, bool]:
    """Return the ledger of a tape within other hooks, None if stock reruns it too; and whether our patch reruns it."""
    around = private.innermost_mode()
    ledger, is_within = (around.ledger, around.is_within) if isinstance(around, Tape) else (None, False)
    frame = private.checkpoint_frame()[0]
    if ledger is None or is_within or frame is None:
        return ledger, is_within
    is_ours = runs_again(module)  # its positional arguments the checkpoint asks the model's tape to keep
    ledger.note_checkpoint(frame, tensors_in(kwargs.values()), is_asked=not is_ours)
    return ledger if is_ours else None, is_ours


def mark_buffers(model: nn.Module) -> None:
    """Mark the storages of buffers, which are alive whether a tape keeps them or not (parameters need no mark)."""
    owners = [(m, name) for m in model.modules() for name, b in m._buffers.items() if b is not None and not is_lazy(b)]
    for module, name in owners:
        with contextlib.suppress(NotImplementedError):  # sparse
            buffer: Any = module._buffers[name]
            setattr(buffer.untyped_storage(), MARK, BUFFER)
    model.__dict__[BUFFERS] = owners


def asks_for_index(config: MemSaveConfig) -> bool:
    """Return whether the model takes a column of sample indices, for the cache of its sampler."""
    return config.linear is not None and config.linear.cache == INDEX


def call_with_batch(call: Any) -> Any:
    """Wrap a block's ``__call__`` to pass the batch as an argument, which a checkpoint passes again in its rerun."""

    @functools.wraps(call)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sampler: Sampler | None = self.__dict__.get(SAMPLER)
        if sampler is not None and not torch.compiler.is_compiling() and sampler.batch is not None:
            kwargs[BATCH] = sampler.batch
        return call(self, *args, **kwargs)

    return __call__


@functools.lru_cache(256)
def _parameters(cls: Any) -> list[str]:
    return list(inspect.signature(cls.forward).parameters)[1:]
