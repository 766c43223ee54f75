"""Step time and kept memory of every family, patched beside stock, in one run.

    python scripts/bench/families.py [--families llama bert] [--dtype bf16] [--steps 20] [--markdown table.md]

The two models take alternating steps (forward, backward) on the same batch, so that a drift of the machine meets both;
the ratio is that of the medians. Sizes are those in which kept memory is quoted: hidden 256, 4 heads, batch 4, seq 128.
"""

import argparse
import copy
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hf_memsave import MemSaveConfig, measure_kept, patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.families import FAMILIES, QUOTED, batch_for, build  # noqa: E402 - the tests' own models

#: Columns: hidden dropout, and how it is kept.
VARIANTS = {"no dropout": (0.0, "seed"), 'dropout "seed"': (0.1, "seed"), 'dropout "mask"': (0.1, "mask")}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--steps", type=int, default=20, help="alternating steps per figure")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--markdown", type=Path, help="write the table there, too")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    families = track(options.families, "benchmarking", console=Console(stderr=True))
    rows = [bench(family, options, device) for family in families]
    header = ["family", "kept MiB stock", "kept MiB patched", "ratio", *(f"time, {name}" for name in VARIANTS)]
    title = f"{options.dtype}, {options.layers} layers, median of {options.steps} alternating steps; {machine(device)}"
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
    if options.markdown:
        lines = [" | ".join(header), " | ".join("---" for _ in header), *(" | ".join(row) for row in rows)]
        options.markdown.write_text(f"{title}\n\n" + "".join(f"| {line} |\n" for line in lines), encoding="utf-8")


def bench(family: str, options: argparse.Namespace, device: torch.device) -> list[str]:
    """One row: kept MiB with dropout .1 from its seed, and the ratio of step times for each variant."""
    size = replace(QUOTED, layers=options.layers)
    ratios, kept = [], []
    for dropout, how in VARIANTS.values():
        stock = build(family, size, DTYPES[options.dtype], dropout).to(device)
        patched = copy.deepcopy(stock)
        patch(patched, MemSaveConfig(dropout=how))
        batch = batch_for(stock, size)
        if not kept and dropout:
            kept = [measure_kept(model, batch).total / 2**20 for model in (stock, patched)]
        ratios.append(f"{time_ratio(stock, patched, batch, options.steps):.2f}")
    return [family, f"{kept[0]:.1f}", f"{kept[1]:.1f}", f"{kept[1] / kept[0]:.2f}", *ratios]


def time_ratio(stock: torch.nn.Module, patched: torch.nn.Module, batch: dict[str, torch.Tensor], steps: int) -> float:
    """Median step time of ``patched`` over that of ``stock``."""
    times: tuple[list[float], list[float]] = [], []
    for index in range(steps + 2):
        for model, record in zip((stock, patched), times, strict=True):
            start = time.perf_counter()
            model(**batch).loss.backward()
            if batch["input_ids"].is_cuda:
                torch.cuda.synchronize()
            if index >= 2:  # the first steps allocate
                record.append(time.perf_counter() - start)
            model.zero_grad()
    return statistics.median(times[1]) / statistics.median(times[0])


def machine(device: torch.device) -> str:
    """The machine, in words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{torch.get_num_threads()} CPU threads, {platform.machine()}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
