"""Which code a cached result is of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_READ = (".py", ".yaml", ".json")  # what results follow from


def code_version(asked: Sequence[str] = ()) -> str:
    """16 hexadecimal digits of what a result depends on, but not of how evidence is compared.

    That is the package, its settings, the scripts, the libraries' versions, and what is ``asked``, such as the command.
    """
    folders = (ROOT / name for name in ("hf_memsave", "configs", "scripts"))
    files = sorted(path for folder in folders for path in folder.rglob("*.*") if path.suffix in _READ)
    text = hashlib.sha256(repr((*asked, version("torch"), version("transformers"))).encode())
    for path in files:
        if ROOT / "scripts" / "results" not in path.parents and not path.name.startswith("evidence"):
            text.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return text.hexdigest()[:16]
