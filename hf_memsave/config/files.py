"""The files that a :class:`~hf_memsave.MemSaveConfig` is read from: the package's presets and the user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hf_memsave.errors import ConfigError


def presets() -> dict[str, Any]:
    """Preset name -> its YAML file."""
    found = sorted((files("hf_memsave") / "presets").iterdir(), key=str)
    return {path.name.removesuffix(".yaml"): path for path in found if path.name.endswith(".yaml")}


def is_file(name: str) -> bool:
    """Whether a name is that of a file, rather than a preset's."""
    return name not in presets() and (name.endswith((".yaml", ".yml", ".json")) or Path(name).is_file())


def fields_of(path: str | Path) -> Any:
    """Returns what a YAML or JSON file says (every JSON file is a YAML file): a mapping, if it is one of fields.

    Raises:
        ConfigError: The file is missing, malformed or empty.
    """
    try:
        fields = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Expected a JSON or YAML file.") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is neither JSON nor YAML: {error}") from error
    if fields is None:
        raise ConfigError(
            f"{path} is empty: expected fields of MemSaveConfig, such as 'checkpoint: gate', got none.",
            "Use memsave=True for the exact default, or write {}.",
            option="Leave --memsave out for the exact default, or write {}.",
        )
    return fields


def refuse_unknown(cls: Any, fields: dict[str, Any]) -> None:
    """Raise ConfigError unless ``fields`` are some of those of the dataclass ``cls``."""
    known = [field.name for field in dataclasses.fields(cls)]
    if unknown := sorted(fields.keys() - set(known), key=str):
        raise ConfigError(
            f"{cls.__name__} has no field {listed(unknown)}: expected {listed(known)}. Check the spelling, or leave it "
            "out."
        )


def listed(names: Iterable[Any]) -> str:
    """Names, as an error lists them."""
    return ", ".join(map(repr, names))
