"""What goes on the autograd tape instead of a tensor, and a meter for what is kept."""

from hf_memsave.tape.coding import Blank, Coded, coded
from hf_memsave.tape.hooks import Tape, current, is_available, promise, promised
from hf_memsave.tape.meter import Kept, measure_kept

__all__ = [
    "Blank", "Coded", "Kept", "Tape", "coded", "current", "is_available", "measure_kept", "promise", "promised",
]  # fmt: skip
