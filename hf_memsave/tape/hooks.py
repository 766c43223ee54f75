"""The tape: a function mode that records how tensors are made, and a saved-tensor hook that asks what to keep of them.

While a :class:`Tape` is innermost, every call of a function in the table (:mod:`~hf_memsave.tape.functions`) leaves a
record on the storage that it makes. Nothing else is computed: most records are never read. When autograd wants to keep
a tensor, :meth:`Tape.pack` keeps whichever costs fewer new bytes: the tensor, or what it was made from (the price:
:mod:`~hf_memsave.tape.prices`). What is kept goes to the hook that is active outside (gradient checkpointing, CPU
offload, the user's own), or stays as it is.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling

from hf_memsave.tape import decisions, prices, private, sweep
from hf_memsave.tape.codecs import CODERS, Coders, as_bits
from hf_memsave.tape.handles import Handle, Held, Lent, Ticket
from hf_memsave.tape.ledger import Ledger, Within
from hf_memsave.tape.private import OPS, in_transform, innermost_hooks
from hf_memsave.tape.record import MARK, Record, Sharded, added
from hf_memsave.tape.recorder import Recorder, is_parameter
from hf_memsave.tape.stand_ins import StandIn
from hf_memsave.tape.tensors import is_plain, leaves, owned, plain_tensors
from hf_memsave.tape.wrappers import are_asked, by_class, pack_wrapped, waited

_fetch = operator.methodcaller("get")


class Tape(Recorder):
    """``with Tape(table): block(x)`` records under ``table``, and keeps what costs least.

    Records belong to the tape they were made under: so nothing can cross from one checkpointed block into the next.

    Args:
        table: Function -> what to do when it is called, as ``handler(tape, func, args, kwargs)``.
        dropout: What is kept of a dropout's mask: the generator's state ("seed"), a bit an element ("mask"), "stock".
        coders: What packs bits and codes.
        codec: Codes what has to be kept; None keeps it as it is.
        inputs: What the caller holds until backward: it costs nothing.
        ledger: Told of every tensor that autograd asks to keep.
        decided: What earlier forwards of the same module decided to keep: see :func:`~hf_memsave.tape.decisions.pays`.
        mark_of: What to mark the storage of a parameter with, where a sharding engine may own it.

    Attributes:
        coder: While one operation runs: chooses a handle for what it wants to keep, or None to leave that to the tape.
        copies: Of small parameters: see :mod:`~hf_memsave.tape.copies`.
        memo: Results shared within this forward, by their keys.
        at_end: Called at the end of this forward.
        again: Dicts that hold, as "weight", the weights of linears that may run again.
        head: The linear that gives logits, if those may be computed later; ``logits`` gives them, or None.
        is_in_attention, is_in_loss: SDPA runs, or a loss.
    """

    def __init__(
        self,
        table: Mapping[Any, Any],
        dropout: str = "seed",
        coders: Coders = CODERS,
        codec: Any = None,
        inputs: Iterable[Any] = (),
        ledger: Ledger | Within | None = None,
        decided: decisions.Decisions | None = None,
        mark_of: Callable[[Tensor], Record] | None = None,
    ) -> None:
        super().__init__(ledger, mark_of)
        self.table, self.dropout, self.coders, self.codec = table, dropout, coders, codec
        self.coder: Callable[[Tensor], Handle | None] | None = None
        self.memo: dict[Any, Any] = {}
        self.at_end: list[Callable[[], None]] = []
        self.again: list[dict[str, Any]] = []
        self.head: nn.Module | None = None
        self.logits: Any = None
        self.is_in_attention = self.is_in_loss = False
        self.decided = decisions.Decisions() if decided is None else decided
        self.lock, self._inputs = threading.RLock(), inputs
        self.copies: dict[Any, Held | Lent] = {}
        self._hooks: Any = None
        self._around: Tape | None = None

    def __enter__(self) -> Tape:
        self.outer = innermost_hooks()
        self._hooks = saved_tensors_hooks(self.pack if self.ledger is None else self.pack_told, _fetch)
        self._hooks.__enter__()
        if isinstance(private.innermost_mode(), Tape):  # that of the model, around a checkpointed block
            self._around = private.pop_mode()
            self._root = self._around.root
        private.push_mode(self)
        inputs, self._inputs = self._inputs, ()
        self._state = hash((id(self.table), self.dropout, self.outer is None, self.codec is None))
        try:
            self.take_inputs(inputs)
        except BaseException:
            self._close(*sys.exc_info())
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            while self.at_end and error[0] is None:
                self.at_end.pop()()
        finally:
            self._close(*error)

    def _close(self, *error: object) -> None:
        private.pop_mode()
        if self._around is not None:
            private.push_mode(self._around)
            self._around = None
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*error)
        self.end_block()
        self.end_block()
        if error[0] is None:
            decisions.learn(self)
        self.root._empty_casts()
        for ref in self._noted:
            if (record := ref()) is not None:
                record.notes = None
        self._mark_again()
        for held in (self.at_end, self.memo, self.casts, self.copies, self._readers, self._noted, self.again):
            held.clear()
        # Storages that live on know the tape: it must not hold what knows them.
        self.outer = self.ledger = self.codec = self._root = self.head = self.logits = self.mark_of = None

    def is_innermost(self) -> bool:
        """Whether what is called now asks this tape what to keep: no foreign hook, and no ``torch.func`` transform."""
        hooks = innermost_hooks()
        return hooks is not None and getattr(hooks[0], "__self__", None) is self and not in_transform()

    # What was made, and from what

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_dynamo_compiling():  # a part of the model is compiled: none of this may be traced into its graph
            return func(*args, **(kwargs or {}))
        if types and are_asked(types):
            return by_class(self, func, types, args, kwargs or {})
        handler = self.table.get(func)
        if handler is None:
            if kwargs and (kwargs.get("out") is not None or kwargs.get("inplace")):
                self.before_writes(args, kwargs)
            if type(func) in OPS:
                self.before_op(func, args, kwargs)
            return func(*args, **kwargs) if kwargs else func(*args)
        if not torch.is_grad_enabled():
            return self._without_gradients(handler, func, args, kwargs or {})
        return handler(self, func, args, kwargs or {})

    def call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(*args, **kwargs)``, as if the model had called it."""
        return self.__torch_function__(func, (), args, kwargs)

    def record(self, out: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> None:
        """``func(*args, **kwargs)`` gives ``out``, which shares its storage with no argument, to the bit."""
        self._calls += 1
        made = hash((self._state, self._calls))
        if self.outer is None and self.decided[made] == decisions.UNASKED:
            return
        try:
            seen = plain_tensors(args if not kwargs else (*args, *kwargs.values()))
            if seen is None:
                args, kwargs = waited(self, owned(args)), waited(self, owned(kwargs))
                found = leaves(args, kwargs)
                if not all(is_plain(x) and x.layout is torch.strided for x in found):
                    return
                seen = [(x, x._version) for x in found]
            storage = out.untyped_storage()
        except (RuntimeError, NotImplementedError):  # inference tensors have no version, sparse ones no storage
            return
        if Sharded.any_is_brief:
            prices.copy_brief(self, func, seen)
        record = getattr(storage, MARK, None)
        if record is None or record.tape is not self:
            record = Record(self)
            setattr(storage, MARK, record)
        elif record.func is not None:
            return
        record.func, record.args, record.kwargs, record.seen = func, args, kwargs, seen
        record.version, record.dtype, record.stride, record.made = out._version, out.dtype, out.stride(), made
        self._records.append(weakref.ref(record))
        self.made.append(made)
        if record.handles:  # the op asked to keep its own result, before there was a record
            self.asked.add(made)
            if decisions.pays(self, record, storage.nbytes() if record.is_kept else 1):
                prices.settle(self, record, storage)
            elif record.is_kept:
                sweep.wait(self, record, storage.nbytes())
        elif self.codec is not None and record.node is not None:  # likewise, and it was coded
            self._give_code_way(record, storage)

    # What to keep

    def pack(self, tensor: Tensor) -> Handle:
        """Called by autograd with each tensor to keep; returns what goes on the tape."""
        if self.coder is not None and (chosen := self.coder(tensor)) is not None:
            return chosen
        kind = type(tensor)
        if kind is nn.Parameter:
            return Held(tensor) if self.outer is None else self.keep(tensor)
        is_known = kind is Tensor and tensor.layout is torch.strided
        record = getattr(tensor.untyped_storage(), MARK, None) if is_known else None
        if record is None or record.tape is not self:
            record = self.record_of(tensor)
            if record is None or record.tape is None:
                return self.keep(tensor) if is_plain(tensor) or is_parameter(tensor) else pack_wrapped(self, tensor)
        storage = tensor.untyped_storage()
        is_open = record.node is not None or (record.func is not None and not record.is_kept)
        handle = self.ticket(record, storage, tensor) if is_open else None
        return self.hold(record, storage, tensor) if handle is None else handle

    def pack_told(self, tensor: Tensor) -> Handle:
        """:meth:`pack`, of which the ledger is told."""
        entry, handle = self.note(tensor, self.record_of(tensor)), self.pack(tensor)
        if entry is not None and self.in_place is None:
            entry.ask(handle)
        return handle

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
            if record.func is None or record.costs_nothing() or record.func is None or not record.is_of(tensor):
                return None  # how it was made is not known, or was forgotten just now, as its holders are gone
            if not decisions.pays(self, record, storage.nbytes()):
                if self.decided[record.key] != decisions.NEVER:  # another thread may have cleared them
                    self.asked.add(record.made)
                return None
            self.asked.add(record.made)
            node = prices.settle(self, record, storage)
        elif not record.is_of(tensor) or not node.is_there():
            return None
        elif self.codec is not None and record.func is not None:
            self._give_code_way(record, storage)
        return Ticket(node, tensor)

    def _give_code_way(self, record: Record, storage: Any) -> None:
        """Let go of the code of a tensor that can be had by what is kept, coded or not, anyway."""
        code = None if record.node is None else record.node()
        if code is not None and decisions.pays(self, record, code.nbytes_kept()):
            self.asked.add(record.made)
            code.is_given_by(prices.settle(self, record, storage))

    def hold(self, record: Record, storage: Any, tensor: Tensor) -> Handle:
        """For a tensor that has to be kept."""
        is_kept = record.costs_nothing()
        if not is_kept and (self.codec is not None or tensor.dtype is torch.bool):
            code = self.codec if tensor.dtype is not torch.bool else as_bits
            if (coded := code(self, record, storage, tensor)) is not None:
                return coded
        if self.outer is not None and (known := record.lent(tensor)) is not None:
            known.uses += 1
            return known
        handle = Held(tensor) if self.outer is None else self.keep(tensor)
        if not is_kept:
            record.is_kept = True
            nbytes = storage.nbytes()
            for ref in () if record.is_distrusted else record.handles:
                if isinstance(stand_in := ref(), StandIn):
                    stand_in.is_kept_as(tensor, handle)
            if record.func is None:
                self.asks(nbytes)
            else:
                sweep.wait(self, record, nbytes)
        record.handles = added(record.handles, weakref.ref(handle))
        return handle

    def stand_in(self, tensor: Tensor, small: Tensor, decode: Callable[[Tensor], Tensor] | None) -> StandIn:
        """A handle that keeps ``small`` instead of ``tensor``, until that is kept anyway."""
        handle = StandIn(tensor, self.keep(small), small.nbytes, decode)
        self.note_small(handle, small.nbytes, "code")
        if (record := self.record_of(tensor)) is not None and record.tape is self:
            record.handles = added(record.handles, weakref.ref(handle))
        return handle

    def cost(self, tensor: Tensor) -> int:
        """Bytes that having ``tensor`` in backward would add to what is kept so far."""
        record = self.record_of(tensor)
        if record is None:
            return tensor.numel() * tensor.itemsize
        return sum(prices.price_of(self, tensor, record, tensor.untyped_storage())[0].values())


private.compile_nothing_of(Tape.__torch_function__, Tape.pack, Tape.pack_told)
