r"""Fine-tune a sequence-to-sequence model (T5, BART, ...) to write summaries, with --memsave or not.

Files of texts and summaries (JSON lines, CSV or TSV)::

    python scripts/run_summarization.py --model_name_or_path google-t5/t5-small --source_prefix "summarize: " \
        --train_file train.jsonl --validation_file valid.jsonl --text_column document --summary_column summary \
        --do_train --do_eval --predict_with_generate --output_dir runs/summaries --memsave
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import datasets
import evaluate
import numpy as np
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

import models
import runs
from arguments import ModelArguments, SampleArguments, Sides, UsageError, option, parse_arguments
from byte_bpe import train_byte_bpe
from text_data import existing, first, pick_columns, read_hub, read_pairs, renamed

METRIC = Path(__file__).parent / "metrics" / "rouge"
USAGE = "(--model_name_or_path NAME | --config_name NAME | --model_type TYPE) (--train_file FILE | --dataset_name NAME)"
USAGE += " [--source_prefix TEXT] [--predict_with_generate] [--memsave [PRESET|FILE]] [--lora_r N] [--do_train]"
USAGE += " [--do_eval]"
#: Split -> the option that names its file, and the one that asks for it.
FILES = {
    "train": ("train_file", "do_train"),
    "validation": ("validation_file", "do_eval"),
    "test": ("test_file", "do_predict"),
}


@dataclass
class SummarizationArguments(SampleArguments):
    """Which texts and summaries, and how long."""

    SIDES: ClassVar[tuple[Sides, ...]] = (
        (("dataset_name", "dataset_config_name"), tuple(file for file, _ in FILES.values())),
    )

    train_file: str | None = option("JSON lines, CSV or TSV, told by the file's name; a row is an example.")
    validation_file: str | None = option("The same, to evaluate on.")
    test_file: str | None = option("The same, to write summaries for.")
    dataset_name: str | None = option("A dataset on the hub, instead of files.")
    dataset_config_name: str | None = option("Its configuration's name.")
    text_column: str | None = option("The column of the texts; the first by default.")
    summary_column: str | None = option("Of the summaries; the second by default.")
    source_prefix: str = option('Put before every text; T5 was pretrained with "summarize: ".', default="")
    max_source_length: int = option("Longer texts are cut to this many tokens.", default=1024)
    max_target_length: int = option(
        "Longer summaries are cut to this many tokens, and none longer is generated.", default=128
    )

    def __post_init__(self):
        """Refuse two answers to one question, and none, and files that do not exist."""
        super().__post_init__()
        files = [file for file, _ in FILES.values()]
        if self.dataset_name or not any(getattr(self, file) for file in files):
            self.exactly_one("dataset_name", *[file for file in files if getattr(self, file)] or ["train_file"])
        self.beside("dataset_name", "dataset_config_name")
        for file in files:
            if getattr(self, file):
                existing(file, getattr(self, file), "JSON lines, CSV or TSV")
        self.positive("max_source_length", "max_target_length")


def load_splits(args: SummarizationArguments, training: Seq2SeqTrainingArguments) -> dict[str, datasets.Dataset]:
    """The splits that the run needs, with columns "text" and "summary", cut to the wanted number of examples."""
    wanted = {split: action for split, (_, action) in FILES.items() if getattr(training, action)}
    limits = {"train": args.max_train_samples, "validation": args.max_eval_samples, "test": args.max_predict_samples}
    columns = (args.text_column, args.summary_column)
    hub = read_hub(args.dataset_name, args.dataset_config_name) if args.dataset_name else {}
    splits = {}
    for split, action in wanted.items():
        file = FILES[split][0]
        if getattr(args, file):
            splits[split] = read_pairs(file, getattr(args, file), columns)
        elif split in hub:
            text, summary = pick_columns(f"--dataset_name {args.dataset_name}", hub[split].column_names, columns)
            splits[split] = renamed(hub[split], text=text, summary=summary)
        else:
            raise UsageError(f"--{action}: expected --{file} or a dataset with a split {split!r}, got none. Add one.")
        splits[split] = first(splits[split], limits[split])
    return splits


def encode(
    dataset: datasets.Dataset, args: SummarizationArguments, tokenizer: PreTrainedTokenizerBase, split: str
) -> datasets.Dataset:
    """Token ids of the texts, each after the prefix, and as labels those of the summaries."""

    def encode_batch(batch: dict[str, list]) -> dict[str, list]:
        texts = [args.source_prefix + text for text in batch["text"]]
        encoded = tokenizer(texts, max_length=args.max_source_length, truncation=True)
        encoded = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        targets = tokenizer(text_target=batch["summary"], max_length=args.max_target_length, truncation=True)
        return encoded | {"labels": targets["input_ids"]}

    return dataset.map(encode_batch, batched=True, remove_columns=dataset.column_names, desc=f"Tokenizing {split}")


def check_lengths(args: SummarizationArguments, config: PreTrainedConfig) -> None:
    """Refuse texts longer than the model's table of positions; T5 has none."""
    longest = getattr(config, "max_position_embeddings", None)
    for name in ("max_source_length", "max_target_length"):
        if longest and getattr(args, name) > longest:
            raise UsageError(
                f"--{name}: expected at most {longest} for this model, got {getattr(args, name)}. Lower it."
            )


def decode(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of token ids ``[examples, length]``, in which -100 is padding."""
    ids = np.where(ids != -100, ids, tokenizer.pad_token_id)
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def rouge(prediction: EvalPrediction, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L from 0 to 100, and the mean length of the summaries in tokens."""
    found = decode(prediction.predictions, tokenizer)
    values = evaluate.load(str(METRIC), keep_in_memory=True).compute(
        predictions=found, references=decode(prediction.label_ids, tokenizer)
    )
    filled = (prediction.predictions != tokenizer.pad_token_id) & (prediction.predictions != -100)
    return {name: 100 * value for name, value in values.items()} | {"gen_len": float(filled.sum(axis=1).mean())}


def run(model_args: ModelArguments, data_args: SummarizationArguments, training_args: Seq2SeqTrainingArguments) -> None:
    """Train, evaluate and predict as asked; everything that can be refused is refused before training starts."""
    runs.check_actions(training_args, "do_train", "do_eval", "do_predict")
    if training_args.do_predict and not training_args.predict_with_generate:
        raise UsageError("--do_predict: expected --predict_with_generate beside it, got none. Remove it or add that.")
    training_args.generation_max_length = training_args.generation_max_length or data_args.max_target_length
    checkpoint = runs.checkpoint_to_resume(training_args)
    set_seed(training_args.seed)
    config = models.load_config(model_args, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, "an encoder and a decoder")
    check_lengths(data_args, config)
    splits = load_splits(data_args, training_args)
    texts = (text for name in ("text", "summary") for text in splits["train"][name]) if "train" in splits else None
    tokenizer = models.load_tokenizer(model_args, config, partial(train_byte_bpe, ends_texts=True), texts)
    models.fit(config, tokenizer, random_weights=model_args.random_weights)
    with training_args.main_process_first(desc="tokenizing"):
        splits = {split: encode(dataset, data_args, tokenizer, split) for split, dataset in splits.items()}
    model = models.load_model(AutoModelForSeq2SeqLM, model_args, config)
    if model_args.lora_r:
        model = models.add_lora(model, model_args, "SEQ_2_SEQ_LM", training_args)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=partial(rouge, tokenizer=tokenizer) if training_args.predict_with_generate else None,
    )
    if training_args.do_train:
        runs.train(trainer, checkpoint, model_args.memsave_config())
    if training_args.do_eval:
        runs.report(trainer, "eval", trainer.evaluate() | {"eval_samples": len(splits["validation"])})
    if training_args.do_predict:
        results = trainer.predict(splits["test"], metric_key_prefix="predict")
        runs.report(trainer, "predict", results.metrics | {"predict_samples": len(splits["test"])})
        if trainer.is_world_process_zero():
            lines = [" ".join(text.split()) for text in decode(results.predictions, tokenizer)]
            path = Path(training_args.output_dir) / "generated_predictions.txt"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, or say in one line why not; returns the exit status."""
    return runs.exit_status(__file__, lambda given: run(*parse(given)), argv)


def parse(argv: Sequence[str]) -> tuple[ModelArguments, SummarizationArguments, Seq2SeqTrainingArguments]:
    """The arguments of this script."""
    classes = (ModelArguments, SummarizationArguments, Seq2SeqTrainingArguments)
    return parse_arguments(argv, classes, USAGE, "Fine-tune a model to write summaries, with --memsave or not.")


if __name__ == "__main__":
    sys.exit(main())
