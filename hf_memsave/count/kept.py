"""Count every byte that a forward leaves alive for backward, wherever it is held.

Memory is counted, not sampled. A dispatch mode sees every storage that any op allocates, in Python or in C++, and the
module that was running; a scan of Python's own objects finds tensors made outside the dispatcher (generator states).
What is still alive when only the loss is held was kept: by autograd, on a ``ctx``, in a closure or in a global.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memsave.config.sizes import gib, html_table
from hf_memsave.device import fuses_dropout
from hf_memsave.errors import MeasureError, not_a_module
from hf_memsave.logs import only_measuring
from hf_memsave.tape.kinds import KINDS_OF_OPS, kind_of_op
from hf_memsave.tape.private import modules_that_run
from hf_memsave.tape.wrappers import parts_of

#: Held by a thread that measures or estimates: logs, garbage collection and random states are process-wide.
one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class KeptStorage:
    """One storage alive after forward: who made it (module path, kind of op, aten op) and its size in bytes."""

    module: str
    kind: str
    op: str
    nbytes: int


@dataclass(frozen=True, repr=False)
class Kept:
    """The result of :func:`measure_kept`."""

    storages: tuple[KeptStorage, ...]

    def __repr__(self) -> str:
        return f"Kept({gib(self.total)} in {len(self.storages):,} storages)"

    def _repr_html_(self) -> str:
        rows = [(kind, gib(size)) for kind, size in {**self.by_kind, "all": self.total}.items()]
        return html_table(repr(self), [("made by", "kept"), *rows])

    @property
    def total(self) -> int:
        """Bytes kept in all."""
        return sum(s.nbytes for s in self.storages)

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes by the path of the module that was running when the storage was made, in order of first use."""
        total: Counter[str] = Counter()
        for storage in self.storages:
            total[storage.module] += storage.nbytes
        return dict(total)

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes by kind of op, in the order of :data:`KINDS_OF_OPS`."""
        found = {s.kind for s in self.storages}
        return {kind: sum(s.nbytes for s in self.storages if s.kind == kind) for kind in KINDS_OF_OPS if kind in found}


def measure_kept(
    model: nn.Module, batch: Mapping[str, Any] | Sequence[Any] | Tensor, forward: Callable[..., Any] | None = None,
) -> Kept:  # fmt: skip
    """Run one forward and count the bytes kept between forward and backward, by module.

    The model runs in its current mode, under active autocast and hooks; parameters, gradients and random states stay as
    they were, and nothing stays kept. Parameters, buffers, the batch and other threads' tensors do not count. If the
    output has a loss, only that is held, as by ``Trainer``; else the whole output. Threads that measure take turns.

    Args:
        model: Any module.
        batch: Keyword arguments (a mapping), positional arguments (a list or tuple), or one tensor.
        forward: Called instead of ``model`` (for a loss of your own, or a checkpointed forward).

    Returns:
        Every storage alive after forward, with its module, kind of op and bytes.

    Raises:
        MeasureError: The model is no module, the batch is text, or inference mode is on, in which nothing is kept.

    Example:
        >>> import torch, transformers
        >>> from hf_memsave import measure_kept, patch
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
        >>> model = transformers.BertModel(transformers.BertConfig(**sizes)).train()
        >>> batch = {"input_ids": torch.ones(4, 32, dtype=torch.long)}
        >>> stock, report = measure_kept(model, batch), patch(model)
        >>> measure_kept(model, batch).total < 0.6 * stock.total
        True
    """
    if not isinstance(model, nn.Module):
        raise MeasureError(not_a_module("measure_kept(model, batch)", model))
    if isinstance(batch, (str, bytes)):
        raise MeasureError(
            f"measure_kept(model, batch): expected a mapping, list, tuple or tensor, got the text {batch!r:.40}. "
            "Tokenize it first, as in tokenizer(text, return_tensors='pt'); or pass [text] to a model that takes text."
        )
    if torch.is_inference_mode_enabled():
        raise MeasureError(
            "measure_kept(model, batch): expected grad mode or torch.no_grad(), got torch.inference_mode(), in which "
            "nothing is kept for backward. Call it outside of that."
        )
    call = model if forward is None else forward
    devices = {t.device for t in model.parameters() if fuses_dropout(t)}
    kind = next((device.type for device in devices), "cuda")  # the default is the accelerator's from PyTorch 2.13 on
    watch = _ByModule(model)
    # Autocast caches casts of weights: what was cast before would not be counted, what is cast here would stay.
    torch.clear_autocast_cache()
    with one_at_a_time, contextlib.ExitStack() as stack, torch.enable_grad(), only_measuring():
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        known = {s._cdata: s for s in storages(live_tensors())}
        with watch:
            positional = batch if isinstance(batch, (list, tuple)) else (batch,)
            output = call(**batch) if isinstance(batch, Mapping) else call(*positional)
        if isinstance(output, Mapping) and output.get("loss") is not None:
            output = output["loss"]
        gc.collect()
        found = watch.alive()
        seen = known.keys() | watch.made.keys()
        unseen = {s._cdata: (StorageWeakRef(s), s.nbytes()) for s in storages(live_tensors()) if s._cdata not in seen}
        unseen = {key: (ref, nbytes) for key, (ref, nbytes) in unseen.items() if not ref.expired()}
        del output  # what outlives it was not kept for backward: another thread may have made it meanwhile
        found += [KeptStorage("(outside any op)", "other", "unseen", n) for ref, n in unseen.values() if ref.expired()]
    return Kept(tuple(found))


class OpCall(NamedTuple):
    """A call of an op: the op, its arguments, and its output."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    output: Any


class StorageMode(TorchDispatchMode):
    """A dispatch mode that passes the storages that each op was given, and those it made, to a subclass."""

    #: Returns whether storages on a type of device count; None for all.
    counts: Callable[[str], bool] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(kind, "has_no_bytes", False) for kind in types):  # the ops that it runs come one by one
            return NotImplemented
        if func is torch.ops.prim.device.default:  # autograd asks fake tensors often
            return device_of(args[0])
        kwargs = kwargs or {}
        given = {s._cdata: (s, s.nbytes()) for s in storages(tree_leaves((args, kwargs)), self.counts)}
        output = func(*args, **kwargs)
        made = {s._cdata: s for s in storages(tree_leaves(output), self.counts) if s._cdata not in given}
        self.after(OpCall(func, args, kwargs, output), list(given.values()), list(made.values()))
        return output

    def after(self, call: OpCall, given: list[tuple[Any, int]], made: list[torch.UntypedStorage]) -> None:
        """Handle an op that has run; the storages that it was given come with their bytes before it."""
        raise NotImplementedError


class _ByModule(StorageMode):
    """A mode that records the module and the op that made each storage."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names_of(model)
        # The weak reference keeps the address from being used again.
        self.made: dict[int, tuple[StorageWeakRef, KeptStorage]] = {}

    def after(self, call: OpCall, given: list[tuple[Any, int]], made: list[torch.UntypedStorage]) -> None:
        for storage in made:
            if storage._cdata not in self.made:
                self.made[storage._cdata] = StorageWeakRef(storage), made_by(self.names, call.func, storage.nbytes())

    def alive(self) -> list[KeptStorage]:
        """Return the records of the storages that are still alive, with their bytes now."""
        alive = [(ref, record) for ref, record in self.made.values() if not ref.expired()]
        return [replace(r, nbytes=torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes()) for ref, r in alive]


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the paths of the modules of ``model``, by their ``id``."""
    return {id(m): name or type(m).__name__ for name, m in model.named_modules(remove_duplicate=False)}


def made_by(names: Mapping[int, str], func: Any, nbytes: int) -> KeptStorage:
    """Return the record of a storage that ``func`` just made, by the innermost running module of those in ``names``."""
    running, op = modules_that_run()[0], func.overloadpacket.__name__
    path = next((names[id(m)] for m in running if id(m) in names), "(outside the model)")
    return KeptStorage(path, kind_of_op(running[:1], op), op, nbytes)


def device_of(tensor: Tensor) -> torch.device:
    """Return ``tensor.device``, for fake tensors without the dispatcher, where each query takes as long as an op."""
    return getattr(tensor, "fake_device", None) or tensor.device


def storages(leaves: Iterable[Any], on: Callable[[str], bool] | None = None) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of dense tensors, and of those in wrappers, on the device types for which ``on`` is true."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not is_lazy(leaf):
            for part in parts_of(leaf):
                if part.layout is torch.strided and (on is None or on(device_of(part).type)):
                    with contextlib.suppress(NotImplementedError):  # of a torch.func transform that is still held
                        yield part.untyped_storage()
        elif isinstance(leaf, torch.UntypedStorage) and (on is None or on(leaf.device.type)):  # given to `set_`
            yield leaf


def live_tensors() -> list[Tensor]:
    """Return all tensors that Python's garbage collector tracks."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return [o for o in objects if type(o) in kinds]
