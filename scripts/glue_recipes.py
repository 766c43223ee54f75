"""The experiments of the WTA-CRS paper, for ``run_glue.py --recipe``: 116 of them, made from its tables.

Every figure is from Appendix F of Liu et al. (2023), arXiv:2305.15265, unless a comment says otherwise. To read one, or
to list their names::

    python scripts/glue_recipes.py bert-base/cola/wta-crs
    python scripts/glue_recipes.py
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from arguments import UsageError

#: Steps at a constant learning rate, before it falls.
CONSTANT_STEPS = 500
#: The tables' columns -> how many training examples the task has.
TASKS = {
    "cola": 8_551,
    "sst2": 67_349,
    "mrpc": 3_668,
    "qqp": 363_846,
    "mnli": 392_702,
    "qnli": 104_743,
    "rte": 2_490,
    "stsb": 5_749,
}
NAMES = dict(zip(TASKS, ("CoLA", "SST-2", "MRPC", "QQP", "MNLI", "QNLI", "RTE", "STS-B"), strict=True))
#: Method -> its name in the paper, and ``memsave``: a preset, or for another budget what differs from it.
METHODS = {
    "wta-crs": ("WTA-CRS@0.3", "wta-crs"),
    "wta-crs-0.1": ("WTA-CRS@0.1", "{linear: {budget: 0.1}}"),
    "lora-wta-crs": ("LoRA+WTA-CRS@0.3", "{linear: {budget: 0.3, targets: [lora_A]}}"),
    "lora-wta-crs-0.1": ("LoRA+WTA-CRS@0.1", "{linear: {budget: 0.1, targets: [lora_A]}}"),
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A column group of the paper's tables.

    ``targets`` are the linears q, k and v, which get LoRA; ``batch`` is of Table 11, ``small_batch`` STS-B's.
    """

    title: str
    hub: str
    targets: str
    batch: int
    small_batch: int
    comment: str = ""


def _bert(size: str) -> Model:
    hub = f"google-bert/bert-{size.lower()}-uncased"
    return Model(title=f"BERT-{size}", hub=hub, targets="[query, key, value]", batch=128, small_batch=16)


def _t5(size: str, also: str = "") -> Model:
    hub = f"google-t5/t5-{size.lower()}"
    comment = f"The authors' code makes T5 write the label as text; here it has a classification head, as BERT.{also}"
    return Model(title=f"T5-{size}", hub=hub, targets="[q, k, v]", batch=100, small_batch=100, comment=comment)


MODELS = {
    "bert-base": _bert("Base"),
    "bert-large": _bert("Large"),
    "t5-base": _t5("Base"),
    "t5-large": _t5("Large"),
    "t5-3b": _t5("3B", "\n# The paper splits the batch over GPUs: over four, give --per_device_train_batch_size 25."),
    "opt-350m": Model(
        title="OPT-350M",
        hub="facebook/opt-350m",
        targets="[q_proj, k_proj, v_proj]",
        batch=100,
        small_batch=100,
        comment="The paper has no hyper-parameters for OPT (Appendix E.3). These are T5-3B's of the same method, as in "
        "the\n# authors' code; but there LoRA is on q_proj and v_proj only.",
    ),
}
#: Model, method: learning rates (Table 9, which names no models: its rows are in Table 10's order), and epochs
#: (Table 10). One rate stands for all tasks.
TABLES = {
    ("bert-base", "wta-crs"): ("2e-5", "20 20 10 10 10 10 20 10"),
    ("bert-base", "lora-wta-crs"): ("2e-4 5e-4 2e-4 3e-4 3e-4 2e-4 2e-4 3e-4", "60 20 20 20 20 20 40 40"),
    ("t5-base", "wta-crs"): ("3e-5 3e-5 3e-5 3e-5 3e-5 3e-6 3e-5 3e-5", "40 10 20 10 10 10 50 20"),
    ("t5-base", "wta-crs-0.1"): ("3e-5", "40 10 20 10 10 10 50 20"),
    ("t5-base", "lora-wta-crs"): ("3e-4 3e-5 3e-4 3e-5 3e-5 3e-5 3e-4 3e-4", "40 10 20 20 20 10 50 20"),
    ("t5-base", "lora-wta-crs-0.1"): ("3e-4 3e-5 3e-4 3e-5 3e-5 3e-5 3e-4 3e-4", "40 10 20 20 20 10 50 20"),
    ("bert-large", "wta-crs"): ("2e-5", "60 20 20 10 10 10 40 10"),
    ("bert-large", "lora-wta-crs"): ("3e-4 2e-4 2e-4 2e-4 2e-4 2e-4 3e-4 3e-4", "60 20 20 20 20 20 40 40"),
    ("t5-large", "wta-crs"): ("3e-5 3e-5 3e-5 3e-5 3e-5 3e-6 3e-5 3e-5", "20 10 20 10 10 10 40 20"),
    ("t5-large", "wta-crs-0.1"): ("3e-5 3e-5 3e-5 3e-5 3e-5 3e-6 3e-5 3e-5", "20 10 20 10 10 10 40 20"),
    ("t5-large", "lora-wta-crs"): ("3e-4 3e-5 3e-4 3e-5 3e-5 3e-5 3e-4 3e-4", "40 10 40 10 10 10 60 20"),
    ("t5-large", "lora-wta-crs-0.1"): ("3e-4 3e-5 3e-4 3e-5 3e-5 3e-5 3e-4 3e-4", "40 10 20 10 10 10 60 20"),
    ("t5-3b", "lora-wta-crs"): ("3e-4 3e-5 3e-4 3e-4 3e-4 3e-5 3e-4 3e-4", "40 10 20 10 10 10 60 20"),
    ("t5-3b", "lora-wta-crs-0.1"): ("3e-4 3e-5 3e-4 3e-4 3e-4 3e-5 3e-4 3e-4", "40 10 20 10 10 10 60 20"),
}
#: OPT's tasks, of Table 4.
OPT_TASKS = ("cola", "mrpc", "rte", "stsb")


def names() -> list[str]:
    """Every experiment in the tables, as model/task/method."""
    found = [f"{model}/{task}/{method}" for model, method in TABLES for task in TASKS]
    return found + [f"opt-350m/{task}/lora-wta-crs" for task in OPT_TASKS]


def recipe(name: str) -> str:
    """An experiment's options, as YAML; what the paper leaves open is said in comments."""
    if name not in names():
        raise UsageError(
            f"--recipe: expected model/task/method, as in bert-base/cola/wta-crs, got {name}. "
            "`python scripts/glue_recipes.py` lists all."
        )
    model_name, task, method = name.split("/")
    # The paper has none for OPT: see its comment.
    rates, epochs = (row.split() for row in TABLES["t5-3b" if model_name == "opt-350m" else model_name, method])
    index = list(TASKS).index(task)
    rate, number = rates[index % len(rates)], int(epochs[index])
    model, (title, memsave) = MODELS[model_name], METHODS[method]
    batch = model.small_batch if task == "stsb" else model.batch
    return f"""\
# {model.title} on {NAMES[task]}, {title}, as in Liu et al. (2023), arXiv:2305.15265, Appendix F.
#   python scripts/run_glue.py --recipe {name}
# Without network: --model_name_or_path FOLDER --data_dir FOLDER_OF_OFFICIAL_TSV_FILES. The command line wins.
{f"# {model.comment}{chr(10)}" if model.comment else ""}\
model_name_or_path: {model.hub}
task_name: {task}
dtype: float32 # whatever the weights are saved in
memsave: {memsave}
output_dir: runs/glue/{name.replace("/", "-")}
{lora(model) if method.startswith("lora") else ""}
do_train: true
do_eval: true
max_seq_length: 128
pad_to_max_length: true
per_device_train_batch_size: {batch}
per_device_eval_batch_size: {model.batch}
num_train_epochs: {number}
learning_rate: {rate.replace("e", ".0e")}
{schedule(math.ceil(TASKS[task] / batch) * number)}
optim: adamw_torch
adam_beta1: 0.9
adam_beta2: 0.999
adam_epsilon: 1.0e-8
weight_decay: 0.0
eval_strategy: epoch
save_strategy: epoch
save_total_limit: 1
logging_steps: 20
report_to: none
"""


def lora(model: Model) -> str:
    """The lines for LoRA."""
    return f"""
lora_r: 32
lora_alpha: 32 # this and the dropout are from the authors' code; the paper gives the rank only
lora_dropout: 0.1
lora_target_modules: {model.targets}
"""


def schedule(steps: int) -> str:
    """The lines for the learning rate of a run of so many steps: constant at first, then down to zero on a line.

    That is what the paper says. Its code has Trainer's own linear schedule, which starts to fall, or rises, at once.
    """
    comment = f"""\
# As the paper says: constant for 500 steps, then linear to zero; on one device this run has {steps:,} steps. The
# authors' code has --lr_scheduler_type linear instead, with --warmup_steps 500 (T5, OPT) or 0 (BERT)."""
    if steps <= CONSTANT_STEPS:
        return f"{comment}\nlr_scheduler_type: constant"
    lengths = f"num_stable_steps: {CONSTANT_STEPS}, num_decay_steps: {steps - CONSTANT_STEPS}"
    return f"{comment}\nlr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {{{lengths}, decay_type: linear}}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the recipe that is named, or the names of all."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        print(recipe(given[0]) if given else "\n".join(names()))
    except UsageError as error:
        print(f"glue_recipes.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
