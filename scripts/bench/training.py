"""Train small BERTs from scratch on real GLUE text with gradients that are not exact, beside exact, on paired seeds.

    python scripts/bench/training.py {wta,approximate} --glue FOLDER [--seeds 3] [--workers 2]

FOLDER has the official SST-2 and CoLA folders. Runs of one seed start from the same weights, see the same batches and
draw the same dropout masks; they differ in how gradients are made alone. Finished runs are kept in --cache, by the code
they are of, so that an interrupted bench goes on. Writes scripts/results/NAME-training.{json,md,png}: dev metrics (of
the last three evaluations: mean and range over seeds), curves over steps, and each method's paired difference to exact.
"""

import argparse
import json
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from matplotlib.figure import Figure
from sklearn.metrics import matthews_corrcoef
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_memsave import WTACRS, MemSaveCallback, MemSaveConfig
from hf_memsave.ops.approximate.sign_bit import SignBit
from publish import RESULTS, arguments, table
from publish import write as write_results

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from code_version import code_version  # noqa: E402
from glue_data import TASKS, read_glue  # noqa: E402
from wordpiece import train_wordpiece  # noqa: E402


class Method(NamedTuple):
    """How gradients are made, the method it is paired with, and what is done to the model before."""

    config: MemSaveConfig | None
    beside: str
    prepare: Callable[[BertForSequenceClassification], None] | None = None


class Plan(NamedTuple):
    """A task's folder, metric, steps, steps between evaluations, peak learning rate, and its model's own settings."""

    folder: str
    metric: str
    steps: int
    every: int
    rate: float
    model: dict[str, float] = {}


def freeze_down(model: BertForSequenceClassification) -> None:
    """Leave the linear after each activation as it was drawn: where its weight is trained, few_bit is exact."""
    for layer in model.bert.encoder.layer:
        layer.output.dense.requires_grad_(False)


def fuse(model: BertForSequenceClassification) -> None:
    """Make each activation and the linear after it one."""
    for layer in model.bert.encoder.layer:
        layer.output.dense = SignBit(layer.intermediate.intermediate_act_fn, layer.output.dense)
        layer.intermediate.intermediate_act_fn = torch.nn.Identity()


def _sampled(**fields: Any) -> Method:
    return Method(MemSaveConfig(linear=WTACRS(**fields)), "exact")


def _approximate(**fields: Any) -> Method:
    return Method(MemSaveConfig(**fields), "exact")


#: What is compared -> name -> method.
GROUPS = {
    "wta": {
        "exact": Method(None, "exact"),
        "WTA-CRS @0.3": _sampled(budget=0.3),
        "WTA-CRS @0.1": _sampled(budget=0.1),
        "CRS @0.3": _sampled(budget=0.3, estimator="crs"),
        "top-k @0.3": _sampled(budget=0.3, estimator="topk"),
        "top-k @0.1": _sampled(budget=0.1, estimator="topk"),
    },
    "approximate": {
        "exact": Method(None, "exact"),
        "invert": _approximate(activation="invert"),
        "precision_bit": _approximate(activation="precision_bit"),
        "sign_bit": Method(None, "exact", fuse),
        "norm output": _approximate(norm="output"),
        "tempo": _approximate(activation="invert", norm="output"),
        "int8": _approximate(storage="int8"),
        "int4": _approximate(storage="int4"),
        "exact, frozen down": Method(None, "exact, frozen down", freeze_down),
        "few_bit 4": Method(MemSaveConfig(activation="few_bit"), "exact, frozen down", freeze_down),
        "few_bit 1": Method(MemSaveConfig(activation="few_bit", few_bits=1), "exact, frozen down", freeze_down),
    },
}
METHODS = {name: method for group in GROUPS.values() for name, method in group.items()}
_WIDE = {"initializer_range": 0.1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
#: From scratch, CoLA is learned only with wide initial weights, and after two epochs that do not show it.
PLANS = {
    "sst2": Plan("SST-2", "accuracy", 300, 30, 5e-4),
    "cola": Plan("CoLA", "Matthews correlation", 1340, 134, 5e-4, _WIDE),
}
VOCAB, LENGTH, BATCH = 4000, 32, 32
MODEL = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)


def main() -> None:
    """Run what is missing, and write the results."""
    parser = arguments(__doc__, RESULTS)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--glue", type=Path, required=True, help="the folder of the official tasks' folders")
    parser.add_argument("--tasks", nargs="+", choices=PLANS, help="(wta: both; approximate: sst2)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "memsave-training")
    options = parser.parse_args()
    options.tasks = options.tasks or (list(PLANS) if options.group == "wta" else ["sst2"])
    options.cache /= code_version()
    options.cache.mkdir(parents=True, exist_ok=True)
    jobs = [(t, m, s) for s in range(options.seeds) for t in options.tasks for m in GROUPS[options.group]]
    missing = [job for job in jobs if not cached(options.cache, *job).is_file()]
    with ProcessPoolExecutor(options.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(run, options.glue, options.cache, *job) for job in missing]):
            print(done.result(), file=sys.stderr, flush=True)
    curves = {"/".join(map(str, job)): json.loads(cached(options.cache, *job).read_text()) for job in jobs}
    write(options, curves)


def cached(folder: Path, task: str, method: str, seed: int) -> Path:
    """Where a run's curve lies."""
    config, _, prepare = METHODS[method]
    settings = PLANS[task], config, getattr(prepare, "__name__", None), VOCAB, LENGTH, BATCH, MODEL
    plan = zlib.crc32(repr(settings).encode())
    return folder / f"{task}-{method.replace(' ', '')}-{seed}-{plan:08x}.json"


def run(glue: Path, folder: Path, task: str, method: str, seed: int) -> str:
    """Train once, and write the dev metric of each evaluation; returns a line about the last."""
    plan, chosen = PLANS[task], METHODS[method]
    train, dev, tokenizer = encoded(glue, task)
    set_seed(seed)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), num_labels=2, **{**MODEL, **plan.model})
    )
    if chosen.prepare is not None:
        chosen.prepare(model)
    curve = Curve("eval_matthews" if task == "cola" else "eval_accuracy")
    callbacks: list[TrainerCallback] = [curve]
    if chosen.config is not None:
        callbacks.append(MemSaveCallback(chosen.config))
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output, max_steps=plan.steps, per_device_train_batch_size=BATCH, per_device_eval_batch_size=256,
            learning_rate=plan.rate, warmup_steps=plan.steps // 10, seed=seed, eval_strategy="steps",
            eval_steps=plan.every, save_strategy="no", logging_steps=plan.every, report_to="none",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        Trainer(
            model, args, train_dataset=train, eval_dataset=dev, compute_metrics=metric,
            data_collator=DataCollatorWithPadding(tokenizer), callbacks=callbacks,
        ).train()  # fmt: skip
    cached(folder, task, method, seed).write_text(json.dumps({"metric": curve.metric, "loss": curve.loss}))
    return f"{task} {method} seed {seed}: {curve.metric[-1]:.4f}"


@cache
def encoded(glue: Path, task: str) -> tuple[Dataset, Dataset, PreTrainedTokenizerBase]:
    """A task's training and dev sets, in the ids of a tokenizer trained on the former; made once a process."""
    folder = glue / PLANS[task].folder
    train, dev = (read_glue(folder, task, split) for split in ("train", TASKS[task].validation_splits[0]))
    tokenizer = train_wordpiece(train["sentence"], VOCAB)

    def encode(batch: dict[str, list]) -> dict[str, list]:
        return tokenizer(batch["sentence"], truncation=True, max_length=LENGTH) | {"labels": batch["label"]}

    train, dev = (d.map(encode, batched=True, remove_columns=d.column_names) for d in (train, dev))
    return train, dev, tokenizer


class Curve(TrainerCallback):
    """The dev metric and the training loss of each evaluation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.metric: list[float] = []
        self.loss: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Note them."""
        if "loss" in logs:
            self.loss.append(logs["loss"])

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        """Note them."""
        self.metric.append(metrics[self.name])


def metric(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy, and Matthews correlation."""
    guess, truth = prediction.predictions.argmax(-1), prediction.label_ids
    return {"accuracy": float((guess == truth).mean()), "matthews": float(matthews_corrcoef(truth, guess))}


def write(options: argparse.Namespace, curves: dict[str, dict[str, list[float]]]) -> None:
    """The three files."""
    text = f"""\
# Training from scratch: {options.group}

BERT of {MODEL["num_hidden_layers"]} layers and width {MODEL["hidden_size"]}, random weights, batch {BATCH}, AdamW;
where rows are sampled, k is counted over real tokens. Training loss: the mean over the last three tenths of the steps.
Dev metric: the mean of the last three evaluations. Both are means over {options.seeds} seeds; paired: of the
differences to the exact run of the same seed. ±: the standard error, of a variance pooled over the task's methods.
"""
    header = ["method", "training loss", "paired loss", "dev metric", "range", "paired metric"]
    for task in options.tasks:
        plan = PLANS[task]
        own = "".join(f", {k} {v}" for k, v in plan.model.items())
        text += f"\n## {task}: {plan.metric} after {plan.steps} steps, peak learning rate {plan.rate}{own}\n\n"
        text += table(header, rows(options, task, curves))
        if not any(final(curves[f"{task}/exact/{seed}"]["metric"]) for seed in range(options.seeds)):
            text += "\nExact training learned nothing here by this metric, so equality to it shows nothing.\n"
    write_results(f"{options.group}-training", text, curves, options.out)
    picture(options, curves)


def rows(options: argparse.Namespace, task: str, curves: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """Of a task's table, one a method."""
    methods, seeds = GROUPS[options.group], range(options.seeds)
    of, losses = (
        {m: [final(curves[f"{task}/{m}/{s}"][what]) for s in seeds] for m in methods} for what in ("metric", "loss")
    )
    pairs = {m: paired(of, m, methods[m].beside) for m in methods}
    error, paired_error = pooled(list(of.values())), pooled([values for values in pairs.values() if any(values)])
    found = []
    for method, values in of.items():
        beside = methods[method].beside
        apart, own_error = statistics.mean(paired(losses, method, beside)), paired_error * (method != beside)
        metric = f"{statistics.mean(values):.4f} ± {error:.4f}"
        spread = f"{min(values):.4f} to {max(values):.4f}"
        pair = f"{statistics.mean(pairs[method]):+.4f} ± {own_error:.4f}"
        found.append([method, f"{statistics.mean(losses[method]):.4f}", f"{apart:+.4f}", metric, spread, pair])
    return found


def final(curve: list[float]) -> float:
    """The mean of the last three evaluations: the last alone is noisy on a small dev set."""
    return statistics.mean(curve[-3:])


def paired(of: dict[str, list[float]], method: str, beside: str) -> list[float]:
    """By how much each seed's run differs from that of the method it is paired with."""
    return [v - e for v, e in zip(of[method], of[beside], strict=True)]


def pooled(samples: list[list[float]]) -> float:
    """The standard error of each sample's mean, where all have one variance: few seeds tell little of their own."""
    if not samples or len(samples[0]) < 2:
        return 0.0
    return (statistics.mean(map(statistics.variance, samples)) / len(samples[0])) ** 0.5


def picture(options: argparse.Namespace, curves: dict[str, dict[str, list[float]]]) -> None:
    """Dev metric (above) and training loss (below) over steps; a line a method, a band over the seeds."""
    figure = Figure(figsize=(6 * len(options.tasks), 8), layout="constrained")
    axes = figure.subplots(2, len(options.tasks), squeeze=False)
    for column, task in enumerate(options.tasks):
        plan = PLANS[task]
        for row, (kind, label) in enumerate((("metric", plan.metric), ("loss", "training loss"))):
            axis = axes[row][column]
            for method in GROUPS[options.group]:
                runs = np.array([curves[f"{task}/{method}/{seed}"][kind] for seed in range(options.seeds)])
                x = np.arange(1, runs.shape[1] + 1) * plan.every
                (line,) = axis.plot(x, runs.mean(0), label=method, linewidth=2.5 if method.startswith("exact") else 1.2)
                axis.fill_between(x, runs.min(0), runs.max(0), alpha=0.12, color=line.get_color(), linewidth=0)
            axis.set(title=task, xlabel="step", ylabel=label)
            axis.legend(fontsize=8)
    figure.savefig(options.out / f"{options.group}-training.png", dpi=120)


if __name__ == "__main__":
    main()
