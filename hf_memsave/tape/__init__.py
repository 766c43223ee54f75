"""What goes on the autograd tape instead of a tensor, and a meter for what is kept."""

from hf_memsave.tape.hooks import Tape, current, is_available, promise, promised
from hf_memsave.tape.meter import Kept, measure_kept

__all__ = ["Kept", "Tape", "current", "is_available", "measure_kept", "promise", "promised"]
