"""``MemSaveConfig``: what to keep for backward, in one frozen, strict, serializable place."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml

from hf_memsave.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MemSaveConfig:
    """What to keep instead of each kind of tensor. The defaults are exact: same loss and gradients, to the bit.

    Attributes:
        activation: Outputs of activations and gates: recomputed from their inputs, or kept as stock does.
        norm: Outputs of norms: recomputed from their inputs, or kept as stock does.
        dropout: Masks: drawn again from the generator's state ("seed"), kept in one bit an element ("mask": faster on
            CPU), or kept as stock does.
        attention: SDPA's repeated k and v, masks and transposed output: recomputed or shared, or kept as stock does.
        lora: PEFT adapters' casts of their input: recomputed, or kept as stock does.
    """

    activation: Literal["recompute", "stock"] = field(default="recompute")
    norm: Literal["recompute", "stock"] = field(default="recompute")
    dropout: Literal["seed", "mask", "stock"] = field(default="seed")
    attention: Literal["recompute", "stock"] = field(default="recompute")
    lora: Literal["recompute", "stock"] = field(default="recompute")

    def __post_init__(self) -> None:
        for name, allowed in _choices().items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"MemSaveConfig.{name} must be one of {_listed(allowed)}, got {value!r}. "
                    f"Leave it out for the default, {allowed[0]!r}."
                )

    @classmethod
    def resolve(cls, value: MemSaveConfig | str | bool | dict[str, Any] | None) -> MemSaveConfig | None:
        """What a ``memsave=`` argument means.

        Args:
            value: True for the default, a preset's name, a dict of fields, a config, or False.

        Returns:
            The config; None for False and None.

        Raises:
            ConfigError: It names a preset, field or value that does not exist.
        """
        if isinstance(value, cls):
            return value
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, str):
            return cls.preset(value)
        if isinstance(value, dict):
            return cls.from_dict(value)
        raise ConfigError(
            f"memsave must be True, False, a preset's name or a MemSaveConfig, got {type(value).__name__}. "
            "Use memsave=True for the exact default."
        )

    @classmethod
    def preset(cls, name: str) -> MemSaveConfig:
        """The config that ``configs/presets/<name>.yaml`` holds.

        Returns:
            A config of its own fields and the defaults.

        Raises:
            ConfigError: There is no such preset; the message lists those there are.
        """
        found = presets()
        if name not in found:
            raise ConfigError(
                f"unknown preset {name!r}: expected one of {_listed(found)}. Use memsave=True for the exact default, "
                "or MemSaveConfig(...) to choose each field."
            )
        return cls.from_dict(yaml.safe_load(found[name].read_text(encoding="utf-8")) or {})

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> MemSaveConfig:
        """The config with these fields.

        Returns:
            The config; fields not given have their defaults.

        Raises:
            ConfigError: A key is no field, or a value is not allowed.
        """
        if not isinstance(fields, dict):
            raise ConfigError(f"expected a mapping of MemSaveConfig fields, got {type(fields).__name__}: {fields!r}.")
        if unknown := sorted(fields.keys() - _choices().keys(), key=str):
            raise ConfigError(
                f"MemSaveConfig has no field {_listed(unknown)}: expected {_listed(_choices())}. "
                "Check the spelling, or leave it out."
            )
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON and YAML know it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_file(cls, path: str | Path) -> MemSaveConfig:
        """Read a JSON or YAML file (every JSON file is a YAML file).

        Returns:
            The config that :meth:`to_file` wrote.

        Raises:
            ConfigError: The file is missing or malformed, or a field or value does not exist.
        """
        try:
            fields = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}. Expected a JSON or YAML file.") from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} is neither JSON nor YAML: {error}") from error
        return cls.from_dict({} if fields is None else fields)

    def to_file(self, path: str | Path) -> None:
        """Write JSON where the name ends in ``.json``, else YAML."""
        text = json.dumps(self.to_dict(), indent=2) if str(path).endswith(".json") else yaml.safe_dump(self.to_dict())
        Path(path).write_text(text, encoding="utf-8")


def presets() -> dict[str, Any]:
    """Preset name -> its YAML file."""
    packaged = files("hf_memsave") / "configs" / "presets"
    folder = packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs" / "presets"
    return {p.name.removesuffix(".yaml"): p for p in sorted(folder.iterdir(), key=str) if p.name.endswith(".yaml")}


def _choices() -> dict[str, tuple[str, ...]]:
    return {name: get_args(hint) for name, hint in get_type_hints(MemSaveConfig).items()}


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
