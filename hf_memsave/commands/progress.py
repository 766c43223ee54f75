"""Show on a terminal what a command is at, and for how long."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hf_memsave.commands.arguments import STANDARD_OUTPUT


def progress(console: Console, what: str, redirects: bool = True) -> Progress:
    """Return a context that shows ``what`` a command is at and its seconds; nothing but on a terminal."""
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    is_off = console.stderr or not (console.is_terminal and sys.stderr.isatty())
    options: dict[str, Any] = {"redirect_stdout": redirects, "redirect_stderr": redirects, "disable": is_off}
    shown = Progress(*columns, console=console, transient=True, **options)
    shown.add_task(what, total=None)
    return shown


def loading(args: argparse.Namespace) -> Progress:
    """Return the context in which the libraries of a command with these arguments are imported."""
    console = Console(stderr=getattr(args, "json", None) == STANDARD_OUTPUT)
    return progress(console, "Loading PyTorch and Transformers ...", redirects=False)
