"""What autograd asked to keep in one forward, and what became of it: by kind, once that is over.

Three counts, each of storages once: what stock asks autograd to keep, what is kept here, and of that what lies in main
memory. What stock asks for is seen as the forward runs, since functions that a tape remakes ask for the same tensors as
in stock; where an operation asks for others, or none at all, what stock's own would ask for is counted instead
(:mod:`~hf_memsave.tape.as_stock`). "Stock" is the model as it would be trained without us: under gradient checkpointing
that the user has turned on, too. What only checkpointed blocks of ours would have kept is avoided.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hf_memsave.tape.content import COUNTED, Content, is_parameter
from hf_memsave.tape.kinds import STATE, Makers
from hf_memsave.tape.offload import Away
from hf_memsave.tape.private import tree_leaves
from hf_memsave.tape.tensors import is_plain

#: What PyTorch's selective checkpointing keeps of blocks, among kinds of op.
SELECTED = "selective checkpointing"


@dataclass(eq=False)
class _Entry:
    """One storage, and what holds it or has asked to keep it: weakly, as graphs of branches that are left are gone."""

    forward: object  # in which it is counted
    nbytes: int
    made_by: str
    is_given: bool = False  # the caller of the model holds it, whatever is kept
    contents: WeakSet[Content] = field(default_factory=WeakSet)  # that tapes may keep
    copies: WeakSet[Away] = field(default_factory=WeakSet)  # in main memory
    asked_by: WeakSet[Any] = field(default_factory=WeakSet)  # what autograd got when it asked to keep it
    held_by: WeakSet[Any] = field(default_factory=WeakSet)  # what else holds it, such as a checkpoint

    def note_holder(self, by: Any, is_asked: bool) -> None:
        """Note that ``by`` holds it itself, in stock too if that ``is_asked``."""
        self.held_by.add(by)
        if is_asked:
            self.asked_by.add(by)

    def is_kept(self) -> bool:
        """Whether it is kept on the device, and would not be if nothing asked for it."""
        return not self.is_given and (len(self.held_by) > 0 or any(c.is_kept for c in self.contents))


class Ledger:
    """Counts storages once each, by what became of them when the forward had ended.

    Attributes:
        avoided: Bytes that stock keeps and we do not, by kind of op; below zero for what is kept instead.
        kept: Bytes that are kept on the device, by what made them.
        offloaded: Bytes that are kept in main memory, likewise.
        nbytes_recomputed: What would be kept beyond that if no linear ran again.
        is_counted: A forward was counted; the numbers are zero before.
        is_checkpointed_in_stock: Blocks of it run again as a whole, as the caller has asked for.
        is_loss_chunked: Logits were not computed at once.
        is_trial: What it counted was no training step: that is still counted.
        told: Which parameters the model trained, as a number each time that what it counted was said.
        uncounted: Why a forward was not counted, or of one that was, what stock keeps; empty where all was.
    """

    def __init__(self) -> None:
        self.avoided: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        self.offloaded: Counter[str] = Counter()
        self.nbytes_recomputed = 0
        self.is_counted = self.is_checkpointed_in_stock = self.is_loss_chunked = self.is_trial = False
        self.uncounted = ""
        self.told: list[int] = []
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
            entry.contents.add(content)
        if asked_by is not None:
            entry.asked_by.add(asked_by)
        return entry

    def note_checkpoint(self, frame: Any, tensors: Iterable[Tensor], is_asked: bool) -> None:
        """``frame`` holds these and the state of a generator; in stock too, if that ``is_asked``."""
        state = _Entry(self._forward, torch.get_rng_state().nbytes, STATE)
        self._entries.append(state)
        for entry in [*self._of(tensors), state]:
            entry.note_holder(frame, is_asked)
        self._frames.append(weakref.ref(frame))
        self.is_checkpointed_in_stock |= is_asked

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """The caller of the model has these anyway; but not what other modules made of them, once one was counted."""
        for entry in self._of(x for x in tensors if x.grad_fn is None or not self.is_counted):
            entry.is_given = True

    def _of(self, tensors: Iterable[Tensor]) -> list[_Entry]:
        plain = [x for x in tensors if is_plain(x) and x.layout is torch.strided and not is_parameter(x)]
        return [self.note(x) for x in plain]

    def note_code(self, code: Content, name: str) -> None:
        """Note that ``code`` keeps less instead of a tensor."""
        self._codes.append((weakref.ref(code), self.makers.here(name)))

    def note_stock(self, name: str, nbytes: int, by: Any) -> None:
        """Note that stock keeps so much more for ``by``, which nothing makes here."""
        self._entries.append(_Entry(self._forward, nbytes, self.makers.here(name), asked_by=WeakSet([by])))

    def note_recomputed(self, nbytes: int) -> None:
        """Note that a linear of a rung runs again, in whose place so much would be kept."""
        self._recomputed += nbytes

    def note_missing(self, what: str) -> None:
        """What stock keeps of ``what`` cannot be known."""
        self._missing.append(f"stock's {what} could not run beside it, as where its modules have hooks")

    def note_stock_copy(self, storage: Any) -> None:
        """Note that stock makes another tensor like this one, and keeps that too where it keeps this one."""
        entry: _Entry | None = getattr(storage, COUNTED, None)
        if entry is not None and entry.forward is self._forward:
            self._entries.append(_Entry(self._forward, entry.nbytes, entry.made_by, asked_by=entry.asked_by))

    def forget(self) -> None:
        """Count another forward: this one failed, or was counted."""
        self._recomputed = 0
        self._forward, self._entries = object(), list[_Entry]()
        self._codes: list[tuple[weakref.ref[Content], str]] = []
        self.makers = Makers()
        self._missing: list[str] = []
        self._frames: list[weakref.ref[Any]] = []

    def close(self, out: Any) -> None:
        """The forward has given ``out``: count."""
        for counter in (self.avoided, self.kept, self.offloaded):
            counter.clear()
        self.nbytes_recomputed = self._recomputed
        for frame in filter(None, (ref() for ref in self._frames)):
            for entry in self._of(_selected(frame)):
                entry.note_holder(frame, is_asked=True)
                entry.made_by = SELECTED
        for node in _nodes_of(out):
            self.is_checkpointed_in_stock |= "run_function" in getattr(node, "__dict__", {})  # reentrant
            for entry in self._of(_held_by(node)):
                entry.note_holder(self, is_asked=True)
        for entry in self._entries:
            n, is_away = entry.nbytes, len(entry.copies) > 0
            is_kept = is_away or entry.is_kept()
            if is_kept:
                (self.offloaded if is_away else self.kept)[entry.made_by] += n
            self.avoided[entry.made_by] += n * ((len(entry.asked_by) > 0 and not entry.is_given) - is_kept)
        for ref, name in self._codes:
            if (code := ref()) is not None and (nbytes := code.nbytes_code):
                (self.offloaded if _is_away(code) else self.kept)[name] += nbytes
                self.avoided[name] -= nbytes
        self.is_counted, self.uncounted = True, next(iter(self._missing), "")
        self.forget()

    @property
    def nbytes_avoided(self) -> int:
        """What stock would have kept beyond what is kept now."""
        return max(0, sum(self.avoided.values()))

    @property
    def nbytes_kept(self) -> int:
        """What is kept on the device, for the model's operations or for remaking."""
        return sum(self.kept.values())

    @property
    def nbytes_offloaded(self) -> int:
        """What is kept in main memory."""
        return sum(self.offloaded.values())

    @property
    def nbytes_stock(self) -> int:
        """What stock keeps."""
        return self.nbytes_kept + self.nbytes_offloaded + sum(self.avoided.values())

    @property
    def freed_fraction(self) -> float:
        """The part of what stock keeps on the device that is not kept there; below zero where more is; or else NaN."""
        return 1 - self.nbytes_kept / self.nbytes_stock if self.nbytes_stock and not self.uncounted else math.nan

    def by_kind(self, what: str) -> dict[str, int]:
        """Bytes of "avoided", "kept" or "offloaded" by kind of op (:mod:`~hf_memsave.tape.kinds`), the most first."""
        return dict((+getattr(self, what)).most_common())


def _is_away(code: Content) -> bool:
    """Whether what stands for a tensor lies in main memory: our own hook has packed it."""
    parts = [code] if code.is_handed_on else code.inputs
    packed = [part.inputs[0] for part in parts if type(part) is Content and part.is_handed_on]
    return any(type(one) is tuple and len(one) > 0 and isinstance(one[0], Away) for one in packed)


def _nodes_of(out: Any) -> Iterator[Any]:
    """The nodes that a forward's output hangs on, each once."""
    todo: list[Any] = [x.grad_fn for x in _leaves(out) if isinstance(x, Tensor)]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
            yield node


def _held_by(node: Any) -> list[Tensor]:
    """The leaf that wants a gradient, or what a Function's context holds beside what it saved."""
    held = _leaves(list(getattr(node, "__dict__", {}).values()))
    held += [x for f in held if isinstance(f, partial) for x in _leaves((f.args, f.keywords))]
    held += [node.variable] if node.name().endswith("AccumulateGrad") else []
    return [x for x in held if isinstance(x, Tensor)]


def _selected(frame: Any) -> list[Tensor]:
    """What PyTorch's selective checkpointing keeps of a call by itself: no saved-tensor hook sees that."""
    run = frame.recompute_fn
    context = dict(zip(run.__code__.co_freevars, run.__closure__ or (), strict=True)).get("recompute_context")
    kept = _leaves(list(getattr(context and context.cell_contents, "storage", {}).values()))  # each with its version
    return [x.val for x in kept if isinstance(getattr(x, "val", None), Tensor)]


def _leaves(tree: Any) -> list[Any]:
    """What lists, tuples and dicts hold, one in the other; nothing where one of them holds itself."""
    with contextlib.suppress(RecursionError):
        return tree_leaves(tree)
    return []
