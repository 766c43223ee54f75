"""``memsave demo``: train two small models on generated pairs of sentences, stock and patched, and compare them."""

from __future__ import annotations

import argparse
import io
import random
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich import box
from rich.table import Column, Table

from hf_memsave import Kept, measure_kept, patch
from hf_memsave.commands.arguments import picture
from hf_memsave.commands.options import console_of, freed
from hf_memsave.commands.progress import progress
from hf_memsave.config.files import write
from hf_memsave.config.sizes import MIB
from hf_memsave.tape.kinds import KINDS_OF_OPS

NUMBERS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
NUMBERS += "seventeen eighteen nineteen twenty".split()
_PEOPLE = "sailor baker farmer teacher doctor painter dancer judge".split()
_VERBS = "has finds sells paints keeps".split()
_THINGS = "boats chairs lamps baskets clocks tables books apples".split()
_PLACES = "harbour garden kitchen market school attic".split()
_OTHERS = "[PAD] [UNK] [CLS] [SEP] [MASK] the in more than".split()
# Paul Tol's muted scheme, told apart in every kind of colour vision; grey for the rest.
_COLORS = "#332288 #88CCEE #44AA99 #117733 #DDCC77 #999933 #CC6677 #882255 #AA4499 #BBBBBB".split()
_BATCH_SIZE, _DEV_EXAMPLES, _SEED, _HIDDEN = 32, 500, 0, 128


class Task(NamedTuple):
    """Encoded examples (token ids and "labels", 0 or 1), their tokenizer, and a line that describes them."""

    description: str
    tokenizer: transformers.BertTokenizer
    train: list[dict[str, Any]]
    dev: list[dict[str, Any]]

    @property
    def majority(self) -> float:
        """The accuracy of always giving the most frequent answer of the dev examples."""
        answers = [example["labels"] for example in self.dev]
        return max(answers.count(0), answers.count(1)) / len(answers)


class Run(NamedTuple):
    """The loss of every step of one run, its final weights, dev accuracy, kept bytes and time."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    accuracy: float
    kept: Kept
    seconds_per_step: float


def run(args: argparse.Namespace) -> int:
    """Train, compare, print the table and write the picture; return 0, or 1 if a patched run differs from stock's."""
    out = args.out or (picture("demo.png") if find_spec("matplotlib") else None)
    torch.set_num_threads(1)  # models this small gain little from more, and lose much where other programs run
    steps, console, task = args.steps, console_of(args), generated_task(args.steps * _BATCH_SIZE, _SEED)
    console.print(task.description)
    runs = {}
    for name, config in model_configs(task).items():
        with progress(console, f"Training {name}, stock and patched ..."):
            runs[name] = (train(config, task, steps, False), train(config, task, steps, True))
    console.print(results_table(runs, task))
    if out:
        write_picture(out, task.description, runs)
        console.print(f"Picture: {out}")
    else:
        console.print("No picture: that needs matplotlib. Run: pip install 'hf_memsave[plot]'")
    found = {name: where for name, pair in runs.items() if (where := difference(*pair))}
    please = "Please report this, with the versions that `memsave doctor` prints."
    for name, where in found.items():
        print(f"memsave demo: {name}: {where}. Expected equal bits. {please}", file=sys.stderr)
    if not found:
        console.print(f"Stock and patched agree to the last bit in all {steps} losses and in every trained weight.")
    return int(bool(found))


def generated_task(train_examples: int, seed: int) -> Task:
    """Generate pairs such as "the baker sells nine lamps in the market" and "the baker has more than six lamps"."""
    rng = random.Random(seed)
    first, second, labels = [], [], []
    for _ in range(train_examples + _DEV_EXAMPLES):
        low, high = sorted(rng.sample(range(len(NUMBERS)), 2))
        person, thing, place = map(rng.choice, (_PEOPLE, _THINGS, _PLACES))
        labels.append(rng.randrange(2))  # whether the second sentence follows from the first
        said, claimed = (high, low) if labels[-1] else (low, high)
        fact = f"the {person} {rng.choice(_VERBS)} {NUMBERS[said]} {thing}"
        first.append(rng.choice([f"{fact} in the {place}", f"in the {place} {fact}"]))
        second.append(f"the {person} {rng.choice(_VERBS)} more than {NUMBERS[claimed]} {thing}")
    words = [*_OTHERS, *NUMBERS, *_PEOPLE, *_VERBS, *_THINGS, *_PLACES]
    tokenizer = transformers.BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    encoded = {"labels": labels, **tokenizer(first, second)}
    examples = [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]
    description = f'Generated pairs: does "{second[0]}" follow from "{first[0]}"?'
    return Task(description, tokenizer, examples[:train_examples], examples[train_examples:])


def model_configs(task: Task) -> dict[str, transformers.PreTrainedConfig]:
    """Return configs of two layers: BERT with dropout (but none in attention), and LLaMA, by default without any."""
    common = dict(
        vocab_size=len(task.tokenizer), pad_token_id=task.tokenizer.pad_token_id, num_labels=2,
        hidden_size=_HIDDEN, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
        initializer_range=0.05,  # the usual 0.02 suits wider models
    )  # fmt: skip
    return {
        "BERT": transformers.BertConfig(intermediate_size=4 * _HIDDEN, attention_probs_dropout_prob=0.0, **common),
        "LLaMA": transformers.LlamaConfig(intermediate_size=11 * _HIDDEN // 4, num_key_value_heads=2, **common),
    }


def train(config: Any, task: Task, steps: int, patched: bool) -> Run:
    """Train a model from random weights; stock and patched runs have the same seed, batches and dropout masks."""
    transformers.set_seed(_SEED)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    if patched:
        patch(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, seed=_SEED, max_steps=steps, learning_rate=2e-3, warmup_steps=steps // 5, logging_steps=1,
            per_device_train_batch_size=_BATCH_SIZE, per_device_eval_batch_size=4 * _BATCH_SIZE, use_cpu=True,
            dataloader_pin_memory=False, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, transformers.DataCollatorWithPadding(task.tokenizer), task.train, task.dev,
            compute_metrics=lambda of: {"accuracy": float((of.predictions.argmax(-1) == of.label_ids).mean())},
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        kept = measure_kept(model.train(), dict(next(iter(trainer.get_train_dataloader()))))
        transformers.set_seed(_SEED)
        seconds, accuracy = trainer.train().metrics["train_runtime"], trainer.evaluate()["eval_accuracy"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(losses, model.state_dict(), accuracy, kept, seconds / steps)


def difference(stock: Run, patched: Run) -> str | None:
    """Return where two runs differ, in a loss or a weight; None if they are equal to the bit."""
    for step, (expected, got) in enumerate(zip(stock.losses, patched.losses, strict=True), start=1):
        if expected != got:
            return f"the loss of step {step} is {expected!r} stock and {got!r} patched"
    differs = (name for name, weight in stock.weights.items() if not torch.equal(weight, patched.weights[name]))
    return next((f"{name} differs after training" for name in differs), None)


def results_table(runs: dict[str, tuple[Run, Run]], task: Task) -> Table:
    """Return a table with two rows for each model: stock, and patched below it."""
    headers = ("final loss", "dev accuracy", "majority", "kept for backward, MiB", "freed of that", "s/step")
    table = Table("model", "run", *(Column(header, justify="right") for header in headers), box=box.SIMPLE_HEAD)
    for name, pair in runs.items():
        for model, label, run in zip((name, ""), ("stock", "patched"), pair, strict=True):
            cells = (f"{run.losses[-1]:.6f}", f"{run.accuracy:.1%}", f"{task.majority:.1%}")
            kept = f"{run.kept.total / MIB:.1f}", freed(pair[0].kept.total, run.kept.total)
            table.add_row(model, label, *cells, *kept, f"{run.seconds_per_step:.3f}")
        table.add_section()
    return table


def write_picture(path: Path, title: str, runs: dict[str, tuple[Run, Run]]) -> None:
    """Draw the loss curves of each model's two runs, above a bar for each run: kept bytes by kind of op."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(runs), 8.5), layout="constrained", dpi=150)
    figure.suptitle(title, wrap=True, fontsize=11)
    for (name, pair), curves, bars in zip(runs.items(), *figure.subplots(2, len(runs), squeeze=False), strict=True):
        for label, run, color, width in zip(("stock", "patched"), pair, _COLORS[1::-1], (4, 1), strict=True):
            curves.plot(range(1, len(run.losses) + 1), run.losses, color=color, linewidth=width, label=label)
        curves.set(title=f"{name}, dev accuracy {pair[1].accuracy:.1%}", xlabel="step", ylabel="training loss")
        curves.legend(frameon=False)
        tops = [0.0, 0.0]
        for kind, color in zip(KINDS_OF_OPS, _COLORS, strict=True):
            heights = [run.kept.by_kind.get(kind, 0) / MIB for run in pair]
            bars.bar(("stock", "patched"), heights, 0.6, tops, color=color, label=kind if max(heights) >= 0.05 else "")
            tops = [top + height for top, height in zip(tops, heights, strict=True)]
        totals = [f"{tops[0]:.1f} MiB", f"{tops[1]:.1f} MiB\n{freed(tops[0], tops[1], ' freed')}"]
        bars.bar_label(bars.containers[-1], totals, padding=4, fontsize=11, fontweight="bold")
        bars.set(ylabel="kept for backward [MiB]", ylim=(0, 1.15 * max(tops)))
        bars.legend(reverse=True, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(drawn := io.BytesIO(), format=path.suffix[1:])
    write(path, drawn.getvalue())
