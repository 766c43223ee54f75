"""The command ``memsave``. Its own help and version load no library; a command loads what it runs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

#: Command -> its line in the help. Each is a module of :mod:`hf_memsave.commands` with ``add_options`` and ``run``.
COMMANDS = {
    "report": "what would be patched in a model, and what it keeps, from its config alone",
    "estimate": "whether a training step fits a GPU, from the config alone: no weights, no GPU",
    "plan": "the cheapest setting whose training step fits a GPU: no weights, no GPU",
    "demo": "train a small BERT and a small LLaMA, stock and patched, and compare",
    "verify": "one training step of your model and batch, stock and patched, compared to the bit",
    "auto": "what to convert in your model, for your batch and your memory",
    "doctor": "versions, devices and other patchers; what would be patched in a model, and what not and why",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Show the help, or run one command; returns 0, or 1 if its check failed, or 2 if it cannot do what was asked."""
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    parser = argparse.ArgumentParser(
        prog="memsave", description="Fine-tune Hugging Face models keeping a fraction of the activation memory."
    )
    parser.add_argument("--version", action="version", version=f"hf_memsave {version('hf_memsave')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {name: commands.add_parser(name, help=line) for name, line in COMMANDS.items()}
    if argv[0] not in COMMANDS:
        parser.parse_args(argv)  # which ends the process
    command = import_module(f"hf_memsave.commands.{argv[0]}")
    command.add_options(parsers[argv[0]])
    args = argparse.Namespace()

    from hf_memsave.errors import MemSaveError

    import_module("hf_memsave.commands.options").quiet()
    try:
        return int(command.run(parser.parse_args(argv, args)))
    except MemSaveError as error:
        text = " ".join(error.on_command_line.split())
        for name in filter(lambda name: "_" in name, vars(args)):  # an argument's name, as this command's option
            text = re.sub(rf"(?<![\w/\\]){name}(?![\w/\\])", f"--{name.replace('_', '-')}", text)
        print(f"memsave {argv[0]}: error: {text}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
