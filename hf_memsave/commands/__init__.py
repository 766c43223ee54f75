"""The commands of ``memsave``, one file each, and what they share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from hf_memsave.errors import MemSaveError

#: What to do about a step that fails stock, in the options of :mod:`hf_memsave.commands.inputs`.
GIVE_ANOTHER_BATCH = "Give one with --batch, or lower --batch-size or --seq-len."


#: What the library's errors advise -> the same in options.
_AS_OPTIONS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"Use memsave=True for the exact default, or (MemSaveConfig\(\.\.\.\) to choose each field|write {})\.": (
        "Leave --memsave out for the exact default, or name a file with fields, such as 'checkpoint: gate'."
    ),
    r"\bmemsave=True\b": "--memsave exact",
    r"(?<!--)\b(batch_size|seq_len)\b(?!=\.\.\.)": lambda found: "--" + found[0].replace("_", "-"),
}


class CommandError(MemSaveError):
    """A command that cannot do what it was asked to."""


def as_options(message: str) -> str:
    """What an error of the library says, with the remedies of a command line."""
    for advice, option in _AS_OPTIONS.items():
        message = re.sub(advice, option, message)
    return message


def positive_int(text: str) -> int:
    """An argument's type: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def check_picture(path: Path, suffixes: tuple[str, ...] = (".png", ".pdf", ".svg")) -> None:
    """Refuse, before the work that it would show, a picture or a page with pictures that cannot be written.

    Raises:
        CommandError: matplotlib or jinja2 is missing, or the folder is, or the name does not end in a format's name.
    """
    for library in ("matplotlib", "jinja2"):
        if find_spec(library) is None:
            needs = f"{path}: pictures need {library}, which is missing."
            raise CommandError(f"{needs} Run: pip install 'hf_memsave[plot]'")
    if path.suffix not in suffixes:
        raise CommandError(f"{path}: expected a name that ends in {' or '.join(suffixes)}. Rename the file.")
    check_folder(path)


def check_folder(path: Path) -> None:
    """Refuse a file in a folder that does not exist.

    Raises:
        CommandError: The folder is missing, or ``path`` is one.
    """
    if not path.parent.is_dir() or path.is_dir():
        raise CommandError(f"{path}: expected a file in a folder that exists. Create the folder, or name another file.")
