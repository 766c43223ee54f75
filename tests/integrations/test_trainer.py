"""``transformers.Trainer``: a model built with ``memsave=True`` logs what stock logs, and ends with its weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer

from hf_memsave import measure_kept, patch, unpatch
from support.helpers import only_on_cpu, thinned
from support.rows import Rows, arguments, logged
from support.steps import assert_same, patched_classes
from support.zoo import build

AUTO = {"bert": AutoModelForSequenceClassification, "llama": AutoModelForCausalLM}
AGAIN = {"activation_checkpointing": True}
WAYS = {
    "fp32": {}, "bf16": {"bf16": True}, "checkpointing": AGAIN, "bf16 and checkpointing": AGAIN | {"bf16": True},
    "reentrant checkpointing": AGAIN | {"activation_checkpointing_kwargs": {"use_reentrant": True}},
    "accumulation": {"gradient_accumulation_steps": 2},
}  # fmt: skip


@pytest.fixture
def trainer_of(tmp_path, device):
    only_on_cpu(device)

    def make(family, patched, **options):
        config = build(family).config
        torch.manual_seed(1)
        model = AUTO[family].from_config(config, **({"memsave": True} if patched else {}))
        return Trainer(model, arguments(tmp_path, max_steps=5, **options), train_dataset=Rows(family))

    return make


def history(trainer):
    torch.manual_seed(5)  # Trainer seeds when it is made
    trainer.train()
    return logged(trainer, "loss", "grad_norm", "learning_rate")


@pytest.mark.parametrize(("family", "way"), thinned(2, AUTO, WAYS))
def test_a_run_equals_stocks(family, way, trainer_of):
    ours, stock = (trainer_of(family, patched, **WAYS[way]) for patched in (True, False))
    start = {name: p.detach().clone() for name, p in stock.model.named_parameters()}
    assert_same(dict(ours.model.named_parameters()), start)
    logged, expected = history(ours), history(stock)
    assert patched_classes(ours.model) != {} == patched_classes(stock.model)
    assert len({loss for loss, *_ in expected}) == 5
    assert logged == expected
    assert_same(dict(ours.model.named_parameters()), dict(stock.model.named_parameters()))
    assert any(not torch.equal(p, start[name]) for name, p in stock.model.named_parameters())


@pytest.mark.parametrize("way", ["fp32", "bf16"])
def test_a_trained_model_can_be_patched_again_and_undone(way, trainer_of):
    """As a callback does at the start of every run: Accelerate may have wrapped the model's forward by then."""
    ours, stock = (trainer_of("llama", patched, **WAYS[way]) for patched in (True, False))
    for trainer in (ours, stock):
        trainer.train()
    before = patched_classes(ours.model)
    patch(ours.model)
    assert patched_classes(ours.model) == before
    unpatch(ours.model)
    assert patched_classes(ours.model) == {}
    batch = {name: row.unsqueeze(0) for name, row in Rows("llama")[1].items() if torch.is_tensor(row)}
    assert measure_kept(ours.model.train(), batch).total == measure_kept(stock.model.train(), batch).total
    ours.model.config.use_cache = True  # Trainer has switched it off
    assert ours.model(**batch).past_key_values is not None  # stock's waste is back
