"""The logger ``hf_memsave``, whose messages for the user go to stderr, once.

It shows what training keeps (INFO) and warnings, on the first process alone. ``HF_MEMSAVE_VERBOSITY`` (debug, info,
warning, error or critical) and ``logging.getLogger("hf_memsave").setLevel(...)`` change that, and so does Transformers'
verbosity from ERROR on, unless that variable is set.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TextIO

#: The one logger of the package.
logger = logging.getLogger("hf_memsave")
#: The variable that sets its level.
VARIABLE = "HF_MEMSAVE_VERBOSITY"
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class _Handler(logging.StreamHandler[TextIO]):
    """A handler that writes to the current ``sys.stderr``, between progress bars, what no other but a file's shows."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        others = [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else ())]
        unseen = self.__class__, logging.NullHandler, logging.FileHandler
        return not any(record.levelno >= h.level for h in others if not isinstance(h, unseen))

    def emit(self, record: logging.LogRecord) -> None:
        tqdm: Any = sys.modules.get("tqdm")
        with contextlib.nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=sys.stderr):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if text.startswith("hf_memsave") else f"hf_memsave: {text}"


#: Whether this thread is inside :func:`only_measuring`.
_is_measuring: ContextVar[bool] = ContextVar("is_measuring", default=False)


def _is_shown(record: logging.LogRecord) -> bool:
    """Return whether this process shows a record, by its rank and by the level of Transformers' loggers."""
    verbosity = 0 if os.environ.get(VARIABLE) else logging.getLogger("transformers").level
    is_quiet = verbosity >= logging.ERROR or is_measuring() or _rank() > 0
    return not is_quiet or record.levelno >= max(verbosity, logging.ERROR)


def _rank() -> int:
    """Return this process's rank: torch.distributed's where it is initialized, else the launcher's."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning the first time that this is called with this text."""
    logger.warning("%s", text)


@contextlib.contextmanager
def only_measuring() -> Iterator[None]:
    """Mark the steps that this thread runs inside as no training: of them only errors are logged."""
    token = _is_measuring.set(True)
    try:
        yield
    finally:
        _is_measuring.reset(token)


def is_measuring() -> bool:
    """Return whether this thread is inside :func:`only_measuring`."""
    return _is_measuring.get()


logger.addHandler(_Handler())
logger.addFilter(_is_shown)
_asked = os.environ.get(VARIABLE, "")
if logger.level == logging.NOTSET:  # else the user has set it before
    logger.setLevel(_LEVELS.get(_asked.lower(), logging.INFO))
if _asked and _asked.lower() not in _LEVELS:
    logger.warning("%s: expected one of %s, got %r. It stays at info.", VARIABLE, ", ".join(_LEVELS), _asked)
