"""The command ``memsave``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_memsave import MemSaveError, __version__
from hf_memsave.commands import auto, demo, doctor, estimate, plan, report, verify


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; those of the process if None.

    Returns:
        The exit status: 0, 1 where a command's own check failed, 2 where it cannot do what was asked (one line on
        stderr says why).
    """
    parser = argparse.ArgumentParser(
        prog="memsave", description="Fine-tune Hugging Face models keeping a fraction of the activation memory."
    )
    parser.add_argument("--version", action="version", version=f"hf_memsave {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    report.add_to(commands)
    estimate.add_to(commands)
    plan.add_to(commands)
    demo.add_to(commands)
    verify.add_to(commands)
    auto.add_to(commands)
    doctor.add_to(commands)

    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except MemSaveError as error:
        print(f"memsave {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
