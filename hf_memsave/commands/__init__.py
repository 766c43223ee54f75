"""The commands of ``memsave``, one file each, and what they share."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from hf_memsave.errors import MemSaveError

#: What to do about a step that fails stock, in the options of :mod:`hf_memsave.commands.inputs`.
GIVE_ANOTHER_BATCH = "Give one with --batch, or lower --batch-size or --seq-len."


class CommandError(MemSaveError):
    """A command that cannot do what it was asked to."""


def positive_int(text: str) -> int:
    """An argument's type: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def check_picture(path: Path) -> None:
    """Refuse, before the work that it would show, a picture that cannot be written.

    Raises:
        CommandError: matplotlib is missing, or the folder is, or the name does not end in a format's name.
    """
    if find_spec("matplotlib") is None:
        raise CommandError(f"{path}: pictures need matplotlib, which is missing. Run: pip install 'hf_memsave[plot]'")
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise CommandError(f"{path}: expected a name that ends in .png, .pdf or .svg. Rename the picture.")
    check_folder(path)


def check_folder(path: Path) -> None:
    """Refuse a file in a folder that does not exist.

    Raises:
        CommandError: The folder is missing, or ``path`` is one.
    """
    if not path.parent.is_dir() or path.is_dir():
        raise CommandError(f"{path}: expected a file in a folder that exists. Create the folder, or name another file.")
