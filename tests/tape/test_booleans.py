"""Booleans that autograd keeps in a patched model: one bit an element, once, and stock's gradients."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave import measure_kept, patch
from support.helpers import assert_same_bits, random

ROWS, WIDTH = 64, 256


class Gate(nn.Module):
    """Two uses of one fresh mask ``[ROWS, WIDTH]``, and one of a causal buffer."""

    def __init__(self, view="whole", use_buffer=False, forward=None):
        super().__init__()
        self.other_forward = forward
        self.norm, self.linear, self.view = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), view
        self.register_buffer("causal", torch.ones(ROWS, WIDTH, dtype=torch.bool).tril() if use_buffer else None)

    def forward(self, x):
        if self.other_forward is not None:
            return self.other_forward(self, x)
        x = self.linear(self.norm(x))
        mask = self.causal if self.causal is not None else x.detach() > 0
        if self.view == "expanded":
            mask, x = mask.expand(3, ROWS, WIDTH), x.expand(3, ROWS, WIDTH)
        elif self.view == "transposed":
            mask, x = mask.t(), x.t()
        elif self.view == "part":
            mask, x = mask[: ROWS // 4], x[: ROWS // 4]
        return (x.masked_fill(mask, 2.0) + torch.where(mask, x, -1.0)).square()


def gradients(model, x, around=lambda model, x: model(x)):
    model.zero_grad()
    around(model, x).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("view", ["whole", "expanded", "transposed", "part"])
def test_gradients_are_stocks(device, view):
    stock = Gate(view).to(device)
    ours, x = copy.deepcopy(stock), random(ROWS, WIDTH, device=device).requires_grad_()
    patch(ours)

    def offloaded(model, x):
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    expected = gradients(stock, x)
    checkpoints = [partial(checkpoint, use_reentrant=use_reentrant) for use_reentrant in (True, False)]
    for around in (lambda model, x: model(x), *checkpoints, offloaded):
        for name, grad in gradients(ours, x, around).items():
            assert_same_bits(grad, expected[name], name)
    loss = ours(x).sum()
    for _ in range(2):
        ours.zero_grad()
        loss.backward(retain_graph=True)
        assert_same_bits(ours.linear.weight.grad, expected["linear.weight"])


def test_a_mask_is_kept_once_in_bits(device):
    """Stock keeps a byte an element. Where what it was made from is kept anyway, it is made again; a buffer is left."""
    x, bits = random(ROWS, WIDTH, device=device), ROWS * WIDTH // 8
    for view, expected in (("whole", bits), ("expanded", 0), ("transposed", bits)):
        model = Gate(view).to(device)
        assert masks(model, x) == ROWS * WIDTH
        patch(model)
        assert masks(model, x) == expected
    model = Gate(use_buffer=True).to(device)
    patch(model)
    assert masks(model, x) == 0


def masks(model, x):
    """Bytes kept that are no multiple of an activation."""
    return sum(s.nbytes for s in measure_kept(model, (x,)).storages if s.nbytes in (ROWS * WIDTH, ROWS * WIDTH // 8))


def test_a_part_of_a_mask_is_kept_as_it_is(device):
    model, x = Gate("part").to(device), random(ROWS, WIDTH, device=device)
    stock = measure_kept(model, (x,)).total
    patch(model)
    kept = measure_kept(model, (x,))
    assert kept.total < stock
    assert ROWS * WIDTH // 8 not in [s.nbytes for s in kept.storages]


def test_a_mask_that_is_written_to_later_was_kept_as_it_was(device):
    """Stock raises in backward; the bits are those of the forward."""

    def overwrites(model, x):
        mask = x.detach() > 0
        y = model.linear(model.norm(x)).masked_fill(mask, 2.0)
        mask.zero_()
        return y

    model, x = Gate(forward=overwrites).to(device), random(ROWS, WIDTH, device=device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, x)
    patch(model)
    got = gradients(model, x)["linear.bias"]
    assert_same_bits(got, (x <= 0).sum(0).to(x.dtype))


def test_two_masks_on_one_storage_are_told_apart(device):
    def rewrites(model, x):
        mask = x.detach() > 0
        z = model.linear(model.norm(x))
        y = z.masked_fill(mask, 2.0)
        mask.logical_not_()
        return y + z.masked_fill(mask, 2.0)

    model, x = Gate(forward=rewrites).to(device), random(ROWS, WIDTH, device=device)
    patch(model)
    got = gradients(model, x)["linear.bias"]
    assert_same_bits(got, torch.full_like(got, ROWS))
