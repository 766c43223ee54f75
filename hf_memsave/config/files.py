"""Read the files of a :class:`~hf_memsave.MemSaveConfig`, and write any file as a whole."""

from __future__ import annotations

import os
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from hf_memsave.errors import ConfigError


def presets() -> dict[str, Any]:
    """Return the YAML file of each preset, by name."""
    found = sorted((files("hf_memsave") / "presets").iterdir(), key=str)
    return {path.name.removesuffix(".yaml"): path for path in found if path.name.endswith(".yaml")}


def write(path: str | Path, data: str | bytes) -> None:
    """Write a file as a whole: an OSError, whose ``filename`` is ``path``, leaves the file that was there."""
    content, place = data.encode() if isinstance(data, str) else data, Path(path)
    try:
        if place.exists() and not place.is_file():  # such as /dev/stdout
            place.write_bytes(content)
            return
        place = Path(os.path.realpath(place))  # a link stays one
        made = place.with_name(f".{uuid4()}")
        try:
            made.write_bytes(content)
            if place.exists():
                place.open("r+b").close()  # not allowed where the file is read-only
                shutil.copymode(place, made)
            made.replace(place)
        finally:
            made.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def fields_of(path: str | Path) -> Any:
    """Return what a YAML or JSON file says, fields as a mapping; ConfigError if it is missing, malformed or empty."""
    try:
        fields = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        reason = f"cannot read {path}{where}: {error.strerror}."
        raise ConfigError(reason, "Expected a JSON or YAML file, as memsave plan --out writes.") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is neither JSON nor YAML: {error}") from error
    if fields is None:
        raise ConfigError(
            f"{path} is empty: expected fields of MemSaveConfig, such as 'checkpoint: gate', got none.",
            "Use memsave=True for the exact default, or write {}.",
            option="Leave --memsave out for the exact default, or write {}.",
        )
    return fields
