"""Dataclass fields of configs: an unknown one raises an error with the known ones, and ``repr`` shows changed ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from hf_memsave.errors import ConfigError

T = TypeVar("T")


class UnknownFieldError(ConfigError, TypeError):
    """A field that a config does not have; also a TypeError, as Python raises for an unknown keyword."""


def named_fields(cls: type[T]) -> type[T]:
    """Make the dataclass ``cls`` refuse unknown fields, with a list of its own, and show only changed ones."""
    init: Any = cls.__init__

    @wraps(init)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        if args:
            first = f"{cls.__name__}({dataclasses.fields(cls)[0].name}=...)"  # type: ignore[arg-type]
            is_name = "; a preset's name or a file goes to memsave= itself" if isinstance(args[0], str) else ""
            remedy = f"Name the field, as in {first}{is_name}."
            raise UnknownFieldError(f"{cls.__name__} takes fields by name, got {listed(args)}. {remedy}")
        refuse_unknown(cls, given)
        init(self, **given)

    def __repr__(self: Any) -> str:
        found = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        changed = [f"{n}={dict(v) if n == 'layers' else v!r}" for n, v, default in found if v != default]
        return f"{type(self).__name__}({', '.join(changed)})"

    cls.__init__, cls.__repr__ = __init__, __repr__  # type: ignore[method-assign]
    return cls


def refuse_unknown(cls: Any, fields: dict[str, Any]) -> None:
    """Raise UnknownFieldError unless all of ``fields`` are fields of the dataclass ``cls``."""
    known = [field.name for field in dataclasses.fields(cls)]
    if unknown := sorted(fields.keys() - set(known), key=str):
        remedy = did_you_mean(unknown, known) or "Check the spelling, or leave it out."
        raise UnknownFieldError(f"{cls.__name__} has no field {listed(unknown)}: expected {listed(known)}. {remedy}")


def did_you_mean(unknown: Iterable[Any], known: Iterable[str]) -> str:
    """Return a question that names what is spelled like ``unknown``, or "" if nothing is."""
    near = [name for one in unknown for name in get_close_matches(str(one), known, 1)]
    return f"Did you mean {listed(near)}?" if near else ""


def listed(names: Iterable[Any]) -> str:
    """Join the names for an error message."""
    return ", ".join(map(repr, names))
