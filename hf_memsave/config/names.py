"""Check that a model's name stands for something, before a large library is loaded, and know some models by name."""

from __future__ import annotations

import contextlib
import re
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_memsave.config.fields import did_you_mean
from hf_memsave.config.files import fields_of
from hf_memsave.errors import MeasureError

#: Seconds within which the hub has to answer; else only the cache is read.
_SECONDS = 4
#: The file of the package with sizes of known models.
SHAPES = "shapes.yaml"


def refuse_missing(name: str, *files: str) -> None:
    """Raise MeasureError for a path that does not exist, and for a folder with none of these files."""
    path = Path(name)
    if not path.exists() and (name.endswith(".json") or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)):
        raise MeasureError(f"{name}: no such file or folder. Expected a config.json, or a folder with one.")
    if path.is_dir() and not any((path / file).is_file() for file in files):
        raise MeasureError(f"{name}: expected a config.json in this folder, found none. Name the model's folder.")


def shape_of(name: str) -> dict[str, Any]:
    """Return the fields of a known model's configuration, by its name or one on the hub; none of another model."""
    last = name.rpartition("/")[2].lower().removeprefix("meta-").removesuffix("-hf")
    return _shapes().get(last, {})


def _shapes() -> dict[str, dict[str, Any]]:
    return fields_of(Path(__file__).parents[1] / SHAPES)  # type: ignore[no-any-return]


def may_be_type(name: str) -> bool:
    """Return whether the installed Transformers may have a model type of that name, without loading it."""
    found = find_spec("transformers")
    files = Path((found and found.origin) or "").parent.glob("models/auto/*.py")
    return "/" not in name and any(f'"{name}"' in file.read_text(encoding="utf-8") for file in files)


def refuse_unreachable(name: str) -> None:
    """Raise MeasureError for an unknown name on the hub that is not in the cache while the hub does not answer."""
    from huggingface_hub import constants, try_to_load_from_cache

    near = did_you_mean([name.rpartition("/")[2].lower()], _shapes())
    if not shape_of(name) and not isinstance(try_to_load_from_cache(name, "config.json"), str) and not hub_answers():
        raise MeasureError(
            f"{name}: expected a model in the cache or an answer from {constants.ENDPOINT}, got neither "
            f"within {_SECONDS} seconds. Check the network, HTTPS_PROXY and HF_ENDPOINT, or name a folder, its "
            "config.json, a model type such as 'bert', or a known model such as 'llama-3-8b'.",
            near,
        )


def hub_answers() -> bool:
    """Return whether the hub answers within seconds, where its own client would try for a minute."""
    from huggingface_hub import constants, get_session

    answers = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # of the client in use, or that it is told to stay offline
            answers.append(get_session().head(constants.ENDPOINT, timeout=_SECONDS))

    # A host may have many addresses, each of which takes so long.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return bool(answers)
