"""What every script does around its own task: checkpoints, training, reports, and the exit status."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from arguments import UsageError
from hf_memsave import MemSaveCallback, MemSaveConfig
from hf_memsave.errors import ConfigError, PatchError


def check_actions(training: TrainingArguments, *known: str) -> None:
    """Refuse a run that does nothing, or something that the script cannot do."""
    asked = [name for name in ("do_train", "do_eval", "do_predict") if getattr(training, name)]
    listed = ", ".join(f"--{name}" for name in known[:-1]) + f" and --{known[-1]}"
    if not asked:
        raise UsageError(f"expected at least one of {listed}, got none. Add one.")
    if unknown := [name for name in asked if name not in known]:
        raise UsageError(f"expected only {listed}, got --{unknown[0]}. Remove it.")
    training.label_names = training.label_names or ["labels"]  # PEFT's wrappers hide the model's own


def checkpoint_to_resume(training: TrainingArguments) -> str | None:
    """The checkpoint folder that ``--resume_from_checkpoint`` names; "true" names the last one in the output folder."""
    wanted = training.resume_from_checkpoint
    if wanted in (None, "false"):
        return None
    folder = Path(training.output_dir if wanted == "true" else wanted)
    found = get_last_checkpoint(folder) if wanted == "true" and folder.is_dir() else folder
    if found is None or not Path(found).is_dir():
        raise UsageError(
            f"--resume_from_checkpoint: expected a checkpoint in {folder}, found none. Name one that exists."
        )
    return str(found)


def train(trainer: Trainer, checkpoint: str | None, memsave: MemSaveConfig | None) -> None:
    """Train, and save the model, the tokenizer, the metrics and the log, with the memory kept and freed."""
    if memsave is not None:
        MemSaveCallback(memsave).add_to(trainer)
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    metrics["train_samples"] = len(trainer.train_dataset)
    trainer.save_model()
    report(trainer, "train", metrics)
    trainer.save_state()


def report(trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
    """Print metrics and save them."""
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def exit_status(script: str, start: Callable[[Sequence[str]], None], argv: Sequence[str] | None) -> int:
    """Run, or say in one line why not: 0, or 2 where the user has to change something."""
    try:
        start(sys.argv[1:] if argv is None else argv)
    except (UsageError, ConfigError, PatchError) as error:
        print(f"{Path(script).name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
