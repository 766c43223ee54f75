"""The arguments that every script here has, read from the command line and, below it, from a YAML or JSON file."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from transformers import CONFIG_MAPPING, HfArgumentParser

from hf_memsave import MemSaveConfig
from hf_memsave.config.config import Rung

#: Options of which only one side may be given. Where the command line gives one, the file's others are dropped.
Sides = tuple[tuple[str, ...], ...]
#: Option -> another that is meant for its value: the file's is dropped where the command line gives the first.
GOES_WITH = {"lr_scheduler_type": "lr_scheduler_kwargs"}


class UsageError(Exception):
    """Arguments that cannot be followed; the message says what to change."""


def option(help: str, default: Any = None, **metadata: Any) -> Any:
    """A field of a dataclass, as ``HfArgumentParser`` reads it."""
    return field(default=default, metadata={"help": help, **metadata})


class Options:
    """What is refused of a dataclass of options."""

    def exactly_one(self, *names: str) -> None:
        """Refuse two answers to one question, and none."""
        given = [f"--{name}" for name in names if getattr(self, name)]
        if len(given) != 1:
            wanted = ", ".join(f"--{name}" for name in names[:-1]) + f" and --{names[-1]}"
            got = " and ".join(given) or "none"
            raise UsageError(f"expected exactly one of {wanted}, got {got}. Give one of them.")

    def beside(self, needed: str, *names: str) -> None:
        """Refuse options that mean something only with another one."""
        for name in names:
            if getattr(self, name) and not getattr(self, needed):
                raise UsageError(f"--{name}: expected --{needed} beside it, got none. Remove it or add that.")

    def positive(self, *names: str) -> None:
        """Refuse numbers below one."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name}: expected a positive number, got {value}. Raise it or leave it out.")


@dataclass
class ModelArguments(Options):
    """Which model and tokenizer to train, how its activations are kept, and LoRA."""

    SIDES: ClassVar[tuple[Sides, ...]] = (
        (("model_name_or_path",), ("config_name", "config_overrides"), ("model_type", "config_overrides")),
    )

    model_name_or_path: str | None = option("Pretrained weights: a name on the hub or a folder.")
    config_name: str | None = option("Random weights: a configuration's name on the hub, its folder or its file.")
    model_type: str | None = option("Random weights: an architecture with its default sizes, as in llama.")
    config_overrides: str | None = option("Changes to these, as in num_hidden_layers=2,hidden_size=128.")
    tokenizer_name: str | None = option(
        "A tokenizer's name on the hub or its folder. If not given: the pretrained model's own, or, for random "
        "weights, one trained on the training texts."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        "The weights' dtype; Transformers' own choice if not given."
    )
    memsave: str | None = option(
        "Keep less activation memory: by the default, exact setting, by the preset named here, or by a YAML or JSON "
        "file of MemSaveConfig's fields. In a --config file also these fields themselves.",
        nargs="?",
        const="true",
        metavar="PRESET|FILE",
    )
    checkpoint: Rung | None = option(
        "Keep still less, with --memsave or without it: run these matrix products of each layer again in backward, and "
        "those named before them. Exact; block runs whole layers again, and tiles in parts of the sequence."
    )
    tiles: str | None = option(
        "Run whole layers again in parts of so many tokens, or auto, with --memsave or without it.", metavar="N|auto"
    )
    offload: bool = option(
        "Keep in main memory what has to be kept, with --memsave or without it. Exact; frees memory of a GPU.",
        default=False,
    )
    compile: bool = option("Compile each repeated layer by itself, with --memsave or without it.", default=False)
    train_only: list[str] | None = option(
        "Train only parameters with one of these in their names, as in classifier LayerNorm.", nargs="+", metavar="PART"
    )
    lora_r: int | None = option("Train LoRA adapters of this rank, and the task's head, instead of the model.")
    lora_alpha: int | None = option("LoRA's scale times its rank; 16 if not given.")
    lora_dropout: float | None = option("On the adapters' input; 0 if not given.")
    lora_target_modules: list[str] | None = option(
        "The linears that get adapters, as in q_proj v_proj; all-linear if not given.", nargs="+", metavar="NAME"
    )
    lora_dora: bool = option("With DoRA's magnitudes.", default=False)

    def __post_init__(self):
        """Refuse what can be refused before anything is loaded."""
        self.exactly_one("model_name_or_path", "config_name", "model_type")
        if self.config_overrides and self.model_name_or_path:
            raise UsageError(
                "--config_overrides: expected --config_name or --model_type, got pretrained weights. Remove it."
            )
        if self.model_type and self.model_type not in CONFIG_MAPPING:
            raise UsageError(
                f"--model_type: expected an architecture of Transformers, got {self.model_type}. Correct it."
            )
        self.memsave_config()  # an unknown preset raises a ConfigError
        self.positive("lora_r", "lora_alpha")
        if self.train_only and self.lora_r:
            raise UsageError("--train_only: expected no --lora_r, which chooses what is trained. Remove one.")
        self.beside("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_dora")
        if not 0 <= (self.lora_dropout or 0) < 1:
            raise UsageError(f"--lora_dropout: expected a number in [0, 1), got {self.lora_dropout}. Try 0.05.")

    @property
    def random_weights(self) -> bool:
        """Whether nothing pretrained is loaded."""
        return not self.model_name_or_path

    def memsave_config(self) -> MemSaveConfig | None:
        """What ``--memsave`` means: a preset, a file or, as JSON, fields; and the options beside it. None for stock."""
        names = "checkpoint", "tiles", "offload", "compile"
        fields: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name)}
        if fields.get("tiles", "").isdigit():
            fields["tiles"] = int(fields["tiles"])
        given: Any = self.memsave
        if fields and given == "false":
            raise UsageError(f"--{next(iter(fields))}: expected --memsave true, got --memsave false. Remove one.")
        if given in (None, "true", "false"):
            given = given == "true" or bool(fields)
        elif given.startswith("{"):  # a mapping in the --config file
            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                raise UsageError(f"--memsave: expected fields as JSON, got {given}. {error}") from error
        return MemSaveConfig.resolve(given, fields)


@dataclass
class SampleArguments(Options):
    """How much of the data to use."""

    SIDES: ClassVar[tuple[Sides, ...]] = ()

    max_train_samples: int | None = option("Train on the first examples only.")
    max_eval_samples: int | None = option("Evaluate on the first examples only.")
    max_predict_samples: int | None = option("Predict the first examples only.")

    def __post_init__(self):
        """Refuse numbers below one."""
        self.positive("max_train_samples", "max_eval_samples", "max_predict_samples")


class _Parser(HfArgumentParser):
    """Errors in one line: the usage of some 150 options would bury them."""

    def error(self, message: str):
        raise UsageError(f"{message}. See --help.")


def parse_arguments(
    argv: Sequence[str],
    classes: Sequence[type],
    usage: str,
    description: str,
    recipe: Callable[[str], str] | None = None,
) -> tuple[Any, ...]:
    """One instance of each class: from the ``--config`` file and the command line, of which the latter wins.

    ``recipe`` makes a file's text of what ``--recipe`` names.
    """
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    if recipe is not None:
        first.add_argument("--recipe")
    known, rest = first.parse_known_args(argv)

    parser = _Parser(
        classes, usage=f"%(prog)s [--config FILE] {usage} ...", description=description, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON with any of these options as its keys.")
    options = _options_of_file(Path(known.config)) if known.config else {}
    if recipe is not None:
        parser.add_argument("--recipe", metavar="MODEL/TASK/METHOD", help="An experiment of the paper on WTA-CRS.")
        if known.config and known.recipe:
            raise UsageError("expected --config or --recipe, got both. Give one of them.")
        options = yaml.safe_load(recipe(known.recipe)) if known.recipe else options
    for name in _overruled(rest, [sides for cls in classes for sides in getattr(cls, "SIDES", ())]):
        options.pop(name, None)
    try:
        *parsed, _, unknown = parser.parse_args_into_dataclasses(
            [*_as_argv(options), *rest], return_remaining_strings=True, look_for_args_file=False
        )
    except ValueError as error:  # TrainingArguments and MemSaveConfig check their own values
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(f"expected the options that --help lists, got {' '.join(unknown)}. Remove or correct them.")
    return tuple(parsed)


def _overruled(argv: Sequence[str], questions: Iterable[Sides]) -> set[str]:
    given = {option[2:].partition("=")[0] for option in argv if option.startswith("--")}
    overruled = {GOES_WITH[name] for name in given & GOES_WITH.keys()}
    for sides in questions:
        for name in given:
            answered = [set(side) for side in sides if name in side]
            if len(answered) == 1:  # an option of two sides chooses neither
                overruled |= set().union(*sides) - answered[0]
    return overruled


def _options_of_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"--config {path}: expected a YAML or JSON file, found none. Name one that exists.")
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: expected YAML or JSON. {error}") from error
    if not isinstance(options, dict):
        raise UsageError(
            f"--config {path}: expected options with values, got {type(options).__name__}. Write key: value."
        )
    return options


def _as_argv(options: dict[str, Any]) -> list[str]:
    argv = []
    for name, value in options.items():
        if isinstance(value, list):
            argv += [f"--{name}", *map(str, value)]
        elif value is not None:
            argv.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    return argv
