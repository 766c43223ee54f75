"""Train a LLaMA of ten million random parameters on real text three times: stock, exact, and checkpointed.

    python scripts/bench/compare_runs.py --text FILE [--steps 300]

Every run starts from the same seed and sees the same batches of bytes, in ``transformers.Trainer`` with AdamW; one has
``MemSaveCallback``, one stock gradient checkpointing (non-reentrant). Writes compare-llama-10m.{json,md,png}, and ends
with status 1 if any loss or final weight differs from stock's by a bit.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from hf_memsave import Kept, MemSaveCallback, measure_kept
from hf_memsave.commands.pictures import stacked_bars
from publish import MIB, RESULTS, arguments, publish

SEED = 0
#: Name of a run -> the width and colour of its curve, so that equal ones can all be seen.
RUNS = {"stock": (7, "#88CCEE"), "exact": (3.5, "#332288"), "checkpointing": (1, "#DDCC77")}
HEADER = ("run", "kept MiB", "freed MiB", "freed", "s/step", "ratio", "p10 s/step", "p10 ratio", "final loss")
FORMATS = ("{:.1f}", "{:.1f}", "{:.0%}", *["{:.2f}"] * 4, "{:.4f}")
EQUAL = "every loss and every final weight equals those of stock, bit for bit"
NOTES = """
{equal}

Kept: what is alive between forward and backward of one batch, by `hf_memsave.measure_kept`. Checkpointing also makes
every layer's activations again in backward, one layer at a time: its peak is higher than what it keeps. Seconds: a
step with AdamW, the median and (p10) the 10th percentile. The runs came one after the other on a shared machine: the
ratio of medians includes the change of its load from run to run, that of the quickest steps less of it.
"""


@dataclass(frozen=True)
class Run:
    """What one run gave: the loss and seconds of every step, the final weights, and what one batch keeps."""

    losses: list[float]
    seconds: list[float]
    weights: dict[str, Tensor]
    kept: Kept


class Clock(TrainerCallback):
    """Times every step (forward, backward, clipping and AdamW), and says every tenth of a run how far it is."""

    def __init__(self, name: str) -> None:
        self.name, self.start = name, 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.seconds.append(time.perf_counter() - self.start)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Print one line."""
        if "loss" in logs and state.global_step % max(state.max_steps // 10, 1) == 0:
            print(f"{self.name}: step {state.global_step}, loss {logs['loss']:.4f}", file=sys.stderr, flush=True)


def main() -> int:
    """Train, compare, write; the exit status."""
    parser = arguments(__doc__, RESULTS)
    parser.add_argument("--text", type=Path, required=True, help="a text to learn, byte by byte")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128, help="bytes per example")
    parser.add_argument("--hidden", type=int, default=384, help="a multiple of 48, for 6 heads")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="compare-llama-10m", help="of the three files written")
    options = parser.parse_args()
    examples = read_examples(options.text, options.seq) if options.text.is_file() else []
    if len(examples) < options.batch_size:
        parser.error(f"--text {options.text}: expected a file of {options.batch_size * options.seq} bytes or more")
    torch.set_num_threads(options.threads)
    runs = {name: train(name, examples, options) for name in RUNS}
    found = {name: difference(runs["stock"], runs[name]) for name in ("exact", "checkpointing")}
    size = sum(w.numel() for name, w in runs["stock"].weights.items() if name != "lm_head.weight")  # it is tied
    model = f"LLaMA, {size / 1e6:.1f}M parameters, hidden {options.hidden}, {options.layers} layers, fp32"
    task = f"{options.steps} steps of {options.batch_size} x {options.seq} bytes of {options.text.name}"
    title = f"# {model}\n\n{task}, from random weights, in `transformers.Trainer`; the same seed for every run."
    figures = {name: figures_of(run, runs["stock"]) for name, run in runs.items()}
    rows = [[name, *(f.format(v) for f, v in zip(FORMATS, of.values(), strict=True))] for name, of in figures.items()]
    entries: dict[str, Any] = {"model": model, "task": task, "differences": found}
    entries |= {name: figures[name] | {"losses": run.losses, "seconds": run.seconds} for name, run in runs.items()}
    notes = NOTES.format(equal="\n".join(f"- {name}: {text or EQUAL}." for name, text in found.items()))
    publish(options.name, title, HEADER, rows, entries, options.out, notes)
    picture(options.out / f"{options.name}.png", f"{model}; {task}", runs)
    return int(any(found.values()))


def read_examples(text: Path, seq: int) -> list[dict[str, Tensor]]:
    """The text, cut into pieces of ``seq`` bytes; a byte is a token."""
    tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    return [{"input_ids": piece, "labels": piece} for piece in tokens.split(seq) if len(piece) == seq]


def train(name: str, examples: list[dict[str, Tensor]], options: argparse.Namespace) -> Run:
    """One run from the seed; ``name`` is one of ``RUNS``."""
    transformers.set_seed(SEED)
    config = LlamaConfig(
        vocab_size=256, hidden_size=options.hidden, intermediate_size=11 * options.hidden // 4,
        num_hidden_layers=options.layers, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    model, clock = LlamaForCausalLM(config), Clock(name)
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder, max_steps=options.steps, per_device_train_batch_size=options.batch_size,
            learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
            dataloader_pin_memory=False, dataloader_drop_last=True, seed=SEED,
        )  # fmt: skip
        callbacks = [clock, *([MemSaveCallback()] if name == "exact" else [])]
        trainer = Trainer(model=model, args=training, train_dataset=examples, callbacks=callbacks)
        trainer.remove_callback(ProgressCallback)
        if name == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        kept = measure_kept(model.train(), dict(next(iter(trainer.get_train_dataloader()))))
        transformers.set_seed(SEED)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(losses, clock.seconds, model.state_dict(), kept)


def difference(stock: Run, other: Run) -> str | None:
    """Where a run first differs from stock, or None if every loss and final weight is equal to the bit."""
    for step, (expected, got) in enumerate(zip(stock.losses, other.losses, strict=True), start=1):
        if expected != got:
            return f"the loss of step {step} is {got!r}, and {expected!r} stock"
    unequal = [name for name, expected in stock.weights.items() if not torch.equal(expected, other.weights[name])]
    return f"{unequal[0]} differs after training" if unequal else None


def figures_of(run: Run, stock: Run) -> dict[str, float]:
    """The figures of one run."""
    kept, of_stock, step = run.kept.total / MIB, stock.kept.total / MIB, median(run.seconds)
    fast, stock_fast = (sorted(each.seconds)[len(each.seconds) // 10] for each in (run, stock))
    times = (step, step / median(stock.seconds), fast, fast / stock_fast)
    values = (kept, of_stock - kept, 1 - kept / of_stock, *times, run.losses[-1])
    return dict(zip(HEADER[1:], values, strict=True))


def picture(path: Path, title: str, runs: dict[str, Run]) -> None:
    """Write the three loss curves beside what each run keeps."""
    figure = Figure(figsize=(13, 5.5), layout="constrained", dpi=120)
    figure.suptitle(title, fontsize=11)
    curves, bars = figure.subplots(1, 2)
    for (name, run), (width, color) in zip(runs.items(), RUNS.values(), strict=True):
        curves.plot(range(1, len(run.losses) + 1), run.losses, linewidth=width, color=color, label=name)
    curves.set(xlabel="step", ylabel="training loss (nats per byte)")
    curves.legend(frameon=False)
    curves.spines[["top", "right"]].set_visible(False)
    stacked_bars(bars, {name: run.kept.by_kind for name, run in runs.items()})
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    sys.exit(main())
