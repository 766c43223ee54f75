"""What ``techniques.py`` measures: the techniques, each alone, the presets, and the models, at their widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
)

from hf_memsave import MemSaveConfig

#: No byte kept in a layer depends on it.
VOCAB = 512
#: Everything off: a technique alone is this, and its field.
OFF = MemSaveConfig(activation="stock", norm="stock", dropout="stock", attention="stock", lora="stock", frozen=False)


def alone(**fields: str) -> MemSaveConfig:
    """Nothing but these fields."""
    return replace(OFF, **fields)


ACTIVATIONS = {
    f'activation="{value}"': alone(activation=value) for value in ("recompute", "invert", "precision_bit", "few_bit")
}
NORMS = {f'norm="{value}"': alone(norm=value) for value in ("recompute", "output")}
ATTENTION = {'attention="recompute"': alone(attention="recompute")}
STORAGE = {f'storage="{value}"': alone(storage=value) for value in ("int8", "int4")}
OVER_EXACT = {f'exact, storage="{value}"': MemSaveConfig(storage=value) for value in ("int8", "int4")}


def presets(*names: str) -> dict[str, MemSaveConfig]:
    """Name -> config."""
    return {name: MemSaveConfig.preset(name) for name in names}


#: Setting -> its config; None is stock. The names of presets have no quotes in them.
FULL: dict[str, MemSaveConfig | None] = {
    "stock": None, **ACTIVATIONS, **NORMS, **ATTENTION, **STORAGE,
    **presets("exact", "invact", "tempo", "few-bit", "selective", "wta-crs"), **OVER_EXACT,
}  # fmt: skip
LORA: dict[str, MemSaveConfig | None] = {
    "stock": None, **ACTIVATIONS, "lora=\"recompute\"": alone(lora="recompute"), **STORAGE,
    **presets("exact", "invact", "tempo", "few-bit", "lora-wta-crs"), **OVER_EXACT,
}  # fmt: skip
TEMPO: dict[str, MemSaveConfig | None] = {
    "stock": None,
    "in-place GELU": alone(activation="invert"),
    "in-place LayerNorm": alone(norm="output"),
    "dropout, hidden": alone(dropout="seed"),
    "eager attention, dropout kept": alone(attention="recompute"),
    "dropout, hidden and in attention": alone(dropout="seed", attention="recompute"),
    **presets("tempo", "exact"),
}
#: Part -> its settings.
SETTINGS = {"full": FULL, "lora": LORA, "tempo": TEMPO}
#: Of which peaks and times are measured.
STEP: dict[str, MemSaveConfig | None] = {"stock": None, **presets("exact", "invact", "tempo", "few-bit")}


@dataclass(frozen=True)
class Model:
    """A model at its real width: what builds some of its layers and a batch of a depth, and its full depth by field."""

    make: Callable[[dict[str, int]], tuple[nn.Module, dict[str, Tensor]]]
    depth: dict[str, int]


def labelled(batch: int, **inputs: Tensor) -> dict[str, Tensor]:
    """The batch of a classifier."""
    return {**inputs, "labels": torch.zeros(batch, dtype=torch.long)}


def bert(
    depth: dict[str, int], hidden: int, batch: int, seq: int, dropout: float = 0.0, attention: str = "sdpa"
) -> tuple[nn.Module, dict[str, Tensor]]:
    """BERT with heads of 64, or less where it is narrower, and position embeddings as far as needed."""
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=depth["layers"],
        num_attention_heads=max(2, hidden // 64), intermediate_size=4 * hidden, max_position_embeddings=seq,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, attn_implementation=attention,
    )  # fmt: skip
    ids = torch.randint(5, VOCAB, (batch, seq))
    return BertForSequenceClassification(config), labelled(batch, input_ids=ids, attention_mask=torch.ones_like(ids))


def bert_lora(
    depth: dict[str, int], hidden: int, batch: int, seq: int, targets: str | list[str], dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Tensor]]:
    """BERT with PEFT's defaults: rank 8, no dropout, and adapters in fp32."""
    model, inputs = bert(depth, hidden, batch, seq)
    # "all-linear" leaves out what a model calls its output layer, which this one's classifier is not.
    config = LoraConfig(target_modules=targets, exclude_modules=["classifier"])
    return get_peft_model(model.to(dtype), config), inputs


def vit(depth: dict[str, int], hidden: int, batch: int, image: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """ViT with patches of 16."""
    config = ViTConfig(
        hidden_size=hidden, num_hidden_layers=depth["layers"], num_attention_heads=max(2, hidden // 64),
        intermediate_size=4 * hidden, image_size=image,
    )  # fmt: skip
    return ViTForImageClassification(config), labelled(batch, pixel_values=torch.randn(batch, 3, image, image))


def clip(depth: dict[str, int], vision: int, text: int, batch: int, image: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """CLIP with patches of 14, texts of 77 tokens and QuickGELU, as many texts as images."""
    towers = {
        f"{tower}_config": {
            "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": depth[tower],
            "num_attention_heads": max(2, hidden // 64), "projection_dim": text,
        }
        for tower, hidden in (("vision", vision), ("text", text))
    }  # fmt: skip
    towers["vision_config"] |= {"image_size": image, "patch_size": 14}
    towers["text_config"] |= {"vocab_size": VOCAB, "eos_token_id": VOCAB - 1, "bos_token_id": 1, "pad_token_id": 0}
    inputs = {
        "input_ids": torch.randint(5, VOCAB, (batch, 77)),
        "attention_mask": torch.ones(batch, 77, dtype=torch.long),
        "pixel_values": torch.randn(batch, 3, image, image),
    }
    return CLIPModel(CLIPConfig(projection_dim=text, **towers)), {**inputs, "return_loss": True}


def models(quick: bool, batch: int) -> dict[str, dict[str, Model]]:
    """Table -> model -> how to make it; ``quick`` for narrow ones and short batches."""
    base, large, seq = (32, 64, 32) if quick else (768, 1024, 1024)
    twelve = {"layers": 12}
    full = {
        f"BERT-Base, S{seq}": Model(partial(bert, hidden=base, batch=batch, seq=seq), twelve),
        "ViT-B/16": Model(partial(vit, hidden=base, batch=batch, image=48 if quick else 224), twelve),
        "CLIP-L/14": Model(
            partial(clip, vision=large, text=base, batch=batch, image=42 if quick else 224), {"vision": 24, "text": 12}
        ),
    }
    lora = {
        f"{label}, {name}": Model(
            partial(bert_lora, hidden=base, batch=batch, seq=seq, targets=targets, dtype=dtype), twelve
        )
        for label, targets in (("q, v", ["query", "value"]), ("all linears", "all-linear"))
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    tempo = {
        f"S{length}": Model(
            partial(bert, hidden=large, batch=batch, seq=length, dropout=0.1, attention="eager"), {"layers": 24}
        )
        for length in ((16, 32) if quick else (128, 512))
    }
    return {"full": full, "lora": lora, "tempo": tempo}
