"""Small models from configs, with random weights, and a batch for each."""

from dataclasses import dataclass, replace

import torch
import transformers

VOCAB, CLASSES = 512, 2
#: Log-mel bins of Whisper's input.
MELS = 16


@dataclass(frozen=True)
class Size:
    """Widths of a model and its batch; ``layers`` counts the blocks of the stack under test."""

    hidden: int = 32
    heads: int = 4
    layers: int = 2
    batch: int = 2
    seq: int = 16

    def u(self, itemsize):
        """Bytes of one activation of the block."""
        return self.batch * self.seq * self.hidden * itemsize


#: The setting in which kept memory is quoted.
QUOTED = Size(hidden=256, heads=4, batch=4, seq=128)
#: For what is in proportion to the batch, as products in bf16 may be slow.
HALF = replace(QUOTED, batch=2)

FAMILIES = (
    "bert", "roberta", "gpt2", "t5-encoder", "t5-decoder", "t5-gated-encoder", "llama", "mistral", "phi", "phi3",
    "opt",
)  # fmt: skip
#: For the tests of what is kept.
MORE = ("distilbert", "electra", "qwen2", "qwen3", "gemma")
#: The fewest u a layer: norm inputs (2), q, k, v, o (4; LLaMA's k and v have half the heads) and the MLP's inner width
#: (4; gated 2 x 2.75); a cross-attention has a norm and q, k, v, o more; Phi's two branches share one norm.
FLOOR = {
    **dict.fromkeys(("bert", "roberta", "distilbert", "electra", "gpt2", "opt", "t5-encoder"), 10),
    **dict.fromkeys(("llama", "mistral", "phi3", "qwen2", "qwen3", "gemma"), 10.5),
    "t5-decoder": 15, "t5-gated-encoder": 11.5, "phi": 9,
}  # fmt: skip
#: How a model is trained, and the dtype of its weights.
MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}
#: Of each, the dtype of autocast.
LOW = {"fp32": None, "bf16": None, "autocast": torch.bfloat16}
#: With other norms, eager attention, encoders and decoders, or experts.
ZOO = (
    "gemma2", "gemma3", "olmo2", "glm4", "cohere2", "modernbert", "bart-encoder", "bart-decoder", "whisper-encoder",
    "whisper-decoder", "gpt_neox", "starcoder2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3",
)  # fmt: skip


def _parts(family, size, dropout):
    """The stem of the model's classes in Transformers, its head, and its config's fields."""
    h, heads, layers = size.hidden, size.heads, size.layers
    head_dim = h // heads
    common = dict(hidden_size=h, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=VOCAB)
    wide, gated = (common | dict(intermediate_size=width) for width in (4 * h, int(2.75 * h)))
    encoder = wide | dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0, num_labels=CLASSES)
    grouped = gated | dict(num_key_value_heads=heads // 2, pad_token_id=0)
    full = grouped | dict(head_dim=head_dim, bos_token_id=1, eos_token_id=2)
    routed = full | dict(intermediate_size=h, num_local_experts=4, num_experts_per_tok=2)
    stacks = ("encoder_layers", "decoder_layers")
    sequences = dict(
        d_model=h, encoder_ffn_dim=4 * h, decoder_ffn_dim=4 * h, encoder_attention_heads=heads,
        decoder_attention_heads=heads, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, dropout=dropout, attention_dropout=0.0,
    ) | dict.fromkeys(stacks, 2) | {f"{family.rpartition('-')[2]}_layers": layers}  # fmt: skip
    t5 = dict(
        d_model=h, d_kv=head_dim, d_ff=int(2.75 * h) if "gated" in family else 4 * h, num_heads=heads,
        num_layers=layers if family.endswith("encoder") else 2,
        num_decoder_layers=layers if family.endswith("decoder") else 2, vocab_size=VOCAB, dropout_rate=dropout,
        feed_forward_proj="gated-gelu" if "gated" in family else "relu", decoder_start_token_id=0,
    )  # fmt: skip
    bart = sequences | dict(max_position_embeddings=size.seq)
    whisper = sequences | dict(num_mel_bins=MELS, max_source_positions=size.seq, max_target_positions=size.seq)
    # Latent queries of half the model's width, latent keys and values of a quarter, a shared expert beside the others.
    deepseek = full | dict(
        q_lora_rank=h // 2, kv_lora_rank=h // 4, qk_nope_head_dim=head_dim * 3 // 4, qk_rope_head_dim=head_dim // 4,
        v_head_dim=head_dim, num_key_value_heads=heads, head_dim=head_dim // 4, moe_intermediate_size=h // 2,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=0,
    )  # fmt: skip
    classifies, models, generates = "SequenceClassification", "CausalLM", "ConditionalGeneration"
    return {
        "bert": ("Bert", classifies, encoder),
        "roberta": ("Roberta", classifies, encoder),
        "electra": ("Electra", classifies, encoder | dict(embedding_size=h)),
        "distilbert": ("DistilBert", classifies, dict(
            dim=h, hidden_dim=4 * h, n_layers=layers, n_heads=heads, vocab_size=VOCAB, dropout=dropout,
            attention_dropout=0.0, num_labels=CLASSES,
        )),
        "gpt2": ("GPT2", "LMHeadModel", dict(
            n_embd=h, n_layer=layers, n_head=heads, vocab_size=VOCAB, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=0.0,
        )),
        **dict.fromkeys(("t5-encoder", "t5-decoder", "t5-gated-encoder"), ("T5", generates, t5)),
        "falcon": ("Falcon", models, common),
        "opt": ("OPT", models, common | dict(
            ffn_dim=4 * h, word_embed_proj_dim=h, max_position_embeddings=size.seq, dropout=dropout,
            attention_dropout=0.0,
        )),
        "phi": ("Phi", models, wide | dict(resid_pdrop=dropout)),
        "phi3": ("Phi3", models, grouped | dict(resid_pdrop=dropout)),
        **{stem.lower(): (stem, models, grouped) for stem in ("Llama", "Mistral", "Qwen2")},
        **{stem.lower(): (stem, models, grouped | dict(head_dim=head_dim)) for stem in ("Qwen3", "Gemma")},
        **{stem.lower(): (stem, models, full) for stem in ("Gemma3", "Olmo2", "Glm4", "Cohere2")},
        "gemma2": ("Gemma2", models, full | dict(attn_implementation="eager")),
        "modernbert": ("ModernBert", classifies, gated | dict(
            num_labels=CLASSES, pad_token_id=0, embedding_dropout=dropout, mlp_dropout=dropout, attention_dropout=0.0,
        )),
        **dict.fromkeys(("bart-encoder", "bart-decoder"), ("Bart", generates, bart)),
        **dict.fromkeys(("whisper-encoder", "whisper-decoder"), ("Whisper", generates, whisper)),
        "gpt_neox": ("GPTNeoX", models, wide | dict(
            bos_token_id=1, eos_token_id=2, hidden_dropout=dropout, attention_dropout=0.0,
        )),
        "starcoder2": ("Starcoder2", models, full | dict(intermediate_size=4 * h, residual_dropout=dropout)),
        "mixtral": ("Mixtral", models, routed),
        "qwen3_moe": ("Qwen3Moe", models, full | dict(
            moe_intermediate_size=h, num_experts=4, num_experts_per_tok=2,
        )),
        "gpt_oss": ("GptOss", models, routed),
        "deepseek_v3": ("DeepseekV3", models, deepseek),
    }[family]  # fmt: skip


def config_of(family, size=Size(), dropout=0.1, **more):
    """The config of a model of :func:`build`, with ``more`` fields."""
    stem, _, fields = _parts(family, size, dropout)
    return getattr(transformers, f"{stem}TextConfig" if stem == "Gemma3" else f"{stem}Config")(**fields | more)


def build(family, size=Size(), dtype=torch.float32, dropout=0.1, head=None, **more):
    """A model in training mode; dropout as given, in attention 0; MLP 4x wide (gated 2.75x), half the kv heads.

    ``head`` is another one than the family's ("ForTokenClassification", "Model"), ``more`` other fields of its config.
    T5's relative attention bias is frozen: on CPU, SDPA keeps seq x seq tensors for a bias that wants a gradient.
    """
    torch.manual_seed(0)
    stem, its_head, _ = _parts(family, size, dropout)
    head = head or f"{'' if stem == 'GPT2' else 'For'}{its_head}"
    model = getattr(transformers, stem + head)(config_of(family, size, dropout, **more))
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.0
            if module.has_relative_attention_bias:
                module.relative_attention_bias.weight.requires_grad_(False)
    return model.to(dtype).train()


def llama_8b(layers, hidden):
    """LLaMA-3-8B's proportions in bf16: a quarter of the kv heads, and an MLP 3.5 times as wide."""
    fields = dict(intermediate_size=7 * hidden // 2, num_key_value_heads=1, vocab_size=64)
    return build("llama", Size(hidden=hidden, layers=layers), torch.bfloat16, **fields)


def batch_for(model, size=Size(), padded=False, seed=1):
    """Token ids, an attention mask (right-padded where asked for) and labels, on the model's device.

    For Whisper, sounds of twice as many frames as its encoder has positions, and labels.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (size.batch, size.seq)
    mask = torch.ones(shape, dtype=torch.long)
    if padded:
        mask[1:, size.seq * 3 // 4 :] = 0
    classifies = hasattr(model, "classifier")
    labels = torch.randint(0, CLASSES, shape[:1], generator=generator) if classifies else None
    ids = torch.randint(5, VOCAB, shape, generator=generator)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone() if labels is None else labels}
    if model.config.model_type == "whisper":
        sounds = torch.randn(size.batch, MELS, 2 * size.seq, generator=generator.manual_seed(seed))
        batch = {"input_features": sounds.to(model.dtype), "labels": batch["labels"]}
    return {name: value.to(model.device) for name, value in batch.items()}


def with_batch(model, *size, **how):
    """The model, and a batch for it."""
    return model, batch_for(model, *size, **how)
