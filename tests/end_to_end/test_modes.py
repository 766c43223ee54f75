"""Ways to train: whatever is done around a forward and a backward, a patched model gives and leaves what stock does."""

import contextlib
import gc
import pickle

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.nn.functional import cross_entropy

from hf_memsave import measure_kept, patch, unpatch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.count.kept import _ByModule
from hf_memsave.patching.swap import _CLASSES
from support.helpers import halved
from support.modes import CAUSAL, FAMILIES, MODES, WITHOUT_GRADIENTS, batch_of, make
from support.steps import assert_same, patched_copy, step
from support.zoo import Size, batch_for, build


def pair(family, device="cpu", config=True):
    stock = make(family, device)
    return patched_copy(stock, config), stock


@pytest.mark.parametrize(("family", "mode"), halved(FAMILIES, MODES | WITHOUT_GRADIENTS))
def test_same_as_stock(family, mode, device):
    ours, stock = pair(family, device)
    run = (MODES | WITHOUT_GRADIENTS)[mode]
    expected = run(stock)
    assert_same(run(ours), expected)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_batched_gradients_of_a_model_with_dropout_are_stocks(family):
    """Of several at once, under vmap: per-sample gradients, Jacobians, influence functions."""
    found, size = [], Size(hidden=64, heads=2, batch=4, seq=32)
    for config in (None, True, {"dropout": "mask"}):
        model = build(family, size)
        batch = {n: x for n, x in batch_for(model, size).items() if n != "labels"}
        if config is not None:
            patch(model, config)
        torch.manual_seed(1)
        logits = model(**batch).logits
        logits = logits if logits.dim() == 2 else logits[:, 0]
        losses = cross_entropy(logits, torch.zeros(size.batch, dtype=torch.long), reduction="none")
        options = dict(is_grads_batched=True, allow_unused=True)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        found.append(torch.autograd.grad(losses, matrices, torch.eye(size.batch), **options))
    for stock, *ours in zip(*found, strict=True):
        for mine in ours:
            assert (mine is None) == (stock is None)
            if mine is not None:
                torch.testing.assert_close(mine, stock, rtol=1e-5, atol=1e-7)


def test_a_pickled_model_trains_in_a_process_that_has_never_patched_one(device):
    model = make("bert", device)
    expected = step(model, batch_of(model))
    patch(model)
    pickled = pickle.dumps(model)
    _CLASSES.clear()
    loaded = pickle.loads(pickled)
    assert type(loaded) is not type(model)
    assert_same(step(loaded, batch_of(loaded)), expected)


# What is alive after a step: nothing of ours, however the step was run, and without the cycle collector.


@contextlib.contextmanager
def watched():
    """Without the cycle collector: what says how many bytes made since are alive, in Python, in C++, wherever."""
    gc.collect()
    gc.disable()
    try:
        with _ByModule(torch.nn.Module()) as watch:
            yield lambda: sum(storage.nbytes for storage in watch.alive())
    finally:
        gc.enable()


def alive_after_each_step(model, around, backward):
    """Bytes alive with the loss, and without, of two steps."""
    if around.endswith("reentrant"):
        enable_checkpointing(model, use_reentrant=around == "reentrant")
    batch, during, left = batch_of(model), [], []
    with watched() as alive, save_on_cpu() if around == "save_on_cpu" else contextlib.nullcontext():
        for _ in range(2):
            loss = model(**batch).loss
            during.append(alive())
            if backward:
                loss.backward()
                model.zero_grad(set_to_none=True)
            del loss
            left.append(alive())
    return during, left


AROUND = ["plain", "reentrant", "non-reentrant", "save_on_cpu"]


@pytest.mark.parametrize(("family", "around", "backward"), halved(FAMILIES, AROUND, [True, False]))
def test_nothing_outlives_the_loss(family, around, backward, device):
    """Reference counts alone free it all: no cycle, no registry."""
    ours, stock = pair(family, device)
    during, left = alive_after_each_step(ours, around, backward)
    assert min(during) > 5_000
    if around == "save_on_cpu" and not backward:  # on CPU, an op that keeps its own output then owns itself: torch's
        assert left[-1] <= alive_after_each_step(stock, around, backward)[1][-1]
    else:
        assert left[1] == left[0]
        assert left[0] <= 256  # a constant that an op has cached


@pytest.mark.parametrize("family", FAMILIES)
def test_keeps_no_more_than_stock_under_checkpointing(family, device):
    size = Size(hidden=64, batch=4, seq=32)  # so that a generator's state is less than a mask
    model = build(family, size).to(device)
    batch = batch_for(model, size)
    everything = measure_kept(model, batch).total
    for use_reentrant in (True, False):
        unpatch(model)
        enable_checkpointing(model, use_reentrant=use_reentrant)
        stock = measure_kept(model, batch).total
        patch(model)
        assert measure_kept(model, batch).total <= stock < everything


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_without_gradients_leaves_nothing_behind(family, device):
    model, _ = pair(family, device)
    ids = batch_of(model)["input_ids"]
    with watched() as alive, torch.no_grad():
        for _ in range(2):
            model(input_ids=ids, **({"decoder_input_ids": ids} if family.startswith("t5") else {}))
        assert alive() <= 256


# Caches of keys and values: `use_cache` is left alone, and a patched model makes and takes stock's.


def in_training(model, options):
    """Keys and values by layer, none where there is no cache; and a step."""
    torch.manual_seed(7)
    cache = model(**batch_of(model), **options).past_key_values
    layers = getattr(cache, "self_attention_cache", cache).layers if cache is not None else []
    tensors = {f"{i}.{n}": getattr(x, n).detach() for i, x in enumerate(layers) for n in ("keys", "values")}
    return tensors | step(model, batch_of(model), **options), len(tensors)


@pytest.mark.parametrize("family", CAUSAL)
def test_a_cache_is_made_as_stock_makes_it_in_training_and_outside(family, device):
    ours, stock = pair(family, device)
    for options in ({}, {"use_cache": True}, {"use_cache": False}):
        (mine, count), (theirs, of_stock) = (in_training(model, options) for model in (ours, stock))
        assert count == of_stock == (0 if options.get("use_cache") is False else 4)
        assert_same(mine, theirs)
    with torch.no_grad():
        assert ours(**batch_of(ours)).past_key_values is not None
    assert ours.eval()(**batch_of(ours)).past_key_values is not None
