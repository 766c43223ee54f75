"""Buffers that are written to, or replaced, after the forward that read them; and what offload makes of such writes."""

import contextlib
import copy

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memsave import patch
from hf_memsave.tape import offload
from support.attacks import WIDTH, Attack
from support.helpers import random
from support.steps import assert_same, gradients


def codebook(model, x):
    """Vector quantization: rows of a buffer, which an average of what was seen replaces."""
    return model.f(x) * model.codes[model.rows]


def test_a_buffer_written_through_data_between_forward_and_backward(device):
    torch.manual_seed(0)
    stock = Attack(codebook, codes=torch.randn(64, WIDTH), rows=torch.arange(16)).to(device)
    ours = copy.deepcopy(stock)
    patch(ours)
    found = []
    for model in (stock, ours):
        losses = []
        for seed in range(2):  # the second forward comes before the backward of the first
            losses.append(model(random(16, WIDTH, device=device, seed=seed)).pow(2).mean())
            model.codes.data.mul_(3)
        sum(losses).backward()
        found.append(gradients(model))
    assert_same(*reversed(found))


def test_a_buffer_that_is_replaced_is_let_go_of(device):
    """A queue of keys: what was read of it is kept, as in stock, and not the queue."""

    def read(model, x):
        keys = model.f(x)
        out = keys * model.codes[model.rows]
        model.codes = torch.cat([model.codes[len(keys) :], keys.detach()])
        return out

    torch.manual_seed(0)
    model = Attack(read, codes=torch.randn(4096, WIDTH), rows=torch.arange(16)).to(device)
    patch(model)
    for _ in range(2):
        queue = StorageWeakRef(model.codes.untyped_storage())
        loss = model(random(16, WIDTH, device=device)).sum()
        assert queue.expired()
        loss.backward()


def test_offload_copies_what_was_written_through_data_anew(monkeypatch, device):
    """As any hook that copies; what was kept before is as it was then."""
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 256)

    def write(model, x):
        h = model.f(x)
        y = h.sin()
        h.data.mul_(2)
        return y + h.sin()

    torch.manual_seed(0)
    stock = Attack(write).to(device)
    ours = copy.deepcopy(stock)
    patch(ours, {"offload": True})
    found = []
    for model, hooks in ((stock, saved_tensors_hooks(torch.clone, lambda x: x)), (ours, contextlib.nullcontext())):
        with hooks:
            loss = model(random(64, WIDTH, device=device)).sum()
        loss.backward()
        found.append(gradients(model))
    assert_same(*reversed(found))
