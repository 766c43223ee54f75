"""Kept memory of each technique alone and of each preset, beside stock: BERT-Base trained whole, and with LoRA.

    python scripts/bench/techniques.py [--batch 2] [--models "LoRA on q, v"] [--settings stock exact] [--out [DIR]]

Layers have their real width. Models of one and of two layers are measured; the whole follows, since layers are alike.
A technique alone is written as its field, every other field being "stock".
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_memsave import MemSaveConfig, PatchError, measure_kept, patch
from hf_memsave.arch.versions import enable_checkpointing
from publish import MIB, RESULTS, arguments, publish

VOCAB, DEPTH = 512, 12
OFF = MemSaveConfig(activation="stock", norm="stock", dropout="stock", attention="stock", lora="stock", frozen=False)
ALONE: dict[str, Any] = {
    "activation": ("recompute", "invert", "precision_bit", "few_bit"),
    "norm": ("recompute", "output"),
    "lora": ("recompute",),
    "storage": ("int8", "int4"),
}
EXACT = ("exact", "gate", "block", "tiles", "max")
PRESETS = ("invact", "tempo", "few-bit", "selective", "wta-crs", "lora-wta-crs")
CHECKPOINTING = "gradient checkpointing"
#: Setting -> its config, or gradient checkpointing without one; None is stock.
SETTINGS: dict[str, MemSaveConfig | str | None] = {
    "stock": None,
    CHECKPOINTING: CHECKPOINTING,
    **{name: MemSaveConfig.preset(name) for name in EXACT},
    **{f'`{field}="{value}"`': replace(OFF, **{field: value}) for field, values in ALONE.items() for value in values},
    **{name: MemSaveConfig.preset(name) for name in PRESETS},
    **{f'exact, `storage="{value}"`': MemSaveConfig(storage=value) for value in ALONE["storage"]},
}
NOTES = """
Bytes alive between forward and backward (`measure_kept`: every storage), 1,024 tokens, SDPA, without dropout; freed:
percent of what stock keeps. A name is a preset's. At this length `tiles` is as `block`, and so is `max` on a CPU, where
what it offloads stays in the same memory. LoRA is PEFT's default (r 8, fp32 adapters), with the base in bf16. With
adapters on q and v alone, the linear after the activation is frozen and keeps nothing: `few-bit` then keeps less than
`exact`, and inverting, which keeps the output where stock keeps the input, gains nothing. Other models beside InvAct's
and Tempo's figures: [the papers' tables](papers.md).

![What each setting keeps, in percent of stock](techniques.png)
"""


def bert(layers: int) -> nn.Module:
    """BERT-Base, in fp32."""
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, num_hidden_layers=layers, max_position_embeddings=1024)
    return BertForSequenceClassification(BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes))


def lora(targets: list[str] | str) -> Callable[[int], nn.Module]:
    """BERT-Base in bf16 with PEFT's default adapters; "all-linear" leaves the classifier out."""

    def make(layers: int) -> nn.Module:
        config = LoraConfig(target_modules=targets, exclude_modules=["classifier"])
        return get_peft_model(bert(layers).bfloat16(), config)

    return make


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "BERT-Base": bert,
    "LoRA on q, v": lora(["query", "value"]),
    "LoRA on all linears": lora("all-linear"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the table and the picture."""
    parser = arguments(__doc__, RESULTS)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="NAME")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS], metavar="NAME")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the meter looks at every object: not at the libraries'
    found: dict[str, dict[str, int]] = {setting: {} for setting in options.settings}
    runs = [(setting, name) for setting in found for name in options.models]
    for setting, name in track(runs, "measuring", console=Console(stderr=True)):
        found[setting][name] = kept(MODELS[name], options.batch, SETTINGS[setting])
    shares = shares_of(found)
    rows = [
        [setting, *(cell for name in row for cell in (f"{row[name] / MIB:.1f}", f"{1 - shares[setting][name]:.1%}"))]
        for setting, row in found.items()
    ]
    header = ["setting", *(f"{name}, {what}" for name in options.models for what in ("MiB", "freed"))]
    title = "# Kept memory of each technique, alone and together"
    publish("techniques", title, header, rows, {"kept": found}, options.out, NOTES)
    picture(found).savefig(options.out / "techniques.png", metadata={"Software": None})


def shares_of(found: dict[str, dict[str, int]]) -> dict[str, dict[str, float]]:
    """Of stock's kept bytes, by setting and model."""
    return {setting: {name: row[name] / found["stock"][name] for name in row} for setting, row in found.items()}


def kept(make: Callable[[int], nn.Module], batch: int, config: MemSaveConfig | str | None) -> int:
    """Bytes kept by the whole model, which follows from one layer and two."""
    one, two = (kept_at(make(layers), batch, config) for layers in (1, 2))
    return one + (DEPTH - 1) * (two - one)


def kept_at(model: nn.Module, batch: int, config: MemSaveConfig | str | None) -> int:
    """Bytes kept by a model of less depth; stock's where there is nothing to patch."""
    torch.manual_seed(0)
    ids = torch.randint(5, VOCAB, (batch, 1024))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(batch, dtype=torch.long)}
    if config == CHECKPOINTING:
        enable_checkpointing(model)
    elif isinstance(config, MemSaveConfig):
        try:
            patch(model.train(), config)
        except PatchError as error:
            if not str(error).startswith("nothing to patch"):
                raise
    return measure_kept(model.train(), inputs).total


def picture(found: dict[str, dict[str, int]]) -> Figure:
    """A row of bars for each setting: percent of stock's kept bytes, a bar a model."""
    shares, names = shares_of(found), list(found["stock"])
    figure = Figure(figsize=(9, 1 + 0.42 * len(shares)), layout="constrained", dpi=110)
    axes = figure.subplots()
    for index, name in enumerate(names):
        places = [row + 0.8 * (index + 0.5) / len(names) - 0.4 for row in range(len(shares))]
        axes.barh(places, [100 * row[name] for row in shares.values()], height=0.8 / len(names), label=name)
    labels = {"exact": "exact (memsave=True)", "max": "max (on a CPU)"}
    axes.set_yticks(range(len(shares)), [labels.get(setting, setting.replace("`", "")) for setting in shares])
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_xlabel("kept between forward and backward, percent of stock")
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False)
    return figure


if __name__ == "__main__":
    main()
