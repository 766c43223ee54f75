"""Whether a step on this machine's GPU is stock's: to the bit where stock agrees with itself, else within its noise.

    python scripts/bench/gpu_bits.py [--seconds 420] [--out [DIR]]    # but for rows that DIR has, and that were right
    python scripts/bench/gpu_bits.py --smoke     # tiny models, a few rows of each kind, on CPU too: whether it runs

Small models of eight families from random weights. A step is forward and backward, from one seed; compared are the loss
and every gradient. Of stock there are three steps, of a patched copy two. What is expected, by kind of row:

- bits: a tensor's distance is the norm of the difference over stock's norm, 0 for equal bits. Patched may be twice as
  far from stock as stock's steps are from each other, so where they have the same bits it has them too. That is asked
  under deterministic algorithms, cuBLAS's fixed work spaces and SDPA's math kernel; under the default kernels, where
  the noise of a tensor is itself a matter of chance, it may be that of the median tensor. Expected and got are of the
  worst tensor. Kept is what is on the device between forward and backward, beyond what was there before.
- kept: bytes alone, as Triton's kernels have bits of their own.
- waits: how often the host waits for the device in a third step (`torch.cuda.set_sync_debug_mode`): at most as stock.
- threads: two models train at once, each on a stream of its own: the bits of each alone.

Sequences have 128 tokens: cuDNN's attention in stock gives NaN for some other lengths and a mask. Exit status 1 if a
row is wrong. --out writes gpu-bits.json and .md after every row. --plant makes a fault that has to be found.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once

import torch
from torch import Tensor, nn

import gpu_steps
from gpu_steps import DEFAULT, DEVICE, FIXED, Results, Row, judged, kept, plant, release, step, under, waits
from hf_memsave import MemSaveConfig, patch
from publish import arguments, earlier, publish
from support.zoo import Size, batch_for, build  # found by publish

FAMILIES = ("llama", "bert", "gpt2", "t5-gated-encoder", "phi", "qwen3", "gemma", "opt")
SETTINGS = {
    "exact": MemSaveConfig(),
    "gate": MemSaveConfig(checkpoint="gate"),
    "block": MemSaveConfig(checkpoint="block"),
    "offload": MemSaveConfig(offload=True),
    "exact, Triton": MemSaveConfig(backend="triton"),
}
RUNGS = ("gate", "block", "offload")
MODES = ("bf16", "autocast", "fp32")


class Case(NamedTuple):
    """What is compared. ``adapters``: "", "LoRA" or "QLoRA"; ``mask``: "none", "ones", "left" or "odd"."""

    family: str
    mode: str = "bf16"
    dropout: float = 0.1
    setting: str = "exact"
    kernels: str = FIXED
    mask: str = "ones"
    adapters: str = ""

    def __str__(self) -> str:
        what = [self.family, self.adapters, self.mode, f"dropout {self.dropout}"]
        return ", ".join(filter(None, [*what, {"left": "padded left", "odd": "100 tokens, padded"}.get(self.mask, "")]))


class LeftOut(Exception):
    """Why a row cannot be had here."""


class Rows:
    """Makes rows, in models of this size, with this fault planted in patched ones."""

    def __init__(self, is_smoke: bool, plant: str | None) -> None:
        self.is_smoke, self.plant = is_smoke, plant
        self.size = Size(32, 4, 2, 2, 16) if is_smoke else Size(256, 4, 2, 4, 128)
        self.stock: dict[Case, tuple[list[Results], int]] = {}

    def made(self, case: Case, patched: bool) -> tuple[nn.Module, dict[str, Tensor]]:
        """A model and its batch."""
        size = replace(self.size, seq=self.size.seq * 100 // 128) if case.mask == "odd" else self.size
        dtype = torch.bfloat16 if case.mode == "bf16" else torch.float32
        model = self.adapted(case, size) if case.adapters else build(case.family, size, dtype, case.dropout)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):  # LLaMA has no other
                module.attention_dropout = case.dropout
            if hasattr(module, "config"):  # checkpoint="block" has the bits of stock without a cache
                module.config.use_cache = False
        model = model.to(DEVICE)
        batch = batch_for(model, size, padded=case.mask == "odd")
        if case.mask == "left":
            batch["attention_mask"][1:, : size.seq // 4] = 0
        if case.mask == "none":
            del batch["attention_mask"]
        if patched:
            patch(model, SETTINGS[case.setting])
            plant(model, self.plant, case.kernels)
        return model, batch

    def adapted(self, case: Case, size: Size) -> nn.Module:
        """With adapters at all linears, in fp32, on a base in 16 or in 4 bits."""
        needed = ("peft", "bitsandbytes") if case.adapters == "QLoRA" else ("peft",)
        if missing := [name for name in needed if not find_spec(name)]:
            raise LeftOut(f"{' and '.join(missing)} not installed")
        from support.lora import adapted, quantized

        if case.adapters == "LoRA":
            return adapted(case.family, "bf16, fp32 adapters", case.dropout, size)
        with tempfile.TemporaryDirectory() as folder:
            build(case.family, size, torch.bfloat16).save_pretrained(folder)
            return quantized(folder, 4, family=case.family)

    def of_stock(self, case: Case) -> tuple[list[Results], int]:
        """Three steps, and the bytes kept."""
        key = case._replace(setting="exact")
        if key not in self.stock:
            model, batch = self.made(case, patched=False)
            self.stock[key] = [step(model, batch, case.mode) for _ in range(3)], kept(model, batch, case.mode)
        return self.stock[key]

    def bits(self, case: Case) -> Row:
        """Patched beside stock, and stock beside itself."""
        with under(case.kernels):
            stock, of_stock = self.of_stock(case)
            model, batch = self.made(case, patched=True)
            ours = [step(model, batch, case.mode) for _ in range(2)]
            return with_kept(judged(stock, ours, case.kernels), kept(model, batch, case.mode) / of_stock)

    def kept(self, case: Case) -> Row:
        """Bytes alone."""
        if DEVICE.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
            raise LeftOut("Triton needs a GPU, or TRITON_INTERPRET=1")
        _, of_stock = self.of_stock(case)
        model, batch = self.made(case, patched=True)
        loss = step(model, batch, case.mode)["loss"]
        wrong = "" if loss.isfinite() else f"WRONG: its loss is {loss}"
        return with_kept(Row("", "", wrong), kept(model, batch, case.mode) / of_stock)

    def waits(self, case: Case) -> Row:
        """Of the host for the device."""
        counts = []
        for patched in (False, True):
            model, batch = self.made(case, patched)
            counts.append(waits(partial(step, model, batch, case.mode)))
        stock, ours = counts
        return Row(f"{stock} waits", f"{ours} waits", "WRONG: the host waits" if ours > stock else "")

    def threads(self, case: Case) -> Row:
        """Beside each alone."""
        both = [case, case._replace(family="bert")]

        def trained(made: tuple[nn.Module, dict[str, Tensor]]) -> Results:
            stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = [step(*made, case.mode) for _ in range(3)][-1]
            if stream is not None:
                stream.synchronize()
            return found

        with under(case.kernels):
            alone = [trained(self.made(one, patched=True)) for one in both]
            made = [self.made(one, patched=True) for one in both]
            release()
            with ThreadPoolExecutor(2) as pool:
                at_once = list(pool.map(trained, made))
        rows = [judged([one, one], [two], case.kernels) for one, two in zip(alone, at_once, strict=True)]
        return next((row for row in rows if row.verdict), rows[0])


def with_kept(row: Row, share: float) -> Row:
    """With what is kept, of stock's: no more than that."""
    return row._replace(kept=f"{share:.3f}", verdict=row.verdict or "WRONG: keeps more than stock" * (share > 1.01))


def planned(rows: Rows) -> Iterator[tuple[Callable[[Case], Row], Case]]:
    """Every row once, those that tell most first."""
    some = ("llama", "bert", "gpt2", "t5-gated-encoder")

    def bits(
        families: Sequence[str], settings: Sequence[str], kernels: str, modes: Sequence[str] = ("bf16",), **of: Any
    ) -> Iterator[tuple[Callable[[Case], Row], Case]]:
        for mode, setting, family in itertools.product(modes, settings, families):
            yield rows.bits, Case(family, mode, setting=setting, kernels=kernels, **of)

    yield from bits(FAMILIES, ["exact"], FIXED, ("bf16", "autocast"))
    yield from bits(some, RUNGS, FIXED)
    for adapters, kernels in itertools.product(("LoRA", "QLoRA"), (FIXED, DEFAULT)):
        yield from bits(["llama"], ["exact", "gate"], kernels, dropout=0.05, adapters=adapters)
    for setting, family in itertools.product(("exact", *RUNGS), ("llama", "bert")):
        yield rows.waits, Case(family, setting=setting, kernels=DEFAULT, mask="none")
    for setting in ("exact", *RUNGS):
        yield rows.threads, Case("llama", dropout=0.0, setting=setting)
    yield from bits(FAMILIES, ["exact"], DEFAULT)
    for kernels, mask in itertools.product((FIXED, DEFAULT), ("left", "odd")):
        yield from bits(some, ["exact", "block"], kernels, mask=mask)
    for mode, dropout, family in itertools.product(MODES, (0.1, 0.0), FAMILIES):
        yield rows.kept, Case(family, mode, dropout, "exact, Triton", DEFAULT)
    for setting, kernels, dropout in itertools.product(("exact", *RUNGS), (FIXED, DEFAULT), (0.1, 0.0)):
        yield from bits(FAMILIES, [setting], kernels, MODES, dropout=dropout)


def main(argv: Sequence[str] | None = None) -> int:
    """Make every row; the exit status is 1 where one is wrong."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=420, help="begin no row after so many")
    parser.add_argument("--smoke", action="store_true", help="tiny models, the first row of each kind")
    parser.add_argument("--plant", choices=("bit", "sync", "error"), help="a fault in patched models")
    options = parser.parse_args(argv)
    if DEVICE.type == "cpu" and not options.smoke:
        parser.error("expected a CUDA device, got none. Use --smoke to see whether the script runs.")
    warnings.filterwarnings("ignore", message=".*deterministic")
    rows = Rows(options.smoke, options.plant)
    tasks = list(dict.fromkeys(planned(rows)))
    if options.smoke:
        kinds = {(make.__name__, c.setting, c.kernels, c.mask, c.adapters): (make, c) for make, c in reversed(tasks)}
        tasks = list(kinds.values())[::-1]
    header = ["kind", "case", "setting", "kernels", "kept, of stock's", "expected", "got", "verdict"]
    known = [list(row.values()) for row in earlier("gpu-bits", options.out).get("rows", [])]
    table = {tuple(cells[:4]): cells for cells in known}
    gc.freeze()  # rows collect garbage, which the libraries' objects are not
    end, wrong = time.monotonic() + options.seconds, sum(cells[-1].startswith("WRONG") for cells in known)
    for index, (make, case) in enumerate(tasks):
        about = [make.__name__, str(case), case.setting, case.kernels]
        if (key := tuple(about)) in table and not table[key][-1]:
            continue
        if time.monotonic() > end:
            print(f"{len(tasks) - index} rows not begun: --seconds", file=sys.stderr)
            break
        print(*about, sep=" | ", end=" | ", flush=True)  # before, in case it hangs
        try:
            row = make(case)
        except LeftOut as why:
            row = Row("", "", f"left out: {why}")
        except Exception as error:  # the other rows tell as much
            traceback.print_exc()
            row = Row("", "", f"WRONG: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        print(row.kept, row.expected, row.got, row.verdict, sep=" | ", flush=True)
        table[key] = [*about, row.kept, row.expected, row.got, row.verdict]
        wrong = sum(cells[-1].startswith("WRONG") for cells in table.values())
        title = f"Patched beside stock, {len(table)} of {len(tasks)} rows, {wrong} wrong"
        results = {"wrong": wrong, "rows": [dict(zip(header, cells, strict=True)) for cells in table.values()]}
        publish("gpu-bits", title, header, table.values(), results, options.out, quiet=True)
        if row.verdict.startswith("WRONG"):
            gpu_steps.synchronize()  # which raises where a fault has left nothing to go on with
    print(f"{len(table)} of {len(tasks)} rows, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
