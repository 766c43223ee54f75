"""Sums of gradients over chunks: a linear's as near to float64 as stock's, and all others what autograd gives."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave.ops.loss import chunked_loss, sums
from support.accuracy import unread


def gradients_of(dtype, monkeypatch, chunks=16, rows=512, autocast=False, trains_weight=True):
    """Of a linear head with bias: the distances of ours and of stock's to those of float64."""
    torch.manual_seed(0)
    x, w, b = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((rows, 32), (256, 32), (256,)))
    target = torch.randint(0, 256, (rows,))
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    w.requires_grad_(trains_weight)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, w, b)]
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target), [t for t in wide if t.requires_grad])
    of_logits = torch.bfloat16 if autocast else dtype
    monkeypatch.setattr(chunked_loss, "CHUNK", 256 * (8 + of_logits.itemsize) * rows // chunks)
    with context:
        wanted = [t for t in (x, w, b) if t.requires_grad]
        stock = torch.autograd.grad(F.cross_entropy(F.linear(x, w, b).float(), target), wanted)
        loss = F.cross_entropy(unread(x, w, b), target)
    ours = torch.autograd.grad(loss, wanted)
    return [[((g.double() - e).norm() / e.norm()).item() for g, e in zip(found, exact, strict=True)]
            for found in (ours, stock)]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.parametrize(
    ("rows", "chunks", "trains_weight"),
    [(512, 4, True), (512, 64, True), (48, 6, True), (24, 3, True), (512, 64, False)],
)
def test_a_linear_heads_gradients_are_as_near_to_float64_as_stocks(
    dtype, autocast, rows, chunks, trains_weight, monkeypatch
):
    ours, stock = gradients_of(dtype, monkeypatch, chunks, rows, autocast, trains_weight)
    assert all(a <= 1.005 * b for a, b in zip(ours, stock, strict=True)), (ours, stock)


@pytest.mark.parametrize(("rows", "kept", "products"), [
    (24, [(24, 256), (8, 32), (8, 32), (8, 32)], 0),  # dy takes fewer bytes than the gradient
    (48, [(256, 32)], 0),  # and than the sum
    (256, [(256, 32)], 16),  # 16 rows of dy take a quarter of it
])  # fmt: skip
def test_what_takes_fewest_bytes_is_kept_and_products_wait_for_each_other(rows, kept, products, monkeypatch):
    added, stock = [], sums._add_product
    monkeypatch.setattr(sums, "_add_product", lambda total, dy, *x: added.append(len(dy)) or stock(total, dy, *x))
    torch.manual_seed(0)
    w = torch.randn(256, 32, dtype=torch.bfloat16, requires_grad=True)
    total = sums.Sums([w], torch.float32, rows)
    x, dy = torch.randn(rows, 32, dtype=w.dtype), torch.randn(rows, 256, dtype=w.dtype)
    for part, into in zip(x.split(8), dy.split(8), strict=True):
        total.of[id(w)].add_product(into, part)
    found = total.of[id(w)].kept()
    assert [tuple(tensor.shape) for tensor in found] == kept
    assert added == [16] * products
    expected = dy.double().t() @ x.double()
    gradient = sums.gradient(found, torch.full((), 3.0), w.dtype)
    torch.testing.assert_close(gradient.double(), 3 * expected, rtol=2**-7, atol=1e-2)


def test_where_products_come_in_fp32_they_are_added_block_by_block(monkeypatch):
    asked, stock = [], sums.add_product
    expected = gradients_of(torch.bfloat16, monkeypatch)
    monkeypatch.setattr(sums, "has_wide_products", lambda dy: True)
    monkeypatch.setattr(sums, "_BLOCK", 100 * 32)
    monkeypatch.setattr(sums, "add_product", lambda total, a, b: asked.append(len(a)) or stock(total, a, b))
    found = gradients_of(torch.bfloat16, monkeypatch)
    assert set(asked) == {100, 56}
    assert found[0] == pytest.approx(expected[0], rel=1e-4)


class Used(nn.Module):
    """Uses of a weight ``[5, 4]`` and a bias ``[5]`` in what is computed from x ``[3, 4]``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.b = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))

    def autocast(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, self.w, self.b)

    def of_two_dtypes(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, self.w, self.b)
        return y + F.linear(x, self.w)

    def checkpointed(self, x):
        return checkpoint(lambda x: F.linear(x, self.w, self.b), x, use_reentrant=False)

    def hooked(self, x):
        y = F.linear(x, self.w, self.b)
        y.register_hook(lambda dy: dy * 3)
        return y.tanh()


#: And which parameters have a part of their gradient from autograd.
LOW = Used.autocast, Used.of_two_dtypes
USES = {
    "a linear": (lambda m, x: F.linear(x, m.w, m.b), ""),
    "by name": (lambda m, x: F.linear(x, weight=m.w, bias=m.b), ""),
    "under autocast": (Used.autocast, ""),
    "of two dtypes": (Used.of_two_dtypes, ""),
    "under a checkpoint": (Used.checkpointed, "wb"),
    "in a linear of a linear": (lambda m, x: F.linear(F.linear(x, m.w, m.b), torch.ones(2, 5)), ""),
    "in fp64": (lambda m, x: F.linear(x.double(), m.w.double(), m.b.double()).sum(-1), "wb"),
    "hooks on what comes out": (Used.hooked, ""),
    "twice": (lambda m, x: F.linear(x, m.w, m.b) + F.linear(2 * x, m.w), ""),
    "its norm too": (lambda m, x: F.linear(x, m.w, m.b) / m.w.norm(), "w"),
    "scaled": (lambda m, x: F.linear(x, 2 * m.w, m.b), "wb"),
    "and a scaled bias": (lambda m, x: F.linear(x, m.w, 2 * m.b), "wb"),
    "not transposed": (lambda m, x: x[:, :3] @ m.w[:3] + m.b.sum(), "wb"),
    "of what is no input": (lambda m, x: F.linear(torch.ones(3, 4), m.w, m.b) * x.sum(), ""),
    "and its product with itself": (lambda m, x: F.linear(F.linear(x, m.w), m.w.t()), "w"),
    "of three axes": (lambda m, x: F.linear(x[None], m.w)[0] + m.b, "b"),
    "of one axis": (lambda m, x: F.linear(x[0], m.w, m.b), "wb"),
}


@pytest.mark.parametrize("count", [6, 100], ids=["products at once", "product by product"])
@pytest.mark.parametrize(("use", "of_autograd"), USES.values(), ids=USES)
def test_every_gradient_is_autograds(use, of_autograd, count):
    module = Used()
    x = torch.randn(3, 4, requires_grad=True)
    dy = torch.randn_like(use(module, x))
    wanted = [module.w, module.b]
    expected = torch.autograd.grad(use(module, x), [x, *wanted], dy, allow_unused=True)

    total = sums.Sums(wanted, torch.float32, count)
    for _ in range(2):
        with total.of_linears(module):
            y = use(module, x)
        dx, *found = torch.autograd.grad(y, [x, *wanted], dy, allow_unused=True)
        torch.testing.assert_close(dx, expected[0])
        assert "".join(name for name, part in zip("wb", found, strict=True) if part is not None) == of_autograd
        for one, part in zip(total.of.values(), found, strict=True):
            if part is not None:
                one.total().add_(part)
    for of, p, one in zip(total.of.values(), wanted, expected[1:], strict=True):
        ours = sums.gradient(of.kept(), torch.ones(()), p.dtype)
        assert (ours is None) == (one is None)
        if one is not None:
            torch.testing.assert_close(ours, 2 * one, rtol=0.02 if use in LOW else 1e-5, atol=1e-5)
