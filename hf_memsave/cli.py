"""The commands of ``memsave``; its own help stands in :mod:`hf_memsave_cli`, which loads no library for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from hf_memsave.commands import as_options
from hf_memsave.errors import MemSaveError
from hf_memsave_cli import main, top_level

__all__ = ["main", "run"]


def run(argv: Sequence[str]) -> int:
    """Run the command that ``argv`` begins with.

    Returns:
        Its exit status; 2 where it cannot do what was asked.
    """
    parser, commands = top_level()
    import_module(f"hf_memsave.commands.{argv[0]}").add_to(commands)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except MemSaveError as error:
        print(f"memsave {args.command}: error: {' '.join(as_options(str(error)).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
