"""OPT: pre-norm (OPT-350M: post-norm), ReLU. The common sites are all it has."""

from hf_memsave.arch.spec import Arch

ARCH = Arch(model_type="opt", source="transformers.models.opt.modeling_opt", floor="6 + I")
