"""The peak of a whole training run, patched beside stock: counted over every op, and resident in a process of its own.

    python scripts/bench/peak_over_training.py [--runs bert llama-lora] [--steps 30] [--out [DIR]]

A run is the stock Trainer on random token ids, 30 steps of AdamW with an evaluation after every 15th, batch 8: "fixed"
rows have 128 tokens, "dynamic" ones 16 to 128 and are padded to the longest of their batch. Six layers of hidden 256.
LoRA is in bf16 and takes batches of 2, as a CPU may be slow at products in bf16.

Counted: the most bytes alive at once that the run's ops made: gradients and the optimizer's states too. "Avoided" is
what the callback says of the first step. Resident: how far the process rises above what it had before training, with
pages of its own for each tensor of 128 KiB or more, which go back to the system when the tensor is freed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_memsave import MemSaveCallback
from hf_memsave.measure.peak import count_peak
from publish import MIB, arguments, machine, publish
from support.families import VOCAB, Size, build  # found by publish

SIZE = Size(hidden=256, heads=4, layers=6, batch=8, seq=128)
SHORTEST = 16
LORA_SIZE = replace(SIZE, batch=2)
MODELS = ("bert", "llama", "llama-lora")
PADDINGS = ("fixed", "dynamic")


@dataclass(frozen=True)
class Run:
    """One training run, in bytes.

    Attributes:
        counted: The most that was alive at once, above what was there before.
        avoided: What the first step did not keep, as the callback counts it; 0 in stock.
        risen: How far the process rose above what it had before.
    """

    counted: int
    avoided: int
    risen: int


def main(argv: Sequence[str] | None = None) -> None:
    """Every model and padding, stock and patched, each in a fresh process; print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.one:
        name, padding, how, what = options.one
        print(json.dumps(asdict(measured(name, padding, how == "patched", options.steps, what == "counted"))))
        return
    asked = [(name, padding) for name in options.runs for padding in PADDINGS]
    rows, found = [], {}
    for name, padding in track(asked, "training", console=Console(stderr=True)):
        runs = {how: in_processes(name, padding, how, options.steps) for how in ("stock", "patched")}
        found[f"{name}, {padding}"] = runs
        rows.append(row(f"{name}, {padding}", runs))
    resident = [f"resident: {name}" for name in ("stock", "patched", "falls by")]
    header = ["run", "stock", "patched", "falls by", "avoided", "share", *resident]
    title = f"Peak over a training run of 30 steps with evaluation, MiB; {machine()}"
    publish("peak-over-training", title, header, rows, {"runs": found}, options.out)


def row(name: str, runs: dict[str, dict[str, int]]) -> list[str]:
    """Of the table."""
    stock, ours = runs["stock"], runs["patched"]
    fell, avoided = stock["counted"] - ours["counted"], ours["avoided"]
    cells = [stock["counted"], ours["counted"], fell, avoided]
    resident = [stock["risen"], ours["risen"], stock["risen"] - ours["risen"]]
    return [name, *(f"{n / MIB:.1f}" for n in cells), f"{fell / avoided:.2f}", *(f"{n / MIB:.1f}" for n in resident)]


def in_processes(name: str, padding: str, how: str, steps: int) -> dict[str, int]:
    """Counted in one process, and resident in another: counting needs memory too."""
    found: dict[str, int] = {}
    for what, fields in (("counted", ("counted", "avoided")), ("resident", ("risen",))):
        command = [sys.executable, __file__, "--one", name, padding, how, what, "--steps", str(steps)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        one = json.loads(done.stdout.splitlines()[-1])
        found |= {field: one[field] for field in fields}
    return found


def measured(name: str, padding: str, is_patched: bool, steps: int, is_counted: bool = True) -> Run:
    """Train in this process."""
    callback = MemSaveCallback() if is_patched else None
    with tempfile.TemporaryDirectory() as folder:
        trainer = made(name, padding, steps, folder, callback)
        counted = risen = 0
        if is_counted:
            counted = count_peak(trainer.train).peak
        else:
            forget_resident_peak()
            before = psutil.Process().memory_info().rss
            trainer.train()
            risen = resident_peak() - before
    return Run(counted, callback.report.step.nbytes_avoided if callback else 0, risen)


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


def made(name: str, padding: str, steps: int, folder: str, callback: MemSaveCallback | None = None) -> Trainer:
    """A trainer of the model, with as many rows as it takes, and an evaluation after every half."""
    family, _, adapters = name.partition("-")
    size = LORA_SIZE if adapters else SIZE
    model: nn.Module = build(family, size, torch.bfloat16 if adapters else torch.float32)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear"))
    training = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=size.batch, eval_strategy="steps",
        per_device_eval_batch_size=size.batch, eval_steps=max(1, steps // 2), logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, label_names=["labels"],
    )  # fmt: skip
    rows = data(padding, steps * size.batch, is_causal=family == "llama")
    return Trainer(
        model=model, args=training, train_dataset=rows, eval_dataset=rows[: 2 * size.batch], data_collator=collate,
        callbacks=[callback] if callback else [],
    )  # fmt: skip


def data(padding: str, count: int, is_causal: bool) -> list[dict[str, Any]]:
    """Rows of random ids."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        drawn = int(torch.randint(SHORTEST, SIZE.seq + 1, (), generator=generator))
        length = SIZE.seq if padding == "fixed" else drawn
        ids = torch.randint(1, VOCAB, (length,), generator=generator)
        found.append({"input_ids": ids, "labels": ids if is_causal else torch.tensor(i % 2)})
    return found


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded to the longest."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = (ids != 0).long()
    is_causal = rows[0]["labels"].dim() > 0
    labels = ids.masked_fill(mask == 0, -100) if is_causal else torch.stack([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


if __name__ == "__main__":
    main()
