"""Novikov & Oseledets (2024), InvAct: stored activations, in MiB of one example; no weights and no optimizer.

The paper has no bytes, but percents of what stock stores; the check is the method's. Stock is counted in fp32 and
training, with the checkpoints' own dropouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
)

from hf_memsave import MemSaveConfig
from paper_tables.rows import Row, Setting, step_kept

MIB = 2**20
OFF = MemSaveConfig(activation="stock", norm="stock", dropout="stock", attention="stock", lora="stock", frozen=False)
ALONE = Setting(replace(OFF, activation="invert"))
COLUMNS = ("exact", "gate", "block", "checkpointing")


def clip(act: str) -> CLIPConfig:
    """CLIP-L/14: 24 layers see, 12 read."""
    vision: dict[str, Any] = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, patch_size=14)
    text: dict[str, Any] = dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12)
    vision |= dict(num_hidden_layers=24, hidden_act=act)
    return CLIPConfig(projection_dim=768, vision_config=vision, text_config=text | dict(hidden_act=act))


@dataclass(frozen=True)
class Work:
    """A model of A.1, one example of its inputs, and what InvAct frees, in %."""

    model: Callable[[], nn.Module]
    shapes: dict[str, tuple[int, ...]]
    freed: float
    note: str = ""


TOKENS = {"input_ids": (1, 1024), "labels": (1,)}
PAIR = {"pixel_values": (1, 3, 224, 224), "input_ids": (1, 77)}
WORKS = {
    "BERT-Base, 1024 tokens": Work(
        partial(BertForSequenceClassification, BertConfig(max_position_embeddings=1024)), TOKENS, 22.9,
        "here masks of dropouts take a bit an element, in stock a byte",
    ),
    "Audio Spectrogram Transformer, 1024 x 128": Work(
        partial(ASTForAudioClassification, ASTConfig(num_labels=527)),
        {"input_values": (1, 1024, 128), "labels": (1,)}, 24.0,
    ),
    "ViT-B/16": Work(
        partial(ViTForImageClassification, ViTConfig()), {"pixel_values": (1, 3, 224, 224), "labels": (1,)}, 23.8
    ),
    "CLIP-L/14, 77 tokens, with GELU": Work(
        partial(CLIPModel, clip("gelu")), PAIR, 23.4, "to see what its QuickGELU does in the row below"
    ),
    "CLIP-L/14, 77 tokens": Work(
        partial(CLIPModel, clip("quick_gelu")), PAIR, 23.4,
        "Transformers' QuickGELU is a product with a sigmoid, whose output stock keeps too and inverting frees",
    ),
}  # fmt: skip


def model(name: str) -> nn.Module:
    """In training."""
    return WORKS[name].model().train()


def inputs(name: str, device: torch.device) -> dict[str, Tensor]:
    """One example; CLIP is asked for its loss."""
    found: dict[str, Any] = {"return_loss": True} if WORKS[name].shapes is PAIR else {}
    for key, shape in WORKS[name].shapes.items():
        dtype = torch.float32 if key.endswith("_values") else torch.int64
        found[key] = torch.empty(shape, dtype=dtype, device=device)
    return found


def kept(build: Callable[[], nn.Module], batch: Any, setting: Setting) -> float:
    """MiB kept for backward."""
    return step_kept(build, batch, setting, padded=False) / MIB


def rows() -> Iterator[Row]:
    """All figures of memory of the paper."""
    for name, work in WORKS.items():
        yield Row(
            table="Listing 1, A.1", work=name, unit="MiB", method="InvAct", share=1 - work.freed / 100, here=ALONE,
            measure=partial(kept, partial(model, name), partial(inputs, name)), columns=COLUMNS, note=work.note,
        )  # fmt: skip
