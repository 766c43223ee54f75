"""Training steps of whole models on this machine's GPU, by every method: memory beside its estimate, and time.

    python scripts/bench/models.py --plan first [--seconds 180] [--out [DIR]]
    python scripts/bench/models.py --models "BERT-Large, full, autocast, 32 x 512" --methods stock memsave
    python scripts/bench/models.py --smoke     # tiny models, on CPU too: whether the script runs, and sees a fault

Random weights, a random batch, fused AdamW. Estimates are made before (``known_models.py``), and what they say does not
fit is not begun. The first step, with the optimizer's states there and the attention kernel of the estimate (flash, or
efficient where there is a mask), gives the peak of PyTorch's allocator, what it reserved, and the bytes between forward
and backward; steps with PyTorch's own choice of kernels give another peak, and the median time, of the step and until
all of it is launched. A peak or kept bytes further off than ``memsave estimate --check`` allows are wrong, and so is a
row that fails; the exit status is 1 then. Rows that --out has already and that were right are not made again.

--largest also finds the largest batch, by doubling. --warm runs one step of each row, so that what it compiles lies in
caches.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from transformers import AutoConfig, BertConfig, GPT2Config

from gpu_steps import DEVICE, kept_on_gpu, release, synchronize
from hf_memsave import measure_kept, patch
from hf_memsave.config.names import shape_of
from hf_memsave.count.peak import rounded
from hf_memsave.errors import MeasureError
from hf_memsave.measure.check import SLACK
from hf_memsave.measure.kernels import BACKENDS
from hf_memsave.measure.models import depth_of
from hf_memsave.measure.trace import UNIT, make_states, run_passes, trace_step
from hf_memsave.measure.training import Training, prepared, trace_at, training_of
from hf_memsave.patching.swap import patched_models
from known_models import AUTOCAST, BERT_LARGE, BF16, EIGHT, LLAMA_LORA, METHODS, MODELS, Model, is_estimated
from publish import RESULTS, arguments, earlier, publish

GIB = 2**30
_SMALL = AutoConfig.for_model(**shape_of("llama-3.2-1b"))
#: Beside those of the README, and not estimated.
MORE = {
    "llama-3.2-1b": Model(_SMALL, 4, 2048, BF16),
    "gpt2-medium": Model(GPT2Config(n_embd=1024, n_layer=24, n_head=16), 8, 1024, AUTOCAST),
    "llama-3.2-1b, 1 x 128": Model(_SMALL, 1, 128, BF16),
    "bert-base, 1 x 128": Model(BertConfig(attention_probs_dropout_prob=0.0), 1, 128, AUTOCAST),
}
_FULL = ("memsave", "stock", "checkpointing", "block", "gate", "checkpointing, chunked loss")
_T5 = "T5-Large, full, autocast, 8 x 512"
#: Name -> rows, those that tell most first. Of "compiled" the first step takes long, and Liger replaces a function for
#: the whole process: processes of their own.
PLANS = {
    "first": [
        *((name, method) for method in _FULL for name in (LLAMA_LORA, BERT_LARGE) if is_estimated(name, method)),
        *itertools.product([EIGHT], ("stock", "memsave", "checkpointing", "offload")),
    ],
    "compiled": [
        (EIGHT, "memsave, Triton"), (EIGHT, "torch.compile"), (BERT_LARGE, "memsave, Triton"),
        (EIGHT, "memsave, compiled blocks"), (BERT_LARGE, "torch.compile"),
    ],
    "liger": [(EIGHT, "Liger"), (EIGHT, "Liger, memsave")],  # it has no kernels for BERT, and does not say so
    "host": list(itertools.product(list(MORE)[-2:], ("stock", "memsave", "memsave, Triton"))),
    "models": list(itertools.product((_T5, "llama-3.2-1b", "gpt2-medium"), (*_FULL[:5], "memsave, Triton"))),
}  # fmt: skip
HEADER = ["model", "method", "estimated, GiB", "peak", "off", "reserved", "own kernels", "cuDNN's, estimated",
          "kept, estimated", "kept", "step, ms", "host, ms", "first step, s", "largest batch", "verdict"]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows, whatever fails, and write the table after each; 1 where one is wrong."""
    parser = arguments(__doc__)
    parser.add_argument("--plan", choices=PLANS, default="first", help="rows, unless --models names others")
    parser.add_argument("--models", nargs="+", choices=MODELS | MORE, metavar="MODEL")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(_FULL), metavar="METHOD")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=360, help="begin no row after so many")
    parser.add_argument("--largest", action="store_true", help="find each row's largest batch")
    parser.add_argument("--warm", action="store_true", help="compile, and write nothing")
    parser.add_argument("--smoke", action="store_true", help="tiny models, on whatever device there is")
    parser.add_argument("--plant", action="store_true", help="hold a tenth of the peak more, which has to be found")
    options = parser.parse_args(argv)
    if DEVICE.type == "cpu" and not options.smoke:
        parser.error("expected a CUDA device, got none. Use --smoke to see whether the script runs.")
    found = {} if options.warm else earlier("gpu-models", options.out)
    rows = list(itertools.product(options.models, options.methods)) if options.models else PLANS[options.plan]
    if options.smoke:  # one of each method
        rows = list({method: (name, method) for name, method in reversed(rows)}.values())[::-1]
    end = time.monotonic() + options.seconds
    nn.Linear(8, 8, device=DEVICE)(torch.ones(8, 8, device=DEVICE)).sum().backward()  # has cuBLAS take its work spaces
    for row in rows:
        key = ": ".join(row)
        if key in found and not found[key]["verdict"]:
            continue
        found.setdefault(key, {"verdict": "not begun: --seconds"})
        if time.monotonic() <= end:
            found[key] = measured(*row, options)
        table = {key: cells(one) for key, one in found.items()}
        print(" | ".join([key, *table[key]]), flush=True)
        title = "Steps of whole models, estimated and measured"
        out = None if options.warm else options.out
        lines = [[*key.rsplit(": ", 1), *line] for key, line in table.items()]
        publish("gpu-models", title, HEADER, lines, found, out, quiet=True)
        if found[key]["verdict"].startswith("WRONG"):
            synchronize()  # which raises where a fault has left nothing to go on with
    return int(any(found[": ".join(row)]["verdict"].startswith("WRONG") for row in rows))


def measured(name: str, method: str, options: Any) -> dict[str, Any]:
    """The figures of a row and its verdict, which is empty where it is right."""
    model = (MODELS | MORE)[name]
    is_known = name in MODELS and is_estimated(name, method)
    if options.smoke:
        model = small(model)
    expected = expectation(name, method, model, options.smoke) if is_known else {}
    found: dict[str, Any] = {"expected": expected, "verdict": ""}
    if METHODS[method].change == "liger" and not find_spec("liger_kernel"):
        return found | {"verdict": "left out: liger-kernel is not installed"}
    release()
    free = torch.cuda.mem_get_info()[0] if DEVICE.type == "cuda" else 2**60
    if expected.get("peak", 0) > 0.98 * free:
        return found | {"verdict": f"left out: does not fit into the {free / GIB:.1f} GiB that are free"}
    try:
        run(model, method, options, found)
    except torch.OutOfMemoryError:
        found["verdict"] = f"{'WRONG: ' * (is_known or METHODS[method].memsave is not None)}out of memory"
    except (ImportError, MeasureError) as error:
        found["verdict"] = f"left out: {error}"
    except Exception as error:  # the other rows tell as much
        traceback.print_exc()
        found["verdict"] = f"WRONG: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    is_held = method != "offload"  # of which more is there the slower the bus is
    apart = [what for what, slack in SLACK.items() if is_held and abs(off(found, what)) > slack]
    found["verdict"] = found["verdict"] or (f"WRONG: {' and '.join(apart)} not as estimated" if apart else "")
    torch.compiler.reset()
    return found


def off(found: dict[str, Any], what: str) -> float:
    """How far a figure is from its estimate, as a share of that; 0 where one of them is missing."""
    return found[what] / found["expected"][what] - 1 if found.get(what) and what in found["expected"] else 0.0


def expectation(name: str, method: str, model: Model, is_small: bool) -> dict[str, int]:
    """The estimate, made before; of a tiny model on the CPU, made now."""
    if not is_small:
        known: dict[str, Any] = json.loads((RESULTS / "known-models.json").read_text(encoding="utf-8"))
        return known[name][method]
    if DEVICE.type == "cuda":
        return {}
    config, memsave = model.config, METHODS[method].memsave
    trace = trace_at(config, depth_of(config, None), of(model, method), memsave, on_cpu=True)
    return {"peak": trace.peak, "kept": trace.kept}


def of(model: Model, method: str) -> Training:
    """How a model is trained by a method."""
    checkpointing = METHODS[method].checkpointing
    return training_of(batch_size=model.batch, seq_len=model.tokens, checkpointing=checkpointing, **model.training)


def small(model: Model) -> Model:
    """The same training of a tiny model."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=128)
    return model._replace(config=type(model.config)(**sizes), batch=2, tokens=32)


def run(model: Model, method: str, options: Any, found: dict[str, Any]) -> None:
    """Take the steps, and note what they tell as soon as they do."""
    training, how = of(model, method), METHODS[method]
    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    order = [BACKENDS[kernel] for kernel in dict.fromkeys((training.attention, "flash", "efficient", "math"))]
    of_estimate = sdpa_kernel(order, set_priority=True) if found["expected"] else contextlib.nullcontext()
    with prepared(model.config, training, how.memsave, DEVICE.type) as (net, batch, forward, optimizer):
        forward = changed(net, forward, how.change)
        if options.plant:
            plant(net, found["expected"].get("peak", 0) // 10)
        make_states(optimizer)

        def step(batch: dict[str, Any] = batch) -> None:
            try:
                run_passes(net, batch, forward, None)
                optimizer.step()
            finally:
                optimizer.zero_grad(set_to_none=True)

        begun = time.perf_counter()
        if DEVICE.type == "cuda":
            with of_estimate:
                found["peak"], found["reserved"] = peak_of(step, before)
                if not options.warm:
                    found["kept"] = kept_on_gpu(lambda: forward(**batch).loss)
                    optimizer.zero_grad(set_to_none=True)
        elif how.change != "compile":
            found["peak"] = trace_step(net, batch, optimizer, forward).peak
            kept = measure_kept(net, batch, forward).storages  # made by no op: states of generators, in main memory
            found["kept"] = sum(rounded(one.nbytes, UNIT) for one in kept if one.op != "unseen")
        step()
        synchronize()
        found["first_seconds"] = time.perf_counter() - begun
        if options.warm:
            return
        times: list[tuple[float, float]] = []
        found["own_peak"], _ = peak_of(lambda: times.extend(timed(step) for _ in range(options.steps)), before)
        found["host_seconds"], found["seconds"] = map(statistics.median, zip(*times, strict=True))
        if options.largest:
            found |= largest(step, batch, 2 if options.smoke else 1024)


def plant(net: nn.Module, nbytes: int) -> None:
    """Hold so many bytes more from each forward to the next."""
    held: list[Any] = []

    def hold(*_: Any) -> None:
        held[:] = [torch.empty(nbytes, device=DEVICE, dtype=torch.uint8)]

    net.register_forward_pre_hook(hold)


def changed(net: nn.Module, forward: Callable[..., Any], change: str) -> Callable[..., Any]:
    """The forward of a model by a method that is not memsave's."""
    if change == "compile":
        net.compile()
    elif change == "liger":  # it replaces the loss of Transformers' module, for all models of the process
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=net)
        for model, config in patched_models(net):  # whose forward Liger's hides
            patch(model, config)
    elif change == "offload":

        def away(**batch: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=DEVICE.type == "cuda"):
                return forward(**batch)

        return away
    return forward


def peak_of(call: Callable[[], Any], before: int) -> tuple[int | None, int | None]:
    """The most that the allocator gives out meanwhile, but for what it had given out before, and what it reserves."""
    if DEVICE.type == "cpu":
        call()
        return None, None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    synchronize()
    return torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a step until all is launched, and until it is done."""
    synchronize()
    begun = time.perf_counter()
    step()
    launched = time.perf_counter()
    synchronize()
    return launched - begun, time.perf_counter() - begun


def largest(step: Callable[..., None], batch: dict[str, Any], most: int) -> dict[str, Any]:
    """The largest batch that is found to run: doubled as often as it can be, then half as much again; and its time."""

    def has_room(times: int) -> bool:
        with contextlib.suppress(torch.OutOfMemoryError):
            step(grown(times))
            return True
        release()
        return False

    def grown(times: int) -> dict[str, Any]:
        return {name: value.repeat(times, *[1] * (value.dim() - 1)) for name, value in batch.items()}

    times = 1
    while 2 * times <= most and has_room(2 * times):
        times *= 2
    more = times + times // 2
    times = more if times < more <= most and has_room(more) else times
    biggest = grown(times)
    seconds = statistics.median(timed(partial(step, biggest))[1] for _ in range(2))
    return {"largest_batch": len(biggest["input_ids"]), "seconds_there": seconds}


def cells(found: dict[str, Any]) -> Iterable[str]:
    """Of the table, without model and method."""
    expected = found.get("expected", {})

    def gib(nbytes: int | None) -> str:
        return f"{nbytes / GIB:.4g}" if nbytes else ""

    def ms(name: str) -> str:
        return f"{1e3 * found[name]:.1f}" if name in found else ""

    away = f"{off(found, 'peak'):+.1%}" if found.get("peak") and expected else ""
    first = f"{found['first_seconds']:.1f}" if "first_seconds" in found else ""
    most = f"{found['largest_batch']}: {ms('seconds_there')} ms" if "largest_batch" in found else ""
    return [
        gib(expected.get("peak")), gib(found.get("peak")), away, gib(found.get("reserved")), gib(found.get("own_peak")),
        gib(expected.get("peak under cuDNN")), gib(expected.get("kept")), gib(found.get("kept")), ms("seconds"),
        ms("host_seconds"), first, most, found["verdict"],
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
