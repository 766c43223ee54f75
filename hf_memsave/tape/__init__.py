"""What goes on the autograd tape instead of a tensor, and a meter for what is kept."""

from hf_memsave.tape.meter import Kept, measure_kept
from hf_memsave.tape.private import hooks_work
from hf_memsave.tape.table import table_without
from hf_memsave.tape.tape import Tape, current

__all__ = ["Kept", "Tape", "current", "hooks_work", "measure_kept", "table_without"]
