"""The ledger of one forward: what autograd asked to keep and what became of it, by kind of op.

Three counts, each of storages once: what stock asks autograd to keep, what is kept here, and of that what lies in main
memory. What stock asks for is seen as the forward runs, since functions that a tape recomputes ask for the same tensors
as in stock; where one asks for others or none, :mod:`~hf_memsave.tape.as_stock` counts what stock's would ask for.
"Stock" is the model as trained without us, under the user's own gradient checkpointing too. What only checkpointed
blocks of ours would have kept is avoided.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from hf_memsave.tape.content import COUNTED, Content, alive, is_parameter
from hf_memsave.tape.kinds import STATE, Makers
from hf_memsave.tape.offload import Away
from hf_memsave.tape.private import checkpoint_frame, tree_leaves
from hf_memsave.tape.tensors import is_plain, nodes_before

#: Kind of the tensors that PyTorch's selective checkpointing keeps.
SELECTED = "selective checkpointing"
#: Class of an autograd node -> the attributes with what it saved.
_names_of_saved: Any = lru_cache(256)(lambda cls: [name for name in dir(cls) if name.startswith("_raw_saved_")])


@dataclass(eq=False, slots=True)
class _Entry:
    """One storage, and weak references to what keeps it or has asked to: graphs of branches that are left are gone."""

    forward: object  # in which it is counted
    nbytes: int
    made_by: str
    is_given: bool = False  # the caller of the model keeps it anyway
    contents: list[weakref.ref[Content]] = field(default_factory=list)  # that tapes may keep
    copies: list[weakref.ref[Away]] = field(default_factory=list)  # in main memory
    asked_by: list[weakref.ref[Any]] = field(default_factory=list)  # what autograd got when it asked to keep it
    held_by: list[weakref.ref[Any]] = field(default_factory=list)  # what else keeps it, such as a checkpoint

    def note_holder(self, by: Any, is_asked: bool) -> None:
        """Note that ``by`` keeps the storage itself; in stock too, if ``is_asked``."""
        self.held_by.append(weakref.ref(by))
        if is_asked:
            self.asked_by.append(weakref.ref(by))


class Ledger:
    """Count storages once each, by what became of them when the forward had ended."""

    def __init__(self) -> None:
        self.avoided: Counter[str] = Counter()  # bytes that stock keeps and we do not, by kind; < 0: kept instead
        self.kept: Counter[str] = Counter()  # bytes that are kept on the device, by what made them
        self.offloaded: Counter[str] = Counter()  # bytes that are kept in main memory, by what made them
        self.nbytes_recomputed = 0  # that would be kept in addition if no linear was recomputed
        self.nbytes_moved = 0  # that the caller's gradient checkpointing moves to main memory, in stock too
        self.is_counted = False  # a forward was counted; the numbers are zero before
        self.is_checkpointed_in_stock = False  # the caller has gradient checkpointing on, which recomputes whole blocks
        self.is_checkpointed = False  # blocks run again by their patch
        self.is_loss_chunked = False  # logits were computed in chunks
        self.is_on_cpu = False  # the model is on a CPU, whose memory is main memory
        self.is_trial = False  # the forward was no training step: the first one of a training step is still counted
        self.told: list[int] = []  # for each training step that was counted, a number for what parameters it trained
        self.uncounted = ""  # why the forward, or what stock keeps of it, was not counted; empty where both were
        self.forget()

    def note(self, tensor: Tensor, content: Content | None = None, asked_by: Any = None) -> _Entry:
        """Note that ``tensor`` may be kept, as ``content`` tells at the end, and in stock for ``asked_by``."""
        storage = tensor.untyped_storage()
        entry: _Entry | None = getattr(storage, COUNTED, None)
        if entry is None or entry.forward is not self._forward:
            entry = _Entry(self._forward, storage.nbytes(), self.makers.of(tensor))
            setattr(storage, COUNTED, entry)
            self._entries.append(entry)
        if content is not None:
            entry.contents.append(weakref.ref(content))
        if asked_by is not None:
            entry.asked_by.append(weakref.ref(asked_by))
        return entry

    def note_checkpoint(self, frame: Any, tensors: Iterable[Tensor], is_asked: bool) -> None:
        """Note that checkpoint ``frame`` keeps ``tensors`` and a generator's state; in stock too, if ``is_asked``."""
        self._entries.append(_Entry(self._forward, torch.get_rng_state().nbytes, STATE))
        for entry in [self._entries[-1], *self._of(tensors)]:
            entry.note_holder(frame, is_asked)
        self._frames.append(weakref.ref(frame))
        self.is_checkpointed_in_stock |= is_asked
        self.is_checkpointed |= not is_asked

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Leave the caller's ``tensors`` out of the count; after a first count, not ones that other modules made."""
        for entry in self._of(x for x in tensors if x.grad_fn is None or not self.is_counted):
            entry.is_given = True

    def _of(self, tensors: Iterable[Tensor]) -> list[_Entry]:
        return [self.note(x) for x in tensors if is_plain(x) and x.layout is torch.strided and not is_parameter(x)]

    def note_code(self, code: Content, name: str) -> None:
        """Note that ``code`` keeps less instead of a tensor."""
        self._codes.append((weakref.ref(code), self.makers.here(name)))

    def note_stock(self, name: str, nbytes: int, by: Any) -> None:
        """Note that stock keeps ``nbytes`` more for ``by``, which nothing makes here."""
        self._entries.append(_Entry(self._forward, nbytes, self.makers.here(name), asked_by=[weakref.ref(by)]))

    def note_missing(self, what: str) -> None:
        """Note that what stock keeps of ``what`` cannot be known."""
        self._missing.append(f"stock's {what} could not run beside it, as where its modules have hooks")

    def note_stock_copy(self, storage: Any) -> None:
        """Note that stock makes a copy of the tensor on ``storage``, and keeps that too where it keeps the tensor."""
        entry: _Entry | None = getattr(storage, COUNTED, None)
        if entry is not None and entry.forward is self._forward:
            self._entries.append(_Entry(self._forward, entry.nbytes, entry.made_by, asked_by=entry.asked_by))

    def forget(self) -> None:
        """Begin to count another forward: this one failed, or was counted."""
        self.recomputed = 0  # bytes of products that run again: ``nbytes_recomputed``, once counted
        self._forward, self._entries = object(), list[_Entry]()
        self._codes: list[tuple[weakref.ref[Content], str]] = []
        self.makers = Makers()
        self.asked: dict[Any, Any] = {}  # what stock's operations ask for, by what they are called with
        self._missing: list[str] = []
        self._frames: list[weakref.ref[Any]] = []

    def close(self, out: Any) -> None:
        """Count what is kept, now that the forward has returned ``out``."""
        for counter in (self.avoided, self.kept, self.offloaded):
            counter.clear()
        self.nbytes_recomputed, self.nbytes_moved = self.recomputed, 0
        nodes = list(nodes_before(x for x in _leaves(out) if isinstance(x, Tensor)))
        for frame in ({ref() for ref in self._frames} | {f for node in nodes for f in _frames_of(node)}) - {None}:
            for entry in self._of(_selected(frame)):
                entry.note_holder(frame, is_asked=True)
                entry.made_by = SELECTED
            self.nbytes_moved += sum(x.untyped_storage().nbytes() for x in _moved(frame))
        for node in nodes:
            self.is_checkpointed_in_stock |= "run_function" in getattr(node, "__dict__", {})  # reentrant
            for entry in self._of(_held_by(node)):
                entry.note_holder(self, is_asked=True)
        for entry in self._entries:
            n, is_away = entry.nbytes, any(alive(entry.copies))
            is_held = any(alive(entry.held_by)) or any(c.is_kept for c in alive(entry.contents))
            is_kept = is_away or (is_held and not entry.is_given)
            if is_kept:
                (self.offloaded if is_away else self.kept)[entry.made_by] += n
            self.avoided[entry.made_by] += n * ((any(alive(entry.asked_by)) and not entry.is_given) - is_kept)
        for ref, name in self._codes:
            if (code := ref()) is not None and (nbytes := code.nbytes_code):
                (self.offloaded if _is_away(code) else self.kept)[name] += nbytes
                self.avoided[name] -= nbytes
        self.is_counted, self.uncounted = True, next(iter(self._missing), "")
        self.forget()

    @property
    def nbytes_avoided(self) -> int:
        """Bytes that stock would keep beyond what is kept here; 0 if fewer."""
        return max(0, sum(self.avoided.values()))

    @property
    def nbytes_kept(self) -> int:
        """Bytes kept on the device, for the model's operations or to recompute tensors."""
        return sum(self.kept.values())

    @property
    def nbytes_offloaded(self) -> int:
        """Bytes kept in main memory."""
        return sum(self.offloaded.values())

    @property
    def nbytes_stock(self) -> int:
        """Bytes that stock keeps."""
        return self.nbytes_kept + self.nbytes_offloaded + sum(self.avoided.values())

    @property
    def freed_fraction(self) -> float:
        """The part of stock's bytes that is not kept on the device; below 0 where more is kept, NaN where uncounted."""
        return 1 - self.nbytes_kept / self.nbytes_stock if self.nbytes_stock and not self.uncounted else math.nan

    def by_kind(self, what: str) -> dict[str, int]:
        """Return the bytes "avoided", "kept" or "offloaded", above 0, by the words for kinds of op, most first."""
        return dict((+getattr(self, what)).most_common())


def _is_away(code: Content) -> bool:
    """Return whether a code lies in main memory: our own hook has packed it."""
    parts = [code] if code.is_handed_on else code.inputs
    packed = [part.inputs[0] for part in parts if type(part) is Content and part.is_handed_on]
    return any(type(one) is tuple and len(one) > 0 and isinstance(one[0], Away) for one in packed)


def _held_by(node: Any) -> list[Tensor]:
    """Return a node's leaf that wants a gradient, or the tensors in a Function's context beside what it saved."""
    held = _leaves(list(own.values())) if (own := getattr(node, "__dict__", None)) else []
    held += [x for f in held if isinstance(f, partial) for x in _leaves((f.args, f.keywords))]
    held += [node.variable] if node.name().endswith("AccumulateGrad") else []
    return [x for x in held if isinstance(x, Tensor)]


def _frames_of(node: Any) -> list[Any]:
    """Return what PyTorch's checkpointing knows of the calls in which a node saved its tensors."""
    saved = _leaves([getattr(node, name) for name in names]) if (names := _names_of_saved(type(node))) else []
    return [checkpoint_frame([hook])[0] for one in saved if (hook := getattr(one, "unpack_hook", None)) is not None]


def _moved(frame: Any) -> list[Tensor]:
    """Return what ``save_on_cpu`` around a checkpointed call keeps of its arguments."""
    packed = [getattr(one, "data", None) for one in getattr(frame, "saved_args", ())]  # a handle, if a tape keeps it
    return [x for one in packed if type(one) is tuple for x in one if isinstance(x, Tensor)]


def _selected(frame: Any) -> list[Tensor]:
    """Return the tensors that PyTorch's selective checkpointing keeps of a call, unseen by saved-tensor hooks."""
    run = frame.recompute_fn
    context = dict(zip(run.__code__.co_freevars, run.__closure__ or (), strict=True)).get("recompute_context")
    kept = _leaves(list(getattr(context and context.cell_contents, "storage", {}).values()))  # each with its version
    return [x.val for x in kept if isinstance(getattr(x, "val", None), Tensor)]


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts; none where one of them contains itself."""
    with contextlib.suppress(RecursionError):
        return tree_leaves(tree)
    return []
