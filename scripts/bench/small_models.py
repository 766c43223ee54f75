"""Almost any model type of Transformers as a small model with random weights, and a batch to train it on."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from small_configs import IMAGE, LENGTH, MEL_BINS, PATCH, VOCABULARY, by_name, small_config

BATCH, SPECIAL_TOKENS, FRAMES = 2, 32, 96

#: Heads and the labels that they take. Of several heads that a type has, the first is trained.
HEADS = {
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens",
    "SPEECH_SEQ_2_SEQ": "tokens",
    "MASKED_LM": "tokens",
    "IMAGE_TEXT_TO_TEXT": "tokens",
    "CAUSAL_LM": "tokens",
    "CTC": "transcript",
    "SEQUENCE_CLASSIFICATION": "class",
    "TOKEN_CLASSIFICATION": "class of each token",
    "QUESTION_ANSWERING": "span",
    "IMAGE_CLASSIFICATION": "class",
    "VIDEO_CLASSIFICATION": "class",
    "AUDIO_CLASSIFICATION": "class",
    "ZERO_SHOT_IMAGE_CLASSIFICATION": None,
    "OBJECT_DETECTION": None,
    "PRETRAINING": None,
}

#: Shapes of a sample's inputs beside token ids: by their name, and by model type where that differs.
SHAPES = {
    "pixel_values": (3, IMAGE, IMAGE),
    "pixel_values_videos": (8, 3, IMAGE, IMAGE),
    "input_values": (960,),
    "input_features": (FRAMES, MEL_BINS),
}
_SHAPES_OF = {
    "idefics2 idefics3 modernvbert smolvlm ultravbert": {"pixel_values": (1, 3, IMAGE, IMAGE)},
    "llava_next llava_next_video llava_onevision": {"pixel_values": (2, 3, IMAGE, IMAGE)},
    "timesformer videomae vivit": {"pixel_values": (8, 3, IMAGE, IMAGE)},
    "audio-spectrogram-transformer": {"input_values": (480, MEL_BINS)},
    "granite_speech5_ctc": {"input_features": (FRAMES, 64)},
    "whisper": {"input_features": (MEL_BINS, 256)},
    "lxmert": {"visual_feats": (10, 2048), "visual_pos": (10, 4)},
    "visual_bert": {"visual_embeds": (10, 512)},
}
SHAPES_OF = {name: shapes for names, shapes in _SHAPES_OF.items() for name in names.split()}
#: Multimodal types that get text alone: their images come in formats of their own.
TEXT_ONLY = set(
    "chameleon deepseek_vl_hybrid emu3 fuyu gemma4 gemma4_unified inkling_mm_model kimi_k25 "
    "lfm2_vl llama4 mllama muse_glimmer neomme paddleocr_vl unlimited_ocr video_llama_3".split()
)
#: Types that have a head and are left out, with the reason.
LEFT_OUT = by_name(
    {
        "takes inputs that no batch here has": "colmodernvbert colpali colqwen2 dia flava granite4_vision "
        "granite_docling idefics instructblip instructblipvideo kosmos-2 kyutai_speech_to_text pi0 pix2struct "
        "pop2piano siglip2 "
        "speech-encoder-decoder voxtral_realtime",
        "its parts must agree in sizes that no table here sets": "blt d_fine deepseek_ocr2 deimv2 dots3_note "
        "fun_asr_nano gemma4_assistant gemma4_unified_assistant inkling2 lw_detr molmo2 moonshine_streaming muse_spark "
        "musicgen musicgen_melody nemo_speechlm nemotron_h_omni pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 "
        "pp_ocrv5_mobile_det pp_ocrv5_server_det pp_ocrv6_medium_det pp_ocrv6_small_det qwen2_5_omni_thinker "
        "qwen3_omni_moe_thinker rf_detr rt_detr rt_detr_v2",
        "stays large": "evolla pp_formulanet vibevoice vibevoice_asr",
    }
)


def model_types() -> list[str]:
    """Every model type with one of the heads, without the other names that some have."""
    return sorted(name for name in CONFIG_MAPPING if CONFIG_MAPPING[name].model_type == name and head_of(name))


def head_of(model_type: str) -> str | None:
    """The head that is trained, or None."""
    return next((head for head in HEADS if model_type in _models_with(head)._model_mapping), None)


def _models_with(head: str) -> Any:
    return getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING")


def small_model(model_type: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model of a type in training mode, always with the same weights, and its batch.

    Raises:
        LookupError: The type is left out; the message says why.
    """
    if model_type in LEFT_OUT:
        raise LookupError(f"left out: {LEFT_OUT[model_type]}")
    config_class, head = CONFIG_MAPPING[model_type], head_of(model_type)
    model_class = _models_with(head)[config_class]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    torch.manual_seed(0)
    model = model_class(small_config(config_class)).train()
    return model, make_batch(model, HEADS[head])


def make_batch(model: PreTrainedModel, labels: str | None) -> dict[str, Tensor]:
    """Random inputs and labels of a kind, always the same; the second sample is padded on the right."""
    takes = inspect.signature(model.forward).parameters
    model_type, main = model.config.model_type, model.main_input_name
    generator = torch.Generator().manual_seed(0)
    mask = _mask(LENGTH)
    ids = torch.randint(SPECIAL_TOKENS, VOCABULARY, (BATCH, LENGTH), generator=generator) * mask
    batch = {"input_ids": ids, "attention_mask": mask} if "input_ids" in takes else {}
    shapes = {name: shape for name, shape in SHAPES.items() if name == main} | SHAPES_OF.get(model_type, {})
    for name, shape in shapes.items():
        batch[name] = torch.randn(BATCH, *shape, generator=generator)
        if name == "input_features" or name == "input_values" and len(shape) == 1:
            batch["attention_mask"] = _mask(max(shape))
    if "bbox" in takes:  # left, top, right, bottom
        batch["bbox"] = torch.randint(500, (BATCH, LENGTH, 4), generator=generator).sort().values
    batch |= _labels(labels, ids, mask)
    if {"input_ids", "pixel_values"} <= takes.keys() and model_type not in TEXT_ONLY:
        batch = _add_images(model, batch, generator)
    return {name: value for name, value in batch.items() if name in takes}


def _mask(length: int) -> Tensor:
    return (torch.arange(length) < torch.tensor([[length], [2 * length // 3]])).long()


def _labels(labels: str | None, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    if labels == "span":
        return {"start_positions": torch.tensor([3, 5]), "end_positions": torch.tensor([9, 12])}
    known = {
        "tokens": ids.masked_fill(mask == 0, -100),
        "transcript": ids[:, :8],
        "class": torch.tensor([0, 1]),
        "class of each token": (ids % 2).masked_fill(mask == 0, -100),
    }
    return {"labels": known[labels]} if labels in known else {}


def _add_images(model: PreTrainedModel, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """One image a sample and, where the model looks for image tokens, as many of them before the text."""
    takes, config = inspect.signature(model.forward).parameters, model.config
    vision = getattr(config, "vision_config", config)
    channels = next((getattr(vision, n) for n in ("num_channels", "in_channels", "in_chans") if hasattr(vision, n)), 3)
    pixels = torch.randn(BATCH, channels, IMAGE, IMAGE, generator=generator)
    images = {"pixel_values": batch.get("pixel_values", pixels)}
    if "image_grid_thw" in takes:  # patches, laid out in rows
        side, depth = IMAGE // PATCH, getattr(vision, "temporal_patch_size", 1)
        patches = torch.randn(BATCH * side**2, channels * depth * PATCH**2, generator=generator)
        images = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, side, side]] * BATCH)}
    if "image_sizes" in takes and config.model_type != "llava":
        images["image_sizes"] = torch.tensor([[IMAGE, IMAGE]] * BATCH)
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    embed = getattr(model, "get_image_features", getattr(model.base_model, "get_image_features", None))
    if token is None or embed is None:
        return batch | images
    with torch.no_grad():
        embedded = embed(**images)
    embedded = getattr(embedded, "pooler_output", embedded)
    count = sum(part.shape[:-1].numel() for part in tree_leaves(embedded)) // BATCH
    for name, value in {"input_ids": token, "attention_mask": 1, "labels": -100}.items():
        batch[name] = torch.cat([torch.full((BATCH, count), value), batch[name]], dim=1)
    is_image = (batch["input_ids"] == token).long()
    return batch | images | {"token_type_ids": is_image, "mm_token_type_ids": is_image}


def loss_of(output: Any) -> Tensor:
    """The model's own loss or, where it returns none, the mean squares of its outputs."""
    if output.get("loss") is not None:
        return output["loss"]
    tensors = [t for t in tree_leaves(output.to_tuple()) if isinstance(t, Tensor) and t.requires_grad]
    return sum(tensor.float().square().mean() for tensor in tensors)
