"""The command ``memsave``. Its own help and version load no library; a command loads what it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

#: Command -> its line in the help.
COMMANDS = {
    "report": "what would be patched in a model, and what it keeps, from its config alone",
    "estimate": "whether a training step fits a GPU, from the config alone: no weights, no GPU",
    "plan": "the cheapest setting whose training step fits a GPU: no weights, no GPU",
    "demo": "train a small BERT and a small LLaMA, stock and patched, and compare",
    "verify": "one training step of your model and batch, stock and patched, compared to the bit",
    "auto": "what to convert in your model, for your batch and your memory",
    "doctor": "versions, devices and other patchers; what would be patched in a model, and what not and why",
}


def top_level() -> tuple[argparse.ArgumentParser, Any]:
    """The parser of ``memsave`` itself, and the place for those of its commands."""
    parser = argparse.ArgumentParser(
        prog="memsave", description="Fine-tune Hugging Face models keeping a fraction of the activation memory."
    )
    parser.add_argument("--version", action="version", version=f"hf_memsave {version('hf_memsave')}")
    return parser, parser.add_subparsers(dest="command", metavar="COMMAND", required=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Show the help, or run one command.

    Args:
        argv: The arguments after the program's name; those of the process if None.

    Returns:
        The exit status: 0, 1 where a command's own check failed, 2 where it cannot do what was asked (one line on
        stderr says why).
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in COMMANDS:
        parser, commands = top_level()
        for name, line in COMMANDS.items():
            commands.add_parser(name, help=line)
        parser.parse_args(argv or ["--help"])
    from hf_memsave.cli import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
