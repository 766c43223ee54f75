"""What goes on the autograd tape instead of a tensor."""

from hf_memsave.tape.current import clear_leftovers, current, has_leftovers
from hf_memsave.tape.private import hooks_work
from hf_memsave.tape.table import table_without
from hf_memsave.tape.tape import Tape

__all__ = ["Tape", "clear_leftovers", "current", "has_leftovers", "hooks_work", "table_without"]
