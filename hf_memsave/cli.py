"""The command ``memsave``. Help and wrong arguments load no large library; a command loads what it runs."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module

from hf_memsave import __version__
from hf_memsave.errors import MemSaveError

#: Command -> its line in the help. Each is a module of :mod:`hf_memsave.commands` with ``run``.
COMMANDS = {
    "report": "what patch() changes in a model, and what a step keeps, from the config alone",
    "estimate": "whether a training step fits a GPU, from the config alone: no weights, no GPU",
    "plan": "the cheapest setting whose training step fits a GPU: no weights, no GPU",
    "demo": "train a small BERT and a small LLaMA, stock and patched, and compare",
    "verify": "one training step of your model and batch, stock and patched, compared bit by bit",
    "auto": "what to convert in your model, for your batch and your memory",
    "doctor": "versions and devices; what patch() changes in a model, and what not and why",
}


def main(given: Sequence[str] | None = None) -> int:
    """Show the help, or run one command; return 0, or 1 if its check failed, or 2 if it cannot do what was asked."""
    argv = list(sys.argv[1:] if given is None else given) or ["--help"]
    about = "Fine-tune Hugging Face models with less activation memory."
    parser = argparse.ArgumentParser("memsave", description=about)
    parser.add_argument("--version", action="version", version=f"hf_memsave {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {name: commands.add_parser(name, help=line) for name, line in COMMANDS.items()}
    if argv[0] not in COMMANDS:
        parser.parse_args(argv)  # which ends the process
    arguments = import_module("hf_memsave.commands.arguments")
    arguments.add_options(parsers[argv[0]], argv[0])
    try:
        args = arguments.parse(parser, parsers[argv[0]], argv)
        arguments.check(args)
        if given is None and argv[0] in ("report", "estimate", "plan") and "--check" not in argv:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else each trace runs in a process of its own, without GPUs
        with quiet():
            gc.disable()
            with import_module("hf_memsave.commands.progress").loading(args):
                command = import_module(f"hf_memsave.commands.{argv[0]}")
            gc.enable()
            if given is None:
                gc.freeze()  # what is loaded stays: looking through it for garbage and for tensors takes seconds
            status = int(command.run(args))
        print(end="", flush=True)
        return status
    except MemSaveError as error:
        wrong = " ".join(error.on_command_line.split())
    except OSError as error:
        wrong = f"expected to read or write {error.filename or 'standard output'}, got: {error.strerror or error}. "
        wrong += "Make room there, or name another file."
        if given is None and error.filename is None:  # what cannot be printed would be tried again as the process ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    print(f"memsave {argv[0]}: error: {wrong}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide other libraries' logs and warnings while a command runs: what stops it is raised."""
    before, fake = logging.root.manager.disable, logging.getLogger("torch._subclasses.fake_tensor")
    logging.disable(logging.WARNING)
    fake.disabled = True  # it logs, as an error, what it raises
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("default", module="hf_memsave")
            yield
    finally:
        logging.disable(before)
        fake.disabled = False


if __name__ == "__main__":
    sys.exit(main())
