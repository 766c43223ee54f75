"""``memsave demo``: train two small models, stock and patched, and compare everything."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from rich import box
from rich.table import Column, Table
from torch import Tensor

from hf_memsave import Kept, measure_kept, patch
from hf_memsave.commands.arguments import picture
from hf_memsave.commands.demo_task import DemoTask, generated_task
from hf_memsave.commands.options import console_of
from hf_memsave.config.sizes import MIB

_BATCH_SIZE = 32
_SEED, _HIDDEN = 0, 128


@dataclass(frozen=True)
class Run:
    """What one run gave: the loss of every step, the final weights, dev accuracy, memory and time."""

    losses: list[float]
    weights: dict[str, Tensor]
    accuracy: float
    kept: Kept
    seconds_per_step: float


def run(args: argparse.Namespace) -> int:
    """Train, compare, print the table and write the picture; returns 0, or 1 if a patched run differs from stock's."""
    out = args.out or (picture("demo.png") if find_spec("matplotlib") else None)
    torch.set_num_threads(1)  # models this small gain little from more, and lose much where other programs run
    steps, console = args.steps, console_of(args)
    task = generated_task(steps * _BATCH_SIZE, _SEED)
    console.print(task.description)
    runs = {}
    for name, config in model_configs(task).items():
        with console.status(f"Training {name}, stock and patched ..."):
            runs[name] = (train(config, task, steps, False), train(config, task, steps, True))
    console.print(results_table(runs, task), *unlearned(runs, task, steps), sep="\n")
    if out:
        from hf_memsave.commands.pictures import demo_picture

        demo_picture(out, task.description, runs)
        console.print(f"Picture: {out}")
    else:
        console.print("No picture: that needs matplotlib. Run: pip install 'hf_memsave[plot]'")
    failed = 0
    for name, pair in runs.items():
        if found := difference(*pair):
            failed = 1
            please = "Please report this, with the versions of torch and transformers."
            print(f"memsave demo: {name}: {found}. Expected equal bits. {please}", file=sys.stderr)
    if not failed:
        console.print(f"Stock and patched agree to the last bit in all {steps} losses and in every trained weight.")
    return failed


def model_configs(task: DemoTask) -> dict[str, transformers.PreTrainedConfig]:
    """Two layers of BERT, with its dropout (but none in attention), and two of LLaMA, which by default has none."""
    common = dict(
        vocab_size=len(task.tokenizer), pad_token_id=task.tokenizer.pad_token_id, num_labels=2,
        hidden_size=_HIDDEN, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
        initializer_range=0.05,  # the usual 0.02 suits wider models
    )  # fmt: skip
    return {
        "BERT": transformers.BertConfig(intermediate_size=4 * _HIDDEN, attention_probs_dropout_prob=0.0, **common),
        "LLaMA": transformers.LlamaConfig(intermediate_size=11 * _HIDDEN // 4, num_key_value_heads=2, **common),
    }


def train(config: Any, task: DemoTask, steps: int, patched: bool) -> Run:
    """Train from random weights; stock and patched runs see the same seed, batches and dropout masks."""
    transformers.set_seed(_SEED)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    if patched:
        patch(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=_BATCH_SIZE,
            per_device_eval_batch_size=4 * _BATCH_SIZE, learning_rate=2e-3, warmup_steps=steps // 5, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
            seed=_SEED,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=task.train, eval_dataset=task.dev,
            data_collator=transformers.DataCollatorWithPadding(task.tokenizer),
            compute_metrics=lambda of: {"accuracy": float((of.predictions.argmax(-1) == of.label_ids).mean())},
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        kept = measure_kept(model.train(), dict(next(iter(trainer.get_train_dataloader()))))
        transformers.set_seed(_SEED)
        seconds = trainer.train().metrics["train_runtime"]
        accuracy = trainer.evaluate()["eval_accuracy"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(losses, model.state_dict(), accuracy, kept, seconds / steps)


def difference(stock: Run, patched: Run) -> str | None:
    """Where two runs differ, in a loss or a weight, or None if they are equal to the bit."""
    for step, (expected, got) in enumerate(zip(stock.losses, patched.losses, strict=True), start=1):
        if expected != got:
            return f"the loss of step {step} is {expected!r} stock and {got!r} patched"
    for name, weight in stock.weights.items():
        if not torch.equal(weight, patched.weights[name]):
            return f"{name} differs after training"
    return None


def unlearned(runs: dict[str, tuple[Run, Run]], task: DemoTask, steps: int) -> list[str]:
    """A line for each model that is no better than the most frequent answer by two standard errors of its accuracy."""
    lines = []
    for name, (stock, _) in runs.items():
        error = (stock.accuracy * (1 - stock.accuracy) / len(task.dev)) ** 0.5
        if stock.accuracy <= task.majority + 2 * error:
            lines.append(
                f"{name} has not learned this: it is right in {stock.accuracy:.1%} of {len(task.dev)} dev examples "
                f"(standard error {error:.1%}), and the most frequent answer in {task.majority:.1%}. {steps} steps "
                "from random weights are too few; what is compared is bits, bytes and time."
            )
    return lines


def results_table(runs: dict[str, tuple[Run, Run]], task: DemoTask) -> Table:
    """Two rows for each model: stock, and patched below it."""
    headers = ("final loss", "dev accuracy", "majority", "kept MiB", "ratio", "s/step")
    table = Table("model", "run", *(Column(header, justify="right") for header in headers), box=box.SIMPLE_HEAD)
    for name, (stock, patched) in runs.items():
        for label, run in (("stock", stock), ("patched", patched)):
            cells = (f"{run.losses[-1]:.6f}", f"{run.accuracy:.1%}", f"{task.majority:.1%}")
            kept = (f"{run.kept.total / MIB:.1f}", f"{stock.kept.total / run.kept.total:.2f}x")
            table.add_row(name if run is stock else "", label, *cells, *kept, f"{run.seconds_per_step:.3f}")
        table.add_section()
    return table
