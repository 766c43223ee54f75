"""What this machine's GPU is, and what it can: a copy's bandwidth and a matrix product's rate.

    python scripts/bench/gpu_machine.py [--smoke] [--out [DIR]]

--out writes gpu-machine.json and .md. Other figures of the GPU are read beside these.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from gpu_steps import DEVICE, synchronize
from publish import arguments, measured_on, publish


def seconds(call: Callable[[], Any]) -> float:
    """The quickest of ten calls."""
    found = []
    for _ in range(10):
        synchronize()
        begun = time.perf_counter()
        call()
        synchronize()
        found.append(time.perf_counter() - begun)
    return min(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write."""
    parser = arguments(__doc__)
    parser.add_argument("--smoke", action="store_true", help="small tensors, on whatever device there is")
    options = parser.parse_args(argv)
    side = 64 if options.smoke else 8192
    a, b = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    copied = torch.empty(side**3 // 256, device=DEVICE, dtype=torch.uint8)  # 2 GiB, which no cache holds
    found: dict[str, Any] = {
        "device": measured_on(),
        "memory, GiB": torch.cuda.get_device_properties(0).total_memory / 2**30 if DEVICE.type == "cuda" else 0,
        "processors": os.cpu_count(),
        "main memory, GiB": psutil.virtual_memory().total / 2**30,
        "copy, GB/s, read and written": 2 * copied.nbytes / seconds(copied.clone) / 1e9,
        "product, 8192 x 8192, bf16, TFLOP/s": 2 * side**3 / seconds(lambda: a @ b) / 1e12,
    }
    rows = [[name, value if isinstance(value, str) else f"{value:,.1f}"] for name, value in found.items()]
    publish("gpu-machine", "The machine", ["what", ""], rows, found, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
