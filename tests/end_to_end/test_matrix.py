"""Model x trainer x full or LoRA x way to train: 20 steps of each equal a stock run's, loss by loss and bit for bit."""

import contextlib
import io
import itertools
import tempfile

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
from support.steps import assert_same

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


def sft_trainer(model, settings, lora, callbacks):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w1")
    rows = [row["input_ids"].tolist()[: 12 - number % 4] for number, row in enumerate(Rows("llama"))]
    data = datasets.Dataset.from_dict({"input_ids": rows})
    options = dict(train_dataset=data, processing_class=tokenizer, peft_config=lora, callbacks=callbacks)
    return trl.SFTTrainer(model, trl.SFTConfig(**settings), **options)


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
    cls, options = (MemSaveTrainer, {"memsave": patched}) if kind == "trainer" else (Trainer, {})
    return cls(model, TrainingArguments(**settings), train_dataset=Rows(family), callbacks=callbacks, **options)


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def run(*how):
    """What training gave: loss by micro-batch (a logged one may be rounded), what was logged, and both ends' weights.

    And whether the model was patched, and the largest figure of bytes freed.
    """
    losses, patched = [], set()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = trainer_of(*how, folder)
        stock_step = trainer.training_step

        def training_step(model, *args, **kwargs):
            patched.add(any(map(is_patched, model.modules())))
            loss = stock_step(model, *args, **kwargs)
            losses.append(loss.item())
            return loss

        trainer.training_step = training_step
        before = trained(trainer.model)
        torch.manual_seed(5)  # Trainer seeds when it is made
        trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    freed = max(entry.get("memsave/freed_fraction", 0.0) for entry in entries)
    logged = [(entry["loss"], entry["grad_norm"]) for entry in entries]
    return losses, logged, before, trained(trainer.model), patched, freed


@pytest.mark.parametrize(("family", "tuning", "kind", "way"), CASES)
def test_every_step_equals_stocks(family, tuning, kind, way, device):
    only_on_cpu(device)
    losses, logged, before, after, patched, freed = run(family, tuning, way, kind, True)
    *expected, of_stock, is_patched_there, freed_there = run(family, tuning, way, kind, False)
    assert (patched, is_patched_there, freed_there) == ({True}, {False}, 0)
    assert freed > 0 or way == "checkpointing"
    assert len(set(losses)) == STEPS * WAYS[way].get("gradient_accumulation_steps", 1) and len(logged) == STEPS
    assert [losses, logged] == expected[:2]
    assert_same(before, expected[2])
    assert_same(after, of_stock)
    assert all("lora_" in name for name in after) == (tuning == "lora")
    assert any(not torch.equal(p, before[name]) for name, p in after.items()), "nothing was trained"
