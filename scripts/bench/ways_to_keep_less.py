"""Every way to keep less, beside stock, in one run: kept between forward and backward, peak of a step, time of a step.

    python scripts/bench/ways_to_keep_less.py [--models bert llama] [--steps 5] [--out [DIR]]

4 layers of hidden 256, fp32, batch 8 of 128 tokens, without dropout, on one CPU thread.

Kept and peak: bytes of all storages alive that the step's ops made, without gradients from before; what offload has
copied to main memory is told apart. "SAC" is PyTorch's selective checkpointing of every block that keeps products and
attention. Times: CPU seconds of the quickest step, over those of stock's, which takes turns with it, as other work
shares the machine. What is compiled is in host_time.py.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hf_memsave import MemSaveConfig, patch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.count.peak import Count
from hf_memsave.tape.offload import Away
from publish import MIB, arguments, machine, publish
from support.zoo import Size, batch_for, build  # found by publish

SIZE = Size(hidden=256, heads=4, layers=4, batch=8, seq=128)
RUNGS: tuple[Any, ...] = ("o_proj", "qkv", "up", "gate", "block")
aten = torch.ops.aten
#: What selective checkpointing keeps.
PRODUCTS = [
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_attention_math.default,
]  # fmt: skip


def checkpointed(model: nn.Module, **options: Any) -> None:
    """With Transformers' gradient checkpointing of every block."""
    enable_checkpointing(model, **options)


#: Name -> what is done to a model.
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "stock": lambda model: None,
    "stock, gradient checkpointing": checkpointed,
    "SAC: products, attention": partial(
        checkpointed, context_fn=partial(create_selective_checkpoint_contexts, PRODUCTS)
    ),
    "exact": lambda model: patch(model),
    **{f'checkpoint="{rung}"': partial(patch, config=MemSaveConfig(checkpoint=rung)) for rung in RUNGS},
    "offload": partial(patch, config=MemSaveConfig(offload=True)),
    "max": partial(patch, config="max"),
}


class _OnDevice(Count):
    """Counts what is not a copy in main memory, too."""

    def __init__(self) -> None:
        super().__init__()
        self.highest = 0

    def note(self, func: Any, args: Any) -> None:
        self.highest = max(self.highest, self.live - Away.total)


def main(argv: Sequence[str] | None = None) -> None:
    """Every way on every model; print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=("bert", "llama"), default=["bert", "llama"])
    parser.add_argument("--steps", type=int, default=7, help="timed, after one that is not")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, found = [], {}
    asked = [(name, way) for name in options.models for way in WAYS]
    for name, way in track(asked, "measuring", console=Console(stderr=True)):
        one = found[f"{name}, {way}"] = measured(name, WAYS[way], options.steps)
        cells = [f"{one[field] / MIB:.1f}" for field in ("kept", "away", "peak")]
        rows.append([name, way, *cells, f"{one['time']:.2f}"])
    header = ["model", "way", "kept, MiB", "in main memory", "peak, MiB", "time of a step, of stock's"]
    publish("ways-to-keep-less", f"Ways to keep less; {machine()}", header, rows, {"ways": found}, options.out)


def measured(name: str, change: Callable[[nn.Module], Any], steps: int) -> dict[str, Any]:
    """Bytes of a step, and its time over stock's."""
    model, batch = made(name)
    change(model)
    taken = timed(model, made(name)[0], batch, steps)
    model.zero_grad()
    with _OnDevice() as count:
        loss = model(**batch).loss
        gc.collect()
        away = Away.total
        kept = count.live - away
        loss.backward()
    count.made.clear()
    return {"kept": kept, "away": away, "peak": count.highest, "time": taken}


def timed(forward: Callable[..., Any], stock: nn.Module, batch: dict[str, torch.Tensor], steps: int) -> float:
    """Seconds of the quickest step but the first, over those of stock; of the process on the CPU."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(1 + steps):
        for run, found in zip((forward, stock), seconds, strict=True):
            start = time.process_time()
            run(**batch).loss.backward()
            found.append(time.process_time() - start)
    return min(seconds[0][1:]) / min(seconds[1][1:])


def made(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model in training mode, and a batch."""
    torch.manual_seed(0)
    model = build(name, SIZE, dropout=0.0)
    return model, batch_for(model, SIZE)


if __name__ == "__main__":
    main()
