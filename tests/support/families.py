"""Small models of the supported families, from configs, with random weights; and a batch for each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB, CLASSES = 512, 2


@dataclass(frozen=True)
class Size:
    """Widths of a model and its batch; ``layers`` counts the blocks of the stack under test."""

    hidden: int = 32
    heads: int = 4
    layers: int = 2
    batch: int = 2
    seq: int = 16

    def u(self, itemsize: int) -> int:
        """Bytes of one activation of the block."""
        return self.batch * self.seq * self.hidden * itemsize


#: The setting in which kept memory is quoted.
QUOTED = Size(hidden=256, heads=4, batch=4, seq=128)
#: The same for what is in proportion to the batch: products in bf16 may be slow.
HALF = replace(QUOTED, batch=2)

FAMILIES = (
    "bert", "roberta", "gpt2", "t5-encoder", "t5-decoder", "t5-gated-encoder", "llama", "mistral", "phi", "phi3",
    "opt",
)  # fmt: skip
#: More of them, for the tests of what is kept.
MORE = ("distilbert", "electra", "qwen2", "qwen3", "gemma")


def build(family: str, size: Size = Size(), dtype: torch.dtype = torch.float32, dropout: float = 0.1) -> nn.Module:
    """A model in training mode; dropout as given, in attention 0; MLP 4x wide (gated 2.75x), half the kv heads.

    T5's relative attention bias is frozen: on CPU, SDPA keeps seq x seq tensors for a bias that wants a gradient.
    """
    torch.manual_seed(0)
    h, heads = size.hidden, size.heads
    gated = int(2.75 * h)
    common = dict(hidden_size=h, num_hidden_layers=size.layers, num_attention_heads=heads, vocab_size=VOCAB)
    if family in ("bert", "roberta", "electra"):
        options = dict(common, intermediate_size=4 * h, hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0)
        options["num_labels"] = CLASSES
        model = {
            "bert": lambda: BertForSequenceClassification(BertConfig(**options)),
            "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**options)),
            "electra": lambda: ElectraForSequenceClassification(ElectraConfig(**options, embedding_size=h)),
        }[family]()
    elif family == "distilbert":
        options = dict(dim=h, hidden_dim=4 * h, n_layers=size.layers, n_heads=heads, vocab_size=VOCAB)
        drops = dict(dropout=dropout, attention_dropout=0.0)
        model = DistilBertForSequenceClassification(DistilBertConfig(**options, **drops, num_labels=CLASSES))
    elif family == "gpt2":
        drops = dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0)
        model = GPT2LMHeadModel(GPT2Config(n_embd=h, n_layer=size.layers, n_head=heads, vocab_size=VOCAB, **drops))
    elif family.startswith("t5"):
        model = _t5(family, size, dropout)
    elif family == "opt":
        options = dict(common, ffn_dim=4 * h, word_embed_proj_dim=h, max_position_embeddings=size.seq)
        model = OPTForCausalLM(OPTConfig(**options, dropout=dropout, attention_dropout=0.0))
    elif family == "phi":
        model = PhiForCausalLM(PhiConfig(**common, intermediate_size=4 * h, resid_pdrop=dropout))
    else:
        options = dict(common, intermediate_size=gated, num_key_value_heads=heads // 2, pad_token_id=0)
        model = {
            "llama": lambda: LlamaForCausalLM(LlamaConfig(**options)),
            "mistral": lambda: MistralForCausalLM(MistralConfig(**options)),
            "phi3": lambda: Phi3ForCausalLM(Phi3Config(**options, resid_pdrop=dropout)),
            "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**options)),
            "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**options, head_dim=h // heads)),
            "gemma": lambda: GemmaForCausalLM(GemmaConfig(**options, head_dim=h // heads)),
        }[family]()
    return model.to(dtype).train()


def _t5(family: str, size: Size, dropout: float) -> nn.Module:
    is_gated = "gated" in family
    of_encoder = family.endswith("encoder")
    model = T5ForConditionalGeneration(
        T5Config(
            d_model=size.hidden,
            d_kv=size.hidden // size.heads,
            d_ff=int(2.75 * size.hidden) if is_gated else 4 * size.hidden,
            num_heads=size.heads,
            num_layers=size.layers if of_encoder else 2,
            num_decoder_layers=2 if of_encoder else size.layers,
            vocab_size=VOCAB,
            dropout_rate=dropout,
            feed_forward_proj="gated-gelu" if is_gated else "relu",
            decoder_start_token_id=0,
        )
    )
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.0
            if module.has_relative_attention_bias:
                module.relative_attention_bias.weight.requires_grad_(False)
    return model


def batch_for(model: nn.Module, size: Size = Size(), padded: bool = False, seed: int = 1) -> dict[str, torch.Tensor]:
    """Token ids, an attention mask (right-padded where asked for) and labels, on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size.batch, size.seq)
    mask = torch.ones(shape, dtype=torch.long)
    if padded:
        mask[1:, size.seq * 3 // 4 :] = 0
    classifies = hasattr(model, "classifier")
    labels = torch.randint(0, CLASSES, shape[:1], generator=generator) if classifies else None
    ids = torch.randint(5, VOCAB, shape, generator=generator)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone() if labels is None else labels}
    return {name: value.to(model.device) for name, value in batch.items()}
