"""Each kernel on this machine's GPU: its bandwidth beside a copy's, its time and its error beside PyTorch's.

    python scripts/bench/ops.py [--shapes machine 8192x4096 1024x128256] [--out [DIR]]
    TRITON_INTERPRET=1 python scripts/bench/ops.py --smoke     # tiny tensors, on CPU: whether the script runs

The cases of the kernels' own tests, forward and backward, in bf16; of 128,256 columns, as a head's logits, the loss
alone. "machine" is a copy and a matrix product. Times are those of launches, by torch.profiler. Bandwidth is what has
to be read and written, over the time. A result further from float64 than PyTorch's by more than its roundings is wrong,
and the exit status 1.
--out writes gpu-ops.json and .md after every row; what was right there is not made again. --repeats 0 compiles alone.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from gpu_steps import DEVICE, release, synchronize
from publish import ROOT, arguments, earlier, publish

KERNELS = ROOT / "hf_memsave" / "_vendor" / "memsave_kernels"
sys.path[:0] = [str(KERNELS / "torch-ext"), str(KERNELS / "tests")]
from cases import CASES  # noqa: E402
from cases.case import Case, no_worse, widen  # noqa: E402

SHAPES = ("8192x4096", "1024x128256", "16384x768", "4096x14336", "130x128256", "8192x1024")


def make(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Random numbers, as a case's ``inputs`` asks for them."""
    return (scale * torch.randn(shape, device=DEVICE)).to(dtype)


def launches(call: Callable[[], Any], repeats: int) -> Counter[str]:
    """Mean seconds on the GPU of each kernel in a call, by its name; "": of the call, where the profiler tells none."""
    call()
    synchronize()
    begun = time.perf_counter()
    call()
    synchronize()
    found = Counter({"": time.perf_counter() - begun})
    if DEVICE.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(repeats):
                call()
            synchronize()
        seen = {event.key: event.self_device_time_total / 1e6 / repeats for event in profiler.key_averages()}
        found = Counter({name: spent for name, spent in seen.items() if spent}) or found
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case at every shape; 1 where one failed, or is wrong."""
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", metavar="ROWSxCOLUMNS")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="tiny tensors, on whatever device there is")
    options = parser.parse_args(argv)
    if DEVICE.type == "cpu" and not options.smoke:
        parser.error("expected a CUDA device, got none. Use --smoke under TRITON_INTERPRET=1 to see whether it runs.")
    shapes, repeats = options.shapes or (["8x64", "2x70000"] if options.smoke else SHAPES), options.repeats
    header = ["shape", "case", "kernel", "us", "GB/s", "of a copy's", "all, us", "PyTorch, us", "verdict"]
    found: dict[str, list[list[str]]] = earlier("gpu-ops", options.out)
    title = f"Kernels in bf16, triton {triton.__version__}"
    for shape in shapes:
        again = {row[0] for row in found.get(shape, []) if row[-1]}
        found[shape] = [row for row in found.get(shape, []) if row[0] not in again]
        known = {row[0] for row in found[shape]}
        for row in measured(shape, repeats, known) if shape != "machine" else [] if known else machine(options.smoke):
            found[shape].append(row)
            print(" | ".join(row), flush=True)
            table = [[shape, *row] for shape, rows in found.items() for row in rows]
            publish("gpu-ops", title, header, table, found, options.out, quiet=True)
    return int(any(row[-1] for rows in found.values() for row in rows))


def machine(is_smoke: bool) -> list[list[str]]:
    """What this GPU can, which other figures are read beside: a copy of 2 GiB, and a product."""
    side = 64 if is_smoke else 8192
    x, a, b = torch.empty(side**3 // 256, device=DEVICE, dtype=torch.uint8), make(side, side), make(side, side)
    copy, product = (launches(call, 5).total() for call in (x.clone, lambda: a @ b))
    rate = f"of {side} x {side}, {2 * side**3 / product / 1e12:.0f} TFLOP/s"
    moved = f"of {x.nbytes / 2**30:.2g} GiB"
    return [
        ["copy", moved, f"{1e6 * copy:.1f}", f"{2 * x.nbytes / copy / 1e9:.0f}", "1.00", "", "", ""],
        ["product", rate, f"{1e6 * product:.1f}", "", "", "", "", ""],
    ]  # fmt: skip


def measured(shape: str, repeats: int, known: Container[str]) -> Iterator[list[str]]:
    """The rows of the table at a shape: first a copy's, then one for each kernel of each case that is not known."""
    rows, columns = map(int, shape.split("x"))
    torch.manual_seed(0)
    x = make(rows, columns)
    seconds = launches(x.clone, max(1, repeats)).total()
    copy = 2 * x.nbytes / seconds
    if repeats and "copy" not in known:
        yield ["copy", "", f"{1e6 * seconds:.1f}", f"{copy / 1e9:.0f}", "1.00", "", "", ""]
    is_loss = columns > 65536
    for case in (case for case in CASES if case.bytes_per_element and is_loss == ("cross" in case.name)):
        if case.name in known:
            continue
        release()
        try:
            args = case.inputs(make, rows, columns)
            if not repeats:
                case.ours(*args)
                continue
            verdict = wrong(case, args)
            calls = partial(case.ours, *args), partial(case.eager, torch.float32, *args)
            ours, stock = (launches(call, repeats) for call in calls)
        except Exception as error:  # the other cases tell as much
            traceback.print_exc()
            yield [case.name, *[""] * 6, f"WRONG: {type(error).__name__}"]
            synchronize()  # which raises where nothing is left to go on with
            continue
        for kernel, size in case.bytes_per_element.items():
            taken = sum(spent for name, spent in ours.items() if not name or name.startswith(kernel))
            if size:
                bandwidth = size * rows * columns / taken if taken else 0.0
                us, *of_all = (f"{1e6 * one:.1f}" for one in (taken, ours.total(), stock.total()))
                told = verdict or "WRONG: not launched" * (not taken)
                yield [case.name, kernel, us, f"{bandwidth / 1e9:.0f}", f"{bandwidth / copy:.2f}", *of_all, told]


def wrong(case: Case, args: tuple[Any, ...]) -> str:
    """What is wrong with a case's results, or ""."""
    results = case.ours(*args), case.eager(torch.float32, *args), case.eager(torch.float64, *widen(args))
    try:
        for number, (ours, eager, exact) in enumerate(zip(*results, strict=True)):
            if exact.numel() > 1:  # a loss is PyTorch's own sum
                no_worse(f"result {number}", ours, eager, exact, case.roundings)
    except AssertionError as error:
        return f"WRONG: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
