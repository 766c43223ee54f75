"""Small configurations of Transformers' model types: two layers, hidden 64, four heads, vocabulary 128.

Everything but the sizes stays at its default, dropout among them. :data:`SIZES` names the fields that most
configurations share, :data:`OVERRIDES` what single ones need; sub-configurations shrink likewise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

LENGTH, VOCABULARY, IMAGE, PATCH, MEL_BINS = 48, 128, 64, 8, 16


def by_name(names_of: Mapping[Any, str]) -> dict[str, Any]:
    """A table from one of values, each with its names in one string."""
    return {name: value for value, names in names_of.items() for name in names.split()}


#: Fields that are set to a number, wherever a configuration has one there.
SIZES = by_name(
    {
        64: "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim model_dim projection_dim out_hidden_size "
        "word_embed_proj_dim decoder_hidden_size hidden_size_global pred_hidden_size image_size crop_size",
        2: "num_hidden_layers num_layers n_layer n_layers layers depth encoder_layers decoder_layers "
        "num_encoder_layers num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers "
        "pred_num_hidden_layers num_experts_per_tok experts_per_token moe_k moe_topk top_k_experts",
        4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
        "decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads pred_num_attention_heads "
        "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_heads linear_num_key_heads "
        "linear_num_value_heads index_n_heads",
        256: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner d_inner hidden_dim mlp_dim "
        "ffn_hidden_size encoder_intermediate_size decoder_intermediate_size dim_ff",
        128: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "expert_ffn_hidden_size max_position_embeddings n_positions n_ctx max_seq_len max_source_positions "
        "max_target_positions vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size entity_vocab_size "
        "pronunciation_vocab_size shape_vocab_size",
        32: "kv_lora_rank q_lora_rank base_channels",
        16: "head_dim d_kv d_head kv_channels attention_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "index_topk linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim sliding_window "
        "attention_window attention_chunk_size local_attention chunk_size mamba_chunk_size mamba_d_state state_size "
        "mamba_d_head mamba_head_dim hidden_size_per_layer_input mm_tokens_per_image num_mel_bins",
        8: "patch_size rotary_dim num_frames frames_per_clip",
        1: "first_k_dense_replace n_group topk_group n_shared_experts num_shared_experts encoder_sparse_step "
        "decoder_sparse_step",
    }
)
#: Of these, what is set where the default is None, too.
REQUIRED = {"vocab_size", "num_experts", "n_routed_experts", "num_experts_per_tok", "top_k_experts"}
#: Lists by stage: of widths, which are quartered, and of numbers of layers, which become one.
STAGE_WIDTHS, STAGE_DEPTHS = {"hidden_sizes", "embed_dims", "embed_dim", "encoder_hidden_sizes"}, {"depths"}
#: Lists by layer: a model has as many layers as there are kinds, and at least two.
LAYER_KINDS = {"layer_types", "mlp_layer_types"}


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)} | more}


_WAV2VEC = dict(conv_dim=[32] * 3, conv_kernel=[10, 3, 3], conv_stride=[5, 2, 2], num_conv_pos_embeddings=16)
_WAV2VEC |= dict(num_conv_pos_embedding_groups=4, num_feat_extract_layers=3, mask_time_length=4)
_ONE_TILE = {"image_grid_pinpoints": [[IMAGE, IMAGE]]}
_HYBRID = ["linear_attention", "hybrid"]

#: Fields of single configurations: model types -> fields.
_OVERRIDES = {
    "hubert sew sew-d data2vec-audio unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm speecht5": _WAV2VEC,
    "swin swinv2 donut-swin": dict(num_heads=[2, 4, 8], depths=[1, 1, 1], window_size=4, patch_size=4),
    "llava_next llava_next_video llava_onevision": _ONE_TILE,
    "wav2vec2-bert seamless_m4t seamless_m4t_v2": {"feature_projection_input_dim": MEL_BINS},
    "hunyuan_v1_dense hunyuan_v1_moe ministral": {"head_dim": 16},
    "mobilevit mobilevitv2": {"patch_size": 2},
    "chameleon emu3": {"vocabulary_map": {"<image>": 4}},
    "glm4v_text glm46v_text glm_ocr_text glmga_text qwen2_vl_text qwen2_5_vl_text paddleocr_vl_text "
    "cosmos3_edge_text": _rope(2, 3, 3),
    "hunyuan_vl_text": _rope(2, 3, 3) | {"head_dim": 16},
    "ernie4_5_vl_moe_text": _rope(3, 3, 2),
    "glm4v_moe_text": _rope(1, 1, 2, partial_rotary_factor=0.5),
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(
            ("sliding_attention", "full_attention"), {"rope_type": "default", "rope_theta": 1e4}
        ),
    },
    "align_vision_model efficientnet": dict(width_coefficient=0.5, depth_coefficient=0.5, hidden_dim=640),
    "align": {"projection_dim": 160},
    "aria": {"projector_patch_to_query_dict": {(IMAGE // PATCH) ** 2: 16}},
    "audio-spectrogram-transformer": {"max_length": 480},
    "bamba": {"attn_layer_indices": [1]},
    "bit": dict(hidden_sizes=[128] * 4, num_groups=8),
    "blip-2": {"image_token_id": 5},
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=128, moe_num_experts=4, moe_top_k=2),
    ),
    "diffusion_gemma_text": {"moe_intermediate_size": 128},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=16),
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hgnet_v2": {"hidden_sizes": [256, 512, 1024, 2048]},
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    "layoutlmv3": dict(input_size=IMAGE, coordinate_size=10, shape_size=12),
    "levit": {"patch_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 96},
    "mamba2": dict(num_heads=8, n_groups=1),
    "nemotron": {"num_key_value_heads": 4},
    "perceiver": dict(max_position_embeddings=LENGTH, d_latents=64, num_latents=16, num_self_attends_per_block=2),
    "qwen4_exp_text": dict(
        indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4
    ),
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": dict(axial_pos_embds_dim=(16, 48), axial_pos_shape=(8, 6), attn_layers=["local", "lsh"]),
    "speech_to_text": dict(input_feat_per_channel=MEL_BINS, conv_channels=64),
    "step3p5 step3p7_text": {"sliding_window": 16},
    "textnet": {"hidden_sizes": [64, 64, 128, 256, 512]},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": dict(layer_types=_HYBRID * 2, num_hidden_layers=4),
    "zamba2": dict(layer_types=_HYBRID * 2, num_hidden_layers=4, hybrid_layer_ids=[1, 3], num_mem_blocks=1),
    "zaya": {"num_experts_per_tok": 1},
}
OVERRIDES = {name: fields for names, fields in _OVERRIDES.items() for name in names.split()}


def small_config(cls: type[PreTrainedConfig], tokens: dict[str, int] | None = None) -> PreTrainedConfig:
    """A small configuration, its sub-configurations included.

    ``tokens`` are the special tokens of the configurations around it, to which its own are added.
    """
    tokens = {"pad_token": 0, "bos_token": 1, "eos_token": 2} if tokens is None else tokens
    fields = {"pad_token_id": 0}
    for field in dataclasses.fields(cls):
        default = None if field.default is dataclasses.MISSING else field.default
        if (value := _small(field.name, default, tokens)) is not None:
            fields[field.name] = value
    if isinstance(groups := getattr(cls, "num_key_value_heads", None), int):
        fields["num_key_value_heads"] = 4 if groups == getattr(cls, "num_attention_heads", None) else min(groups, 2)
    specs: dict[str, Any] | None = getattr(cls, "sub_configs_defaults", None)
    for name, spec in (cls.sub_configs if specs is None else specs).items():  # which older Transformers have, classes
        sub, kind = getattr(spec, "config_class", spec), getattr(spec, "model_type", None)
        if not issubclass(sub, PreTrainedConfig) and kind in CONFIG_MAPPING:  # AutoConfig: one of many
            sub = CONFIG_MAPPING[kind]
        if issubclass(sub, PreTrainedConfig):
            fields[name] = small_config(sub, tokens)
    config = cls(**fields | _layer_kinds(cls) | OVERRIDES.get(cls.model_type, {}))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = tokens["bos_token"]
    return config


def _small(name: str, default: Any, tokens: dict[str, int]) -> Any:
    """What a field is set to; None leaves it as it is."""
    if name.endswith(("_token_id", "_token_index")) and isinstance(default, int):
        return tokens.setdefault(name.removesuffix("_id").removesuffix("_index"), len(tokens))
    if isinstance(default, (list, tuple)):
        if name in STAGE_DEPTHS:
            return type(default)(1 for _ in default)
        if name in STAGE_WIDTHS:
            return type(default)(width // 4 for width in default)
        return type(default)(IMAGE for _ in default) if name == "image_size" else None
    known = type(default) is int or default is None and name in REQUIRED
    return SIZES.get(name) if known else None


def _layer_kinds(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """The lists by layer, each with every kind that the default one has."""
    names = LAYER_KINDS.intersection(field.name for field in dataclasses.fields(cls))
    kinds = {name: list(dict.fromkeys(getattr(cls(), name) or ())) for name in sorted(names)}
    layers = max(2, *map(len, kinds.values())) if kinds else 2
    lists = {name: (some + some[-1:] * layers)[:layers] for name, some in kinds.items() if some}
    return lists | {"num_hidden_layers": layers} if lists else {}
