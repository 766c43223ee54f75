"""Train small BERTs from scratch on real GLUE text with sampled weight gradients, beside exact ones, on paired seeds.

    python scripts/bench_wta_training.py --glue FOLDER [--seeds 3] [--workers 2]

FOLDER has the official SST-2 and CoLA folders. Runs of one seed start from the same weights, see the same batches and
draw the same dropout masks; they differ in the weight gradients alone. Finished runs are kept in --cache, so that an
interrupted bench goes on. Writes scripts/results/wta-training.{json,md,png}: dev metrics (of the last three
evaluations: mean and range over seeds), curves over steps, and each method's paired difference to exact.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
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
from hf_memsave.glue import TASKS, read_glue
from hf_memsave.wordpiece import train_wordpiece

RESULTS = Path(__file__).resolve().parent / "results"
#: Name -> what samples the weight gradients; None for exact ones.
METHODS = {
    "exact": None,
    "WTA-CRS @0.3": WTACRS(budget=0.3),
    "WTA-CRS @0.1": WTACRS(budget=0.1),
    "CRS @0.3": WTACRS(budget=0.3, estimator="crs"),
    "top-k @0.3": WTACRS(budget=0.3, estimator="topk"),
    "top-k @0.1": WTACRS(budget=0.1, estimator="topk"),
}
#: Task -> its folder, metric, steps, and steps between evaluations.
PLANS = {"sst2": ("SST-2", "accuracy", 300, 30), "cola": ("CoLA", "Matthews correlation", 300, 30)}
VOCAB, LENGTH, BATCH, RATE = 4000, 32, 32, 5e-4
MODEL = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)


def main() -> None:
    """Run what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--glue", type=Path, required=True, help="the folder of the official tasks' folders")
    parser.add_argument("--tasks", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "memsave-wta-training")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    jobs = [(t, m, s) for s in range(options.seeds) for t in options.tasks for m in METHODS]
    missing = [job for job in jobs if not cached(options.cache, *job).is_file()]
    with ProcessPoolExecutor(options.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(run, options.glue, options.cache, *job) for job in missing]):
            print(done.result(), file=sys.stderr, flush=True)
    curves = {"/".join(map(str, job)): json.loads(cached(options.cache, *job).read_text()) for job in jobs}
    write(options, curves)


def cached(folder: Path, task: str, method: str, seed: int) -> Path:
    """Where a run's curve lies."""
    return folder / f"{task}-{method.replace(' ', '')}-{seed}.json"


def run(glue: Path, folder: Path, task: str, method: str, seed: int) -> str:
    """Train once, and write the dev metric of each evaluation; returns a line about the last."""
    _, _, steps, every = PLANS[task]
    train, dev, tokenizer = encoded(glue, task)
    set_seed(seed)
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=2, **MODEL))
    curve = Curve("eval_matthews" if task == "cola" else "eval_accuracy")
    callbacks: list[TrainerCallback] = [curve]
    if METHODS[method] is not None:
        callbacks.append(MemSaveCallback(MemSaveConfig(linear=METHODS[method])))
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output, max_steps=steps, per_device_train_batch_size=BATCH, per_device_eval_batch_size=256,
            learning_rate=RATE, warmup_steps=steps // 10, seed=seed, eval_strategy="steps", eval_steps=every,
            save_strategy="no", logging_steps=every, report_to="none", disable_tqdm=True, use_cpu=True,
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
    folder = glue / PLANS[task][0]
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
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = range(options.seeds)
    lines = [
        "# Training from scratch with sampled weight gradients", "",
        f"BERT of {MODEL['num_hidden_layers']} layers and width {MODEL['hidden_size']}, random weights, batch {BATCH}, "
        f"AdamW, peak learning rate {RATE}; k counted over real tokens. Dev metric, the mean of the last three "
        f"evaluations: mean, and range over {options.seeds} seeds. Paired: the mean over seeds of the difference to "
        "the exact run of the same seed.",
    ]  # fmt: skip
    for task in options.tasks:
        _, name, steps, every = PLANS[task]
        lines += ["", f"## {task}: {name} after {steps} steps", "", "| method | mean | range | paired difference |"]
        lines += ["| --- | --- | --- | --- |"]
        of = {m: [final(curves[f"{task}/{m}/{s}"]["metric"]) for s in seeds] for m in METHODS}
        for method, values in of.items():
            paired = statistics.mean(v - e for v, e in zip(values, of["exact"], strict=True))
            spread = f"{min(values):.4f} to {max(values):.4f}"
            lines.append(f"| {method} | {statistics.mean(values):.4f} | {spread} | {paired:+.4f} |")
        if not any(of["exact"]):
            lines += ["", "Exact training learned nothing here by this metric, so equality to it shows nothing."]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    machine = f"{platform.machine()}, CPU"
    command = f"python scripts/{Path(__file__).name} --glue FOLDER --seeds {options.seeds}"
    date = datetime.date.today().isoformat()
    lines += ["", f"- command: `{command}`", f"- machine: {machine}", f"- versions: {versions}", f"- date: {date}", ""]
    (options.out / "wta-training.md").write_text("\n".join(lines), encoding="utf-8")
    rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in curves.items())
    (options.out / "wta-training.json").write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    picture(options, curves)
    print("\n".join(lines))


def final(metric: list[float]) -> float:
    """The mean of the last three evaluations: the last alone is noisy on a small dev set."""
    return statistics.mean(metric[-3:])


def picture(options: argparse.Namespace, curves: dict[str, dict[str, list[float]]]) -> None:
    """Dev metric (above) and training loss (below) over steps; a line a method, a band over the seeds."""
    figure = Figure(figsize=(6 * len(options.tasks), 8), layout="constrained")
    axes = figure.subplots(2, len(options.tasks), squeeze=False)
    for column, task in enumerate(options.tasks):
        _, name, _, every = PLANS[task]
        for row, (kind, label) in enumerate((("metric", name), ("loss", "training loss"))):
            axis = axes[row][column]
            for method in METHODS:
                runs = np.array([curves[f"{task}/{method}/{seed}"][kind] for seed in range(options.seeds)])
                x = np.arange(1, runs.shape[1] + 1) * every
                (line,) = axis.plot(x, runs.mean(0), label=method, linewidth=2.5 if method == "exact" else 1.2)
                axis.fill_between(x, runs.min(0), runs.max(0), alpha=0.12, color=line.get_color(), linewidth=0)
            axis.set(title=task, xlabel="step", ylabel=label)
            axis.legend(fontsize=8)
    figure.savefig(options.out / "wta-training.png", dpi=120)


if __name__ == "__main__":
    main()
