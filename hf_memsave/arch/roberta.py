"""RoBERTa: BERT's blocks. The common sites are all it has."""

from hf_memsave.arch.spec import Arch

ARCH = Arch(model_type="roberta", source="transformers.models.roberta.modeling_roberta", floor="6 + I")
