"""What a layer keeps with the kernels of Liger-Kernel or of the Hub, with hf_memsave, and with both.

    python scripts/bench/beside.py [--models "LLaMA, LoRA"] [--out [DIR]]

The kernels run in Triton's interpreter, on a CPU. A layer is the difference between models of three layers and of one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from torch import nn

from hf_memsave import measure_kept, patch
from publish import arguments, publish
from support import libraries
from support.zoo import Size, batch_for, build

SIZE = {"hidden": 512, "heads": 4, "batch": 1, "seq": 16}
PROPORTIONS = {"intermediate_size": 1792, "num_key_value_heads": 1, "vocab_size": 512}
MODELS = {"LLaMA": "llama", "LLaMA, LoRA": "llama", "Qwen3": "qwen3", "Qwen3, LoRA": "qwen3", "Gemma": "gemma"}
WAYS = ("", "Liger-Kernel", "kernelize")
RUNGS: dict[str, dict[str, Any] | None] = {
    "without": None, "exact": {}, "gate": {"checkpoint": "gate"}, "block": {"checkpoint": "block"},
}  # fmt: skip
NOTES = """
In u a layer: the bytes of one activation of the model's width. Widths have Llama-3-8B's proportions (an MLP of 3.5
times the width, a quarter of the heads for keys and values), in float16; LoRA is PEFT's, p = .05, rank 1 (so that what
its rank keeps is small), fp32 adapters on all linears. Losses are left out: they are in no layer. At "block" .31 is the
state of the CPU's generator. Liger's rotary kernel writes over queries and keys, which are then kept.
"""


def layer(name: str, change: Callable[[nn.Module, str], nn.Module], fields: dict[str, Any] | None) -> float:
    """What a layer keeps, in u; ``fields`` of a config, None for no hf_memsave."""
    kept = []
    for layers in (1, 3):
        size = Size(layers=layers, **SIZE)
        model = build(MODELS[name], size, torch.float16, **PROPORTIONS)
        if "LoRA" in name:
            adapters = LoraConfig(r=1, target_modules="all-linear", lora_dropout=0.05)
            model = get_peft_model(model, adapters).train()
        model = change(model, MODELS[name])
        if fields is not None:
            patch(model, **fields)
        inner = (model.get_base_model() if "LoRA" in name else model).model
        ids = batch_for(inner, size)["input_ids"]
        kept.append(measure_kept(model, {}, forward=lambda inner=inner, ids=ids: inner(input_ids=ids)).total)
    return (kept[1] - kept[0]) / 2 / size.u(2)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the table."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    options = parser.parse_args(argv)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        repository = libraries.built_for_hub(Path(folder))
        for name in track(options.models, console=Console(stderr=True)):
            results[name] = {}
            for way in WAYS:
                for rung, fields in RUNGS.items():
                    with pytest.MonkeyPatch.context() as undone:
                        change = {
                            "": lambda model, family: model,
                            "Liger-Kernel": partial(libraries.with_liger, undone),
                            "kernelize": lambda model, family, of=undone: libraries.kernelized(of, model, repository),
                        }[way]
                        results[name][f"{way}, {rung}" if way else rung] = layer(name, change, fields)
    rows = [
        [name, rung, *(f"{of[f'{way}, {rung}' if way else rung]:.1f}" for way in WAYS)]
        for name, of in results.items()
        for rung in RUNGS
    ]
    header = ["model", "hf_memsave", "kept, u", *(f"with {way}" for way in WAYS if way)]
    publish(
        "beside",
        "# Kept by a layer, with other libraries' kernels and with hf_memsave",
        header,
        rows,
        results,
        options.out,
        NOTES,
    )


if __name__ == "__main__":
    main()
