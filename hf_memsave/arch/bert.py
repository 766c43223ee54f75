"""BERT: post-norm, GELU. The common sites are all it has."""

from hf_memsave.arch.spec import Arch

ARCH = Arch(model_type="bert", source="transformers.models.bert.modeling_bert", floor="6 + I")
