"""WTA-CRS's tables (Liu et al., 2023, arXiv:2305.15265): T5 in fp32 on GLUE's tasks as text.

What the paper leaves open, its public code has (github.com/zirui-ray-liu/WTACRS): T5ForConditionalGeneration of
Transformers 4.6, whose attention is eager; sentences padded to 128 tokens, and a label of CoLA as a target of 3; LoRA
on q, k, v; a "GB" of 1,000 MiB. "then": in training, the decoder held keys and values of the sentence until the loss
was there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from hf_memsave import WTACRS, MemSaveConfig
from hf_memsave.config.lora import Lora
from hf_memsave.measure.figures import OWN, Trace
from hf_memsave.measure.largest import MOST, search
from hf_memsave.measure.lora import add_adapters, quantize
from paper_tables.rows import STOCK, Row, Setting, deep_trace

MIB = 2**20
#: The paper's GB.
GB, UNIT = 1000 * MIB, "GB of 1,000 MiB"
SOURCE, TARGET = 128, 3
SMALL: dict[str, Any] = {"decoder_start_token_id": 0, "use_cache": False}
CONFIGS = {
    "T5-Base": T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, **SMALL),
    "T5-Large": T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16, **SMALL),
    "T5-3B": T5Config(d_model=1024, d_ff=16384, d_kv=128, num_layers=24, num_heads=32, **SMALL),
}
#: The paper's Table 8.
A100 = 81251 * MIB - OWN
#: Of linears and, as in the paper, of attention's two products.
SAMPLED = {b: Setting(MemSaveConfig(linear=WTACRS(budget=b, attention=True))) for b in (0.3, 0.1)}
#: What its sequences are too short for is left out.
COLUMNS = ("exact", "gate", "block", "checkpointing")
#: Model -> of Table 2 full, LoRA, LST, WTA-CRS and LoRA + WTA-CRS at .3 and .1, then of Table 7 QLoRA, with WTA-CRS.
TABLES = {
    "T5-Base": (17.66, 13.84, 5.50, {0.3: 8.44, 0.1: 7.30}, {0.3: 6.50, 0.1: 5.44}, 13.64, 6.31),
    "T5-Large": (45.85, 36.83, 14.85, {0.3: 21.58, 0.1: 18.46}, {0.3: 17.44, 0.1: 14.64}, 36.12, 16.75),
}
#: What a row says if nothing else is to be said.
THEN = "then: the decoder's cache; the rest is not found"


def t5(training: str, has_cache: bool, config: T5Config) -> nn.Module:
    """T5, trained "full", with "lora" or with "qlora"."""
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model: Any = T5ForConditionalGeneration._from_config(config, **options)
    if training == "qlora":
        quantize(model)
    if training != "full":
        add_adapters(model, Lora(r=32, alpha=32, dropout=0.1, targets="q+k+v"))
    if has_cache:
        hold(model)
    return model.train()  # type: ignore[no-any-return]


def hold(model: Any) -> None:
    """Have the model's output hold the decoder's keys and values of the sentence, as the linears give them."""
    held: list[Tensor] = []

    def leave(module: Any, inputs: Any, output: Any) -> None:
        output["held"] = tuple(held)
        held.clear()

    for block in model.decoder.block:
        for linear in (block.layer[1].EncDecAttention.k, block.layer[1].EncDecAttention.v):
            linear.register_forward_hook(lambda module, inputs, output: held.append(output))
    model.register_forward_hook(leave)


def sentences(batch: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """A batch, padded, and its labels as text."""
    empty = functools.partial(torch.empty, dtype=torch.int64, device=device)
    return {"input_ids": empty(batch, tokens), "attention_mask": empty(batch, tokens), "labels": empty(batch, TARGET)}


@functools.cache
def trace(
    model: str, training: str, setting: Setting, batch: int = 100, tokens: int = SOURCE, then: bool = False
) -> Trace:
    """A step; of QLoRA, patched, at its full depth, as layers are not alike where fp32 sums run beside 16 bits."""
    config = CONFIGS[model]
    in_full = model == "T5-Base" or (training == "qlora" and setting.memsave is not None)
    return deep_trace(
        config, functools.partial(t5, training, then), functools.partial(sentences, batch, tokens), setting,
        in_full=in_full,
    )  # fmt: skip


def rows() -> Iterator[Row]:
    """All of them."""
    for model, (full, lora, lst, sampled, lora_sampled, qlora, qlora_sampled) in TABLES.items():
        work = f"{model}, {{}}, 100 x {SOURCE}"
        for budget, setting in SAMPLED.items():
            yield row(model, "full", setting, table="2", work=work.format("full"), stock=full,
                      method=f"WTA-CRS@{budget}", figure=sampled[budget])  # fmt: skip
        yield over_full(model, "lora", STOCK, table="2", work=work.format("full"), stock=full, method="LoRA",
                        figure=lora, note=f"LoRA itself, without hf_memsave; {THEN}")  # fmt: skip
        for budget, setting in SAMPLED.items():
            yield row(model, "lora", setting, table="2", work=work.format("LoRA"), stock=lora,
                      method=f"LoRA+WTA-CRS@{budget}", figure=lora_sampled[budget])  # fmt: skip
        yield over_full(model, "lora", SAMPLED[0.3], table="2", work=work.format("full"), stock=full,
                        method="LoRA+WTA-CRS@0.3", figure=lora_sampled[0.3],
                        note=f"all but stock with LoRA; {THEN}")  # fmt: skip
        yield Row(table="2", work=work.format("full"), unit=UNIT, stock=full, method="LST", figure=lst,
                  note="missing: a ladder of side networks, which is another model")  # fmt: skip
        yield row(model, "qlora", SAMPLED[0.3], table="7", work=work.format("QLoRA"), stock=qlora,
                  method="QLoRA+WTA-CRS@0.3", figure=qlora_sampled, columns=COLUMNS[:3])  # fmt: skip
    yield over_full("T5-3B", "lora", SAMPLED[0.3], batch=32, table="5.2", work=f"T5-3B, full, 32 x {SOURCE}",
                    stock=66.4, method="LoRA+WTA-CRS", figure=21.6,
                    note="all but stock with LoRA; no budget is named")  # fmt: skip
    for method, setting, share in (
        ("LoRA", STOCK, 1.9), ("LoRA+WTA-CRS@0.3", SAMPLED[0.3], 4.8), ("LoRA+WTA-CRS@0.1", SAMPLED[0.1], 6.4),
    ):  # fmt: skip
        yield Row(
            table="Figure 6", work=f"T5-3B, full, {SOURCE} tokens, A100 of 80 GB", unit="sequences", method=method,
            share=share, measure=functools.partial(most, "lora"), here=setting, rung="gate", more_is_better=True,
            measure_stock=lambda: most("full", STOCK), columns=COLUMNS[:2] if setting != STOCK else (),
            note="all but stock with LoRA; the paper has multiples of stock alone",
        )  # fmt: skip
    for model in TABLES:
        for tokens in (128, 256):
            yield Row(
                table="Figure 2", work=f"{model}, full, 64 x {tokens}: activations", unit="% of the total", columns=(),
                measure=functools.partial(activations, model, tokens, False),
                then=functools.partial(activations, model, tokens, True, STOCK),
                note="missing: the sizes; the text has 73 to 88% for all, which 128 tokens do not reach here",
            )  # fmt: skip
    yield Row(table="Figure 13", work="T5-Base, T5-Large, T5-3B: the largest batch", note="missing: the numbers")


def row(model: str, training: str, setting: Setting, **of: Any) -> Row:
    """A row with what all have."""
    return Row(
        unit=UNIT, here=setting, rung="gate", **{"columns": COLUMNS, "note": THEN} | of,
        measure=lambda s: trace(model, training, s).peak / GB,
        then=lambda: trace(model, training, STOCK, then=True).peak / GB,
    )  # fmt: skip


def over_full(model: str, training: str, setting: Setting, batch: int = 100, **of: Any) -> Row:
    """A row whose stock is trained in full, and all else otherwise."""
    return Row(
        unit=UNIT, here=setting, rung="gate", columns=() if setting == STOCK else COLUMNS,
        measure=lambda s: trace(model, training, s, batch).peak / GB,
        measure_stock=lambda: trace(model, "full", STOCK, batch).peak / GB,
        then=lambda: trace(model, "full", STOCK, batch, then=True).peak / GB,
        **of,
    )  # fmt: skip


def most(training: str, setting: Setting) -> float:
    """The largest batch of T5-3B."""
    return search(lambda batch: trace("T5-3B", training, setting, batch).peak, A100, 32, MOST)


def activations(model: str, tokens: int, then: bool, setting: Setting) -> float:
    """Their part of weights, gradients, states and activations, in %."""
    step = trace(model, "full", setting, 64, tokens, then=then)
    return 100 * (step.peak - step.parameters - step.states) / (step.peak + step.trained)
