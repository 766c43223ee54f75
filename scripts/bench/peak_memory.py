"""The peak of a training step, patched beside stock: counted storage by storage, and resident in a process of its own.

    python scripts/bench/peak_memory.py [--cases bert llama-lora] [--processes 3] [--out [DIR]]

A step is one forward and backward without gradients from before; 6 layers of hidden 256, batch 8, 128 tokens, MLP 4x
wide (LLaMA 2.75x, half the kv heads), hidden dropout .1 (LLaMA none, its adapters .05).

Counted: the most bytes alive at once that the step's ops made (`count_peak`). Resident: how far the process rises in
the step above what it had before; a small step comes first, since kernels load with their first call. It is measured
twice: with pages of its own for each tensor of 128 KiB or more (MALLOC_MMAP_THRESHOLD_), which go back to the system
when the tensor is freed; and as glibc does by default, where freed tensors of up to 32 MiB leave holes in a heap. The
median over the processes. --out writes peak-memory.json and peak-memory.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from torch import nn

from hf_memsave import patch
from hf_memsave.measure.peak import count_peak
from publish import add_out, machine, publish
from support.families import Size, batch_for, build  # found by publish

SIZE = Size(hidden=256, heads=4, layers=6, batch=8, seq=128)
SMALL = Size(hidden=256, heads=4, layers=6, batch=1, seq=8)
MIB = 2**20
#: How tensors are allocated in the processes: the environment that says it to glibc. Others allocate as they do.
ALLOCATION = {"own pages": {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}, "default": {}}


@dataclass(frozen=True)
class Case:
    """What is trained; ``limit`` is the most that the counted peak should be of stock's."""

    family: str
    limit: float
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    lora: bool = False


CASES = {
    "bert": Case("bert", 0.64),
    "llama": Case("llama", 0.60),
    "llama-lora": Case("llama", 0.31, torch.bfloat16, lora=True),
    "bert-autocast": Case("bert", 0.55, autocast=True),
    "llama-autocast": Case("llama", 0.44, autocast=True),
}


@dataclass(frozen=True)
class Peaks:
    """Of one step in one process, in bytes; ``whole`` has libraries and weights in it."""

    counted: int
    risen: int
    whole: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every case stock and patched, each in a fresh process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--processes", type=int, default=1, help="fresh processes per figure, of which the median")
    add_out(parser)
    parser.add_argument("--one", choices=("stock", "patched"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes: expected a positive number, got {options.processes}. Raise it or leave it out.")
    if options.one:
        print(json.dumps(asdict(peaks(CASES[options.cases[0]], options.one == "patched"))))
        return
    runs = [(name, how, kind) for name in options.cases for how in ("stock", "patched") for kind in ALLOCATION]
    found: dict[str, dict[str, Any]] = {
        name: {"limit": CASES[name].limit, **{kind: {} for kind in ALLOCATION}} for name in options.cases
    }
    for name, how, kind in track(runs, "measuring", console=Console(stderr=True)):
        alone = [in_a_process(name, how, ALLOCATION[kind]) for _ in range(options.processes)]
        found[name][kind][how] = {field: statistics.median(run[field] for run in alone) for field in alone[0]}
    title = f"Peak of a step, MiB, patched beside stock; {machine()}"
    publish("peak-memory", title, *table(found), {"cases": found}, options.out)


def peaks(case: Case, patched: bool) -> Peaks:
    """The step's peaks in this process, resident first: counting needs memory too."""
    torch.set_num_threads(1)
    model = made(case, patched)
    step_of(case, model, SMALL)()
    model.zero_grad()
    step = step_of(case, model, SIZE)
    forget_resident_peak()
    before = psutil.Process().memory_info().rss
    step()
    whole = resident_peak()
    model.zero_grad()
    return Peaks(count_peak(step).peak, whole - before, whole)


def made(case: Case, patched: bool) -> nn.Module:
    """The model of a case, in training mode."""
    model = build(case.family, SIZE, case.dtype)
    if case.lora:
        model = get_peft_model(model, LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear")).train()
    if patched:
        patch(model, True)
    return model


def step_of(case: Case, model: nn.Module, size: Size) -> Callable[[], None]:
    """One forward and backward of a batch."""
    batch = batch_for(model, size)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            loss = model(**batch).loss
        loss.backward()

    return step


def forget_resident_peak() -> None:
    """Let Linux count the process's peak from here on; elsewhere what was before stays in."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_peak() -> int:
    """Bytes resident at the most so far (VmHWM; ru_maxrss would have those of the parent process in it)."""
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_a_process(name: str, how: str, environment: dict[str, str]) -> dict[str, int]:
    """The fields of :class:`Peaks`, from a fresh process; what ``environment`` does not say of malloc is unset."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    command = [sys.executable, str(Path(__file__).resolve()), "--cases", name, "--one", how]
    done = subprocess.run(command, capture_output=True, text=True, env=kept | environment)
    if done.returncode:
        raise RuntimeError(
            f"{name}, {how}: expected a process that ends well, got exit code {done.returncode}. Mend what it says:\n"
            f"{done.stderr}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The header and a row for each case."""
    header = ["case", "counted, stock", "patched", "ratio", "limit"]
    for kind in ALLOCATION:
        header += [f"resident, {kind}, stock", "patched", "ratio"]
    rows = []
    for name, row in found.items():
        cells = [name, *beside(row["own pages"], "counted"), f"{row['limit']:.2f}"]
        rows.append(cells + [cell for kind in ALLOCATION for cell in beside(row[kind], "risen")])
    return header, rows


def beside(row: dict[str, dict[str, float]], field: str) -> list[str]:
    """MiB of stock and of patched, and their ratio."""
    stock, patched = row["stock"][field], row["patched"][field]
    return [f"{stock / MIB:.1f}", f"{patched / MIB:.1f}", f"{patched / stock:.3f}"]


if __name__ == "__main__":
    main()
