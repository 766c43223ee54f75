"""The tape: a function mode that records how tensors are made, and a saved-tensor hook that asks what to keep of them.

While a :class:`Tape` is innermost, every call of a function in the table (:mod:`~hf_memsave.tape.functions`) leaves a
record on the storage that it makes. Nothing else is computed: most records are never read. When autograd wants to keep
a tensor, :meth:`Tape.pack` keeps whichever costs fewer new bytes: the tensor, or what it was made from (the price:
:mod:`~hf_memsave.tape.prices`). What is kept goes to the hook that is active outside (gradient checkpointing, CPU
offload, the user's own), or stays as it is.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from hf_memsave.tape import prices
from hf_memsave.tape.codecs import as_bits
from hf_memsave.tape.ledger import Ledger
from hf_memsave.tape.private import (
    hooks_work,
    in_transform,
    innermost_hooks,
    innermost_mode,
    no_dispatch,
    no_modes,
    pop_mode,
    push_mode,
)
from hf_memsave.tape.record import (
    MARK,
    PARAMETER,
    Handle,
    Held,
    Lent,
    Node,
    Record,
    StandIn,
    Ticket,
    Weak,
    is_plain,
    leaves,
    owned,
    plain_tensors,
)

_fetch = operator.methodcaller("get")


class Tape(TorchFunctionMode):
    """``with Tape(table): block(x)`` records under ``table``, and keeps what costs least.

    Records belong to the tape they were made under: so nothing can cross from one checkpointed block into the next.

    Args:
        table: Function -> what to do when it is called, as ``handler(tape, func, args, kwargs)``.
        dropout: What is kept of a dropout's mask: the generator's state ("seed"), or a bit an element ("mask").
        codec: Codes what has to be kept; None keeps it as it is.
        inputs: What the caller holds until backward: it costs nothing.
        ledger: Told of every tensor that autograd asks to keep.
        decided: What earlier forwards of the same module decided to keep: see :func:`~hf_memsave.tape.prices.pays`.

    Attributes:
        coder: While one operation runs: chooses a handle for what it wants to keep, or None to leave that to the tape.
        memo: Results shared within this forward, by whoever puts them there.
        casts: Leaf -> its conversion under autocast, shared within the whole forward as by autocast's own cache.
        is_in_attention: SDPA runs.
        is_in_loss: A loss runs.
        is_around: Checkpointed blocks within laid tapes of their own.
        block: How many blocks have ended.
        outer: The (pack, unpack) pair active outside, or None.
    """

    def __init__(
        self,
        table: Mapping[Any, Any],
        dropout: str = "seed",
        codec: Any = None,
        inputs: Iterable[Any] = (),
        ledger: Ledger | None = None,
        decided: dict[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.table, self.dropout, self.codec = table, dropout, codec
        self.coder: Callable[[Tensor], Handle | None] | None = None
        self.memo: dict[Any, Any] = {}
        self.casts: dict[Any, tuple[Tensor, Tensor]] = {}
        self._root: Tape | None = None
        self.is_in_attention = self.is_in_loss = self.is_around = False
        self.ledger = ledger
        self.decided: dict[int, int] = {} if decided is None else decided
        self.lock = threading.RLock()
        self.block = 0
        self.outer: Any = None
        self._inputs = inputs
        self._records: list[weakref.ref[Record]] = []
        self._kept: list[weakref.ref[Record]] = []
        self._before: tuple[list[weakref.ref[Record]], list[weakref.ref[Record]]] = [], []  # of the last block
        self._copies: dict[Any, Held | Lent] = {}
        self._readers: dict[int, list[weakref.ref[Node]]] = {}
        self._noted: list[weakref.ref[Record]] = []
        self._hooks: Any = None
        self._state = 0
        self._around: TorchFunctionMode | None = None

    def __enter__(self) -> Tape:
        self.outer = innermost_hooks()
        self._hooks = saved_tensors_hooks(self.pack, _fetch)
        self._hooks.__enter__()
        if isinstance(innermost_mode(), Tape):  # that of the model, around a checkpointed block
            self._around = pop_mode()
            self._around.is_around = True
            self._root = self._around.root
        push_mode(self)
        inputs, self._inputs = self._inputs, ()
        self._state = hash((id(self.table), self.dropout, self.outer is None, self.codec is None))
        for tensor in tensors_in(inputs):
            record = self.record_of(tensor)
            if record is not None and record.tape is self:
                record.is_kept = record.is_input = True
                self.happened(tensor.shape)
        return self

    def __exit__(self, *error: object) -> None:
        pop_mode()
        if self._around is not None:
            push_mode(self._around)
            self._around = None
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*error)
        self.end_block()
        self.end_block()
        self.root._empty_casts()
        for ref in self._noted:
            if (record := ref()) is not None:
                record.notes = None
        self.memo.clear()
        self.casts.clear()
        self._copies.clear()
        self._readers.clear()
        # Storages that live on know the tape: it must not hold what knows them.
        self.outer = self.ledger = self.codec = self._root = None

    def begin_block(self, inputs: Iterable[Any]) -> None:
        """What a block is given and blocks far back made, such as an encoder's output: kept once, for all that come."""
        with no_modes():
            for tensor in tensors_in(inputs):
                prices.anchor(self, tensor, 0, self.block)

    def end_block(self, *outputs: Any) -> None:
        """Records outlive their block only for what it hands on, and by one block; held longer, peaks would not fall.

        Args:
            *outputs: What the block hands on.
        """
        with no_modes():
            self._end_block(outputs)

    def _end_block(self, outputs: Iterable[Any]) -> None:
        handed_on: set[Record] = set()
        for tensor in tensors_in(outputs):
            prices.anchor(self, tensor, 3, self.block + 1)
            prices.gather(self, tensor, handed_on)
        records, kept = self._before
        for ref in kept:
            if (record := ref()) is not None and record.is_kept and record.func is not None:
                prices.sweep(self, record)
        for ref in records:
            if (record := ref()) is not None:
                record.forget()
        for ref in self._records:
            record = ref()
            if record is not None and not record.is_kept and record not in handed_on:
                record.forget()
        self._before = [weakref.ref(record) for record in handed_on], self._kept
        self._records, self._kept = [], []
        self.block += 1
        if self.casts:
            self._empty_casts()

    def _empty_casts(self) -> None:
        """Of leaves, shared under autocast: whoever asked to keep one remakes it, and the next block fills it again."""
        for cast, _ in self.casts.values():
            storage = cast.untyped_storage()
            record = getattr(storage, MARK, None)
            if record is not None and not record.is_kept and storage.nbytes():
                with no_dispatch():  # not the storage: selective checkpointing may hold it too
                    cast.data = cast.new_empty(0)

    @property
    def root(self) -> Tape:
        """The tape of the model, around those of checkpointed blocks."""
        return self if self._root is None else self._root

    def is_innermost(self) -> bool:
        """Whether what is called now asks this tape what to keep: no foreign hook, and no ``torch.func`` transform."""
        hooks = innermost_hooks()
        return hooks is not None and getattr(hooks[0], "__self__", None) is self and not in_transform()

    # What was made, and from what

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self.table.get(func)
        if handler is None:
            if kwargs and (kwargs.get("out") is not None or kwargs.get("inplace")):
                self.before_writes(args, kwargs)
            return func(*args, **kwargs) if kwargs else func(*args)
        if not torch.is_grad_enabled():
            return self._without_gradients(handler, func, args, kwargs or {})
        return handler(self, func, args, kwargs or {})

    def _without_gradients(self, handler: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Nothing is recorded, but what is written to is seen."""
        if getattr(handler, "is_write", False):
            return handler(self, func, args, kwargs)
        self.before_writes(args, kwargs)
        return func(*args, **kwargs)

    def before_writes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a call that may write to what ``out=`` names, or with ``inplace`` to its first argument."""
        out = kwargs.get("out")
        targets = list(out) if isinstance(out, (list, tuple)) else [out]
        if kwargs.get("inplace") or any(a is True for a in args):
            targets.append(args[0] if args else kwargs.get("input"))
        for target in targets:
            if isinstance(target, Tensor):
                self.before_write(target)

    def call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(*args, **kwargs)``, as if the model had called it."""
        return self.__torch_function__(func, (), args, kwargs)

    def record(self, out: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> None:
        """``func(*args, **kwargs)`` gives ``out``, which shares its storage with no argument, to the bit."""
        try:
            seen = None if kwargs else plain_tensors(args)
            if seen is None:
                args, kwargs = owned(args), owned(kwargs)
                found = leaves(args, kwargs)
                if not all(map(is_plain, found)):
                    return
                seen = [(x, x._version) for x in found]
            storage = out.untyped_storage()
        except (RuntimeError, NotImplementedError):  # inference tensors have no version, sparse ones no storage
            return
        record = getattr(storage, MARK, None)
        if record is None or record.tape is not self:
            record = Record(self)
            setattr(storage, MARK, record)
        elif record.func is not None:
            return
        record.func, record.args, record.kwargs, record.seen = func, args, kwargs, seen
        record.version, record.dtype, record.stride = out._version, out.dtype, out.stride()
        self._records.append(weakref.ref(record))
        if record.handles:  # the op asked to keep its own result, before there was a record
            if prices.pays(self, record, storage.nbytes() if record.is_kept else 1):
                prices.settle(self, record, storage)
            elif record.is_kept:
                self._weaken(record, storage.nbytes())

    # What to keep

    def pack(self, tensor: Tensor) -> Handle:
        """Called by autograd with each tensor to keep; returns what goes on the tape."""
        if self.coder is not None and (chosen := self.coder(tensor)) is not None:
            if self.ledger is not None:
                self._note_replaced(tensor)
            return chosen
        record = self.record_of(tensor)
        if record is None or record.tape is None:
            return self.keep(tensor)
        storage = tensor.untyped_storage()
        if self.ledger is not None:
            self.note(record, storage, tensor)
        handle: Handle | None = None
        if record.node is not None or (record.func is not None and not record.is_kept):
            handle = self.ticket(record, storage, tensor)
        return self.hold(record, storage, tensor) if handle is None else handle

    def happened(self, what: Any, func: Any = None) -> int:
        """Add to all that has happened in this forward, as far as it decides what to keep.

        Returns:
            A number for it.
        """
        self._state = state = hash((self._state, len(self._records), what, func))
        return state

    def note(self, record: Record, storage: Any, tensor: Tensor, is_source: bool = False) -> None:
        """Tell the ledger that ``tensor`` was asked for, or is needed to remake another one."""
        if self.ledger is not None and self.outer is None:  # what a hook outside makes of it is not for us to count
            self.ledger.note(record, storage, tensor, is_source)

    def _note_replaced(self, tensor: Tensor) -> None:
        """The same where something else is kept instead."""
        record = self.record_of(tensor)
        if record is not None and record.tape is self:
            self.note(record, tensor.untyped_storage(), tensor)

    def note_small(self, handle: Handle, nbytes: int, name: str) -> None:
        """Tell it that so little is kept instead of a tensor."""
        if self.ledger is not None and self.outer is None:
            self.ledger.note_small(handle, nbytes, name)

    def record_of(self, tensor: Tensor) -> Record | None:
        """What this tape knows of the storage; None where a storage does not tell the tensor."""
        kind = type(tensor)
        if kind is not Tensor and kind is not nn.Parameter and not is_plain(tensor):
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse tensor
            return None
        record: Record | None = getattr(storage, MARK, None)
        if record is None or (record.tape is not self and record.tape is not None):
            record = self._new_record(tensor, record)
            setattr(storage, MARK, record)
        return record

    def _new_record(self, tensor: Tensor, known: Record | None) -> Record:
        if known is not None and known.around is not None and known.around.tape is self:
            return known.around  # it was another tape's while a checkpointed block ran
        base = tensor._base
        if isinstance(tensor if base is None else base, nn.Parameter):
            return PARAMETER
        record = Record(self)
        if known is not None and known.tape is self._root:
            record.around = known
        return record

    def known(self, tensor: Tensor) -> Record | None:
        """The same, where it is known already: FSDP2 fills the storages of parameters, before they are parameters."""
        try:
            return getattr(tensor.untyped_storage(), MARK, None) if is_plain(tensor) else None
        except NotImplementedError:  # a sparse tensor
            return None

    def keep(self, tensor: Tensor) -> Held | Lent:
        """A handle that holds ``tensor`` and nothing less."""
        if self.outer is None:
            return Held(tensor)
        pack, fetch = self.outer
        return Lent(tensor, pack, fetch, self.lock)

    def ticket(self, record: Record, storage: Any, tensor: Tensor) -> Ticket | None:
        """For a tensor that can be had again for less than it takes to keep."""
        node = None if record.node is None else record.node()
        if node is None:
            if record.costs_nothing() or record.func is None or not record.is_of(tensor):
                return None
            if not prices.pays(self, record, storage.nbytes()):
                return None
            node = prices.settle(self, record, storage)
        elif not record.is_of(tensor) or not node.is_there():
            return None
        return Ticket(node, tensor)

    def hold(self, record: Record, storage: Any, tensor: Tensor) -> Handle:
        """For a tensor that has to be kept."""
        is_kept = record.costs_nothing()
        if not is_kept and (self.codec is not None or tensor.dtype is torch.bool):
            code = self.codec if tensor.dtype is not torch.bool else as_bits
            if (coded := code(self, record, storage, tensor)) is not None:
                return coded
        if self.outer is not None and (known := _lent_before(record, tensor)) is not None:
            known.uses += 1
            return known
        handle = self.keep(tensor)
        if not is_kept:
            record.is_kept = True
            nbytes = storage.nbytes()
            for ref in record.handles:
                if isinstance(stand_in := ref(), StandIn):
                    stand_in.is_kept_as(tensor, handle)
            if record.func is None:
                self.happened(nbytes)
            else:
                self._weaken(record, nbytes)
        record.handles = (*record.handles, weakref.ref(handle))
        return handle

    def stand_in(self, tensor: Tensor, small: Tensor, decode: Callable[[Tensor], Tensor] | None) -> StandIn:
        """A handle that keeps ``small`` instead of ``tensor``, until that is kept anyway."""
        handle = StandIn(tensor, self.keep(small), small.nbytes, decode)
        self.note_small(handle, small.nbytes, "code")
        record = self.record_of(tensor)
        if record is not None and record.tape is self:
            record.handles = (*record.handles, weakref.ref(handle))
        return handle

    def copy_of(self, parameter: Tensor) -> Held | Lent:
        """A handle of a small parameter as it is now, one for all that need it.

        FSDP2 frees parameters when their block's forward ends, and gathers them again only for that block's backward,
        while the next block may need what was made from them before. And optimizers write to them through ``.data``,
        which no version tells.

        Returns:
            What goes on the tape.
        """
        key = _key(parameter)
        handle = self._copies.get(key)
        if handle is None:
            handle = self._copies[key] = self.keep(parameter.detach().clone())
        elif isinstance(handle, Lent):
            handle.uses += 1
        return handle

    def has_copy(self, parameter: Tensor) -> bool:
        """Whether :meth:`copy_of` made one already."""
        return _key(parameter) in self._copies

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether keeping ``tensor`` itself would cost nothing."""
        record = self.record_of(tensor)
        return record is not None and (record.tape is None or record.costs_nothing())

    def cost(self, tensor: Tensor) -> int:
        """Bytes that having ``tensor`` in backward would add to what is kept so far."""
        record = self.record_of(tensor)
        if record is None:
            return tensor.numel() * tensor.itemsize
        return sum(prices.price_of(self, tensor, record, tensor.untyped_storage())[0].values())

    def as_activation(self, tensor: Tensor) -> None:
        """Tell that ``tensor`` depends on the batch, though no autograd node says so."""
        record = self.record_of(tensor)
        if record is not None and record.tape is self:
            record.is_activation = True

    def notes(self, tensor: Tensor) -> dict[Any, Any]:
        """What others wish to find again with the storage of ``tensor``, while this forward lasts."""
        record = self.record_of(tensor)
        if record is None or record.tape is None:
            return {}
        if record.notes is None:
            record.notes = {}
            self._noted.append(weakref.ref(record))
        return record.notes

    def before_write(self, tensor: Tensor) -> None:
        """Called before ``tensor`` is written to: what was to be remade from it is made now, as stock would keep it."""
        record = self.known(tensor)
        if record is not None and record.tape is None:
            self._freeze(self._readers.pop(id(tensor.untyped_storage()), ()))
        while record is not None and record.tape is not None:
            self._freeze(record.dependents)
            record.dependents, record = (), record.around

    @staticmethod
    def _freeze(nodes: Iterable[weakref.ref[Node]]) -> None:
        for ref in nodes:
            if (node := ref()) is not None:
                node.freeze()

    def reads(self, node: Node, parameter: Tensor) -> None:
        """``node`` holds a parameter or a buffer itself."""
        self._readers.setdefault(id(parameter.untyped_storage()), []).append(weakref.ref(node))

    def release(self, tensor: Tensor) -> None:
        """Nobody is going to ask for ``tensor`` any more, though it lives on: hold nothing that it was made from."""
        record = self.record_of(tensor)
        if record is not None and record.tape is self and not record.is_kept:
            record.forget()

    def distrust(self, tensor: Tensor) -> None:
        """Versions of ``tensor`` tell nothing any more: it is kept as it is from now on."""
        record = self.record_of(tensor)
        if record is not None and record.tape is self:
            record.forget()
            record.node, record.version, record.is_distrusted = None, -1, True

    def _weaken(self, record: Record, nbytes: int) -> None:
        """The tensor is kept: hold what it was made from no more, but know it again if others keep it too."""
        if self.decided.get(record.key) == prices.NEVER:
            record.forget()
            return
        weak = prices.weaken(self, record, nbytes)
        record.args, record.kwargs, record.seen, record.is_weak = weak.args, weak.kwargs, weak.seen, True
        ref = weakref.ref(record)
        self._kept.append(ref)
        sources = [a for a, _ in record.seen if type(a) is Weak]
        if len(sources) == 1 and self.outer is None and (source := sources[0].record()) is not None:
            source.remakes = (*source.remakes, (ref, nbytes, sources[0].version))


def current() -> Tape | None:
    """The tape that is innermost on this thread; None under a foreign hook, and wherever ops must be stock."""
    if not hooks_work():
        return None
    hooks = innermost_hooks()
    owner = getattr(hooks[0], "__self__", None) if hooks is not None else None
    return owner if isinstance(owner, Tape) else None


def _key(parameter: Tensor) -> tuple[Any, ...]:
    geometry = parameter.storage_offset(), parameter.shape, parameter.stride(), parameter.dtype
    return id(parameter.untyped_storage()), *geometry, parameter._version


def _lent_before(record: Record, tensor: Tensor) -> Lent | None:
    """The handle by which a foreign hook keeps this very view already."""
    for ref in record.handles:
        lent = ref()
        if type(lent) is Lent and lent.via is None and lent.view.is_of(tensor):
            return lent
    return None


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """Those in the arguments of a model, and one level below."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, Tensor))
