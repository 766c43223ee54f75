"""What is approximated, sampled or left to stock by module: a table of classes. The exact floor needs none."""

from hf_memsave.arch.sites import HIDDEN, KINDS, LINEARS, kind_of, path_of

__all__ = ["HIDDEN", "KINDS", "LINEARS", "kind_of", "path_of"]
