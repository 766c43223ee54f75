"""Every way to keep less, beside stock, in one run: kept between forward and backward, peak of a step, time of a step.

    python scripts/bench/ways_to_keep_less.py [--models bert llama] [--steps 5] [--out [DIR]]

4 layers of hidden 256, fp32, batch 8 of 128 tokens, without dropout, on one CPU thread.

Kept and peak: bytes of all storages alive that the step's ops made, without gradients from before; what offload has
copied to main memory is told apart. "SAC" is PyTorch's selective checkpointing of every block that keeps products and
attention. Of torch.compile, kept and peak are those of Inductor's own graphs, partitioned by its own budget and then
run op by op, where its fused kernels hold less in between; its time is Inductor's. Times: CPU seconds of the quickest
step, over those of stock's, which takes turns with it, as other work shares the machine.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch._functorch.config as partitioner
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from rich.console import Console
from rich.progress import track
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import select_decomp_table
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hf_memsave import MemSaveConfig, patch
from hf_memsave.count.peak import Count
from hf_memsave.tape.offload import Away
from publish import MIB, arguments, machine, publish
from support.families import Size, batch_for, build  # found by publish

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
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **options})  # type: ignore[operator]


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
#: Name -> the partitioner's budget, and whether the model is patched.
COMPILED = {"compile, budget 1.0": (1.0, False), "compile, budget .99": (0.99, False), "compile, exact": (1.0, True)}


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
    asked = [(name, way) for name in options.models for way in (*WAYS, *COMPILED)]
    for name, way in track(asked, "measuring", console=Console(stderr=True)):
        one = (
            compiled(name, *COMPILED[way], options.steps) if way in COMPILED else eager(name, WAYS[way], options.steps)
        )
        found[f"{name}, {way}"] = one
        cells = [f"{one[field] / MIB:.1f}" for field in ("kept", "away", "peak")]
        rows.append([name, way, *cells, f"{one['time']:.2f}"])
    header = ["model", "way", "kept, MiB", "in main memory", "peak, MiB", "time of a step, of stock's"]
    publish("ways-to-keep-less", f"Ways to keep less; {machine()}", header, rows, {"ways": found}, options.out)


def eager(name: str, change: Callable[[nn.Module], Any], steps: int) -> dict[str, Any]:
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


def compiled(name: str, budget: float, is_patched: bool, steps: int) -> dict[str, Any]:
    """What the compiled forward hands to its backward; the peak of the same graphs, op by op; Inductor's time."""
    model, batch = made(name)
    if is_patched:
        patch(model)
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers(), *batch.values())}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in own:
            found[at] = tensor.untyped_storage().nbytes()
        return tensor

    count = _OnDevice()
    with partitioner.patch(activation_memory_budget=budget):
        torch._dynamo.reset()
        forward = torch.compile(model, backend=counted_by(count))
        forward(**batch).loss.backward()
        model.zero_grad()
        count.highest = 0
        gc.disable()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward(**batch).loss
        loss.backward()
        gc.enable()
        count.made.clear()
        torch._dynamo.reset()
        taken = timed(torch.compile(model), made(name)[0], batch, steps)
    torch._dynamo.reset()
    return {"kept": sum(found.values()), "away": 0, "peak": count.highest, "time": taken}


def counted_by(count: _OnDevice) -> Any:
    """A backend that runs the partitioned graphs op by op, and has ``count`` see them."""

    def compiler(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            with count:
                return graph(*args)

        return make_boxed_func(run)

    return aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )  # fmt: skip


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
