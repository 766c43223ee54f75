"""``MemSaveConfig(budget=...)`` in a trainer: planned for its batch as training begins, and its step fits."""

import random
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from hf_memsave import MemSaveCallback, MemSaveConfig, patch
from hf_memsave.count.peak import count_peak
from hf_memsave.errors import PlanError
from hf_memsave.measure.estimate import estimate
from hf_memsave.measure.figures import CONTEXT, WORKSPACES
from hf_memsave.measure.lora import Lora
from hf_memsave.planner import budget as module
from hf_memsave.planner.budget import _longest, plan_for
from hf_memsave.planner.plan import plan
from support import rows
from support.helpers import on_stand_in
from support.steps import patched_classes
from support.zoo import Size, build

pytestmark = on_stand_in
#: The longest row has 113 tokens, and is padded.
LONGEST, BATCH = 120, 8


def collate(given):
    """Pads to a multiple of 8."""
    width = -(-max(len(row["input_ids"]) for row in given) // 8) * 8
    ids = torch.tensor([list(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in given])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def samples():
    return Dataset.from_list([{"input_ids": [3] * n} for n in (5, LONGEST - 7, 30, 50, 7, 64, 9, 11)])


def llama(layers=3):
    return build("llama", Size(hidden=128, layers=layers), torch.bfloat16)


arguments = partial(rows.arguments, max_steps=2, optim="sgd", per_device_train_batch_size=BATCH)


@pytest.mark.long
@pytest.mark.parametrize("door", ["callback", "trainer", "trainer, with LoRA"])
def test_a_trainer_plans_for_its_own_batch_and_its_step_stays_within_the_budget(tmp_path, door, caplog):
    model, lora = llama(), None
    if "LoRA" in door:
        lora = Lora(r=4, alpha=8, dropout=0.1, targets="q_proj+v_proj")
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(model, config)
    step = dict(batch_size=BATCH, seq_len=LONGEST, optimizer="sgd", padded=True, lora=lora)
    budget = estimate(llama(), **step).patched.needed - 2**20  # less than a step needs at the floor
    wanted = plan(llama(), budget=budget, **step).config
    assert wanted.checkpoint or wanted.offload
    common = dict(model=model, args=arguments(tmp_path), train_dataset=samples(), data_collator=collate)
    options = {"callbacks": [MemSaveCallback({"budget": budget})]} if door == "callback" else {}
    trainer = Trainer(**common, **(options or {"memsave": MemSaveConfig(budget=budget)}))
    with caplog.at_level("INFO", "hf_memsave"):
        trainer.train()
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, MemSaveCallback))
    assert callback.report.config == wanted and callback.config.budget == budget
    assert f"The cheapest in {budget / 2**20:,.2f} MiB" in caplog.text
    model.zero_grad()
    batch = collate([{"input_ids": [3] * LONGEST}] * BATCH)
    peak = count_peak(lambda: model(**batch).loss.backward()).peak
    assert peak + sum(p.nbytes for p in model.parameters()) <= 1.03 * (budget - CONTEXT - WORKSPACES)


def test_a_step_is_planned_as_the_trainer_takes_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "plan", lambda model, **step: asked.append(step))
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], use_dora=True)
    args = arguments(tmp_path, optim="adafactor", gradient_accumulation_steps=3, gradient_checkpointing=True, bf16=True)
    batches = torch.utils.data.DataLoader(samples(), collate_fn=collate)
    plan_for(MemSaveConfig(budget="24GiB", norm="stock"), get_peft_model(llama(), lora), args, batches)
    assert asked == [dict(
        budget="24GiB", memsave=MemSaveConfig(norm="stock"), batch_size=BATCH, seq_len=LONGEST, padded=True,
        dtype=torch.bfloat16, autocast=torch.bfloat16, optimizer="adafactor", accumulation=3,
        lora=Lora(r=4, alpha=8, dropout=0.1, targets="q_proj+v_proj", dora=True), quantized=None, checkpointing=True,
        attention="flash", devices=1, sharding="ddp",
    )]  # fmt: skip


@pytest.mark.parametrize(("options", "is_planned_with"), [({"every_n_layers": 2}, False), ({"offload": True}, True)])
def test_checkpointing_of_some_blocks_is_planned_without_and_selective_not_at_all(
    options, is_planned_with, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr(module, "plan", lambda model, **step: asked.append(step["checkpointing"]))
    batches = torch.utils.data.DataLoader(samples(), collate_fn=collate)
    args = arguments(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
    plan_for(MemSaveConfig(budget="24GiB"), llama(), args, batches)
    assert asked == [is_planned_with]
    args = arguments(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=options | {"selective": True})
    with pytest.raises(PlanError, match="expected gradient checkpointing of whole blocks, got .*'selective': True"):
        plan_for(MemSaveConfig(budget="24GiB"), llama(), args, batches)


def test_where_stock_fits_a_trainer_leaves_or_makes_the_model_stock(tmp_path, caplog):
    model, options = llama(), arguments(tmp_path, max_steps=1)
    trainer = Trainer(model, options, train_dataset=samples(), data_collator=collate, memsave={"budget": "24GiB"})
    with caplog.at_level("INFO", "hf_memsave"):
        for _ in range(2):
            trainer.train()
    assert patched_classes(model) == {} and "memsave/kept_gib" not in str(trainer.state.log_history)
    (plan, _) = [line for line in caplog.messages if "the plan for budget='24GiB':\n" in line]  # of each training
    assert plan.endswith("Stock fits in 24.00 GiB (25.8 GB): you need nothing.")
    patch(model, "gate")
    with caplog.at_level("INFO", "hf_memsave"):
        Trainer(model, options, train_dataset=samples(), data_collator=collate, memsave={"budget": "24GiB"}).train()
    assert patched_classes(model) == {} and "'24GiB' (in place of the patch that was there):\n" in caplog.text


class Drawing(torch.utils.data.Dataset):
    """Crops and masks at random: every row by all generators that there are, and by how many were read."""

    def __init__(self):
        self.rows = torch.randint(1, 256, (40_000, 32), generator=torch.Generator().manual_seed(0))
        self.torch, self.python = torch.Generator().manual_seed(0), random.Random(0)
        self.numpy, self.reads = numpy.random.RandomState(0), 0
        self.crop = SimpleNamespace(generator=numpy.random.default_rng(0))  # within the data set, one of its own

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.reads += 1
        at = int(self.crop.generator.integers(8))
        draws = (
            torch.randint(256, ()), random.randrange(256), numpy.random.randint(256), self.numpy.randint(256),
            torch.randint(256, (), generator=self.torch), self.python.randrange(256), self.reads,
        )  # fmt: skip
        ids = self.rows[i][at : at + 16].clone()
        ids[: len(draws)] = torch.tensor(draws) % 256
        return {"input_ids": ids}


class Masking:
    """Draws from a generator that is made at the first batch."""

    generator = None

    def __call__(self, rows):
        self.generator = self.generator or torch.Generator().manual_seed(0)
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": torch.randint(256, ids.shape, generator=self.generator)}


@pytest.mark.long
def test_data_that_draw_give_the_losses_of_stock_and_few_rows_are_read(tmp_path, caplog):
    def losses(memsave):
        transformers.set_seed(0)
        data = Drawing()
        options = arguments(tmp_path, max_steps=3, per_device_train_batch_size=2)
        trainer = Trainer(llama(), options, train_dataset=data, data_collator=Masking(), memsave=memsave)
        trainer.train()
        return rows.logged(trainer), data.reads

    stock = losses(False)
    with caplog.at_level("INFO", "hf_memsave"):
        assert losses({"budget": "24GiB"}) == stock
    assert "planned for 16 tokens, the longest of 256 rows read out of 40000" in caplog.text


class Lines(torch.utils.data.Dataset):
    """Reads each row off a file that it holds open."""

    def __init__(self, path):
        path.write_text("".join(f"{i:06}\n" for i in range(5000)))
        self.file = path.open(encoding="utf-8")

    def __len__(self):
        return 5000

    def __getitem__(self, i):
        self.file.seek(7 * i)
        return {"input_ids": [int(self.file.readline())]}


def test_rows_of_an_open_file_are_afterwards_what_they_were(tmp_path):
    """Read in a process of their own they are not: that shares the place in the file, and not what was buffered."""
    data = Lines(tmp_path / "rows.txt")
    assert data[0] == {"input_ids": [0]}
    assert _longest(torch.utils.data.DataLoader(data, collate_fn=collate), "") == 8
    assert [data[i]["input_ids"][0] for i in range(5000)] == list(range(5000))


class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 16

    def __iter__(self):
        yield from [{"input_ids": [3] * 8}] * 16


#: Options and data of a run, and what is said.
WRONG = {
    "no length": ({}, Stream(), "expected a data set with a length .* hf_memsave.plan"),
    "an unknown optimizer": ({"optim": "adagrad"}, samples(), "expected optim to be one of adamw_torch, .*adagrad"),
    "too little": ({}, samples(), "nothing fits: expected at most 501.00 MiB, .* too much. Not one sequence of 8 tok"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_planned_is_an_error_as_training_begins(tmp_path, name):
    options, data, message = WRONG[name]
    common = dict(model=llama(2), args=arguments(tmp_path, **options), train_dataset=data, data_collator=collate)
    trainer = Trainer(**common, memsave=MemSaveConfig(budget="501MiB"))
    with pytest.raises(PlanError, match=message):
        trainer.train()
