"""Every way to run a step beside stock, in one run: its time, what a layer keeps, and its peak.

    python scripts/bench/host_time.py [--rows LLaMA BERT] [--ways eager whole] [--seconds 5] [--out [DIR]] [--resume]

4 layers of hidden 256 on one CPU thread. LoRA is as people train it: PEFT's defaults on all linears of a base in bf16,
with fp32 adapters. At batch 1 and 8 tokens what is left of a step is Python, PyTorch's dispatcher and the reading of
weights; 4 x 128 tokens is a small real step. Ways: the tape alone ("eager"), also with LoRA's masks drawn again where
they are kept in bits (dropout="seed"); each repeated block compiled, the tape around them ("by blocks"); the patched
model compiled ("whole"); stock compiled; and at 1 x 8 the host's part of the Triton backend: the vendored kernels look
up what they would launch, as on a GPU, and launch nothing (what they would have written stays as it was allocated). A
GPU's own cost of a launch, some microseconds, is not in it.

Time: CPU seconds of the process, of steps that take turns with stock's, over stock's; the means of the quickest tenth,
which other work on the machine disturbs least. Kept: between forward and backward, the difference of two depths, in
u = tokens x hidden x bytes of a weight. Peak: the most bytes alive that a step made, its gradients among them. Both are
counted op by op; of compiled ways by PyTorch's profiler, which sees all that is allocated but by NumPy. First step:
CPU seconds, the compiler's own processes too. Without a compiler, name the other ways. What is measured is written
after each row and shape; --resume goes on from there.

The second table is of what may grow: layers, adapters of which one is active, and lengths of a batch (1 x 8, or all of
8 to 207 in any order), of which each is learned. There a step's time is the mean of all but the first tenth, and what
Python's collector takes is told apart: what a forward keeps makes it walk over all objects of all libraries, the more
often the more layers there are. After gc.freeze() it leaves these out, as in the first table.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels then take tensors of the CPU
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "KINETO_LOG_LEVEL": "5"}  # so that processes are waited for; quiet

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.count.peak import count_peak
from hf_memsave.ops.fused import linear
from hf_memsave.ops.fused.kernels import kernels
from publish import MIB, arguments, machine, publish, table
from support.zoo import Size, batch_for, build  # found by publish

LAYERS, FEWER = 4, 2
#: Of the compiler: empty, so that a first step compiles all; removed at the end.
CACHE = tempfile.TemporaryDirectory()
#: Batch and tokens.
SHAPES = {"1 x 8": (1, 8), "4 x 128": (4, 128)}


class Row(NamedTuple):
    """A model: its dropout is that of its adapters (of rank 16, in fp32, the first one active), if it has any."""

    family: str
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    adapters: int = 0
    is_autocast: bool = False  # to bf16
    in_4_bits: bool = False


LORA = Row("llama", 0.05, torch.bfloat16, 1)
ROWS = {
    "LLaMA, LoRA": LORA,
    "LLaMA, LoRA, no dropout": LORA._replace(dropout=0.0),
    "LLaMA, LoRA, autocast": LORA._replace(is_autocast=True),
    "LLaMA, LoRA, fp32 base": LORA._replace(dtype=torch.float32),
    "LLaMA, QLoRA": LORA._replace(in_4_bits=True),
    "LLaMA": Row("llama"),
    "LLaMA, autocast": Row("llama", is_autocast=True),
    "BERT": Row("bert", 0.1),
    "GPT-2": Row("gpt2", 0.1),
    "T5": Row("t5-encoder", 0.1),
}
#: Rows that are measured compiled too, and with Triton.
IN_ALL_WAYS = ("LLaMA, LoRA", "LLaMA", "BERT", "GPT-2")
#: Row of the second table -> a model, its layers, and lengths of its batches.
GROWTH = {f"LLaMA, LoRA, {n} layers": (LORA, n, (8,)) for n in (2, 8, 32, 80)}
GROWTH |= {f"LLaMA, LoRA, {n} adapters": (LORA._replace(adapters=n), LAYERS, (8,)) for n in (1, 4, 16)}
GROWTH |= {f"LLaMA, {len(n)} lengths": (Row("llama"), LAYERS, n) for n in (range(107, 108), range(8, 208))}
#: Way -> the fields of its configuration (None for stock), and whether the model is compiled as a whole.
WAYS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "stock": (None, False),
    "eager": ({}, False),
    'dropout="seed"': ({"dropout": "seed"}, False),
    "Triton, host": ({"backend": "triton"}, False),
    "by blocks": ({"compile": True}, False),
    "whole": ({}, True),
    "stock, compiled": (None, True),
}
#: The most that a step should take of stock's: of eager, of what is compiled by blocks or whole.
LIMITS = {
    "1 x 8": {
        "LLaMA, LoRA": (1.5, 0.85, 0.65),
        "LLaMA": (1.4, 0.95, 1.0),
        "BERT": (1.35, 1.0, 1.0),
        "GPT-2": (1.45, 1.0, 1.0),
    },
    "4 x 128": {"LLaMA, LoRA": (1.15, 1.05, 1.05), **dict.fromkeys(("LLaMA", "BERT", "GPT-2"), (1.06, 1.05, 1.05))},
}
FEWEST, WARM_UP = 10, 3


def main(argv: Sequence[str] | None = None) -> None:
    """Time and count every way of every row at every shape, and print the table as it grows."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS)[1:], default=list(WAYS)[1:], metavar="WAY")
    parser.add_argument("--growth", nargs="*", choices=GROWTH, default=list(GROWTH), metavar="ROW")
    parser.add_argument("--seconds", type=float, default=20.0, help="of alternating steps, for each row and shape")
    parser.add_argument("--resume", action="store_true", help="with --out: measure what is missing there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = CACHE.name
    launch_nothing()
    file = options.out / "host-time.json" if options.out and options.resume else None
    known = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}
    found, grown = known.get("rows", {}), known.get("growth", {})
    for row in options.rows:
        for shape in options.shapes:
            ways = [way for way in options.ways if is_there(row, shape, way) and name(row, shape, way) not in found]
            if ways:
                found |= measured(row, shape, ways, options.seconds)
                show(found, grown, options.out, quiet=True)
    for name_of_row in options.growth:
        if name_of_row not in grown:
            grown[name_of_row] = grows(*GROWTH[name_of_row], options.seconds)
            show(found, grown, options.out, quiet=True)
    show(found, grown, options.out, quiet=False)


def name(row: str, shape: str, way: str) -> str:
    """Of the figures of a row of the table."""
    return f"{row}; {shape}; {way}"


def is_there(row: str, shape: str, way: str) -> bool:
    """Whole models take long to compile, and their time matters where the host's does; most rows are eager alone."""
    if way == 'dropout="seed"':
        return row == "LLaMA, LoRA"
    return way == "eager" or (row in IN_ALL_WAYS and (shape == "1 x 8" or way not in ("whole", "Triton, host")))


def measured(row: str, shape: str, ways: Sequence[str], seconds: float) -> dict[str, dict[str, float]]:
    """The figures of these ways, by name."""
    torch._dynamo.reset()
    batch, counted, warm = inputs(ROWS[row], *SHAPES[shape]), {}, {}
    runs: dict[str, Any] = {}
    for way in ("stock", *ways):
        start = seconds_of_all()
        runs[way] = made(ROWS[row], way, LAYERS)
        step(runs[way], batch)
        warm[way] = seconds_of_all() - start
    times = in_turn(runs, [batch], seconds)
    for way, run in runs.items():
        count = counted_by_profiler if "compiled" in way or way in ("by blocks", "whole") else counted_by_op
        kept, peak = count(run, batch)
        counted[way] = (kept - count(made(ROWS[row], way, FEWER), batch)[0]) / (LAYERS - FEWER), peak
    u = batch["input_ids"].numel() * 256 * (2 if ROWS[row].is_autocast else ROWS[row].dtype.itemsize)
    stock = quickest_tenth(times["stock"], 1)
    return {
        name(row, shape, way): {
            "stock, ms": 1e3 * stock, "step": quickest_tenth(times[way], 1) / stock,
            "forward": quickest_tenth(times[way], 0) / quickest_tenth(times["stock"], 0), "steps": len(times[way]),
            "kept": counted[way][0] / u, "stock kept": counted["stock"][0] / u,
            "peak": counted[way][1] / MIB, "stock peak": counted["stock"][1] / MIB, "warm-up": warm[way],
        } for way in ways
    }  # fmt: skip


def grows(row: Row, layers: int, lengths: Sequence[int], seconds: float) -> dict[str, float]:
    """The time of a step of the patched model, beside stock's; and with all that the collector does."""
    runs = {way: made(row, way, layers) for way in ("stock", "eager")}
    batches = [inputs(row, 1, length) for length in random.Random(0).sample(lengths, len(lengths))]
    found: dict[str, float] = {}
    for more, is_frozen in {"more": True, "more, collected": False}.items():
        times = in_turn(runs, batches, seconds, max(4 * FEWEST, 10 * len(batches) // 2), is_frozen)
        stock, ours = (statistics.fmean(step for _, step in times[way][len(times[way]) // 10 :]) for way in runs)
        found = {"stock, ms": 1e3 * stock, "step": ours / stock} | found | {more: 1e3 * (ours - stock) / layers}
    return found


class Autocast:
    """A model that runs under autocast to bf16."""

    def __init__(self, model: Any) -> None:
        self.model, self.zero_grad = model, model.zero_grad

    def __call__(self, **batch: Tensor) -> Any:
        """Run the model."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**batch)


def made(row: Row, way: str, layers: int) -> Any:
    """A model in training mode, as this way runs it."""
    torch.manual_seed(0)
    dropout = 0.0 if row.adapters else row.dropout
    model: Any = build(row.family, Size(hidden=256, heads=4, layers=layers), row.dtype, dropout)
    if row.in_4_bits:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=row.dtype)
            model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked, dtype=row.dtype).train()
    model.config.use_cache = False  # as Trainer has it
    config = LoraConfig(r=16, lora_dropout=row.dropout, target_modules="all-linear", init_lora_weights=False)
    for i in range(row.adapters):
        if i:
            model.add_adapter(str(i), config)
        else:
            model = get_peft_model(model, config).train()
    fields, is_compiled = WAYS[way]
    if fields is not None:
        patch(model, MemSaveConfig(**fields))
    run = torch.compile(model) if is_compiled else model
    return Autocast(run) if row.is_autocast else run


def inputs(row: Row, batch: int, seq: int) -> dict[str, Tensor]:
    """Token ids, an attention mask and labels."""
    size = Size(batch=batch, seq=seq)
    return batch_for(build(row.family, size), size)


def step(run: Any, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Seconds of a step's forward, and of all of it; clearing its gradients is not timed."""
    start = time.process_time()
    loss = run(**batch).loss
    middle = time.process_time()
    loss.backward()
    end = time.process_time()
    run.zero_grad()
    return middle - start, end - start


def in_turn(
    runs: dict[str, Any],
    batches: Sequence[dict[str, Tensor]],
    seconds: float,
    fewest: int = FEWEST,
    is_frozen: bool = True,
) -> dict[str, list[tuple[float, float]]]:
    """The steps of each, in turn first, until the time is up; each batch is one round's."""
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in runs}
    for run in list(runs.values()) * WARM_UP:
        step(run, batches[0])
    gc.collect()
    if is_frozen:
        gc.freeze()  # the collector stays on, but does not look at the libraries' objects
    end, order, rounds = time.perf_counter() + seconds, list(runs), 0
    try:
        while time.perf_counter() < end or rounds < fewest:
            for way in order:
                times[way].append(step(runs[way], batches[rounds % len(batches)]))
            order.append(order.pop(0))
            rounds += 1
    finally:
        gc.unfreeze()
    return times


def quickest_tenth(times: list[tuple[float, float]], part: int) -> float:
    """The mean of the quickest tenth of the forwards (0) or of whole steps (1)."""
    return statistics.fmean(sorted(one[part] for one in times)[: max(1, len(times) // 10)])


def seconds_of_all() -> float:
    """Of the process on the CPU, and of the compiler's that it waited for."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_children.ru_utime + of_children.ru_stime


def counted_by_op(run: Any, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Bytes kept, and the peak of a step, which makes its gradients."""
    kept = measure_kept(run.model if isinstance(run, Autocast) else run, {}, forward=lambda: run(**batch)).total
    return kept, count_peak(lambda: run(**batch).loss.backward()).peak


def counted_by_profiler(run: Any, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Likewise: the sums of all that is allocated and freed."""
    step(run, batch)
    mark = 12345  # bytes, between forward and backward
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        loss = run(**batch).loss
        gc.collect()
        torch.empty(mark, dtype=torch.uint8)
        loss.backward()
    run.zero_grad()
    results: Any = found.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    live = peak = kept = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.nbytes() == mark:
            kept = live
        live += event.nbytes()
        peak = max(peak, live)
    return kept, peak


def show(found: dict[str, dict[str, float]], grown: dict[str, dict[str, float]], out: Any, quiet: bool) -> None:
    """Stock's own figures stand beside each row."""
    rows = []
    for key, one in found.items():
        row, shape, way = key.split("; ")
        limits = dict(zip(("eager", "by blocks", "whole"), LIMITS[shape].get(row, ()), strict=False))
        cells = [f"{one[part]:.2f}" for part in ("step", "forward")]
        cells += [f"{limits[way]:.2f}" if way in limits else "", f"{one['warm-up']:.0f}"]
        pairs = [f"{one[part]:.1f} of {one[f'stock {part}']:.1f}" for part in ("kept", "peak")]
        rows.append([row, shape, way, f"{one['stock, ms']:.1f}", *cells, *pairs])
    header = ["model", "batch x tokens", "way", "step, stock, ms", "step, over stock's", "forward", "step's limit"]
    header += ["first step, s", "kept a layer, u", "peak, MiB"]
    columns = {"stock, ms": "step, stock, ms", "step": "step, over stock's", "more": "more than stock, ms a layer"}
    columns["more, collected"] = "without gc.freeze()"
    more = [[row, *(f"{one[part]:.2f}" for part in columns)] for row, one in grown.items()]
    notes = table(["model, 1 x 8 tokens", *columns.values()], more)
    results = {"rows": found, "growth": grown}
    publish("host-time", f"Ways to run a step; {machine()}", header, rows, results, out, f"\n{notes}", quiet)


def launch_nothing() -> None:
    """Replace the launch of every vendored kernel by all of it but the launch, and the product given in fp32."""
    kernels()
    package = {name: module for name, module in sys.modules.items() if name.startswith("memsave_kernels.")}
    own: Any = package["memsave_kernels._launch"]
    real, compiled = own.launch, {}

    def launch(
        kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], num_warps: int = 4
    ) -> None:
        if 0 not in grid:
            first = next(arg for arg in args if isinstance(arg, Tensor))
            key = [id(kernel), first.get_device(), num_warps, *constants.values()]  # as `own.launch` makes one
            key += [(a.dtype, a.data_ptr() % 16) if isinstance(a, Tensor) else type(a) for a in args]
            compiled.setdefault(tuple(key), kernel)

    def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        product = a @ b
        return product if product.dtype == dtype else torch.empty_like(product, dtype=dtype)

    def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        torch.mm(a, b)
        return total

    for module in package.values():
        if getattr(module, "launch", None) is real:
            module.launch = launch  # type: ignore[attr-defined]
    linear.wide_product, linear.add_product = wide_product, add_product


if __name__ == "__main__":
    main()
