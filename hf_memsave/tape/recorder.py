"""What a tape knows: a record of every storage, who counts them, and who must hear of a write."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_memsave.tape import offload, prices, sweep
from hf_memsave.tape.handles import Handle, Node
from hf_memsave.tape.ledger import Ledger, Within
from hf_memsave.tape.private import checkpoint_frame, no_dispatch, no_modes, unwrapped
from hf_memsave.tape.record import MARK, PARAMETER, Record, added
from hf_memsave.tape.tensors import is_plain, tensors_in
from hf_memsave.tape.wrappers import parts_of
from hf_memsave.tape.writes import targets, targets_of_op


class Recorder(TorchFunctionMode):
    """The part of a tape that knows storages.

    Attributes:
        block: How many blocks have ended.
        casts: Leaf -> its conversion under autocast, shared within the whole forward as by autocast's own cache.
        outer: The (pack, unpack) pair active outside, or None.
        mark_of: As a tape's argument; on the root.
        most_work: How many functions remaking one tensor may run.
        has_decided: A decision was taken that no earlier forward had taken.
        distrusted: How many tensors have been written to, or may be, without their version telling; on the root.
        made: Of each record that was made, what tells it from others in this forward and finds it in the next.
        asked: Those of which anybody asked how their tensor was made.
        kept: Of tensors kept in this block, before others kept all that they were made from.
        in_place: Of what in stock something else asks what to keep now: see :mod:`~hf_memsave.tape.as_stock`.
    """

    in_place: Literal["exact", "inexact"] | None = None

    def __init__(self, ledger: Ledger | Within | None, mark_of: Callable[[Tensor], Record] | None = None) -> None:
        super().__init__()
        self.ledger, self.mark_of = ledger, mark_of
        self.outer: Any = None
        self._root: Any = None
        self._records: list[weakref.ref[Record]] = []
        self._readers: dict[int, Iterable[weakref.ref[Node]]] = {}
        self._noted: list[weakref.ref[Record]] = []
        self._state = self._calls = 0
        self.has_decided = False
        self.distrusted = 0
        self._marks: list[tuple[Any, Record]] = []
        self.made: list[int] = []
        self.asked: set[int] = set()
        self.block = 0
        self.most_work = prices.MOST_WORK
        self.casts: dict[Any, tuple[Tensor, Tensor]] = {}
        self.kept: list[weakref.ref[Record]] = []
        self._before: tuple[list[weakref.ref[Record]], list[weakref.ref[Record]]] = [], []  # of the last block

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
        around = known if known is not None and known.tape is self._root else None
        is_distrusted = around is not None and around.is_distrusted and not self._is_run_again()
        if not is_distrusted and is_parameter(tensor):
            mark_of = self.root.mark_of
            return PARAMETER if mark_of is None else mark_of(tensor if tensor._base is None else tensor._base)
        record = Record(self)
        record.around, record.is_distrusted = around, is_distrusted
        return record

    def _is_run_again(self) -> bool:
        """Whether what this covers runs again in backward, where no tape around it tells what that one distrusts."""
        return self.outer is not None and checkpoint_frame(self.outer)[0] is not None

    def known(self, tensor: Tensor) -> Record | None:
        """The same, where it is known already: FSDP2 fills the storages of parameters, before they are parameters."""
        try:
            return getattr(tensor.untyped_storage(), MARK, None) if is_plain(tensor) else None
        except NotImplementedError:  # a sparse tensor
            return None

    def notes(self, tensor: Tensor) -> dict[Any, Any]:
        """What others wish to find again with the storage of ``tensor``, while this forward lasts."""
        record = self.record_of(tensor)
        if record is None or record.tape is None:
            return {}
        if record.notes is None:
            record.notes = {}
            self._noted.append(weakref.ref(record))
        return record.notes

    def take_inputs(self, inputs: Iterable[Any]) -> None:
        """Whoever called the model holds the tensors among these: they cost nothing."""
        for tensor in tensors_in(inputs):
            record = self.record_of(tensor)
            if record is not None and record.tape is self:
                record.is_kept = record.is_input = True
                self._state = hash((self._state, tensor.shape))

    def as_activation(self, tensor: Tensor) -> None:
        """Tell that ``tensor`` depends on the batch, though no autograd node says so."""
        record = self.record_of(tensor)
        if record is not None and record.tape is self:
            record.is_activation = True

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether keeping ``tensor`` itself would cost nothing."""
        record = self.record_of(tensor)
        return record is not None and (record.tape is None or record.costs_nothing())

    def _without_gradients(self, handler: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Nothing is recorded, but what is written to is seen."""
        if getattr(handler, "is_write", False):
            return handler(self, func, args, kwargs)
        self.before_writes(args, kwargs)
        return func(*args, **kwargs)

    def before_writes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a call that may write to what ``out=`` names, or with ``inplace`` to its first argument."""
        for target in targets(args, kwargs):
            self.before_write(target)

    def before_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Before an op of ``torch.ops`` that writes to arguments."""
        for target in targets_of_op(op, args, kwargs or {}):
            self.before_write(target)

    def before_write(self, tensor: Tensor) -> None:
        """Called before ``tensor`` is written to: what was to be remade from it is made now, as stock would keep it."""
        tensor = unwrapped(tensor)
        if not is_plain(tensor):
            for part in parts_of(tensor):  # whose versions do not tell
                self.before_write(part)
                self.distrust(part)
            return
        record = self.known(tensor)
        if self.outer is not None and record is not None:
            offload.before_write(tensor)
        if record is not None and record.tape is None and not record.is_sharded:
            for tape in (self, self.root):
                self._freeze(tape._readers.pop(id(tensor.untyped_storage()), ()))
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
        key = id(parameter.untyped_storage())
        self._readers[key] = added(self._readers.get(key, ()), weakref.ref(node))

    def release(self, tensor: Tensor) -> None:
        """Nobody is going to ask for ``tensor`` any more, though it lives on: hold nothing that it was made from."""
        record = self.record_of(tensor)
        if record is not None and record.tape is self and not record.is_kept:
            record.forget()

    def escapes(self, tensor: Tensor) -> None:
        """Its storage is handed out under a version of its own; of parameters and buffers, what is written is seen."""
        record = self.record_of(tensor)
        if record is None or record.tape is not None:
            self.distrust(tensor)
        elif not record.is_sharded:
            self.root.distrusted += 1

    def hides(self, tensor: Tensor) -> bool:
        """Whether a write to ``tensor`` may be one to a parameter or buffer whose version does not tell."""
        record = self.known(tensor)
        is_filled = record is not None and record.is_sharded and tensor.dim() == 1  # by FSDP2, as it was before
        return record is not None and record.tape is None and not is_filled and not is_parameter(tensor)

    def distrust(self, tensor: Tensor) -> None:
        """Versions of ``tensor`` tell nothing any more: until the end of the forward it is kept as it is."""
        self.root.distrusted += 1
        record = self.record_of(tensor)
        if record is not None and record.tape is None:
            storage, mark, root = tensor.untyped_storage(), record, self.root
            root._marks.append((storage, mark))
            record = Record(self)
            if root is not self:
                record.around = Record(root)
                record.around.is_distrusted = True
            setattr(storage, MARK, record)
        if record is not None and record.tape is self:
            record.forget()
            record.node, record.version, record.is_distrusted = None, -1, True
            if record.notes:
                record.notes.clear()

    def asks(self, nbytes: int) -> int:
        """Whether to keep so much is asked. A forward is known by its calls and by its questions, but for tiny ones.

        Returns:
            A number for the question, and all before.
        """
        key = hash((self._state, self._calls, nbytes))
        if nbytes > prices.TINY:
            self._state = key
        return key

    def note(self, tensor: Tensor, record: Record | None) -> Any:
        """Tell the ledger that ``tensor`` may be kept: what that knows of it, or None where nothing is counted."""
        if self.ledger is None or record is None or record.tape is not self:
            return None
        return self.ledger.note(tensor.untyped_storage(), tensor, record, self.in_place == "inexact")

    def note_small(self, handle: Handle, nbytes: int, name: str, is_exact: bool = True) -> None:
        """Tell it that so little is kept instead of a tensor."""
        if self.ledger is not None:
            self.ledger.note_small(handle, nbytes, name, is_exact and self.in_place != "inexact")

    # Blocks

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
                sweep.sweep(self, record)
        for ref in records:
            if (record := ref()) is not None:
                record.forget()
        for ref in self._records:
            record = ref()
            if record is not None and not record.is_kept and record not in handed_on:
                record.forget()
        self._before = [weakref.ref(record) for record in handed_on], self.kept
        self._records, self.kept = [], []
        self.block += 1
        if self.casts:
            self._empty_casts()

    def _empty_casts(self) -> None:
        """Of leaves, shared under autocast: whoever asked to keep one remakes it, and the next block fills it again."""
        for cast, _ in self.casts.values():
            storage = cast.untyped_storage()
            record = getattr(storage, MARK, None)
            if (record is None or not record.is_kept) and storage.nbytes():
                with no_dispatch():  # not the storage: selective checkpointing may hold it too
                    cast.data = cast.new_empty(0)

    def _mark_again(self) -> None:
        """Parameters and buffers, which were distrusted for as long as the forward."""
        for storage, mark in self._marks:
            setattr(storage, MARK, mark)
        self._marks.clear()

    @property
    def root(self) -> Any:
        """The tape of the model, around those of checkpointed blocks."""
        return self if self._root is None else self._root


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is one, or a view of one, which has its version."""
    whole = tensor if tensor._base is None else tensor._base
    return type(whole) is not Tensor and isinstance(whole, nn.Parameter)  # which asks in Python
