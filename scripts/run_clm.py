r"""Train a causal language model on text, from pretrained or random weights, with --memsave or not.

Text files and random weights, without any network; the tokenizer is trained on the text::

    python scripts/run_clm.py --config_name config.json --train_file train.txt --validation_file valid.txt \
        --block_size 256 --do_train --do_eval --output_dir runs/clm --memsave

LoRA adapters over weights in four bits (QLoRA)::

    python scripts/run_clm.py --model_name_or_path NAME --load_in_4bit --lora_r 16 --train_file train.txt \
        --do_train --do_eval --output_dir runs/qlora --memsave
"""

import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import datasets
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import models
import runs
from arguments import ModelArguments, SampleArguments, Sides, UsageError, option, parse_arguments
from byte_bpe import train_byte_bpe
from text_data import existing, first, pick_columns, read_hub, read_lines, renamed

USAGE = "(--model_name_or_path NAME | --config_name NAME | --model_type TYPE) (--train_file FILE | --dataset_name NAME)"
USAGE += " [--block_size N] [--memsave [PRESET|FILE]] [--lora_r N] [--load_in_4bit] [--do_train] [--do_eval]"
#: Blocks are no longer than this unless asked for.
LONGEST_DEFAULT = 1024


@dataclass
class ClmModelArguments(ModelArguments):
    """QLoRA, beside what every model has."""

    load_in_4bit: bool = option(
        "QLoRA: the frozen weights in four bits (NF4, double quantization); needs --lora_r.", default=False
    )

    def __post_init__(self):
        """Refuse four bits for weights that are trained, or that are random."""
        super().__post_init__()
        self.beside("model_name_or_path", "load_in_4bit")
        self.beside("lora_r", "load_in_4bit")
        if self.load_in_4bit and not importlib.util.find_spec("bitsandbytes"):
            raise UsageError(
                "--load_in_4bit: expected bitsandbytes to be installed, found none. Run: pip install bitsandbytes"
            )


@dataclass
class ClmArguments(SampleArguments):
    """Which text to train on, and in what pieces."""

    SIDES: ClassVar[tuple[Sides, ...]] = (
        (("dataset_name", "dataset_config_name", "text_column"), ("train_file", "validation_file")),
    )

    train_file: str | None = option("A plain text file.")
    validation_file: str | None = option("Another one, to evaluate on.")
    dataset_name: str | None = option("A dataset on the hub, instead of files.")
    dataset_config_name: str | None = option("Its configuration's name.")
    text_column: str | None = option("Its column with the text; the first by default.")
    validation_split_percentage: float = option(
        "Without validation data, evaluate on the first lines, this share of all; never train on it.", default=5
    )
    block_size: int | None = option(
        f"Tokens in each example; if not given, what the model takes, but at most {LONGEST_DEFAULT}."
    )

    def __post_init__(self):
        """Refuse two answers to one question, and none, and files that do not exist."""
        super().__post_init__()
        self.exactly_one("train_file", "dataset_name")
        self.beside("train_file", "validation_file")
        self.beside("dataset_name", "dataset_config_name", "text_column")
        for name in ("train_file", "validation_file"):
            if getattr(self, name):
                existing(name, getattr(self, name), "a plain text file")
        self.positive("block_size")
        if not 0 < self.validation_split_percentage < 100:
            raise UsageError(
                f"--validation_split_percentage: expected more than 0 and less than 100, got "
                f"{self.validation_split_percentage}. Try 5."
            )


def load_splits(args: ClmArguments) -> dict[str, datasets.Dataset]:
    """The lines (or a hub dataset's rows) to train and to evaluate on, as column "text"."""
    splits = {}
    if args.dataset_name:
        splits = read_hub(args.dataset_name, args.dataset_config_name)
        where = f"--dataset_name {args.dataset_name}"
        (column,) = pick_columns(where, splits["train"].column_names, (args.text_column,))
        splits = {split: renamed(rows, text=column) for split, rows in splits.items()}
    else:
        splits["train"] = read_lines("train_file", args.train_file)
        if args.validation_file:
            splits["validation"] = read_lines("validation_file", args.validation_file)
    if "validation" not in splits:
        lines = splits["train"]
        count = math.ceil(len(lines) * args.validation_split_percentage / 100)
        if count == len(lines):
            raise UsageError(
                f"training text: expected lines to spare for evaluation, got {len(lines)} in all. "
                "Give --validation_file."
            )
        splits = {"train": lines.select(range(count, len(lines))), "validation": lines.select(range(count))}
    return splits


def block_size(args: ClmArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens in each example."""
    longest = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or sys.maxsize)
    if args.block_size and args.block_size > longest:
        raise UsageError(f"--block_size: expected at most {longest} for this model, got {args.block_size}. Lower it.")
    return args.block_size or min(longest, LONGEST_DEFAULT)


def pack(
    dataset: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, size: int, split: str, limit: int | None
) -> datasets.Dataset:
    """Blocks of ``size`` tokens, as the Transformers example makes them: concatenate, then split.

    Each line is tokenized by itself, with whatever the tokenizer adds. What is left over at the end of each thousand
    lines is dropped, so a text is never padded.
    """

    def encode(batch: dict[str, list]) -> dict[str, list]:
        return {"input_ids": tokenizer(batch["text"], verbose=False)["input_ids"]}

    def split_up(batch: dict[str, list]) -> dict[str, list]:
        ids = list(chain.from_iterable(batch["input_ids"]))
        blocks = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
        # Nothing predicts a block's first token, and its label says so: with some models (GPT-2) Trainer would divide
        # the loss by the number of all tokens otherwise, and report too little.
        return {"input_ids": blocks, "labels": [[-100, *block[1:]] for block in blocks]}

    tokens = dataset.map(encode, batched=True, remove_columns=dataset.column_names, desc=f"Tokenizing {split}")
    blocks = tokens.map(split_up, batched=True, remove_columns=["input_ids"], desc=f"Packing {split}")
    if not len(blocks):
        found = sum(map(len, tokens["input_ids"]))
        raise UsageError(
            f"{split} text: expected at least --block_size {size} tokens, got {found}. Lower it, or add text."
        )
    return first(blocks, limit)


def load_model(args: ClmModelArguments, config: PreTrainedConfig, training: TrainingArguments) -> torch.nn.Module:
    """The model, stock or patched, whole or with adapters over weights as they are or in four bits."""
    quantization = None
    if args.load_in_4bit:
        dtype = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    model = models.load_model(AutoModelForCausalLM, args, config, quantization)
    if args.load_in_4bit:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(
            model, training.gradient_checkpointing, training.gradient_checkpointing_kwargs
        )
    return models.add_lora(model, args, "CAUSAL_LM", training) if args.lora_r else model


def run(model_args: ClmModelArguments, data_args: ClmArguments, training_args: TrainingArguments) -> None:
    """Train and evaluate as asked; everything that can be refused is refused before training starts."""
    runs.check_actions(training_args, "do_train", "do_eval")
    checkpoint = runs.checkpoint_to_resume(training_args)
    set_seed(training_args.seed)
    config = models.load_config(model_args, MODEL_FOR_CAUSAL_LM_MAPPING, "a causal language modeling head")
    lines = load_splits(data_args)
    tokenizer = models.load_tokenizer(model_args, config, train_byte_bpe, lines["train"]["text"])
    models.fit(config, tokenizer, random_weights=model_args.random_weights)
    size = block_size(data_args, config, tokenizer)
    limits = {"train": data_args.max_train_samples} if training_args.do_train else {}
    limits |= {"validation": data_args.max_eval_samples} if training_args.do_eval else {}
    with training_args.main_process_first(desc="tokenizing"):
        blocks = {split: pack(lines[split], tokenizer, size, split, limit) for split, limit in limits.items()}
    trainer = Trainer(
        model=load_model(model_args, config, training_args),
        args=training_args,
        train_dataset=blocks.get("train"),
        eval_dataset=blocks.get("validation"),
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        runs.train(trainer, checkpoint, model_args.memsave_config())
    if training_args.do_eval:
        metrics = trainer.evaluate() | {"eval_samples": len(blocks["validation"])}
        loss = metrics["eval_loss"]
        runs.report(trainer, "eval", metrics | {"perplexity": math.exp(loss) if loss < 700 else math.inf})


def main(argv: Sequence[str] | None = None) -> int:
    """Run, or say in one line why not; returns the exit status."""
    return runs.exit_status(__file__, lambda given: run(*parse(given)), argv)


def parse(argv: Sequence[str]) -> tuple[ClmModelArguments, ClmArguments, TrainingArguments]:
    """The arguments of this script."""
    classes = (ClmModelArguments, ClmArguments, TrainingArguments)
    return parse_arguments(argv, classes, USAGE, "Train a causal language model on text, with --memsave or not.")


if __name__ == "__main__":
    sys.exit(main())
