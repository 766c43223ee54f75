"""The tape that calls on this thread ask, and what an interrupt has left there."""

from __future__ import annotations

from typing import Any

from hf_memsave.tape import private
from hf_memsave.tape.offload import Offload
from hf_memsave.tape.private import hooks_work, innermost_hooks
from hf_memsave.tape.tape import Tape


def current() -> Tape | None:
    """Return the tape innermost on this thread; None under a foreign hook, and wherever ops must be stock."""
    hooks = innermost_hooks() if hooks_work() else None
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, Tape) else None


def has_leftovers() -> bool:
    """Return whether a tape's mode or hooks are on this thread."""
    modes = [private.get_mode(i) for i in range(private.count_modes())]
    return any(isinstance(one, Tape) for one in (_owner(innermost_hooks()), *modes))


def clear_leftovers() -> None:
    """Remove the modes and hooks that interrupted forwards left on this thread; for where none of our forwards runs."""
    while isinstance(_owner(innermost_hooks()), (Tape, Offload)):
        private.pop_hooks()
    modes = [private.pop_mode() for _ in range(private.count_modes())]
    for mode in reversed(modes):
        if not isinstance(mode, Tape):
            private.push_mode(mode)


def _owner(hooks: Any) -> Any:
    return None if hooks is None else getattr(hooks[0], "__self__", None)
