"""Booleans that autograd keeps in a patched model: one bit an element, once, and stock's gradients."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave import measure_kept, patch
from hf_memsave.tape.bits import pack_bits, unpack_bits
from support.helpers import assert_same_bits, random
from support.launches import Launches
from support.steps import assert_same, backward, patched

ROWS, WIDTH = 64, 256
BITS = ROWS * WIDTH // 8


class Gate(nn.Module):
    """``fn`` of a linear's output and a mask; by default two uses of one fresh mask ``[ROWS, WIDTH]`` or of a view."""

    def __init__(self, view=lambda x: x, is_buffer=False, fn=None):
        super().__init__()
        self.norm, self.linear, self.view, self.fn = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), view, fn
        self.register_buffer("causal", torch.ones(ROWS, WIDTH, dtype=torch.bool).tril() if is_buffer else None)

    def forward(self, x):
        y = self.linear(self.norm(x))
        if self.fn is not None:
            return self.fn(y, x.detach() > 0)
        y, mask = self.view(y), self.view(y.detach() > 0 if self.causal is None else self.causal)
        return (y.masked_fill(mask, 2.0) + torch.where(mask, y, -1.0)).square()


VIEWS = {
    "whole": lambda x: x, "expanded": lambda x: x.expand(3, ROWS, WIDTH), "transposed": lambda x: x.t(),
    "part": lambda x: x[: ROWS // 4],
}  # fmt: skip


@pytest.fixture
def x(device):
    return random(ROWS, WIDTH, device=device)


def gradients(model, x, around=lambda model, x: model(x)):
    return backward(model, around(model, x).sum())


def offloaded(model, x):
    with torch.autograd.graph.save_on_cpu():
        return model(x)


@pytest.mark.parametrize("view", VIEWS)
def test_gradients_are_stocks(device, view, x):
    model, x = Gate(VIEWS[view]).to(device), x.requires_grad_()
    expected = gradients(model, x)
    patch(model)
    checkpoints = [partial(checkpoint, use_reentrant=use_reentrant) for use_reentrant in (True, False)]
    for around in (lambda model, x: model(x), *checkpoints, offloaded):
        assert_same(gradients(model, x, around), expected)
    loss = model(x).sum()
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert_same_bits(model.linear.weight.grad, expected["linear.weight.grad"])


def masks(model, x):
    """Bytes kept that are no multiple of an activation."""
    return sum(s.nbytes for s in measure_kept(model, (x,)).storages if s.nbytes in (ROWS * WIDTH, BITS))


def test_a_mask_is_kept_once_in_bits(device, x):
    """Stock keeps a byte an element. Where what it was made from is kept anyway, it is made again.

    A buffer is left, and so is a mask of which a part alone is kept.
    """
    for view, expected in {"whole": BITS, "expanded": 0, "transposed": BITS}.items():
        model = Gate(VIEWS[view]).to(device)
        assert masks(model, x) == ROWS * WIDTH
        patch(model)
        assert masks(model, x) == expected
    model = patched(Gate(is_buffer=True).to(device))
    assert masks(model, x) == 0
    model = Gate(VIEWS["part"]).to(device)
    stock = measure_kept(model, (x,)).total
    patch(model)
    assert measure_kept(model, (x,)).total < stock
    assert BITS not in [s.nbytes for s in measure_kept(model, (x,)).storages]


def test_a_mask_that_is_written_to_later_was_kept_as_it_was(device, x):
    """Stock raises in backward; the bits are those of the forward, and of two on one storage those of each."""

    def overwrites(y, mask):
        y = y.masked_fill(mask, 2.0)
        mask.zero_()
        return y

    def rewrites(y, mask):
        first = y.masked_fill(mask, 2.0)
        mask.logical_not_()
        return first + y.masked_fill(mask, 2.0)

    for fn, expected in ((overwrites, (x <= 0).sum(0)), (rewrites, torch.full((WIDTH,), ROWS))):
        model = Gate(fn=fn).to(device)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(model, x)
        patch(model)
        assert_same_bits(gradients(model, x)["linear.bias.grad"], expected.to(x))


@pytest.mark.parametrize("n", [0, 1, 8, 1001])
def test_eight_booleans_are_packed_and_unpacked_by_numpy_or_where_a_mode_counts_by_four_operations(n):
    flags = torch.arange(n, dtype=torch.uint8).mul(85).view(torch.bool)  # 0, 85, 170, 255, 84 and so on
    few = pack_bits(flags)
    found_of_few = unpack_bits(few, n)
    with Launches() as packing:
        packed = pack_bits(flags)
    with Launches() as unpacking:
        found = unpack_bits(packed, n)
    assert found.tolist() == found_of_few.tolist() == [bool(byte) for byte in flags.view(torch.uint8).tolist()]
    assert torch.equal(packed, few) and found.dtype == found_of_few.dtype == torch.bool
    assert packed.nbytes == -(-n // 8)
    assert packing.count <= 4 + 2 * (n % 8 > 0)  # and what fills the last byte
    assert unpacking.count == 4 + (n % 8 > 0)  # and the copy without it
    assert found.untyped_storage().nbytes() == found_of_few.untyped_storage().nbytes() == n
