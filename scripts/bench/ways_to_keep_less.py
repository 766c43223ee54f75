"""Compare every way to keep less in one run: bytes kept, peak of a step, and time of a step, beside stock's.

    python scripts/bench/ways_to_keep_less.py [--models "LLaMA, LoRA"] [--rounds 7] [--out [DIR]]

Models of width 512 on one CPU thread. LLaMA's logits take more than 128 MiB in fp32, so that a chunked loss is used
where a way has one; its vocabulary is small, so that the head is a small part of a step, as in large models.
LoRA is PEFT's default: rank 16 on all linears, adapters in fp32, dropout .05, the base in bf16.

Kept and peak: bytes of all storages alive that the step's operations made, without gradients from before; what offload
has copied to main memory is counted apart. "Selective checkpointing" is PyTorch's, which here keeps products and
attention. Time: CPU seconds of a step over those of stock's step in the same round, in which each way takes its turn,
in another order each time; the median of all rounds but the first three, in which the tape learns. glibc keeps freed
memory for the next tensor, as CUDA's allocator does: else the page faults of stock's larger tensors would count.
Compiled ways are in host_time.py.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hf_memsave import MemSaveConfig, patch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.count.kept import OpCall
from hf_memsave.count.peak import Count
from hf_memsave.tape.offload import Away
from known_models import METHODS, RUNGS
from publish import MIB, arguments, machine, publish
from support.zoo import Size, batch_for, build  # found by publish

HEADER = ["model", "way", "loss", "kept, MiB", "in main memory", "peak, MiB", "time of a step, of stock's"]
#: glibc's M_TRIM_THRESHOLD and M_MMAP_MAX, and the values under which it gives no memory back.
MALLOC = ((-1, 2**31 - 1), (-4, 0))
#: Rounds that are not timed.
LEARNING = 3
aten = torch.ops.aten
#: What selective checkpointing keeps.
PRODUCTS = [
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_attention_math.default,
]  # fmt: skip
SELECTIVE = partial(create_selective_checkpoint_contexts, PRODUCTS)


class Model(NamedTuple):
    """What is trained."""

    family: str
    size: Size
    has_lora: bool = False


_SHORT = Size(hidden=512, heads=8, layers=4, batch=16, seq=512)
#: 8,192 tokens of these words make 130 MiB of logits.
WORDS = 4160
LORA, FULL, BERT, LONG = "LLaMA, LoRA", "LLaMA, full", "BERT, full", "LLaMA, LoRA, 1 x 8192 tokens"
MODELS = {
    LORA: Model("llama", _SHORT, has_lora=True),
    FULL: Model("llama", _SHORT),
    BERT: Model("bert", Size(hidden=512, heads=8, layers=4, batch=4, seq=512)),
    LONG: Model("llama", Size(hidden=512, heads=8, layers=2, batch=1, seq=8192), has_lora=True),
}


class Way(NamedTuple):
    """How a step keeps less: a configuration to patch with, and stock's gradient checkpointing."""

    memsave: Any = None
    checkpointing: bool = False
    context_fn: Any = None

    def change(self, model: nn.Module) -> None:
        """Apply it to a model."""
        if self.checkpointing:
            enable_checkpointing(model, **{"context_fn": self.context_fn} if self.context_fn else {})
        if self.memsave:
            patch(model, self.memsave)

    @property
    def loss(self) -> str:
        """What the way does with the logits of a language model."""
        return "in chunks" if self.memsave and MemSaveConfig.resolve(self.memsave).loss == "chunked" else "whole"


WAYS = {
    "stock": Way(),
    'memsave=True, loss="stock"': Way(METHODS["memsave, whole loss"].memsave),
    "memsave=True": Way("exact"),
    **{f'"{rung}"': Way(rung) for rung in (*RUNGS, "gate", "block")},
    "gradient checkpointing": Way(checkpointing=True),
    "gradient checkpointing + chunked loss": Way(METHODS["checkpointing, chunked loss"].memsave, checkpointing=True),
    "selective checkpointing": Way(checkpointing=True, context_fn=SELECTIVE),
    "offload": Way({"offload": True}),
    '"max"': Way("max"),
    '"tiles"': Way("tiles"),
}


class _OnDevice(Count):
    """Counts what is not a copy in main memory, too."""

    def __init__(self) -> None:
        super().__init__()
        self.highest = 0

    def note(self, call: OpCall) -> None:
        self.highest = max(self.highest, self.live - Away.total)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every way on every model; print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=5, help="that are timed, after three that are not")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for parameter, value in MALLOC:
        ctypes.CDLL(None).mallopt(parameter, value)
    logging.getLogger("hf_memsave").setLevel("ERROR")
    rows, found = [], {}
    for name in options.models:
        model = MODELS[name]
        runs = {way: step_of(model, WAYS[way]) for way in WAYS if is_run(name, way)}
        times = timed(runs, options.rounds)
        for way, run in runs.items():
            one = found[f"{name}; {way}"] = counted(run) | {"time": times[way]}
            cells = [f"{one[field] / MIB:.1f}" for field in ("kept", "away", "peak")]
            loss = "" if model.family == "bert" else WAYS[way].loss
            rows.append([name, way, loss, *cells, f"{one['time']:.2f}"])
        runs.clear()
        gc.collect()
    publish("ways-to-keep-less", f"Ways to keep less; {machine()}", HEADER, rows, {"ways": found}, options.out)


def is_run(name: str, way: str) -> bool:
    """Whether a model has that way: tiles are for long sequences, and all rungs are shown of one model."""
    if way == '"tiles"':
        return name == LONG
    return name == LORA or way not in [f'"{rung}"' for rung in RUNGS]


def step_of(model: Model, way: Way) -> Callable[[], torch.Tensor]:
    """Make a model that is trained this way, and return its forward."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if model.has_lora else torch.float32
    words = {} if model.family == "bert" else {"vocab_size": WORDS}
    made: nn.Module = build(model.family, model.size, dtype, 0.1 if model.family == "bert" else 0.0, **words)
    batch = batch_for(made, model.size)
    made.config.use_cache = False
    if model.has_lora:
        made = get_peft_model(made, LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.05)).train()
    way.change(made)
    return lambda: made(**batch).loss


def timed(runs: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Return the CPU time of a step of each run over stock's: the median of the last rounds."""
    ratios: dict[str, list[float]] = {way: [] for way in runs}
    order = random.Random(0)
    for _ in track(range(LEARNING + rounds), "rounds", console=Console(stderr=True)):
        seconds = {}
        for way, run in order.sample(list(runs.items()), len(runs)):
            start = time.process_time()
            run().backward()
            seconds[way] = time.process_time() - start
        for way, taken in seconds.items():
            ratios[way].append(taken / seconds["stock"])
    return {way: statistics.median(found[LEARNING:]) for way, found in ratios.items()}


def counted(run: Callable[[], torch.Tensor]) -> dict[str, int]:
    """Return the bytes of one more step: kept on the device and in main memory, and the peak on the device."""
    gc.collect()
    with _OnDevice() as count:
        loss = run()
        gc.collect()
        away = Away.total
        kept = count.live - away
        loss.backward()
    count.made.clear()
    return {"kept": kept, "away": away, "peak": count.highest}


if __name__ == "__main__":
    main()
