"""One training run of the demo: a small model, ``transformers.Trainer``, and what it cost."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    EvalPrediction,
    LlamaConfig,
    PreTrainedConfig,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_memsave import Kept, measure_kept, patch
from hf_memsave.commands.demo_task import DemoTask

BATCH_SIZE = 32
SEED = 0
_HIDDEN = 128


def model_configs(task: DemoTask) -> dict[str, PreTrainedConfig]:
    """Two layers of BERT, with its dropout (but none in attention), and two of LLaMA, which by default has none."""
    common = dict(
        vocab_size=len(task.tokenizer),
        pad_token_id=task.tokenizer.pad_token_id,
        num_labels=task.labels,
        hidden_size=_HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.05,  # the usual 0.02 suits wider models
    )
    return {
        "BERT": BertConfig(intermediate_size=4 * _HIDDEN, attention_probs_dropout_prob=0.0, **common),
        "LLaMA": LlamaConfig(intermediate_size=11 * _HIDDEN // 4, num_key_value_heads=2, **common),
    }


@dataclass(frozen=True)
class Run:
    """What one run gave: the loss of every step, the final weights, dev accuracy, memory and time."""

    losses: list[float]
    weights: dict[str, Tensor]
    accuracy: float
    kept: Kept
    seconds_per_step: float


def train(config: PreTrainedConfig, task: DemoTask, steps: int, *, patched: bool, advance: Callable[[], None]) -> Run:
    """Train from random weights; stock and patched runs see the same seed, batches and dropout masks."""
    set_seed(SEED)
    model = AutoModelForSequenceClassification.from_config(config)
    if patched:
        patch(model)
    clock = _Clock(advance)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=BATCH_SIZE,
                per_device_eval_batch_size=4 * BATCH_SIZE,
                learning_rate=2e-3,
                warmup_steps=steps // 5,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
                seed=SEED,
            ),
            train_dataset=task.train,
            eval_dataset=task.dev,
            data_collator=DataCollatorWithPadding(task.tokenizer),
            compute_metrics=_accuracy,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        kept = measure_kept(model.train(), dict(next(iter(trainer.get_train_dataloader()))))
        set_seed(SEED)
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(losses, model.state_dict(), accuracy, kept, median(clock.seconds))


def difference(stock: Run, patched: Run) -> str | None:
    """Where two runs differ, in a loss or a weight, or None if they are equal to the bit."""
    for step, (expected, got) in enumerate(zip(stock.losses, patched.losses, strict=True), start=1):
        if expected != got:
            return f"the loss of step {step} is {expected!r} stock and {got!r} patched"
    for name, weight in stock.weights.items():
        if not torch.equal(weight, patched.weights[name]):
            return f"{name} differs after training"
    return None


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())}


class _Clock(TrainerCallback):
    """Times every step."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self.advance = advance
        self.seconds: list[float] = []
        self.start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        self.advance()
