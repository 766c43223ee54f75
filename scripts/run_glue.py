r"""Fine-tune a Transformers model on a GLUE task, stock or with hf_memsave.

A model from the hub, or a folder::

    python scripts/run_glue.py --model_name_or_path bert-base-cased --task_name mrpc \
        --do_train --do_eval --output_dir runs/mrpc --memsave

A model with random weights and official GLUE files, without any network::

    python scripts/run_glue.py --config_name config.json --config_overrides num_hidden_layers=2 \
        --data_dir glue/MRPC --do_train --do_eval --output_dir runs/mrpc --memsave exact

LoRA, from a recipe; and with weight gradients from a sample of the tokens, as in the paper of WTA-CRS::

    python scripts/run_glue.py --config configs/recipes/glue-bert-mrpc-lora.yaml --memsave
    python scripts/run_glue.py --recipe bert-base/mrpc/lora-wta-crs
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import datasets
import evaluate
import numpy as np
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

import models
import runs
from arguments import ModelArguments, SampleArguments, Sides, UsageError, option, parse_arguments
from glue_data import TASKS, GlueTask, folder_of, guess_task, read_glue
from glue_recipes import recipe
from text_data import first
from wordpiece import train_wordpiece

#: The official metrics, as an `evaluate` module that needs no hub.
METRICS = Path(__file__).parent / "metrics" / "glue"
USAGE = "(--model_name_or_path NAME | --config_name NAME | --model_type TYPE) (--task_name TASK | --data_dir DIR)"
USAGE += " [--memsave [PRESET|FILE]] [--lora_r N] [--do_train] [--do_eval] [--do_predict]"


@dataclass
class GlueArguments(SampleArguments):
    """Which task to train on, and how much of it."""

    SIDES: ClassVar[tuple[Sides, ...]] = ((("task_name",), ("data_dir",)),)

    task_name: str | None = option(f"A GLUE task on the hub: {', '.join(TASKS)}.")
    data_dir: str | None = option("A folder with one task's official TSV files; its name or --task_name tells which.")
    max_seq_length: int = option("Longer examples are cut to this many tokens.", default=128)
    pad_to_max_length: bool = option("Pad to --max_seq_length, or to the longest example of each batch.", default=True)

    def __post_init__(self):
        """Refuse two answers to one question, and none."""
        super().__post_init__()
        if self.task_name and self.task_name not in TASKS:
            raise UsageError(
                f"--task_name: expected one of {', '.join(TASKS)}, got {self.task_name}. Name one of them."
            )
        if self.data_dir and self.task_name:
            self.task_name, self.data_dir = None, folder_of(self.data_dir, self.task_name)
        self.exactly_one("task_name", "data_dir")
        self.positive("max_seq_length")


def load_splits(args: GlueArguments, training: TrainingArguments) -> tuple[GlueTask, dict[str, datasets.Dataset]]:
    """The task, and the splits that the run needs, cut to the wanted number of examples."""
    task = TASKS[args.task_name or guess_task(args.data_dir)]
    limits = {"train": args.max_train_samples} if training.do_train else {}
    if training.do_eval:
        limits |= dict.fromkeys(task.validation_splits, args.max_eval_samples)
    if training.do_predict:
        limits |= dict.fromkeys(task.test_splits, args.max_predict_samples)
    splits = {}
    for split, limit in limits.items():
        if args.data_dir:
            dataset = read_glue(args.data_dir, task.name, split)
        else:
            try:
                dataset = datasets.load_dataset("nyu-mll/glue", task.name, split=split)
            except OSError as error:
                raise UsageError(
                    f"--task_name {task.name}: expected to find it on the hub or in the cache, got: {error} "
                    "Give the folder of the official files as --data_dir instead."
                ) from error
        splits[split] = first(dataset, limit)
    return task, splits


def load_config(args: ModelArguments, task: GlueTask) -> PreTrainedConfig:
    """The model's configuration, with a head for the task."""
    config = models.load_config(args, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "a sequence classification head")
    if task.labels:
        known = {str(label).lower(): index for index, label in (config.id2label or {}).items()}
        ids = known if known.keys() == set(task.labels) else {label: i for i, label in enumerate(task.labels)}
        config.label2id = {label: ids[label] for label in task.labels}
        config.id2label = {index: label for label, index in config.label2id.items()}
        config.problem_type = "single_label_classification"
    else:
        config.num_labels = 1
        config.problem_type = "regression"
    return config


def load_tokenizer(
    args: ModelArguments, config: PreTrainedConfig, task: GlueTask, training_set: datasets.Dataset | None
) -> PreTrainedTokenizerBase:
    """The tokenizer asked for, else the pretrained model's, else one trained on the training texts."""
    texts = None if training_set is None else (text for column in task.text_columns for text in training_set[column])
    return models.load_tokenizer(args, config, train_wordpiece, texts)


def encode(
    splits: dict[str, datasets.Dataset],
    task: GlueTask,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    args: GlueArguments,
) -> dict[str, datasets.Dataset]:
    """Tokenize every split; labels become the model's ids, and test splits have none."""
    longest = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or sys.maxsize)
    if args.max_seq_length > longest:
        raise UsageError(f"--max_seq_length: expected at most {longest} for this model, got {args.max_seq_length}.")

    def encode_batch(batch: dict[str, list]) -> dict[str, list]:
        encoded = tokenizer(
            *(batch[column] for column in task.text_columns),
            max_length=args.max_seq_length,
            truncation=True,
            padding="max_length" if args.pad_to_max_length else False,
            # RoBERTa's table of token types has one row, whatever the tokenizer says.
            return_token_type_ids=None if getattr(config, "type_vocab_size", 2) > 1 else False,
        )
        if task.labels:
            encoded["labels"] = [config.label2id[task.labels[i]] if i >= 0 else i for i in batch["label"]]
        else:
            encoded["labels"] = batch["label"]
        return encoded

    encoded = {}
    for split, dataset in splits.items():
        encoded[split] = dataset.map(
            encode_batch, batched=True, remove_columns=dataset.column_names, desc=f"Tokenizing {split}"
        )
        if split in task.test_splits:
            encoded[split] = encoded[split].remove_columns("labels")
    return encoded


def task_values(outputs: np.ndarray, task: GlueTask, config: PreTrainedConfig) -> np.ndarray:
    """Logits ``[examples, classes]`` as class ids of the task, or predicted scores ``[examples]`` of a regression."""
    if not task.labels:
        return outputs.squeeze(-1)
    return outputs[:, [config.label2id[label] for label in task.labels]].argmax(axis=-1)


def metrics_for(task: GlueTask, config: PreTrainedConfig) -> Callable[[EvalPrediction], dict[str, float]]:
    """The task's official metrics, and their mean where there are two."""
    metric = evaluate.load(str(METRICS), task.name, keep_in_memory=True)

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        references = prediction.label_ids
        if task.labels:
            references = [task.labels.index(config.id2label[index]) for index in references]
        values = metric.compute(predictions=task_values(prediction.predictions, task, config), references=references)
        return values | ({"combined_score": float(np.mean(list(values.values())))} if len(values) > 1 else {})

    return compute


def save_predictions(path: Path, outputs: np.ndarray, task: GlueTask, config: PreTrainedConfig) -> None:
    """Write predictions in the format of GLUE's submissions: index and label, or score."""
    values = task_values(outputs, task, config)
    written = [task.label_names[value] for value in values] if task.labels else [f"{value:.3f}" for value in values]
    lines = ["index\tprediction", *(f"{index}\t{label}" for index, label in enumerate(written))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(model_args: ModelArguments, data_args: GlueArguments, training_args: TrainingArguments) -> None:
    """Train, evaluate and predict as asked; everything that can be refused is refused before training starts."""
    runs.check_actions(training_args, "do_train", "do_eval", "do_predict")
    checkpoint = runs.checkpoint_to_resume(training_args)
    set_seed(training_args.seed)
    task, splits = load_splits(data_args, training_args)
    config = load_config(model_args, task)
    tokenizer = load_tokenizer(model_args, config, task, splits.get("train"))
    models.fit(config, tokenizer, random_weights=model_args.random_weights)
    with training_args.main_process_first(desc="tokenizing"):
        splits = encode(splits, task, tokenizer, config, data_args)
    model = models.load_model(AutoModelForSequenceClassification, model_args, config)
    if model_args.lora_r:
        model = models.add_lora(model, model_args, "SEQ_CLS", training_args)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get(task.validation_splits[0]),
        processing_class=tokenizer,
        compute_metrics=metrics_for(task, config),
        preprocess_logits_for_metrics=lambda logits, _: logits[0] if isinstance(logits, tuple) else logits,
    )
    if training_args.do_train:
        runs.train(trainer, checkpoint, model_args.memsave_config())
    if training_args.do_eval:
        found = {}
        for split in task.validation_splits:
            suffix = "_mm" if split.endswith("mismatched") else ""
            results = trainer.evaluate(splits[split]) | {"eval_samples": len(splits[split])}
            found |= {name + suffix: value for name, value in results.items()}
        runs.report(trainer, "eval", found)
    if training_args.do_predict:
        for split in task.test_splits:
            suffix = "_mm" if split.endswith("mismatched") else ""
            outputs = trainer.predict(splits[split], metric_key_prefix="predict").predictions
            if trainer.is_world_process_zero():
                path = Path(training_args.output_dir) / f"predict_results_{task.name}{suffix}.txt"
                save_predictions(path, outputs, task, config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, or say in one line why not; returns the exit status."""
    return runs.exit_status(__file__, lambda given: run(*parse(given)), argv)


def parse(argv: Sequence[str]) -> tuple[ModelArguments, GlueArguments, TrainingArguments]:
    """The arguments of this script."""
    classes = (ModelArguments, GlueArguments, TrainingArguments)
    return parse_arguments(
        argv, classes, USAGE, "Fine-tune a Transformers model on a GLUE task, with --memsave or not.", recipe
    )


if __name__ == "__main__":
    sys.exit(main())
