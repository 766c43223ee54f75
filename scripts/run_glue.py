r"""Fine-tune a Transformers model on a GLUE task, stock or with hf_memsave.

A model from the hub, or a folder::

    python scripts/run_glue.py --model_name_or_path bert-base-cased --task_name mrpc \
        --do_train --do_eval --output_dir runs/mrpc --memsave

A model with random weights and official GLUE files, without any network::

    python scripts/run_glue.py --config_name config.json --config_overrides num_hidden_layers=2 \
        --data_dir glue/MRPC --do_train --do_eval --output_dir runs/mrpc --memsave exact
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import evaluate
import numpy as np
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import hf_memsave  # from now on from_pretrained and from_config take memsave=
from glue_arguments import DataArguments, ModelArguments, UsageError, parse_arguments
from hf_memsave.errors import ConfigError, PatchError
from hf_memsave.glue import TASKS, GlueDataError, GlueTask, guess_task, read_glue
from hf_memsave.wordpiece import VocabularyError, load_vocab_tokenizer, train_wordpiece

METRICS = Path(__file__).parent / "metrics" / "glue"


def load_splits(args: DataArguments, training: TrainingArguments) -> tuple[GlueTask, dict[str, datasets.Dataset]]:
    """The task, and the splits that the run needs, cut to the wanted number of examples."""
    task = TASKS[args.task_name or guess_task(args.data_dir)]
    limits = {"train": args.max_train_samples} if training.do_train else {}
    if training.do_eval:
        limits |= dict.fromkeys(task.validation_splits, args.max_eval_samples)
    if training.do_predict:
        limits |= dict.fromkeys(task.test_splits, args.max_predict_samples)
    if not limits:
        raise UsageError("expected at least one of --do_train, --do_eval and --do_predict, got none. Add one.")

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
        splits[split] = dataset.select(range(min(limit or len(dataset), len(dataset))))
    return task, splits


def load_config(args: ModelArguments, task: GlueTask) -> PreTrainedConfig:
    """The model's configuration, with a head for the task."""
    name = args.model_name_or_path or args.config_name
    try:
        config = AutoConfig.from_pretrained(name)
        if args.config_overrides:
            config.update_from_string(args.config_overrides)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"configuration {name}: {error}") from error
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UsageError(
            f"{name}: expected a model with a sequence classification head, got {config.model_type!r}. Name another."
        )
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
    """The tokenizer asked for, else the pretrained model's, else one trained on the training texts.

    The special tokens and vocabulary of a model with random weights are set to the tokenizer's.
    """
    name = args.tokenizer_name or args.model_name_or_path
    if args.vocab_file:
        tokenizer = load_vocab_tokenizer(args.vocab_file)
    elif name:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise UsageError(f"tokenizer {name}: {error} Give --tokenizer_name or --vocab_file.") from error
    elif training_set is None:
        raise UsageError(
            "expected a tokenizer, got none to train one on. Add --do_train, --tokenizer_name or --vocab_file."
        )
    else:
        texts = (text for column in task.text_columns for text in training_set[column])
        tokenizer = train_wordpiece(texts, config.vocab_size)

    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if args.config_name:
        config.vocab_size = len(tokenizer)
        config.bos_token_id = tokenizer.bos_token_id if tokenizer.bos_token else tokenizer.cls_token_id
        config.eos_token_id = tokenizer.eos_token_id if tokenizer.eos_token else tokenizer.sep_token_id
        config.pad_token_id = tokenizer.pad_token_id
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id  # T5's own choice
    elif config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def memsave_flag(args: ModelArguments) -> dict[str, bool | hf_memsave.MemSaveConfig]:
    """The keyword that patches a model; a stock model is loaded without it."""
    if args.memsave in (None, "false"):
        return {}
    return {"memsave": True if args.memsave == "true" else hf_memsave.MemSaveConfig.preset(args.memsave)}


def load_model(
    args: ModelArguments, config: PreTrainedConfig, flag: dict[str, bool | hf_memsave.MemSaveConfig]
) -> PreTrainedModel:
    """The model with a head for the task, stock or patched."""
    if args.config_name:
        return AutoModelForSequenceClassification.from_config(config, **flag)
    try:
        return AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, config=config, **flag)
    except OSError as error:
        raise UsageError(f"--model_name_or_path {args.model_name_or_path}: {error}") from error


def encode(
    splits: dict[str, datasets.Dataset],
    task: GlueTask,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    args: DataArguments,
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


def save_predictions(path: Path, outputs: np.ndarray, task: GlueTask, config: PreTrainedConfig) -> None:
    """Write predictions in the format of GLUE's submissions: index and label, or score."""
    values = task_values(outputs, task, config)
    written = [task.label_names[value] for value in values] if task.labels else [f"{value:.3f}" for value in values]
    lines = ["index\tprediction", *(f"{index}\t{label}" for index, label in enumerate(written))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments) -> None:
    """Train, evaluate and predict as asked; everything that can be refused is refused before training starts."""
    set_seed(training_args.seed)
    flag = memsave_flag(model_args)
    checkpoint = checkpoint_to_resume(training_args)
    task, splits = load_splits(data_args, training_args)
    config = load_config(model_args, task)
    tokenizer = load_tokenizer(model_args, config, task, splits.get("train"))
    with training_args.main_process_first(desc="tokenizing"):
        splits = encode(splits, task, tokenizer, config, data_args)
    trainer = Trainer(
        model=load_model(model_args, config, flag),
        args=training_args,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get(task.validation_splits[0]),
        processing_class=tokenizer,
        compute_metrics=metrics_for(task, config),
        preprocess_logits_for_metrics=lambda logits, _: logits[0] if isinstance(logits, tuple) else logits,
    )

    if training_args.do_train:
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        metrics["train_samples"] = len(splits["train"])
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = {}
        for split in task.validation_splits:
            suffix = "_mm" if split.endswith("mismatched") else ""
            results = trainer.evaluate(splits[split]) | {"eval_samples": len(splits[split])}
            metrics |= {name + suffix: value for name, value in results.items()}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training_args.do_predict:
        for split in task.test_splits:
            suffix = "_mm" if split.endswith("mismatched") else ""
            outputs = trainer.predict(splits[split], metric_key_prefix="predict").predictions
            if trainer.is_world_process_zero():
                path = Path(training_args.output_dir) / f"predict_results_{task.name}{suffix}.txt"
                save_predictions(path, outputs, task, config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, or say in one line why not; returns the exit status."""
    try:
        run(*parse_arguments(sys.argv[1:] if argv is None else argv))
    except (UsageError, GlueDataError, VocabularyError, ConfigError, PatchError) as error:
        print(f"{Path(__file__).name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
