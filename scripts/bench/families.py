"""Step time and kept memory of every family, patched beside stock, in one run.

    python scripts/bench/families.py [--families llama bert] [--dtype bf16] [--steps 20] [--out [DIR]]

The two models take alternating steps (forward, backward) on the same batch, so that a drift of the machine meets both;
the ratio is that of the medians. Sizes are those in which kept memory is quoted: hidden 256, 4 heads, batch 4, seq 128.
"""

import argparse
import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from hf_memsave import MemSaveConfig, measure_kept, patch
from publish import MIB, arguments, gpu, machine, publish, ratio_of_medians
from support.families import FAMILIES, MODES, QUOTED, batch_for, build  # found by publish

#: Columns: hidden dropout, and how it is kept.
VARIANTS = {"no dropout": (0.0, "auto"), "dropout": (0.1, "auto"), 'dropout="seed"': (0.1, "seed")}


def main() -> None:
    """Run the benchmark and print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=20, help="alternating steps per figure")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    families = track(options.families, "benchmarking", console=Console(stderr=True))
    rows = [bench(family, options) for family in families]
    header = ["family", "kept MiB stock", "kept MiB patched", "ratio", *(f"time, {name}" for name in VARIANTS)]
    how = f"{options.dtype}, {options.layers} layers, median of {options.steps} alternating steps"
    publish("families", f"{how}; {gpu() or machine()}", header, rows, {}, options.out)


def bench(family: str, options: argparse.Namespace) -> list[str]:
    """One row: kept MiB with dropout .1, and the ratio of step times for each variant."""
    size = replace(QUOTED, layers=options.layers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ratios, kept = [], []
    for dropout, how in VARIANTS.values():
        stock = build(family, size, MODES[options.dtype], dropout).to(device)
        patched = copy.deepcopy(stock)
        patch(patched, MemSaveConfig(dropout=how))
        batch = batch_for(stock, size)
        if not kept and dropout:
            kept = [measure_kept(model, batch).total / MIB for model in (stock, patched)]
        calls = [partial(step, model, batch) for model in (stock, patched)]
        ratios.append(f"{ratio_of_medians(*calls, options.steps):.2f}")
    return [family, f"{kept[0]:.1f}", f"{kept[1]:.1f}", f"{kept[1] / kept[0]:.2f}", *ratios]


def step(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """Forward and backward."""
    model(**batch).loss.backward()


if __name__ == "__main__":
    main()
