"""Model x trainer x full or LoRA x way to train: 20 steps of each equal a stock run's, loss by loss and bit for bit."""

import contextlib
import functools
import io
import itertools
import tempfile
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from hf_memsave import MemSaveCallback, MemSaveTrainer
from hf_memsave.patching.swap import is_patched
from support.families import VOCAB, Size, build
from support.helpers import MATRIX, only_on_cpu
from support.rows import Rows
from support.steps import Results, assert_same

STEPS = 20
SIZE = Size(hidden=16, heads=2, layers=1)
FAMILIES = {"bert": "bert", "t5": "t5-decoder", "gpt2": "gpt2", "llama": "llama"}
TUNINGS, KINDS = ("full", "lora"), ("callback", "trainer", "sft")
WAYS = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
}


#: Tuning and kind of a family's run in each way: with these every pair of values is met.
CHOSEN = {
    "bert": (("full", "callback"), ("full", "trainer"), ("lora", "callback"), ("lora", "trainer")),
    "t5": (("lora", "trainer"), ("lora", "callback"), ("full", "trainer"), ("full", "callback")),
    "gpt2": (("full", "sft"), ("full", "callback"), ("lora", "sft"), ("lora", "trainer")),
    "llama": (("lora", "trainer"), ("lora", "sft"), ("full", "callback"), ("full", "sft")),
}
CASES = [
    pytest.param(family, *how, way, marks=() if how == chosen else MATRIX)
    for family, of_family in CHOSEN.items()
    for way, chosen in zip(WAYS, of_family, strict=True)
    for how in itertools.product(TUNINGS, KINDS if family in ("gpt2", "llama") else KINDS[:2])
]

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning"),
]


class Run(NamedTuple):
    """What 20 steps of training gave: ``patched`` and ``losses`` have one entry for each micro-batch."""

    losses: list[float]
    logged: list[tuple[float, float]]
    before: Results
    trained: Results
    patched: list[int]
    freed: float


def sft_trainer(model, settings, lora, callbacks):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    words = models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w1")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w2", unk_token="w1"
    )
    rows = [row["input_ids"].tolist()[: 12 - number % 4] for number, row in enumerate(Rows("llama"))]
    return trl.SFTTrainer(
        model,
        trl.SFTConfig(**settings),
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=callbacks,
    )


def trainer_of(family, tuning, way, kind, patched, folder):
    model = build(FAMILIES[family], SIZE)
    if family == "t5":
        model.encoder.block = model.encoder.block[:1]
    lora = LoraConfig(target_modules="all-linear", lora_dropout=0.05) if tuning == "lora" else None
    # TRL's own defaults are checkpointing and bf16; each way says what it wants.
    settings = dict(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", seed=3,
    ) | {"bf16": False, "gradient_checkpointing": False} | WAYS[way]  # fmt: skip
    callbacks = [MemSaveCallback()] if patched and kind != "trainer" else []
    if kind == "sft":
        return sft_trainer(model, settings, lora, callbacks)
    torch.manual_seed(1)  # for the adapters
    model = model if lora is None else get_peft_model(model, lora)
    arguments = dict(args=TrainingArguments(**settings), train_dataset=Rows(family), callbacks=callbacks)
    if kind == "trainer":
        return MemSaveTrainer(model, memsave=patched, **arguments)
    return Trainer(model, **arguments)


def trained(model) -> Results:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def run(family, tuning, way, kind, patched) -> Run:
    """Train; the losses are taken as they are, since a logged one may be rounded."""
    losses, sites = [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = trainer_of(family, tuning, way, kind, patched, folder)
        stock_step = trainer.training_step

        def training_step(model, *args, **kwargs):
            sites.append(sum(map(is_patched, model.modules())))
            loss = stock_step(model, *args, **kwargs)
            losses.append(loss.item())
            return loss

        trainer.training_step = training_step
        before = trained(trainer.model)
        torch.manual_seed(5)  # Trainer seeds when it is made
        trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    freed = max(entry.get("memsave/freed_mib", 0.0) for entry in entries)
    logged = [(entry["loss"], entry["grad_norm"]) for entry in entries]
    return Run(losses, logged, before, trained(trainer.model), sites, freed)


@functools.cache
def stock_run(family, tuning, way, is_sft) -> Run:
    """Shared by the callback's case and that of our own trainer: without memsave both are ``Trainer``."""
    return run(family, tuning, way, "sft" if is_sft else "callback", patched=False)


@pytest.mark.parametrize(("family", "tuning", "kind", "way"), CASES)
def test_every_step_equals_stocks(family, tuning, kind, way, device):
    only_on_cpu(device)
    if kind == "sft":
        pytest.importorskip("trl")
    ours, stock = run(family, tuning, way, kind, patched=True), stock_run(family, tuning, way, kind == "sft")
    batches = STEPS * WAYS[way].get("gradient_accumulation_steps", 1)
    assert len(stock.losses) == len(stock.patched) == len(ours.patched) == batches
    assert len(stock.logged) == STEPS and len(set(stock.losses)) == batches
    assert not any(stock.patched) and all(ours.patched)
    assert stock.freed == 0 and (ours.freed > 0 or way == "checkpointing")
    assert_same(ours.before, stock.before)
    assert ours.losses == stock.losses
    assert ours.logged == stock.logged
    assert_same(ours.trained, stock.trained)
    assert all("lora_" in name for name in stock.trained) == (tuning == "lora")
    moved = [name for name, p in stock.trained.items() if not torch.equal(p, stock.before[name])]
    assert moved, "nothing was trained"
