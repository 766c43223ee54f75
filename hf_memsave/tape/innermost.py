"""Which tape is asked here."""

from __future__ import annotations

from hf_memsave.tape.hooks import Tape
from hf_memsave.tape.private import hooks_work, innermost_hooks


def current() -> Tape | None:
    """The tape that is innermost on this thread; None under a foreign hook, and wherever ops must be stock."""
    if not hooks_work():
        return None
    hooks = innermost_hooks()
    owner = getattr(hooks[0], "__self__", None) if hooks is not None else None
    return owner if isinstance(owner, Tape) else None
