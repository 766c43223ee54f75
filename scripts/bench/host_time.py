"""Time of a step and of its forward over stock's, where only the host counts and where the kernels do too.

    python scripts/bench/host_time.py [--rows bert llama "BERT, bf16 autocast"] [--seconds 30] [--out [DIR]]

At batch 1 and 8 tokens what is left of a step is Python, PyTorch's dispatcher and the reading of weights; 4 x 128
tokens is a small real step. Rows of the families have 4 layers of hidden 256 in fp32. The others have hidden 64, where
no kernel counts, and the Triton backend too: the vendored kernels look up what they would launch, as on a GPU, and
launch nothing (what they would have written stays as it was allocated); a product given in fp32, which the CPU lacks,
is one in 16 bits beside an allocation. A GPU's own cost of a launch, some microseconds, is not in it; launches.py
counts those. Stock and patched take turns in one run, so that a drift of the machine meets both. Time is that of the
process on the CPU. The ratio is that of the medians; beside it that of the means of the quickest tenth, which other
work on the machine disturbs least.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels then take tensors of the CPU

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from hf_memsave import MemSaveConfig, patch
from hf_memsave.ops.fused import linear
from hf_memsave.ops.fused.kernels import kernels
from publish import arguments, machine, publish
from support.families import FAMILIES, Size, batch_for, build  # found by publish

#: Batch and tokens, and the most that a step should take of stock's.
SHAPES = {"1 x 8": (1, 8, "1.35"), "4 x 128": (4, 128, "1.10")}
BACKENDS = {"torch": MemSaveConfig(), "Triton": MemSaveConfig(backend="triton")}
FEWEST, WARM_UP = 20, 3
_NARROW: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64)
#: Of each step: the seconds of its forward, and of all of it.
Times = list[tuple[float, float]]


def bert() -> nn.Module:
    """In fp32, with dropout, but none in attention."""
    return BertForMaskedLM(BertConfig(intermediate_size=256, attention_probs_dropout_prob=0.0, **_NARROW))


def llama() -> nn.Module:
    """In bf16."""
    return LlamaForCausalLM(LlamaConfig(intermediate_size=192, num_key_value_heads=2, **_NARROW)).bfloat16()


def adapted() -> nn.Module:
    """LLaMA with LoRA adapters of rank 16 at all linears, in fp32 as PEFT makes them."""
    options: dict[str, Any] = dict(r=16, lora_dropout=0.05, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(llama(), LoraConfig(**options))


NARROW = {"BERT, bf16 autocast": bert, "LLaMA, full, bf16": llama, "LLaMA, LoRA, bf16": adapted}


def main(argv: Sequence[str] | None = None) -> None:
    """Time every row at every shape and print the table."""
    parser = arguments(__doc__)
    known = (*FAMILIES, *NARROW)
    parser.add_argument("--rows", nargs="+", choices=known, default=["bert", "gpt2", "llama", *NARROW], metavar="ROW")
    parser.add_argument("--seconds", type=float, default=30.0, help="of alternating steps, for each row and shape")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    launch_nothing()
    runs = [(row, shape) for row in options.rows for shape in (SHAPES if row in FAMILIES else ["1 x 8"])]
    figures, rows = {}, []
    for row, shape in track(runs, description="timing", console=Console(stderr=True)):
        names = ["torch"] if row in FAMILIES else list(BACKENDS)
        times = in_turn(row, shape, names, options.seconds)
        stock = times.pop("stock")
        for backend, found in times.items():
            ratios = [of(found, part) / of(stock, part) for part in (1, 0) for of in (median, quickest_tenth)]
            figures[f"{row}, {shape}, {backend}"] = {"stock": median(stock, 1), "ratios": ratios, "steps": len(stock)}
            cells = [f"{1e3 * median(stock, 1):.2f}", *(f"{ratio:.2f}" for ratio in ratios)]
            rows.append([row, shape, backend, *cells, SHAPES[shape][2]])
    parts = [f"{part}, time over stock's{which}" for part in ("step", "forward") for which in ("", ", quickest tenth")]
    header = ["model", "batch x tokens", "backend", "step, stock, ms", *parts, "step's limit"]
    publish("host-time", f"Host time over stock's; {machine()}", header, rows, {"rows": figures}, options.out)


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
            key = id(kernel), first.get_device(), num_warps, *constants.values(), *map(own._specialized, args)
            compiled.setdefault(key, kernel)

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


def in_turn(row: str, shape: str, backends: Sequence[str], seconds: float) -> dict[str, Times]:
    """The steps of stock and of each backend, in turn first, until the time is up."""
    batch, tokens, _ = SHAPES[shape]
    size = Size(hidden=256, heads=4, layers=4, batch=batch, seq=tokens)
    models: dict[str, nn.Module] = {}
    for name in ("stock", *backends):
        torch.manual_seed(0)
        models[name] = build(row, size, dropout=0.0) if row in FAMILIES else NARROW[row]().train()
        if name != "stock":
            patch(models[name], BACKENDS[name])
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    inputs = batch_for(models["stock"], size) if row in FAMILIES else dict(input_ids=ids, labels=ids)
    times: dict[str, Times] = {name: [] for name in models}
    for model in list(models.values()) * WARM_UP:
        step(model, inputs, "autocast" in row)
    gc.collect()
    gc.freeze()  # the collector stays on, but does not look at the libraries' objects
    end, order = time.perf_counter() + seconds, list(models)
    try:
        while time.perf_counter() < end or len(times["stock"]) < FEWEST:
            for name in order:
                times[name].append(step(models[name], inputs, "autocast" in row))
            order.append(order.pop(0))
    finally:
        gc.unfreeze()
    return times


def step(model: nn.Module, inputs: dict[str, Any], is_autocast: bool) -> tuple[float, float]:
    """Seconds of a step's forward, and of all of it; clearing its gradients is not timed."""
    start = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        loss = model(**inputs).loss
    middle = time.process_time()
    loss.backward()
    end = time.process_time()
    model.zero_grad()
    return middle - start, end - start


def median(times: Times, part: int) -> float:
    """Of the forwards (0) or of whole steps (1)."""
    return statistics.median(one[part] for one in times)


def quickest_tenth(times: Times, part: int) -> float:
    """The mean of the quickest tenth."""
    return statistics.fmean(sorted(one[part] for one in times)[: max(1, len(times) // 10)])


if __name__ == "__main__":
    main()
