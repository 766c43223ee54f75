"""The words of an architecture table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Site:
    """One place where an op replaces a module.

    Attributes:
        cls: Name of the module's class in the table's ``source``, or a full dotted path.
        op: Name of the op.
        names: The op's role -> the module's attribute, where they differ.
    """

    cls: str
    op: str
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Arch:
    """The sites of one ``model_type``.

    Attributes:
        model_type: As in the model's ``config.json``.
        source: The module that defines the classes.
        sites: What to patch, beyond what every model shares.
        floor: Kept memory per layer at the floor, in u: a formula of g (kv heads / heads) and I (MLP width / hidden).
    """

    model_type: str
    source: str
    sites: tuple[Site, ...] = ()
    floor: str = ""

    def by_class(self) -> dict[str, Site]:
        """Full class path -> site."""
        return {site.cls if "." in site.cls else f"{self.source}.{site.cls}": site for site in self.sites}
