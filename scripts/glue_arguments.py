"""The arguments of ``run_glue.py``: from the command line and, below it, from a YAML or JSON file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_memsave.glue import TASKS


class UsageError(Exception):
    """Arguments that cannot be followed; the message says what to change."""


@dataclass
class ModelArguments:
    """Which model and tokenizer to train, and how its activations are kept."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Pretrained weights: a name on the hub or a folder."}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Random weights: a configuration's name on the hub, its folder or its file."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Changes to --config_name, as in num_hidden_layers=2,hidden_size=128."}
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={"help": "A tokenizer's name on the hub or its folder; the model's own if not given."},
    )
    vocab_file: str | None = field(default=None, metadata={"help": "A BERT vocab.txt, instead of --tokenizer_name."})
    memsave: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "true",
            "metavar": "PRESET",
            "help": "Keep less activation memory: by the default, exact setting, or by the preset named here.",
        },
    )

    def __post_init__(self):
        """Refuse two answers to one question, and none."""
        _exactly_one(model_name_or_path=self.model_name_or_path, config_name=self.config_name)
        if self.tokenizer_name and self.vocab_file:
            _exactly_one(tokenizer_name=self.tokenizer_name, vocab_file=self.vocab_file)
        if self.config_overrides and not self.config_name:
            raise UsageError("--config_overrides: expected --config_name beside it, got none. Remove it or add that.")


@dataclass
class DataArguments:
    """Which task to train on, and how much of it."""

    task_name: str | None = field(default=None, metadata={"help": f"A GLUE task on the hub: {', '.join(TASKS)}."})
    data_dir: str | None = field(
        default=None, metadata={"help": "A folder with one task's official TSV files; its name or columns tell which."}
    )
    max_seq_length: int = field(default=128, metadata={"help": "Longer examples are cut to this many tokens."})
    pad_to_max_length: bool = field(
        default=True, metadata={"help": "Pad to --max_seq_length, or to the longest example of each batch."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first examples only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first examples only."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict the first examples only."})

    def __post_init__(self):
        """Refuse two answers to one question, and none."""
        _exactly_one(task_name=self.task_name, data_dir=self.data_dir)
        if self.task_name and self.task_name not in TASKS:
            raise UsageError(
                f"--task_name: expected one of {', '.join(TASKS)}, got {self.task_name}. Name one of them."
            )
        for name in ("max_seq_length", "max_train_samples", "max_eval_samples", "max_predict_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name}: expected a positive number, got {value}. Raise it or leave it out.")


def _exactly_one(**options: str | None) -> None:
    given = [f"--{name}" for name, value in options.items() if value]
    if len(given) != 1:
        wanted = " and ".join(f"--{name}" for name in options)
        raise UsageError(f"expected exactly one of {wanted}, got {' and '.join(given) or 'neither'}. Give one of them.")


class _Parser(HfArgumentParser):
    """Errors in one line: the usage of some 150 options would bury them."""

    def error(self, message: str):
        raise UsageError(f"{message}. See --help.")


def parse_arguments(argv: Sequence[str]) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """The arguments of the ``--config`` file and the command line, of which the latter wins."""
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    known, rest = first.parse_known_args(argv)

    parser = _Parser(
        (ModelArguments, DataArguments, TrainingArguments),
        usage="%(prog)s [--config FILE] (--model_name_or_path NAME | --config_name NAME) "
        "(--task_name TASK | --data_dir DIR) [--memsave [PRESET]] [--do_train] [--do_eval] [--do_predict] ...",
        description="Fine-tune a Transformers model on a GLUE task, stock or with hf_memsave.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON with any of these options as its keys.")
    try:
        *parsed, _, unknown = parser.parse_args_into_dataclasses(
            [*(_options_of_file(Path(known.config)) if known.config else ()), *rest],
            return_remaining_strings=True,
            look_for_args_file=False,
        )
    except ValueError as error:  # TrainingArguments checks its own values
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(f"expected the options that --help lists, got {' '.join(unknown)}. Remove or correct them.")
    return tuple(parsed)


def _options_of_file(path: Path) -> list[str]:
    """The options of a YAML or JSON file as they would stand on the command line."""
    if not path.is_file():
        raise UsageError(f"--config {path}: expected a YAML or JSON file, found none. Name one that exists.")
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UsageError(f"--config {path}: expected YAML or JSON. {error}") from error
    if not isinstance(options, dict):
        raise UsageError(
            f"--config {path}: expected options with values, got {type(options).__name__}. Write key: value."
        )
    argv = []
    for name, value in options.items():
        if isinstance(value, list):
            argv += [f"--{name}", *map(str, value)]
        elif value is not None:
            argv.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    return argv
