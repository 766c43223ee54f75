"""The files that a :class:`~hf_memsave.MemSaveConfig` is read from: the package's presets and the user's own."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hf_memsave.errors import ConfigError


def presets() -> dict[str, Any]:
    """Preset name -> its YAML file."""
    found = sorted((files("hf_memsave") / "presets").iterdir(), key=str)
    return {path.name.removesuffix(".yaml"): path for path in found if path.name.endswith(".yaml")}


def fields_of(path: str | Path) -> Any:
    """Returns what a YAML or JSON file says (every JSON file is a YAML file): a mapping, if it is one of fields.

    Raises:
        ConfigError: The file is missing, malformed or empty.
    """
    try:
        fields = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(
            f"cannot read {path}{where}: {error.strerror}. Expected a JSON or YAML file, as memsave plan --out writes."
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is neither JSON nor YAML: {error}") from error
    if fields is None:
        raise ConfigError(
            f"{path} is empty: expected fields of MemSaveConfig, such as 'checkpoint: gate', got none.",
            "Use memsave=True for the exact default, or write {}.",
            option="Leave --memsave out for the exact default, or write {}.",
        )
    return fields
