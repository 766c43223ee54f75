"""GPT-2: pre-norm, NewGELU, ``Conv1D`` linears. The common sites are all it has."""

from hf_memsave.arch.spec import Arch

ARCH = Arch(model_type="gpt2", source="transformers.models.gpt2.modeling_gpt2", floor="6 + I")
