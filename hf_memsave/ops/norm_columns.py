r"""Which columns of a norm keep their input: those whose x̂ cannot be told from y = γ x̂ + β well enough.

A column is in need where |β| > |γ|, or γ is 0 or makes y subnormal. Which ones these are says the device; how many, the
host has to know before it asks for memory. Where it would wait for that, a norm has room for as many as were in need
before the optimizer's last step, and for a few more, and the device fills it with the neediest. So the host waits in a
norm's first forward, and after a change by anybody but an optimizer: a loaded checkpoint, a pruned weight.

If one step brings more than there is room for, the least needy of them give an imprecise x̂ (0 where γ is) in that
forward, and the next one says so in a warning. Rooms change while the optimizer steps and at no other time that a
backward could notice, so a block that runs again in backward keeps what it kept before.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_memsave.device import Questions, has_numbers, waits
from hf_memsave.tape import current
from hf_memsave.tape.private import backward_id, no_modes

logger = logging.getLogger(__name__)

#: One column in this many may keep its input.
SHARE = 8
#: One column in this many, and one more, may come to be in need within a step.
SPARE = 128


def vectors(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """γ and β of a norm."""
    return getattr(module, "weight", None), getattr(module, "bias", None)


def is_too_many(columns: int, width: int) -> bool:
    """Whether a norm with so many columns in need should rather be made again from its input."""
    return columns * SHARE > width


def divides(weight: Tensor) -> Tensor:
    """Where one can divide by γ: it is finite, and at least 8 times tiny, below which much of y is subnormal."""
    size, finite = weight.abs(), torch.finfo(weight.dtype)
    return (size >= 8 * finite.tiny).logical_and_(size <= finite.max)


def in_need(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Finds the columns whose x̂ cannot be told from y well enough.

    Returns:
        Their indices among all elements of ``weight``, on its device.
    """
    if not has_numbers(weight):
        return weight.new_empty(0, dtype=torch.long)
    return _is_in_need(weight.detach().flatten(), None if bias is None else bias.detach().flatten()).nonzero().flatten()


def columns_of(module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Finds the columns whose input a norm should keep, and those of all norms that ran before along with them.

    Returns:
        Those :func:`in_need`, and some more where the host would wait for their number; None if they are too many.
    """
    if not waits(weight):
        columns = in_need(weight, bias)
        return None if is_too_many(len(columns), weight.numel()) else columns
    tape = current()
    memo = {} if tape is None else tape.root.memo
    state = _state(weight, bias)
    if state not in memo:
        known = [m for m in list(_rooms) if m is not module and _is_here(*vectors(m), weight)]
        with no_modes():
            memo.update(_find([m for m in known if _state(*vectors(m)) not in memo] + [module]))
    found: Tensor | None = memo[state][0]
    return found


@dataclass(eq=False)
class _Room:
    """Of how many columns a norm keeps the input.

    Attributes:
        width: The number of columns.
        needed: How many were in need when the device last told.
        size: How many there is room for; None if those in need are too many.
        state: Of its vectors when ``size`` was settled: see :func:`_state`. None if it has to be settled anew.
    """

    width: int
    needed: int = 0
    size: int | None = None
    state: Any = None

    def settle(self, state: Any) -> None:
        """Make room for what those in need may become within a step."""
        spare = 1 + self.width // SPARE
        is_too_much = is_too_many(self.needed, self.width)
        self.state, self.size = state, None if is_too_much else min(self.needed + spare, self.width // SHARE)


#: Of the norms that have run on a device that the host would wait for.
_rooms: weakref.WeakKeyDictionary[nn.Module, _Room] = weakref.WeakKeyDictionary()
_questions = Questions()
#: By optimizer, while it steps: the rooms of its norms, where nobody else has changed γ or β.
_stepping: dict[int, list[tuple[nn.Module, _Room]]] = {}


def _is_in_need(weight: Tensor, bias: Tensor | None) -> Tensor:
    well = divides(weight)
    if bias is not None:
        well &= bias.abs() <= weight.abs()
    return well.logical_not_()


def _rank(weight: Tensor, bias: Tensor) -> Tensor:
    """Above 1, or NaN, for a column in need; the more, the larger |β| is beside |γ|."""
    ratio = (bias / weight).abs_().masked_fill_(divides(weight).logical_not_(), torch.inf)
    return torch.where(_is_in_need(weight, bias), 1 + ratio.clamp_min(1), ratio.clamp_max(1))


def _state(weight: Tensor, bias: Tensor | None) -> Any:
    """Another one when either has changed, or lies elsewhere."""
    return in_need, *((id(t), t._version, t.untyped_storage()._cdata) for t in (weight, bias) if t is not None)


def _is_here(weight: Tensor | None, bias: Tensor | None, like: Tensor) -> bool:
    """Whether the vectors of a norm can be read with those of ``like``: not where they are sharded or offloaded."""
    known = [t for t in (weight, bias) if t is not None]
    is_like = all(type(t) is type(like) and (t.device, t.dtype) == (like.device, like.dtype) for t in known)
    return weight is not None and is_like and all(t.untyped_storage().nbytes() for t in known)


def _find(modules: Sequence[nn.Module]) -> dict[Any, Any]:
    """Fill the rooms of all these norms, and ask how many of their columns are in need.

    Returns:
        By state: the columns, or None if they are too many; and the vectors, so that no others take their place in
        memory.
    """
    _watch_optimizers()
    norms: list[Any] = [vectors(module) for module in modules]
    weights = [weight.detach().flatten() for weight, _ in norms]
    biases = [
        torch.zeros_like(w) if b is None else b.detach().flatten() for w, (_, b) in zip(weights, norms, strict=True)
    ]
    widths = [len(w) for w in weights]
    ranks = _rank(torch.cat(weights), torch.cat(biases))
    is_needed = (ranks <= 1).logical_not_()
    states = [_state(*norm) for norm in norms]
    rooms = [_rooms.setdefault(module, _Room(width)) for module, width in zip(modules, widths, strict=True)]
    if backward_id() == -1 and has_numbers(ranks):
        _questions.hear()
        _questions.ask(is_needed, partial(_told, [weakref.ref(room) for room in rooms], widths))
    if any(room.state != state for room, state in zip(rooms, states, strict=True)):
        needed = _counts(is_needed.cpu(), widths) if has_numbers(ranks) else [0] * len(widths)
        for room, state, number in zip(rooms, states, needed, strict=True):
            if room.state != state:
                room.needed = number
                room.settle(state)
    columns = _neediest(ranks.split(widths), [room.size for room in rooms])
    return dict(zip(states, zip(columns, norms, strict=True), strict=True))


def _counts(is_needed: Tensor, widths: list[int]) -> list[int]:
    return [int(one.sum()) for one in is_needed.split(widths)]


def _neediest(ranks: Sequence[Tensor], sizes: Sequence[int | None]) -> list[Tensor | None]:
    """As many columns as each has room for; those of norms of one width together."""
    found: list[Tensor | None] = [None] * len(ranks)
    of_width = defaultdict(list)
    for i, size in enumerate(sizes):
        if size is not None:
            of_width[len(ranks[i])].append((i, size))
    for group in of_width.values():
        columns = torch.stack([ranks[i] for i, _ in group]).topk(max(size for _, size in group)).indices
        for (i, size), row in zip(group, columns, strict=True):
            found[i] = row[:size].clone()
    return found


def _told(asked: Sequence[weakref.ref[_Room]], widths: list[int], is_needed: Tensor) -> None:
    """Hear how many columns were in need in an earlier forward; the room of a norm that had too little is unsettled."""
    short = 0
    for ref, needed in zip(asked, _counts(is_needed, widths), strict=True):
        if (room := ref()) is not None:
            room.needed = needed
            if room.size is not None and room.needed > room.size:
                short, room.state = short + 1, None
    if short:
        logger.warning(
            "norm='output': in %d norms, one step brought more columns with |β| > |γ| or γ near 0 than there was room "
            "for, so that the gradients of the forward after it are imprecise there. From now on they keep their "
            "input. If this comes again, use norm='recompute'.", short,
        )  # fmt: skip


@cache
def _watch_optimizers() -> None:
    """Have every optimizer say when it steps: it changes little, and nobody else may."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    _questions.hear()
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    rooms = [(m, room) for m, room in list(_rooms.items()) if not own.isdisjoint(map(id, vectors(m)))]
    _stepping[id(optimizer)] = [(m, room) for m, room in rooms if room.state == _state(*vectors(m))]


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for module, room in _stepping.pop(id(optimizer), ()):
        room.settle(_state(*vectors(module)))
