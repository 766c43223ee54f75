"""Every way to run a step beside stock, in one run: its time, what a layer keeps, and its peak.

    python scripts/bench/host_time.py [--rows LLaMA BERT] [--ways eager whole] [--seconds 5] [--out [DIR]] [--resume]

4 layers of hidden 256 on one CPU thread. At batch 1 and 8 tokens what is left of a step is Python, PyTorch's dispatcher
and the reading of weights; 4 x 128 tokens is a small real step. Ways: the tape alone ("eager"); each repeated block
compiled, the tape around them ("by blocks"); the patched model compiled ("whole"); stock compiled; and at 1 x 8 the
host's part of the Triton backend: the vendored kernels look up what they would launch, as on a GPU, and launch nothing
(what they would have written stays as it was allocated). A GPU's own cost of a launch, some microseconds, is not in it.

Time: CPU seconds of the process, of steps that take turns with stock's, over stock's; the means of the quickest tenth,
which other work on the machine disturbs least. Kept: between forward and backward, the difference of two depths, in
u = tokens x hidden x bytes of a weight. Peak: the most bytes alive that a step made, its gradients among them. Both are
counted op by op; of compiled ways by PyTorch's profiler, which sees all that is allocated but by NumPy. First step:
CPU seconds, the compiler's own processes too. Without a compiler, name the other ways. What is measured is written
after each row and shape; --resume goes on from there.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels then take tensors of the CPU
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "KINETO_LOG_LEVEL": "5"}  # so that processes are waited for; quiet

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.count.peak import count_peak
from hf_memsave.ops.fused import linear
from hf_memsave.ops.fused.kernels import kernels
from publish import MIB, arguments, machine, publish
from support.zoo import Size, batch_for, build  # found by publish

LAYERS, FEWER = 4, 2
#: Batch and tokens.
SHAPES = {"1 x 8": (1, 8), "4 x 128": (4, 128)}
#: Row -> its family, dropout, dtype, and whether it has adapters: PEFT's of rank 16 at all linears, in fp32.
ROWS: dict[str, tuple[str, float, torch.dtype, bool]] = {
    "LLaMA, LoRA": ("llama", 0.05, torch.float32, True),
    "LLaMA, LoRA, bf16 base": ("llama", 0.05, torch.bfloat16, True),
    "LLaMA": ("llama", 0.0, torch.float32, False),
    "BERT": ("bert", 0.1, torch.float32, False),
    "GPT-2": ("gpt2", 0.1, torch.float32, False),
    "T5": ("t5-encoder", 0.1, torch.float32, False),
}
#: Way -> the fields of its configuration (None for stock), and whether the model is compiled as a whole.
WAYS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "stock": (None, False),
    "eager": ({}, False),
    "Triton, host": ({"backend": "triton"}, False),
    "by blocks": ({"compile": True}, False),
    "whole": ({}, True),
    "stock, compiled": (None, True),
}
#: The most that a step may take of stock's: of eager, of what is compiled by blocks or whole.
LIMITS = {
    "1 x 8": {"LoRA": (1.4, 0.85, 0.65), "": (1.45, 1.0, 1.0)},
    "4 x 128": {"LoRA": (1.12, 1.05, 1.05), "": (1.08, 1.05, 1.05)},
}
FEWEST, WARM_UP = 10, 3


def main(argv: Sequence[str] | None = None) -> None:
    """Time and count every way of every row at every shape, and print the table as it grows."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS)[1:], default=list(WAYS)[1:], metavar="WAY")
    parser.add_argument("--seconds", type=float, default=20.0, help="of alternating steps, for each row and shape")
    parser.add_argument("--resume", action="store_true", help="with --out: measure what is missing there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    launch_nothing()
    file = options.out / "host-time.json" if options.out and options.resume else None
    found = json.loads(file.read_text(encoding="utf-8"))["rows"] if file and file.exists() else {}
    for row in options.rows:
        for shape in options.shapes:
            ways = [way for way in options.ways if is_there(row, shape, way) and name(row, shape, way) not in found]
            if ways:
                found |= measured(row, shape, ways, options.seconds)
                show(found, options.out, quiet=True)
    show(found, options.out, quiet=False)


def name(row: str, shape: str, way: str) -> str:
    """Of the figures of a row of the table."""
    return f"{row}; {shape}; {way}"


def is_there(row: str, shape: str, way: str) -> bool:
    """Whole models take long to compile, and their time matters where the host's does; T5 has its row in eager."""
    if way == "Triton, host":
        return shape == "1 x 8" and row != "T5"
    is_known = way != "by blocks" or hasattr(MemSaveConfig, "compile")
    return way == "eager" or (row != "T5" and is_known and (shape == "1 x 8" or way != "whole"))


def measured(row: str, shape: str, ways: Sequence[str], seconds: float) -> dict[str, dict[str, float]]:
    """The figures of these ways, by name."""
    torch._dynamo.reset()
    batch, counted, warm = inputs(row, shape), {}, {}
    runs: dict[str, Any] = {}
    for way in ("stock", *ways):
        start = seconds_of_all()
        runs[way] = made(row, shape, way, LAYERS)
        step(runs[way], batch)
        warm[way] = seconds_of_all() - start
    times = in_turn(runs, batch, seconds)
    for way, run in runs.items():
        count = counted_by_profiler if "compiled" in way or way in ("by blocks", "whole") else counted_by_op
        kept, peak = count(run, batch)
        counted[way] = (kept - count(made(row, shape, way, FEWER), batch)[0]) / (LAYERS - FEWER), peak
    u = batch["input_ids"].numel() * 256 * ROWS[row][2].itemsize
    stock = quickest_tenth(times["stock"], 1)
    return {
        name(row, shape, way): {
            "stock, ms": 1e3 * stock, "step": quickest_tenth(times[way], 1) / stock,
            "forward": quickest_tenth(times[way], 0) / quickest_tenth(times["stock"], 0), "steps": len(times[way]),
            "kept": counted[way][0] / u, "stock kept": counted["stock"][0] / u,
            "peak": counted[way][1] / MIB, "stock peak": counted["stock"][1] / MIB, "warm-up": warm[way],
        } for way in ways
    }  # fmt: skip


def made(row: str, shape: str, way: str, layers: int) -> Any:
    """A model in training mode, as this way runs it."""
    family, dropout, dtype, is_adapted = ROWS[row]
    batch, seq = SHAPES[shape]
    torch.manual_seed(0)
    model: Any = build(family, Size(hidden=256, heads=4, layers=layers, batch=batch, seq=seq), dtype, dropout)
    model.config.use_cache = False  # as Trainer has it
    if is_adapted:
        lora: dict[str, Any] = dict(r=16, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, LoraConfig(**lora)).train()
    fields, is_compiled = WAYS[way]
    if fields is not None:
        patch(model, MemSaveConfig(**fields))
    return torch.compile(model) if is_compiled else model


def inputs(row: str, shape: str) -> dict[str, Tensor]:
    """Token ids, an attention mask and labels."""
    batch, seq = SHAPES[shape]
    size = Size(batch=batch, seq=seq)
    return batch_for(build(ROWS[row][0], size), size)


def step(run: Any, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Seconds of a step's forward, and of all of it; clearing its gradients is not timed."""
    start = time.process_time()
    loss = run(**batch).loss
    middle = time.process_time()
    loss.backward()
    end = time.process_time()
    run.zero_grad()
    return middle - start, end - start


def in_turn(runs: dict[str, Any], batch: dict[str, Tensor], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """The steps of each, in turn first, until the time is up."""
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in runs}
    for run in list(runs.values()) * WARM_UP:
        step(run, batch)
    gc.collect()
    gc.freeze()  # the collector stays on, but does not look at the libraries' objects
    end, order = time.perf_counter() + seconds, list(runs)
    try:
        while time.perf_counter() < end or min(map(len, times.values())) < FEWEST:
            for way in order:
                times[way].append(step(runs[way], batch))
            order.append(order.pop(0))
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
    return measure_kept(run, batch).total, count_peak(lambda: run(**batch).loss.backward()).peak


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


def show(found: dict[str, dict[str, float]], out: Any, quiet: bool) -> None:
    """Stock's own figures stand beside each row."""
    rows = []
    for key, one in found.items():
        row, shape, way = key.split("; ")
        of_eager, by_blocks, whole = LIMITS[shape]["LoRA" if "LoRA" in row else ""]
        limit = {"eager": of_eager, "by blocks": by_blocks, "whole": whole}.get(way)
        cells = [f"{one[part]:.2f}" for part in ("step", "forward")]
        cells += [f"{limit:.2f}" if limit and row != "T5" else "", f"{one['warm-up']:.0f}"]
        pairs = [f"{one[part]:.1f} of {one[f'stock {part}']:.1f}" for part in ("kept", "peak")]
        rows.append([row, shape, way, f"{one['stock, ms']:.1f}", *cells, *pairs])
    header = ["model", "batch x tokens", "way", "step, stock, ms", "step, over stock's", "forward", "step's limit"]
    header += ["first step, s", "kept a layer, u", "peak, MiB"]
    publish("host-time", f"Ways to run a step; {machine()}", header, rows, {"rows": found}, out, quiet=quiet)


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
