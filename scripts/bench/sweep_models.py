"""Train every small model type that Transformers has, stock and patched, and compare them bit for bit.

    python scripts/bench/sweep_models.py [--types bert llama] [--modes fp32 bf16] [--jobs 2] [--out [DIR]]

Each type takes one training step in each mode: the stock model twice, to see whether it agrees with itself, then the
patched one, from the same seed. The loss, every gradient and every buffer must be equal bit for bit. What is kept
between forward and backward is measured beside it. Types run in processes of their own, so that one that crashes or
hangs is a row of the table like any other. The exit status is 1 if a type differs, or fails patched alone, without an
entry in EXPLAINED.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import statistics
import sys
import textwrap
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

from hf_memsave import PatchError, measure_kept, patch
from hf_memsave.arch.versions import enable_checkpointing
from publish import RESULTS, arguments, versions, write
from publish import table as markdown
from small_models import BATCH, LENGTH, loss_of, model_types, small_model

MODES = ("fp32", "bf16", "autocast", "checkpointing")
#: Differences that are understood: (type, mode) -> reason.
EXPLAINED: dict[tuple[str, str], str] = {}

SAME, DIFFERS, UNSTABLE, FAILED, NOTHING, SKIPPED = (
    "same", "differs", "stock differs from itself", "fails patched", "nothing to patch", "skipped",
)  # fmt: skip
#: Imported once, for all the processes.
_PRELOADED = ["hf_memsave", "peft", "transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert"]


@dataclass(frozen=True)
class Run:
    """One type in one mode: its status, and what differs or why nothing was compared."""

    type: str
    mode: str
    status: str
    detail: str = ""
    #: Bytes kept.
    stock: int = 0
    patched: int = 0
    #: Whether the loss and the gradients of the stock model are.
    finite: bool = True

    @property
    def ratio(self) -> float | None:
        """Kept patched over kept stock, if both were measured."""
        return self.patched / self.stock if self.stock and self.patched else None

    @property
    def unexplained(self) -> bool:
        """Whether something is wrong that EXPLAINED does not know."""
        return self.status in (DIFFERS, FAILED) and (self.type, self.mode) not in EXPLAINED


#: Everything of a training step that must agree, by name.
Values = dict[str, Tensor | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep, and write the report."""
    parser = arguments(__doc__, RESULTS)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="model types; all if not given")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--jobs", type=int, default=2, help="types at a time, each on one thread")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one type in all modes")
    options = parser.parse_args(argv)
    runs = sweep(options.types or model_types(), options.modes, options.jobs, options.timeout)
    report = "\n".join(summary(runs, options.modes))
    text = f"{versions()}, CPU: batch {BATCH}, seq {LENGTH}\n\n{report}\n\n{table(runs, options.modes)}"
    write("sweep-models", text, {"runs": [asdict(run) for run in runs]}, options.out, quiet=True)
    print(report)
    return int(any(run.unexplained for run in runs))


def sweep(types: Sequence[str], modes: Sequence[str], jobs: int, timeout: float) -> list[Run]:
    """Every type in every mode, in the order given."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with ThreadPoolExecutor(jobs) as pool:
        tasks = {pool.submit(run_type, context, name, modes, timeout): name for name in types}
        found = {tasks[task]: task.result() for task in tqdm(as_completed(tasks), "types", len(tasks), unit="type")}
    return [run for name in types for run in found[name]]


def run_type(context: Any, model_type: str, modes: Sequence[str], timeout: float) -> list[Run]:
    """One type in a process of its own, of which the last report in each mode counts."""
    runs = {mode: Run(model_type, mode, SKIPPED, "stock ended its process or ran out of time") for mode in modes}
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=report_type, args=(sender, model_type, modes), daemon=True)
    process.start()
    sender.close()
    deadline = time.monotonic() + timeout
    with contextlib.suppress(EOFError):  # the process has ended
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            run = receiver.recv()
            runs[run.mode] = run
    process.kill()
    process.join()
    return list(runs.values())


def report_type(sender: Connection, model_type: str, modes: Sequence[str]) -> None:
    """Send a :class:`Run` for each mode, and one before each patched step in case it never ends."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    gc.collect()
    gc.freeze()  # measure_kept walks all objects; half a million of them belong to imported modules
    try:
        model, batch = small_model(model_type)
    except Exception as error:
        for mode in modes:
            sender.send(Run(model_type, mode, SKIPPED, _one_line(error)))
        return
    for mode in modes:
        for run in compare(model_type, mode, model, batch):
            sender.send(run)


def compare(model_type: str, mode: str, model: nn.Module, batch: dict[str, Tensor]) -> Iterator[Run]:
    """A :class:`Run` for when the patched step never ends, and then the one that counts."""
    try:
        twice = [train_step(model, batch, mode, patched=False) for _ in range(2)]
        run = Run(model_type, mode, FAILED, "ended its process or ran out of time", kept(model, batch, mode, False))
    except Exception as error:
        yield Run(model_type, mode, SKIPPED, _one_line(error))
        return
    trained = [value for name, value in twice[0].items() if value is not None and not name.startswith("buffer")]
    yield (run := replace(run, finite=all(bool(value.isfinite().all()) for value in trained)))
    try:
        ours = train_step(model, batch, mode, patched=True)
        run = replace(run, patched=kept(model, batch, mode, patched=True))
    except Exception as error:
        nothing = isinstance(error, PatchError) and "nothing to patch" in str(error)
        yield replace(run, status=NOTHING if nothing else FAILED, detail=_one_line(error))
        return
    unlike = [differences(values, ours) for values in twice]
    if not all(unlike):
        yield replace(run, status=SAME, detail="")
    else:
        yield replace(run, status=UNSTABLE if differences(*twice) else DIFFERS, detail=unlike[0])


def train_step(stock: nn.Module, batch: dict[str, Tensor], mode: str, patched: bool) -> Values:
    """Loss, gradients and buffers after one forward and backward of a copy, from a fixed seed."""
    model, batch, forward = _prepared(stock, batch, mode, patched)
    loss = forward(**batch)["loss"]
    loss.backward()
    gradients = {f"gradient of {name}": weight.grad for name, weight in model.named_parameters()}
    return {"loss": loss.detach()} | gradients | {f"buffer {name}": b for name, b in model.named_buffers()}


def kept(stock: nn.Module, batch: dict[str, Tensor], mode: str, patched: bool) -> int:
    """The bytes that the same forward keeps until backward."""
    return measure_kept(*_prepared(stock, batch, mode, patched)).total


def _prepared(
    stock: nn.Module, batch: dict[str, Tensor], mode: str, patched: bool
) -> tuple[nn.Module, dict[str, Tensor], Callable[..., dict[str, Tensor]]]:
    """A copy of the model, its batch and its forward, with the random state that every run starts from."""
    model = copy.deepcopy(stock)
    if mode == "bf16":
        model.to(torch.bfloat16)
        batch = {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}
    if patched:
        patch(model, True)
    if mode == "checkpointing":
        if not model.supports_gradient_checkpointing:
            raise NotImplementedError("supports no gradient checkpointing")
        enable_checkpointing(model)

    def forward(**inputs: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            return {"loss": loss_of(model(**inputs))}

    transformers.set_seed(0)
    return model, batch, forward


def differences(one: Values, other: Values) -> str:
    """What differs between two steps, in words; empty if nothing does."""
    if one.keys() != other.keys():
        return "other parameters or buffers"
    unlike = [name for name in one if not _equal(one[name], other[name])]
    if not unlike:
        return ""
    more = f" and {len(unlike) - 1} more of {len(one)} values" if len(unlike) > 1 else ""
    return f"{unlike[0]}{more}, by up to {max(_distance(one[name], other[name]) for name in unlike):.0e}"


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference, relative to the largest value; infinite if they cannot be compared."""
    if one is None or other is None or one.shape != other.shape:
        return float("inf")
    largest = one.abs().max().double().clamp(min=1e-300)
    return float((one.double() - other.double()).abs().max() / largest)


def _one_line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 120, placeholder=" ...")


def summary(runs: Sequence[Run], modes: Sequence[str]) -> list[str]:
    """The report's list: what was compared, what is wrong with it, what was left out."""
    measured = [run for run in runs if run.ratio is not None]
    ratios = {mode: [run.ratio for run in measured if run.mode == mode] for mode in modes}
    medians = [f"{statistics.median(some):.2f} in {mode} ({len(some)} types)" for mode, some in ratios.items() if some]
    lines = [
        f"- {len({run.type for run in measured})} types, {len(measured)} runs compared",
        f"- median kept/stock: {', '.join(medians) or 'none'}",
    ]
    more = [run for run in measured if run.ratio > 1]
    lines += _listed("keep more than stock", more, lambda run: f"{run.ratio:.2f}")
    for status in (DIFFERS, FAILED, UNSTABLE, NOTHING, SKIPPED):
        lines += _listed(status, [run for run in runs if run.status == status], _reason)
    return lines + _listed("not finite in stock", [run for run in measured if not run.finite], lambda run: "inf or nan")


def _reason(run: Run) -> str:
    explained = EXPLAINED.get((run.type, run.mode))
    return f"{run.detail} ({explained})" if explained else run.detail


def _listed(title: str, runs: Sequence[Run], reason: Callable[[Run], str]) -> list[str]:
    """A line with a title, and under it one for each reason, with its types and modes."""
    grouped: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        grouped[reason(run)][run.type].append(run.mode)
    lines = [f"- {title}: {len({run.type for run in runs})} types, {len(runs)} runs" if runs else f"- {title}: none"]
    for why, types in sorted(grouped.items()):
        lines.append(f"  - {why}: " + ", ".join(f"{name} ({', '.join(modes)})" for name, modes in types.items()))
    return lines


def table(runs: Sequence[Run], modes: Sequence[str]) -> str:
    """A row for each type that was compared: kept/stock, and "=" where every value is equal, in each mode."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for run in runs:
        if run.status != SKIPPED:
            ratio = "" if run.ratio is None else f"{run.ratio:.2f} "
            cells[run.type][run.mode] = ratio + ("=" if run.status == SAME else run.status)
    return markdown(["type", *modes], ([name, *(row.get(mode, "") for mode in modes)] for name, row in cells.items()))


if __name__ == "__main__":
    sys.exit(main())
