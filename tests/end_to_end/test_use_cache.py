"""Caches of keys and values: ``use_cache`` is left alone, and a patched model makes and takes stock's."""

import contextlib
import copy

import pytest
import torch

from hf_memsave import MemSaveConfig, patch
from hf_memsave.arch.versions import cache_name
from support.modes import CAUSAL, SMALL, batch_of, make
from support.steps import assert_same, step


def in_training(model, options):
    """Keys and values by layer, None for none; and a step."""
    torch.manual_seed(7)
    cache = model(**batch_of(model), **options).past_key_values
    tensors = {}
    if cache is not None:
        layers = getattr(cache, "self_attention_cache", cache).layers
        tensors = {f"{i}.{n}": getattr(x, n).detach() for i, x in enumerate(layers) for n in ("keys", "values")}
    return tensors | step(model, batch_of(model), **options), len(tensors)


@pytest.mark.parametrize("options", [{}, {"use_cache": True}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("family", CAUSAL)
def test_training_makes_the_cache_that_stock_makes(family, options, device):
    stock = make(family, device)
    ours = copy.deepcopy(stock)
    patch(ours)
    (mine, count), (theirs, of_stock) = in_training(ours, options), in_training(stock, options)
    assert count == of_stock == (0 if options.get("use_cache") is False else 4)
    assert_same(mine, theirs)


@pytest.mark.parametrize("how", ["eval", "no_grad"])
@pytest.mark.parametrize("family", CAUSAL)
def test_a_cache_is_made_as_ever_outside_of_training(family, how, device):
    model = make(family, device)
    patch(model)
    if how == "eval":
        model.eval()
    with torch.no_grad() if how == "no_grad" else contextlib.nullcontext():
        assert model(**batch_of(model)).past_key_values is not None


@pytest.mark.parametrize("checkpoint", [None, "block"])
def test_a_cache_given_by_the_user_is_used(checkpoint, device):
    stock = make("llama", device).eval()
    ours = copy.deepcopy(stock)
    patch(ours, MemSaveConfig(checkpoint=checkpoint))
    results = []
    for model in (ours, stock):
        ids = batch_of(model)["input_ids"]
        with torch.no_grad():
            cache = model(input_ids=ids[:, :5]).past_key_values
        model.train()
        torch.manual_seed(7)
        output = model(input_ids=ids[:, 5:], **{cache_name(stock): cache})
        assert output.past_key_values is cache
        results.append({"logits": output.logits.detach(), "length": torch.tensor(cache.get_seq_length())})
    assert results[0]["length"] == SMALL.seq
    assert_same(*results)
