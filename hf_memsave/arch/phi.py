"""Phi: attention and MLP side by side after one norm, NewGELU. The common sites are all it has."""

from hf_memsave.arch.spec import Arch

ARCH = Arch(model_type="phi", source="transformers.models.phi.modeling_phi", floor="5 + I")
