"""Time and bandwidth of every element-wise kernel on this machine's GPU, beside PyTorch's own functions and a copy.

    python scripts/bench/ops.py [--shapes 8192x4096 1024x128256] [--out [DIR]]
    TRITON_INTERPRET=1 python scripts/bench/ops.py --smoke     # tiny tensors, on CPU: whether the script runs

Tensors are in bf16; of 128,256 columns, as a head's logits, only cross-entropy is measured. A time is the median of
--repeats by CUDA events, each after the L2 cache was overwritten.
Bandwidth is what has to be read and written, over the time; a copy of a tensor of that size is measured beside it.
--out writes ops-<device>.json and .md after every shape.
"""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from hf_memsave.ops.approximate.few_bit import on_device
from hf_memsave.ops.approximate.inverse import FITS
from hf_memsave.ops.fused.kernels import kernels
from hf_memsave.ops.sampled.estimators import row_norms
from hf_memsave.tape.codecs import pack_bits, pack_codes, unpack_bits
from hf_memsave.tape.quantize import FORMATS, decode, encode
from publish import arguments, publish

SHAPES = ("8192x4096", "1024x128256", "130x128256", "16384x768", "8192x1024", "4096x14336")


class Op(NamedTuple):
    """One kernel, PyTorch's own functions for the same, and how many tensors like x have to be read and written."""

    ours: Callable[[], Any]
    stock: Callable[[], Any]
    tensors: float


def ops(rows: int, columns: int, device: torch.device) -> dict[str, Op]:
    """The kernels of exact training, on tensors of so many rows and columns."""
    k = kernels()
    x, u, dy = (torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(3))
    w, b = (torch.randn(columns, device=device, dtype=torch.bfloat16) for _ in range(2))
    width = min(128, columns // 2)
    q = of_heads(x, width)
    cos, sin = (torch.randn(1, rows, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    rstd = k.rms_norm_forward(x, w, 1e-6, "llama")[1]
    normed = k.dropout_norm_forward(x, u, w, b, 1e-5, 0.1, 7)
    mean, std = normed.mean, normed.rstd

    def rms_norm(x: Tensor) -> Tensor:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def rotary(x: Tensor) -> Tensor:
        q = of_heads(x, width)
        half = torch.cat((-q[..., width // 2 :], q[..., : width // 2]), -1)
        return q * cos[:, None] + half * sin[:, None]

    def dropout_norm(x: Tensor) -> Tensor:
        return F.layer_norm(F.dropout(x, 0.1) + u, (columns,), w, b)

    return {
        "RMSNorm": Op(lambda: k.rms_norm_forward(x, w, 1e-6, "llama"), lambda: rms_norm(x), 2),
        "RMSNorm, backward": Op(
            lambda: k.rms_norm_backward(dy, x, w, rstd, "llama", True), backward(rms_norm, x, dy), 3
        ),
        "SwiGLU": Op(lambda: k.gated_forward(x, u, "silu"), lambda: F.silu(x) * u, 3),
        "SwiGLU, backward": Op(
            lambda: k.gated_backward(dy, x, u, "silu"), backward(lambda x: F.silu(x) * u, x, dy), 5
        ),
        "GELU": Op(lambda: k.activation_forward(x, "gelu"), lambda: F.gelu(x), 2),
        "GELU, backward": Op(lambda: k.activation_backward(dy, x, "gelu"), backward(F.gelu, x, dy), 3),
        "rotary": Op(lambda: k.rotary_forward(q, cos, sin), lambda: rotary(x), 2),
        "rotary, backward": Op(lambda: k.rotary_backward(q, cos, sin), backward(rotary, x, q), 2),
        "dropout, residual, LayerNorm": Op(
            lambda: k.dropout_norm_forward(x, u, w, b, 1e-5, 0.1, 7), lambda: dropout_norm(x), 4
        ),
        "the same, backward": Op(
            lambda: k.dropout_norm_backward(dy, normed.h, w, b, mean, std, 0.1, 7, x.dtype, u.dtype),
            backward(dropout_norm, x, dy), 4,
        ),
        "LoRA input": Op(lambda: k.lora_input_forward(x, 0.05, 7), lambda: F.dropout(x, 0.05), 2),
        "LoRA output": Op(lambda: k.lora_output_forward(x, u, 2.0), lambda: x + u * 2.0, 3),
    }  # fmt: skip


def approximate_ops(rows: int, columns: int, device: torch.device) -> dict[str, Op]:
    """The kernels of what is not exact, beside what they stand for, or beside PyTorch's own functions."""
    k, bits, fit, share = kernels(), 4, FITS["gelu"], 3
    x, dy = (torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(2))
    w, b = (torch.randn(columns, device=device, dtype=torch.bfloat16) for _ in range(2))
    y, sides = k.inverted_forward(x, "gelu", fit.turn)
    boundaries, levels = on_device("gelu", bits, device)
    pieces = k.few_bit_codes(x, boundaries)
    _, z, rstd = k.output_norm_forward(x, w, b)
    flags = x > 0
    packed = k.pack_bits(flags)
    index = torch.randperm(rows, device=device)[: rows // share]
    scale = torch.rand(len(index), device=device)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (columns,), w, b)

    def in_pieces() -> Tensor:
        return pack_codes(torch.bucketize(x.float(), boundaries, out_int32=True, right=True).to(torch.uint8), bits)

    found = {
        "inverted GELU": Op(lambda: k.inverted_forward(x, "gelu", fit.turn), lambda: F.gelu(x), 2 + 1 / 16),
        "inverted GELU, backward": Op(
            lambda: k.inverted_backward(dy, y, sides, fit), backward(F.gelu, x, dy), 3 + 1 / 16
        ),
        "few-bit codes": Op(lambda: k.few_bit_codes(x, boundaries), in_pieces, 1 + bits / 16),
        "few-bit GELU, backward": Op(
            lambda: k.few_bit_backward(dy, pieces, levels), backward(F.gelu, x, dy), 2 + bits / 16
        ),
        "output norm": Op(lambda: k.output_norm_forward(x, w, b), lambda: norm(x), 3),
        "output norm, again": Op(lambda: k.output_norm_again(z, w, b), lambda: norm(x), 2),
        "output norm, backward": Op(
            lambda: k.output_norm_backward(dy, z, w, b, rstd, True), backward(norm, x, dy), 3
        ),
        "bits": Op(lambda: k.pack_bits(flags), lambda: pack_bits(flags), 1 / 2 + 1 / 16),
        "bits, back": Op(lambda: k.unpack_bits(packed, flags.numel()), lambda: unpack_bits(packed, flags.numel()),
                         1 / 2 + 1 / 16),
        "drawn rows": Op(lambda: k.gather_rows(x, index, scale),
                         lambda: (x.index_select(0, index) * scale[:, None]).to(x.dtype), 2 / share),
        "norms of rows": Op(lambda: k.row_norms(x), lambda: row_norms(x), 1),
    }  # fmt: skip
    for name, form in FORMATS.items():
        codes = k.encode(x, name, 7)
        size = 1 + (form.bits / 8 + 2 * form.bounds.itemsize / form.block) / x.itemsize
        found[name] = Op(partial(k.encode, x, name, 7), partial(encode, x.view(-1), form), size)
        found[f"{name}, back"] = Op(
            partial(k.decode, *codes, name, x.numel(), x.dtype), partial(decode, *codes, form, x.numel(), x.dtype), size
        )
    return found


def cross_entropy(rows: int, columns: int, device: torch.device) -> dict[str, Op]:
    """Losses, and their gradient in place of the logits, which are read and written once."""
    logits = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    leaf, labels = logits.clone().requires_grad_(), torch.randint(columns, (rows,), device=device)
    count = torch.full((), rows, dtype=torch.float32, device=device)
    return {
        "cross-entropy": Op(
            lambda: kernels().cross_entropy_forward_(logits, labels, count),
            lambda: torch.autograd.grad(F.cross_entropy(leaf.float(), labels), leaf), 2,
        )
    }  # fmt: skip


def of_heads(x: Tensor, width: int) -> Tensor:
    """As attention lays out its heads."""
    return x.view(1, x.shape[0], -1, width).transpose(1, 2)


def backward(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Callable[[], Any]:
    """The backward of a function of x, whose forward ran once."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True)


def seconds(function: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median, on a cold cache."""
    found = []
    for _ in range(2):
        function()
    cache = torch.empty(2**26 if device.type == "cuda" else 1, dtype=torch.int32, device=device)
    for _ in range(repeats):
        cache.zero_()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            function()
            found.append(time.perf_counter() - begun)
    return statistics.median(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every kernel; the exit status is 1 where a shape failed."""
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="ROWSxCOLUMNS")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--smoke", action="store_true", help="tiny tensors, on whatever device there is")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() and not options.smoke:
        parser.error("expected a CUDA device, got none. Use --smoke under TRITON_INTERPRET=1 to see whether it runs.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes, repeats = (["8x64", "4x128256"], 1) if options.smoke else (options.shapes, options.repeats)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    title = f"{where}, torch {torch.__version__}, triton {triton.__version__}, bf16"
    header = ["shape", "kernel", "us", "PyTorch, us", "GB/s", "of a copy's"]
    table: list[list[str]] = []
    figures: dict[str, dict[str, Any]] = {}
    failed = False
    for shape in shapes:
        figures[shape] = {}
        try:
            measure(shape, device, repeats, figures[shape], table)
        except Exception:  # the other shapes' figures are worth as much
            traceback.print_exc()
            failed = True
        publish(f"ops-{where.lower().replace(' ', '-')}", title, header, table, figures, options.out, quiet=True)
    return int(failed)


def measure(shape: str, device: torch.device, repeats: int, figures: dict[str, Any], table: list[list[str]]) -> None:
    """Every kernel at a shape, into figures and the table's rows."""
    rows, columns = map(int, shape.split("x"))
    size = 2 * rows * columns
    copy = 2 * size / seconds(torch.randn(rows, columns, device=device, dtype=torch.bfloat16).clone, device, repeats)
    figures["copy"] = {"bytes_per_second": copy}
    made = (cross_entropy,) if columns > 65536 else (ops, approximate_ops)
    for name, op in (item for make in made for item in make(rows, columns, device).items()):
        ours, stock = (seconds(function, device, repeats) for function in (op.ours, op.stock))
        bandwidth = op.tensors * size / ours
        figures[name] = {"seconds": ours, "stock_seconds": stock, "bytes_per_second": bandwidth}
        times = [f"{1e6 * ours:.1f}", f"{1e6 * stock:.1f}", f"{bandwidth / 1e9:.0f}", f"{bandwidth / copy:.2f}"]
        table.append([shape, name, *times])
        print(" | ".join(table[-1]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
