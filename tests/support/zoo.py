"""Small models beyond :mod:`support.families`: other norms, eager attention, encoders and decoders, experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from support.families import CLASSES, VOCAB, Size, batch_for

#: Log-mel bins of Whisper's input.
MELS = 16
#: Experts, and how many of them a token goes to; they are as wide as the model is.
EXPERTS, ROUTED = 4, 2


def _decoder_only(name: str, **more: Any) -> Callable[[dict[str, Any], Size, float], nn.Module]:
    def make(common: dict[str, Any], size: Size, dropout: float) -> nn.Module:
        options = dict(common, intermediate_size=int(2.75 * size.hidden), num_key_value_heads=size.heads // 2)
        options |= dict(head_dim=size.hidden // size.heads, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        own = {key: value(size, dropout) if callable(value) else value for key, value in more.items()}
        model = getattr(hf, f"{name}ForCausalLM")
        return model(getattr(hf, f"{name.replace('Gemma3', 'Gemma3Text')}Config")(**options | own))

    return make


def _modernbert(common: dict[str, Any], size: Size, dropout: float) -> nn.Module:
    options = dict(common, intermediate_size=int(2.75 * size.hidden), num_labels=CLASSES, pad_token_id=0)
    drops = dict(embedding_dropout=dropout, mlp_dropout=dropout, attention_dropout=0.0)
    return hf.ModernBertForSequenceClassification(hf.ModernBertConfig(**options, **drops))


def _gpt_neox(common: dict[str, Any], size: Size, dropout: float) -> nn.Module:
    options = dict(common, intermediate_size=4 * size.hidden, bos_token_id=1, eos_token_id=2)
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**options, hidden_dropout=dropout, attention_dropout=0.0))


def _seq2seq(name: str, model: Any, stack: str, **more: Any) -> Callable[[dict[str, Any], Size, float], nn.Module]:
    def make(common: dict[str, Any], size: Size, dropout: float) -> nn.Module:
        h, heads = size.hidden, size.heads
        layers = dict(encoder_layers=2, decoder_layers=2) | {f"{stack}_layers": size.layers}
        wide = dict(encoder_ffn_dim=4 * h, decoder_ffn_dim=4 * h, d_model=h)
        wide |= dict(encoder_attention_heads=heads, decoder_attention_heads=heads, vocab_size=VOCAB)
        tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)
        own = {key: value(size, dropout) for key, value in more.items()}
        config = getattr(hf, f"{name}Config")
        return model(config(**layers, **wide, **tokens, **own, dropout=dropout, attention_dropout=0.0))

    return make


_BART = dict(max_position_embeddings=lambda size, _: size.seq)
_WHISPER = dict(
    num_mel_bins=lambda *_: MELS,
    max_source_positions=lambda size, _: size.seq,
    max_target_positions=lambda size, _: size.seq,
)
_ROUTED = dict(intermediate_size=lambda size, _: size.hidden, num_local_experts=EXPERTS, num_experts_per_tok=ROUTED)
_QWEN_ROUTED = dict(moe_intermediate_size=lambda size, _: size.hidden, num_experts=EXPERTS, num_experts_per_tok=ROUTED)
#: Latent queries of half the model's width, latent keys and values of a quarter, and a shared expert beside the others.
_DEEPSEEK = dict(
    q_lora_rank=lambda size, _: size.hidden // 2,
    kv_lora_rank=lambda size, _: size.hidden // 4,
    qk_nope_head_dim=lambda size, _: size.hidden // size.heads * 3 // 4,
    qk_rope_head_dim=lambda size, _: size.hidden // size.heads // 4,
    v_head_dim=lambda size, _: size.hidden // size.heads,
    num_key_value_heads=lambda size, _: size.heads,
    head_dim=lambda size, _: size.hidden // size.heads // 4,
    moe_intermediate_size=lambda size, _: size.hidden // 2,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=ROUTED,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=0,
)  # fmt: skip

_MAKE: dict[str, Callable[[dict[str, Any], Size, float], nn.Module]] = {
    "gemma2": _decoder_only("Gemma2", attn_implementation="eager"),
    "gemma3": _decoder_only("Gemma3"),
    "olmo2": _decoder_only("Olmo2"),
    "glm4": _decoder_only("Glm4"),
    "cohere2": _decoder_only("Cohere2"),
    "modernbert": _modernbert,
    "bart-encoder": _seq2seq("Bart", hf.BartForConditionalGeneration, "encoder", **_BART),
    "bart-decoder": _seq2seq("Bart", hf.BartForConditionalGeneration, "decoder", **_BART),
    "whisper-encoder": _seq2seq("Whisper", hf.WhisperForConditionalGeneration, "encoder", **_WHISPER),
    "whisper-decoder": _seq2seq("Whisper", hf.WhisperForConditionalGeneration, "decoder", **_WHISPER),
    "gpt_neox": _gpt_neox,
    "starcoder2": _decoder_only(
        "Starcoder2", intermediate_size=lambda size, _: 4 * size.hidden, residual_dropout=lambda _, dropout: dropout
    ),
    "mixtral": _decoder_only("Mixtral", **_ROUTED),
    "qwen3_moe": _decoder_only("Qwen3Moe", **_QWEN_ROUTED),
    "gpt_oss": _decoder_only("GptOss", **_ROUTED),
    "deepseek_v3": _decoder_only("DeepseekV3", **_DEEPSEEK),
}
ZOO = tuple(_MAKE)


def build(name: str, size: Size, dtype: torch.dtype = torch.float32, dropout: float = 0.1) -> nn.Module:
    """A model in training mode; dropout as given where the kind has it, in attention 0; half the heads of k and v."""
    torch.manual_seed(0)
    common = dict(
        hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads, vocab_size=VOCAB
    )
    return _MAKE[name](common, size, dropout).to(dtype).train()


def zoo_batch(model: nn.Module, size: Size, padded: bool = False, seed: int = 1) -> dict[str, torch.Tensor]:
    """As ``batch_for``; for Whisper, sounds of twice as many frames as its encoder has positions."""
    batch = batch_for(model, size, padded, seed)
    if model.config.model_type != "whisper":
        return batch
    generator = torch.Generator().manual_seed(seed)
    sounds = torch.randn(size.batch, MELS, 2 * size.seq, generator=generator)
    return {"input_features": sounds.to(model.device, model.dtype), "labels": batch["labels"]}
