"""The files that a :class:`~hf_memsave.MemSaveConfig` is read from, the package's presets and the user's own."""

from __future__ import annotations

import dataclasses
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hf_memsave.errors import ConfigError


def presets() -> dict[str, Any]:
    """Preset name -> its YAML file."""
    packaged = files("hf_memsave") / "configs" / "presets"
    folder = packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs" / "presets"
    return {p.name.removesuffix(".yaml"): p for p in sorted(folder.iterdir(), key=str) if p.name.endswith(".yaml")}


def is_file(name: str) -> bool:
    """Whether a name is that of a file, rather than a preset's."""
    return name not in presets() and (name.endswith((".yaml", ".yml", ".json")) or Path(name).is_file())


def fields_of(path: str | Path) -> Any:
    """What a JSON or YAML file says (every JSON file is a YAML file).

    Returns:
        A mapping, where it is a file of fields.

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
            f"{path} is empty: expected fields of MemSaveConfig, such as 'checkpoint: gate', got none. Use "
            "memsave=True for the exact default, or write {}."
        )
    return fields


def refuse_unknown(cls: Any, fields: dict[str, Any]) -> None:
    """Make sure that ``fields`` are some of the dataclass ``cls``.

    Raises:
        ConfigError: One is not.
    """
    known = [f.name for f in dataclasses.fields(cls)]
    if unknown := sorted(fields.keys() - set(known), key=str):
        found = f"{cls.__name__} has no field {listed(unknown)}: expected {listed(known)}"
        raise ConfigError(f"{found}. Check the spelling, or leave it out.")


def listed(names: Any) -> str:
    """Names, as an error lists them."""
    return ", ".join(repr(name) for name in names)
