"""What an op is to the patching layer, and how a patched module knows its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn


class KeptBytes(NamedTuple):
    """Bytes an op makes autograd keep: in stock eager code, and here."""

    eager: int
    here: int


def _nothing_to_check(module: nn.Module, names: Mapping[str, str]) -> str | None:
    return None


def _nothing_to_note(module: nn.Module, binding: Binding) -> str:
    return ""


def _nothing_to_refuse(module: nn.Module, binding: Binding) -> str | None:
    return None


def children_are_modules(*roles: str) -> Callable[[nn.Module, Mapping[str, str]], str | None]:
    """A check that the attributes playing ``roles`` are modules."""

    def check(module: nn.Module, names: Mapping[str, str]) -> str | None:
        for name in (names.get(role, role) for role in roles):
            child = getattr(module, name, None)
            if not isinstance(child, nn.Module):
                return f"its {name} is {type(child).__name__}, not a module"
        return None

    return check


@dataclass(frozen=True)
class Op:
    """One memory-saving replacement of a module's forward, or of another of its methods.

    Attributes:
        name: Named like its file.
        setting: The :class:`~hf_memsave.MemSaveConfig` field that chooses it; None if the op is always on.
        forward: Called as ``forward(module, binding, *args, **kwargs)`` where a tape is innermost; elsewhere the stock
            forward runs. It must read the module's children at call time and draw random numbers as stock does.
        check: Returns why this module cannot take the op, or None. Must neither change the module nor run it.
        note: Returns what a patched module still keeps beyond the floor, for the report; "" for nothing.
        refuse: Returns why the value that was asked for cannot be had from this module, and the remedy, or None. Unlike
            ``check``, it always ends in an error.
        expressions: The forwards that the op is exact for, as source text that calls attributes of self by their roles;
            empty where the op calls the module's own forward, or replaces one of PyTorch's.
        method: What the op replaces.
        opens_tape: The op puts a tape in place itself, so it runs without one.
        takes_config: The value of its bindings is the whole config, and not that of its setting alone.
    """

    name: str
    setting: str | None
    forward: Callable[..., Any]
    check: Callable[[nn.Module, Mapping[str, str]], str | None] = _nothing_to_check
    note: Callable[[nn.Module, Binding], str] = _nothing_to_note
    refuse: Callable[[nn.Module, Binding], str | None] = _nothing_to_refuse
    opens_tape: bool = False
    expressions: tuple[str, ...] = ()
    method: str = "forward"
    takes_config: bool = False


@dataclass(frozen=True)
class Binding:
    """What one patched class knows: the class it replaces, its op, where to find the children, and the chosen value.

    The value is that of the op's setting; for a block and an op that ``takes_config``, the whole config. ``alone`` is
    the whole config of a layer that was patched by itself, and None elsewhere.
    """

    stock: Any
    op: Op
    names: Mapping[str, str] = field(default_factory=dict)
    value: Any = "recompute"
    alone: Any = None

    @property
    def tape_config(self) -> Any:
        """The whole config, of a module that lays a tape around its forward; None if it lays none."""
        return self.value if self.op.name == "block" else self.alone

    def child(self, module: nn.Module, role: str) -> Any:
        """The attribute of ``module`` that plays ``role`` ("gate", "eps", …)."""
        return getattr(module, self.names.get(role, role))
