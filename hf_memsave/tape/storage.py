"""What one forward knows of storages: their contents, copies and notes, who reads them, and who must hear of a write.

A content lives *on its storage*, as an attribute of the storage's Python object, which PyTorch preserves for as long
as the storage lives. So a new tensor at the same address can never be mistaken for the old one, and there is no
registry to purge or to lock. The link to a content that is nowhere yet is strong: a call that is not asked for dies
with its tensor. For two blocks it is strong to one that is recomputed, as the first ticket may be gone before another
is asked for. To any other it is weak: the content lives as long as its tickets.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.tape import content as contents
from hf_memsave.tape import offload
from hf_memsave.tape.calls import Calls
from hf_memsave.tape.content import MARK, PARAMETER, Call, Content, alive, contents_on, is_parameter, linked, with_ref
from hf_memsave.tape.frame import Frame
from hf_memsave.tape.ledger import Ledger
from hf_memsave.tape.private import checkpoint_frame, no_dispatch, unwrapped, written_by
from hf_memsave.tape.tensors import View, is_plain, leaves
from hf_memsave.tape.wrappers import parts_of

#: What to mark the storage of a parameter with, where a sharding engine may own it.
MarkOf = Callable[[Tensor], Content] | None
#: Functions that recomputing one tensor may run.
MOST_WORK = 64
#: Where a storage carries what handlers wish to find again with it.
_NOTES = "_memsave_notes"


class Apart:
    """While it is alive, a write to the storage of ``tensor`` leaves ``kept`` as it was: it gets a copy before.

    For an op that keeps one tensor where stock keeps another. ``linked`` is the content that the storage carries,
    ``kept`` the one that keeps this very view, and ``hooks`` are the saved-tensor hooks outside, if any.
    """

    __slots__ = ("content", "storage", "hooks", "__weakref__")

    def __init__(self, linked: Content, kept: Content, tensor: Tensor, hooks: Any) -> None:
        self.content, self.storage, self.hooks = weakref.ref(kept), weakref.ref(tensor.untyped_storage()), hooks
        linked.readers = with_ref(linked.readers, self)

    def freeze(self) -> None:
        """Have ``kept`` keep a copy, if it keeps the tensor still: the storage is about to be written to."""
        content, storage = self.content(), self.storage()
        if content is None or storage is None or not content.is_kept:
            return
        kept: Any = content.view if content.is_handed_on else content.tensor
        if kept is None:
            return
        empty = torch.empty(0, dtype=kept.dtype, device=storage.device)
        copy = empty.set_(storage.clone(), kept.storage_offset(), kept.shape, kept.stride())
        if content.is_handed_on:
            content.hand_on(copy, *self.hooks)
            content.view = None  # of another storage
        else:
            for view in alive(content.views):
                view.forget()
            content.keep(copy)


class Storages:
    """What a tape knows of one forward's storages. Its lock is the owner of its contents."""

    def __init__(self, frame: Frame, ledger: Ledger | None, calls: Calls, mark_of: MarkOf = None) -> None:
        super().__init__()
        self.outer: Any = None  # the (pack, unpack) pair of the hooks active outside
        self.around: Storages | None = None  # the tape that this is within: a checkpointed block's is in the model's
        self.mark = MARK
        self.block = 0  # how many have ended
        self.most_work = MOST_WORK
        self.unversioned = 0  # tensors written to, or that may be, without their version telling; on the root
        self.is_within = False  # of a block that runs again: of its tensors, those that stock asks for are counted
        self.frame, self.ledger, self.calls, self.mark_of = frame, ledger, calls, mark_of
        self.lock = threading.RLock()
        self.casts: dict[Any, tuple[Tensor, Tensor]] = {}  # of leaves, shared as by autocast's own cache
        self.copies: dict[Any, Content] = {}  # of small parameters
        self.memo: dict[Any, Any] = {}  # results shared within this forward, by their keys
        self._readers: dict[int, Any] = {}
        self._noted: list[dict[Any, Any]] = []
        self._marks: list[tuple[Any, Content]] = []

    def close(self) -> None:
        """Forget all: graphs and storages that outlive the forward keep the tape, which must not keep them."""
        self.root.empty_casts()
        for storage, content in self._marks:  # parameters and buffers, unversioned for as long as the forward
            setattr(storage, self.mark, content)
        for notes in self._noted:
            notes.clear()
        for held in (self.casts, self.copies, self.memo, self._readers, self._noted, self._marks):
            held.clear()
        self.outer = self.ledger = self.around = self.mark_of = None

    @contextlib.contextmanager
    def using(self, **values: Any) -> Iterator[None]:
        """Have these fields of the frame hold for what is called meanwhile."""
        before, self.frame = self.frame, self.frame._replace(**values)
        try:
            yield
        finally:
            self.frame = before

    @property
    def root(self) -> Storages:
        """The tape of the model, around those of checkpointed blocks."""
        return self if self.around is None else self.around.root

    def content_of(self, tensor: Tensor) -> Any:
        """Return the content of the storage of ``tensor``, an empty one if none is known; None if wrapped or sparse."""
        kind = type(tensor)
        if kind is not Tensor and kind is not nn.Parameter and not is_plain(tensor):
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse tensor
            return None
        link: Any = getattr(storage, self.mark, None)
        content = link() if type(link) is weakref.ref else link  # not linked(): asked for at every call
        return content if content is not None and content.owner is self.lock else self.content_on(storage, tensor)

    def content_on(self, storage: Any, tensor: Tensor) -> Any:
        """Return the content of ``storage``, that of a plain ``tensor``, an empty one where nothing is known."""
        link: Any = getattr(storage, self.mark, None)
        content = link() if type(link) is weakref.ref else link
        if content is None or (content.owner is not self.lock and content.owner is not None):
            content = self._new(storage, tensor)
            setattr(storage, self.mark, content)
        return content

    def _new(self, storage: Any, tensor: Tensor) -> Content:
        content = Content(self.lock)
        if self.around is not None:
            theirs, of_model = self.around.known(tensor), linked(storage)
            if theirs and theirs.is_unversioned and not (self.outer and checkpoint_frame(self.outer)[0]):
                content.is_unversioned = True  # not in a checkpointed block: in backward no tape around it will tell
                return content
            if of_model is not None and of_model.owner is None:
                return of_model
        if is_parameter(tensor):
            mark_of = self.root.mark_of
            return PARAMETER if mark_of is None else mark_of(tensor if tensor._base is None else tensor._base)
        return content

    def known(self, tensor: Tensor) -> Content | None:
        """Return the content of ``tensor`` if one is known: FSDP2 fills storages before they are parameters'."""
        try:
            return linked(tensor.untyped_storage(), self.mark) if is_plain(tensor) else None
        except NotImplementedError:  # a sparse tensor, or one of a transform
            return None

    def owns(self, content: Content | None) -> bool:
        """Return whether ``content`` is this tape's, and not that of a parameter, a buffer or another tape."""
        return content is not None and content.owner is self.lock

    def link(self, storage: Any, content: Content, old: Content | None = None) -> None:
        """Link ``storage`` to ``content``, which is on the tape, in place of ``old``: its readers read this now."""
        if old is not None:
            content.readers, content.parts, content.is_activation = old.readers, old.parts, old.is_activation
        setattr(storage, self.mark, weakref.ref(content))

    def is_kept(self, tensor: Tensor) -> bool:
        """Return whether to keep ``tensor`` would add no bytes: its storage is kept, or a parameter's."""
        content = self.content_of(tensor)
        return content is not None and (content.owner is None or content.is_kept)

    def as_activation(self, tensor: Tensor) -> None:
        """Note that ``tensor`` depends on the batch, though it requires no gradient: codecs may code it."""
        if self.owns(content := self.content_of(tensor)):
            content.is_activation = True

    def call_that_made(self, tensor: Tensor, funcs: Container[Any] | None = None) -> Call | None:
        """Return how ``tensor`` was made, by one of ``funcs`` if given: then the next forwards record that too."""
        content = self.content_of(tensor)
        call: Call | None = None if content is None else content.call
        if call is None or (funcs is not None and call.func not in funcs):
            return None
        self.calls.used.add(call.number)
        return call

    def forget_call(self, tensor: Tensor) -> None:
        """Forget the call that made ``tensor``, which lives on but is asked for no more, and with it the arguments."""
        if self.owns(content := self.content_of(tensor)) and not content.is_kept:
            content.call = None

    def notes(self, tensor: Tensor) -> dict[Any, Any]:
        """Return the dict of handlers' notes on the storage, until the forward ends or a tape within notes there."""
        if not self.owns(self.content_of(tensor)):
            return {}
        storage = tensor.untyped_storage()
        owner, notes = getattr(storage, _NOTES, (None, {}))
        if owner is not self.lock:
            notes = {}
            setattr(storage, _NOTES, (self.lock, notes))
            self._noted.append(notes)
        return notes

    # What is kept

    def keep(self, tensor: Tensor, content: Content | None = None) -> Content:
        """Keep ``tensor`` as ``content``, or as a new one: as it is, or handed on to the hook outside."""
        if content is None:
            content = Content(self.lock)
            content.uses = 1
        if self.outer is None:
            content.keep(tensor)
        else:
            content.hand_on(tensor, *self.outer)
        return content

    def keep_instead(self, tensor: Tensor, small: Tensor, decode: Callable[[Tensor], Tensor] | None) -> Content:
        """Keep ``small``, enough for one operation's backward, instead of ``tensor``, until that is kept anyway."""
        code = Content(self.lock)
        code.become(decode or contents.same, [self.keep(small)])
        code.uses, code.view = 1, View(tensor)
        self.note_code(code, small.nbytes, "code")
        if self.owns(content := self.content_of(tensor)):
            content.parts = with_ref(content.parts, code)
        return code

    def empty_casts(self) -> None:
        """Empty the casts of leaves that autocast shares, as a block ends: backward recomputes, a block refills."""
        for cast, _ in self.casts.values():
            storage = cast.untyped_storage()
            if storage.nbytes() and not any(content.is_kept for content in contents_on(storage)):
                with no_dispatch():  # not the storage: selective checkpointing may hold it too
                    cast.data = cast.new_empty(0)

    # Writes

    def before_writes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Freeze what depends on ``out=``, or on the first argument, if ``inplace`` or a positional True is given."""
        if kwargs and (out := kwargs.get("out")) is not None:
            self._before_write_of(out)
        if (kwargs and kwargs.get("inplace")) or any([a is True for a in args]):
            self._before_write_of(args[0] if args else kwargs.get("input"))

    def before_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Freeze what depends on the arguments that an op of ``torch.ops`` is about to write to."""
        for place, name in written_by(op):
            self._before_write_of(args[place] if place < len(args) else (kwargs or {}).get(name))

    def _before_write_of(self, argument: Any) -> None:
        for target in leaves([argument], None):
            self.before_write(target)

    def before_write(self, tensor: Tensor) -> None:
        """Freeze what was to be recomputed from ``tensor``, which is about to be written to."""
        tensor = unwrapped(tensor)
        if not is_plain(tensor):
            for part in parts_of(tensor):  # whose versions do not tell
                self.before_write(part)
                self.mark_unversioned(part)
            return
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse tensor
            return
        for content in contents_on(storage):
            if self.outer is not None:
                offload.before_write(tensor)
            if content.owner is None:
                stores = () if content.is_sharded else (self, self.root)
                readers = [ref for one in stores for ref in one._readers.pop(id(storage), ())]
            else:
                readers, content.readers = list(content.readers), ()
            for reader in alive(readers):
                reader.freeze()

    def reads(self, content: Content, parameter: Tensor) -> None:
        """Note that ``content`` is recomputed from ``parameter``, or from a buffer, itself: a write freezes it."""
        key = id(parameter.untyped_storage())
        self._readers[key] = with_ref(self._readers.get(key, ()), content)

    def may_alias_parameter(self, tensor: Tensor) -> bool:
        """Return whether a write to ``tensor`` may change a parameter or buffer whose version does not tell."""
        content = self.known(tensor) or (None if self.around is None else self.around.known(tensor))
        is_filled = content is not None and content.is_sharded and tensor.dim() == 1  # by FSDP2, as it was before
        return content is not None and content.owner is None and not is_filled and not is_parameter(tensor)

    def mark_alias(self, tensor: Tensor) -> None:
        """Note that ``.data`` of ``tensor`` was read: writes through the alias bump another version."""
        content = self.content_of(tensor)
        if content is None or content.owner is not None:
            self.mark_unversioned(tensor)
        elif not content.is_sharded:
            self.root.unversioned += 1

    def mark_unversioned(self, tensor: Tensor) -> None:
        """Trust no version of ``tensor`` any more: until the forward ends, it is kept as it is."""
        self.unversioned += 1
        if (content := self.content_of(tensor)) is not None:
            storage = tensor.untyped_storage()
            new = Content(self.lock)
            if content.owner is None:
                self._marks.append((storage, content))
            else:
                content.call = None
                content.is_unversioned, new.readers = True, content.readers
            new.is_unversioned = True
            setattr(storage, self.mark, new)
            setattr(storage, _NOTES, (None, {}))
        if self.around is not None:
            self.around.mark_unversioned(tensor)

    # Who counts

    def note(self, tensor: Tensor, content: Content | None, asked_by: Any = None) -> Any:
        """Tell the ledger that ``tensor`` may be kept, in stock for ``asked_by``; returns None where nothing counts."""
        if self.ledger is None or content is None or content.owner is not self.lock:
            return None
        return self.ledger.note(tensor, None if self.is_within else content, asked_by)

    def note_code(self, code: Content, nbytes: int, name: str) -> None:
        """Tell the ledger that ``code`` keeps ``nbytes`` instead of a tensor."""
        code.nbytes_code = nbytes
        if self.ledger is not None and not self.is_within:
            self.ledger.note_code(code, name)
