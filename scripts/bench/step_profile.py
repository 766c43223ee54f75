"""Where a step of 1 x 8 tokens spends its time, patched and in stock: what each part of the host's work costs a layer.

    python scripts/bench/step_profile.py [--rows "LLaMA, LoRA" BERT] [--seconds 20] [--out [DIR]]

Models are those of host_time.py. A timer of CPU time interrupts the process each millisecond, and the function that
runs then is noted; where that was only entered, its caller, for what C++ did before. So a kernel counts for what
called it, and autograd's own nodes for autograd. Both models take turns. The timer costs some percent of a step.
"""

from __future__ import annotations

import dis
import gc
import signal
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch

from host_time import LAYERS, ROWS, WARM_UP, inputs, made, step
from publish import arguments, machine, publish

INTERVAL = 0.001
#: Part -> the ends of files' names with its functions, or files and functions; the first that fits counts.
PARTS: dict[str, tuple[str, ...]] = {
    "masks: drawn, and packed into bits": ("tape/dropout.py", "tape/bits.py:pack_bits", "ops/lora.py:_dropped"),
    "masks: read in backward": ("tape/bits.py", "ops/lora.py:_times"),
    "adapters: their functions and products": ("ops/lora.py",),
    "prices": ("tape/decide.py",),
    "packs: contents and handles": (
        *(f"tape/tape.py:Tape.{name}" for name in ("pack", "ticket", "keep_or_reuse", "_keep_new", "_keep_beside")),
        *(f"tape/tape.py:Tape.{name}" for name in ("recompute", "input_handle", "handed_on")), "tape/parameters.py",
        "tape/content.py:Content.__init__", "tape/content.py:Content.become", "tape/content.py:Content.keep",
        "tape/content.py:Ticket.__init__", "tape/content.py:KeptView.__init__", "tape/handles.py:KeptTensor.__init__",
    ),
    "backward: handles, and functions run again": ("tape/content.py", "tape/handles.py"),
    "function mode: records, and functions called": ("hf_memsave/tape/",),
    "patched forwards": ("hf_memsave/",),
    "autograd": ("torch/autograd/",),
    "PEFT": ("/peft/",),
    "modules and functions of PyTorch": ("/torch/",),
    "the model": ("/transformers/",),
}  # fmt: skip
LAST = "the rest"


@cache
def part_of(code: CodeType) -> str:
    """The part that a function belongs to."""
    whole = f"{code.co_filename}:{code.co_qualname}"
    for part, names in PARTS.items():
        for name in names:
            if f"{name}<" in whole or whole.endswith(name) or (":" not in name and name in code.co_filename):
                return part
            if ":" in name and f"{name}." in whole:  # what is within the function
                return part
    return LAST


@cache
def entry_of(code: CodeType) -> int:
    """Where a function begins: the place at which an interrupt finds what was only entered."""
    return next((i.offset for i in dis.get_instructions(code) if i.opname == "RESUME"), -1)


class Sampler:
    """Count, by part, where the process is, while it is on."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        signal.signal(signal.SIGPROF, self.note)

    def note(self, _: int, frame: FrameType | None) -> None:
        """Count the function that runs."""
        if frame is not None and frame.f_back is not None and frame.f_lasti == entry_of(frame.f_code):
            frame = frame.f_back
        self.found[part_of(frame.f_code) if frame else LAST] += 1


def profiled(row: str, seconds: float) -> dict[str, tuple[float, float]]:
    """Microseconds a layer of stock and of the patched model, by part."""
    runs = {way: made(ROWS[row], way, LAYERS) for way in ("stock", "eager")}
    batch, samplers, spent, steps = inputs(ROWS[row], 1, 8), {}, dict.fromkeys(runs, 0.0), 0
    for run in list(runs.values()) * WARM_UP:
        step(run, batch)
    samplers = {way: Sampler() for way in runs}
    gc.collect()
    gc.freeze()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for way, run in runs.items():
            signal.signal(signal.SIGPROF, samplers[way].note)
            signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
            spent[way] += step(run, batch)[1]
            signal.setitimer(signal.ITIMER_PROF, 0)
        steps += 1
    gc.unfreeze()
    of = {way: 1e6 * spent[way] / steps / LAYERS / max(1, samplers[way].found.total()) for way in runs}
    stock, ours = (samplers[way].found for way in runs)
    return {part: (stock[part] * of["stock"], ours[part] * of["eager"]) for part in (*PARTS, LAST)}


def main(argv: Sequence[str] | None = None) -> None:
    """Profile each row, and print the table."""
    parser = arguments(__doc__)
    names = ["LLaMA, LoRA", "LLaMA, LoRA, no dropout", "LLaMA", "BERT", "GPT-2"]
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=names, metavar="ROW")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, Any] = {row: profiled(row, options.seconds) for row in options.rows}
    parts = [part for part in (*PARTS, LAST) if any(sum(of[part]) >= 1 for of in found.values())]
    cells = [[part, *(f"{a:.0f} -> {b:.0f}" for a, b in (of[part] for of in found.values()))] for part in parts]
    cells.append(
        [
            "all",
            *(f"{sum(a):.0f} -> {sum(b):.0f}" for a, b in (zip(*of.values(), strict=True) for of in found.values())),
        ]
    )
    title = f"Where a step of 1 x 8 tokens spends its time, us a layer, stock -> patched; {machine()}"
    publish("step-profile", title, ["", *found], cells, {"rows": found}, options.out)


if __name__ == "__main__":
    main()
