"""Tempo's tables (Andoorveedu et al., 2022, arXiv:2210.10246): BERT in fp32 with dropout in attention, PyTorch 1.9.

Its softmax kept its input too (the paper's 3.4), and its pre-training ran on four GPUs (Table 4), where DDP holds the
gradients all the time: "then" has both. LAMB is estimated as AdamW, as it has as many states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from hf_memsave import MemSaveConfig
from hf_memsave.count.kept import KeptStorage
from hf_memsave.measure.figures import OWN
from hf_memsave.measure.largest import MOST, search
from paper_tables.rows import COLUMNS, GB, GIB, STOCK, Measure, Row, Setting, step_kept, text_trace

TEMPO = Setting(MemSaveConfig.resolve("tempo"))
CHECKPOINT = COLUMNS["checkpointing"]
FP32: dict[str, Any] = {"dtype": "fp32", "optimizer": "adamw_fused", "padded": True}
BASE = BertConfig()
LARGE = BertConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
#: NVIDIA's pre-training: a vocabulary of a multiple of 8, logits of every token.
PRETRAINED = BertConfig(**{**LARGE.to_dict(), "vocab_size": 30528, "architectures": ["BertForMaskedLM"]})
#: Figure 8's.
LONG = BertConfig(**{**PRETRAINED.to_dict(), "num_hidden_layers": 12, "max_position_embeddings": 3072})
CHUNKS = "NVIDIA's code runs chunks of 5 layers again, here it is one; and DDP holds the gradients there"
THEN = "then: PyTorch 1.9's softmax keeps its input, DDP on 4 GPUs holds the gradients"
FULL = "not modelled: fragmentation, NCCL's buffers, and the memory that a GPU has less than its name says"
#: At up to 512 tokens tiles are blocks.
SHORT = tuple(name for name in COLUMNS if name != "tiles")
#: (sequences by "Baseline", "Checkpoint" and "Tempo") of Table 2, by GPU, its memory and tokens.
TABLE_2 = {
    ("2080 Ti", 11, 128): (15, 50, 24), ("2080 Ti", 11, 512): (1, 4, 2),
    ("V100", 16, 128): (28, 96, 41), ("V100", 16, 512): (4, 18, 7),
}  # fmt: skip


def peak(config: BertConfig, batch: int, tokens: int, setting: Setting) -> int:
    """Of a step."""
    return text_trace(config, setting, batch=batch, tokens=tokens, attention="eager", **FP32).peak


def peak_then(config: BertConfig, batch: int, tokens: int) -> int:
    """Of stock's step on PyTorch 1.9, with DDP's gradients."""
    trace = text_trace(config, STOCK, batch=batch, tokens=tokens, old_softmax=True, attention="eager", **FP32)
    return trace.peak + trace.trained


def rows() -> Iterator[Row]:
    """All of them."""
    at_15 = functools.partial(peak, PRETRAINED, 15, 128)
    for method, here, figure in (("Tempo", TEMPO, 9.2), ("Checkpoint", CHECKPOINT, 8.3)):
        yield Row(
            table="4.2", work="BERT-Large, pre-training, 15 x 128", stock=11.3, method=method, figure=figure,
            measure=lambda s: at_15(s) / GB, here=here, columns=SHORT,
            rung="block" if here is CHECKPOINT else "exact",
            then=lambda: peak_then(PRETRAINED, 15, 128) / GB,
            note=CHUNKS if here is CHECKPOINT else THEN,
        )  # fmt: skip
    for (gpu, size, tokens), (stock, checkpoint, tempo) in TABLE_2.items():
        work = f"BERT-Large, pre-training, {tokens} tokens, {gpu} of {size} GB"
        for method, here, figure in (("Tempo", TEMPO, tempo), ("Checkpoint", CHECKPOINT, checkpoint)):
            yield Row(
                table="2", work=work, unit="sequences", stock=stock, method=method, figure=figure,
                measure=most(PRETRAINED, tokens, size), here=here, columns=SHORT,
                rung="block" if here is CHECKPOINT else "exact",
                then=then(PRETRAINED, tokens, size), more_is_better=True,
                note=CHUNKS if here is CHECKPOINT else f"{THEN}; {FULL}",
            )  # fmt: skip
    for tokens, stock in ((128, 16), (512, 2)):
        yield Row(
            table="Figure 2", work=f"BERT-Large, MRPC, {tokens} tokens, 2080 Ti of 11 GB", unit="sequences",
            stock=stock, measure=most(LARGE, tokens, 11), then=then(LARGE, tokens, 11),
            columns=("exact", "gate"), more_is_better=True,
            note=f"{THEN}; {FULL}",
        )  # fmt: skip
    yield from shares()
    figure_8 = functools.partial(peak, LONG, 1, 3072)
    yield Row(
        table="Figure 8", work="BERT-Large of 12 layers, 1 x 3072, A100 of 40 GB", method="Tempo",
        measure=lambda s: figure_8(s) / GB, here=TEMPO, then=lambda: peak_then(LONG, 1, 3072) / GB,
        note="not repeated: stock has not enough memory there; no batch is named, so here it is 1",
    )  # fmt: skip
    for tokens in (128, 512, 2048):
        yield figure_12(tokens)
    for work, times in (("GPT-2, 2080 Ti", 3.0), ("RoBERTa, 512 tokens, 2080 Ti", 2.0)):
        yield Row(
            table="4.3", work=work, unit="sequences", method="Tempo", share=times, more_is_better=True,
            note="missing: the model's size" + (" and the tokens" if "GPT" in work else ""),
        )  # fmt: skip


def most(config: BertConfig, tokens: int, size: int) -> Measure:
    """The largest batch in a GPU's memory, less what CUDA takes."""
    return lambda setting: search(
        lambda batch: peak(config, batch, tokens, setting), size * GIB - OWN, 4096 // tokens, MOST
    )


def then(config: BertConfig, tokens: int, size: int) -> Callable[[], float]:
    """The largest batch of stock as of then."""
    return lambda: search(lambda batch: peak_then(config, batch, tokens), size * GIB - OWN, 2048 // tokens, MOST)


def bert(config: BertConfig, layers: int) -> nn.Module:
    """For MRPC, of so many layers."""
    config = BertConfig(**{**config.to_dict(), "num_hidden_layers": layers})
    model: nn.Module = BertForSequenceClassification._from_config(config, attn_implementation="eager")
    return model.train()


def pairs(batch: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """A batch of MRPC."""
    empty = functools.partial(torch.empty, dtype=torch.int64, device=device)
    return {"input_ids": empty(batch, tokens), "attention_mask": empty(batch, tokens), "labels": empty(batch)}


def of_layer(config: BertConfig, batch: int, tokens: int, setting: Setting, **more: Any) -> int:
    """The bytes that one layer keeps."""
    inputs = functools.partial(pairs, batch, tokens)
    one, two = (step_kept(functools.partial(bert, config, n), inputs, setting, **more) for n in (2, 3))
    return two - one


def is_square(one: KeptStorage) -> bool:
    """Whether it is a map of S x S in each of 12 heads, of 512 tokens; dropout's mask is smaller."""
    return one.nbytes == 4 * 12 * 512 * 512


def is_activation(one: KeptStorage) -> bool:
    """Whether it is GELU's output, which has the bytes of its input."""
    return one.kind == "activation"


def part_of_layer(tokens: int, only: Callable[[KeptStorage], bool], old: bool, setting: Setting = STOCK) -> float:
    """Of a layer of BERT-Base, in %."""
    part, whole = (of_layer(BASE, 1, tokens, setting, old_softmax=old, only=chosen) for chosen in (only, None))
    return 100 * part / whole


def part_of_step(old: bool, setting: Setting = STOCK) -> float:
    """All layers' activations, of what 32 sequences of 128 tokens take, in %."""
    step = text_trace(BASE, setting, batch=32, tokens=128, old_softmax=old, attention="eager", **FP32)
    return 100 * 12 * of_layer(BASE, 32, 128, setting, old_softmax=old) / (step.peak + step.trained)


def shares() -> Iterator[Row]:
    """Parts of stock's memory."""
    for tokens, only, name, stock in ((512, is_square, "S x S maps", 56.0), (128, is_activation, "GELU's input", 17.0)):
        yield Row(
            table="2.1", work=f"BERT-Base, a layer's activations, {tokens} tokens: {name}", unit="%", stock=stock,
            measure=functools.partial(part_of_layer, tokens, only, False), columns=(),
            then=functools.partial(part_of_layer, tokens, only, True),
            note="then: softmax keeps its input" + ", a third map" * (only is is_square),
        )  # fmt: skip
    yield Row(
        table="2.3, Figure 9", work="BERT-Base, MRPC, 32 x 128: the layers' activations", unit="% of the total",
        stock=66.0, measure=functools.partial(part_of_step, False), then=functools.partial(part_of_step, True),
        columns=(), note="of weights, gradients, states and activations together",
    )  # fmt: skip


def figure_12(tokens: int) -> Row:
    """Tempo by its parts."""
    config = BertConfig(max_position_embeddings=2048)
    stock = of_layer(config, 1, tokens, STOCK)
    off: dict[str, Any] = dict.fromkeys(("activation", "norm", "attention", "dropout", "loss"), "stock")
    parts = {"GELU": ("activation", "invert"), "LayerNorm": ("norm", "output"), "attention": ("attention", "recompute")}
    freed = []
    for name, (field, value) in parts.items():
        part = Setting(MemSaveConfig(**off | {field: value}))
        freed.append(f"{name} {100 - 100 * of_layer(config, 1, tokens, part) / stock:.0f}%")
    return Row(
        table="Figure 12", work=f"BERT-Base, a layer's activations, 1 x {tokens}", unit="MB", method="Tempo",
        measure=lambda s: of_layer(config, 1, tokens, s) / 1e6, here=TEMPO, columns=SHORT,
        then=lambda: of_layer(config, 1, tokens, STOCK, old_softmax=True) / 1e6,
        note=f"missing: the figure's numbers. Freed here by part: {', '.join(freed)}",
    )  # fmt: skip
