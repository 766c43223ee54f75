"""Tables of stock classes, by name: what is approximated, sampled, fused, run again or left to stock by module."""

from hf_memsave.arch.fused import FUSED, fused_of
from hf_memsave.arch.sites import HIDDEN, KIND_OF_CLASS, LINEARS, LORA, RUN_AGAIN, is_run_again, kind_of, path_of

__all__ = [
    "FUSED", "HIDDEN", "KIND_OF_CLASS", "LINEARS", "LORA", "RUN_AGAIN", "fused_of", "is_run_again", "kind_of",
    "path_of",
]  # fmt: skip
