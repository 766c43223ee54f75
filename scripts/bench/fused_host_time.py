"""Host time of a step, both backends over stock, where no kernel runs: Triton's launches do nothing.

    python scripts/bench/fused_host_time.py [--steps 100] [--out [DIR]]

Of 1 x 8 tokens in 4 layers of width 64, what is left is Python and PyTorch's dispatcher. The vendored kernels look up
what they would launch, as on a GPU, and launch nothing: what they would have written stays as it was allocated. A
product given in fp32, which the CPU lacks, is one in 16 bits beside an allocation, and so is one added to fp32. A GPU's
own cost of a launch, some microseconds, is not in it; launches.py counts those. Nor is what is done on CUDA alone:
under its autocast BERT's fused norm hands linears its output in 16 bits, and here each first one converts it. Stock and
both backends take turns; time is the process's on the CPU.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from collections.abc import Callable, Sequence
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
from host_time import WARM_UP, Times, quickest_tenth, take_step
from publish import arguments, machine, publish

_SIZE: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64)
METHODS = {"stock": None, "torch": MemSaveConfig(), "Triton": MemSaveConfig(backend="triton")}


def main(argv: Sequence[str] | None = None) -> None:
    """Time every setting and print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="of each method")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    launch_nothing()
    rows, figures = [], {}
    for name, make in track(SETTINGS.items(), description="timing", console=Console(stderr=True)):
        times = in_turn(make, options.steps, is_autocast="autocast" in name)
        stock = times["stock"]
        milliseconds = 1e3 * statistics.median(stock.step)
        figures[name] = {"stock_ms": milliseconds}
        for method in list(METHODS)[1:]:
            found = [of(getattr(times[method], part)) / of(getattr(stock, part)) for part in _PARTS for of in _OF]
            figures[name][method] = found
            rows.append([name, method, f"{milliseconds:.2f}", *(f"{ratio:.2f}" for ratio in found)])
    header = ["setting", "backend", "step, stock, ms"]
    header += [f"{part} over stock's{which}" for part in _PARTS for which in ("", ", quickest tenth")]
    title = f"Host time of a step where no kernel runs, over stock's; {machine()}"
    publish("fused-host-time", title, header, rows, figures, options.out)


_PARTS, _OF = ("step", "forward"), (statistics.median, quickest_tenth)


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


def in_turn(make: Callable[[], nn.Module], steps: int, is_autocast: bool) -> dict[str, Times]:
    """Seconds of so many steps of each method."""
    ids = torch.zeros(1, 8, dtype=torch.long)
    batch, times, models = dict(input_ids=ids, labels=ids), {}, {}
    for method, config in METHODS.items():
        model, times[method] = make(), Times()
        if config is not None:
            patch(model, config)
        models[method] = Autocast(model, is_autocast)
    gc.collect()
    for index in range(WARM_UP + steps):
        for method, model in models.items():
            into = times[method] if index >= WARM_UP else Times()
            take_step(model, batch, into)
    return times


class Autocast(nn.Module):
    """A model whose forward, and nothing else, is under bf16 autocast."""

    def __init__(self, model: nn.Module, enabled: bool) -> None:
        super().__init__()
        self.model, self.enabled = model, enabled

    def forward(self, **batch: Tensor) -> Any:
        """As the model's own."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return self.model(**batch)


def bert() -> nn.Module:
    """In fp32, with dropout, but none in attention."""
    return BertForMaskedLM(BertConfig(intermediate_size=256, attention_probs_dropout_prob=0.0, **_SIZE)).train()


def llama() -> nn.Module:
    """In bf16."""
    return LlamaForCausalLM(LlamaConfig(intermediate_size=192, num_key_value_heads=2, **_SIZE)).bfloat16().train()


def adapted() -> nn.Module:
    """LLaMA with LoRA adapters of rank 16 at all linears, in fp32 as PEFT makes them."""
    options: dict[str, Any] = dict(r=16, lora_dropout=0.05, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(llama(), LoraConfig(**options)).train()


SETTINGS = {"BERT, bf16 autocast": bert, "LLaMA, full": llama, "LLaMA, LoRA p=.05": adapted}


if __name__ == "__main__":
    main()
