"""A sum of losses waits for what divides it; whatever else is done with it is done with stock's."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from hf_memsave.ops import chunked_loss
from hf_memsave.ops.lazy_loss import LazyLoss
from support.accuracy import OfLinear
from support.helpers import taping


@pytest.fixture
def head(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 50 * 12 * 5)
    torch.manual_seed(0)
    x, w = torch.randn(37, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    with taping():
        yield x, w, torch.randint(0, 50, (37,))


def ours_of(head):
    x, w, target = head
    like = torch.empty(37, 50, device="meta")
    loss = chunked_loss.cross_entropy(x, OfLinear(w), [w], like, target, reduction="sum")
    assert type(loss) is LazyLoss
    return loss


def stocks_of(head):
    x, w, target = head
    return F.cross_entropy(x @ w.t(), target, reduction="sum")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return 2 * loss

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def both(loss):
    mean = loss / 7
    return mean + loss.square()


def changed(loss):
    mean = loss / 7
    mean *= 3
    return mean + loss


def logged(loss):
    with torch.no_grad():
        perplexity = (loss / 37).exp()
    return loss / 7 + perplexity


USES = {
    "as it is": lambda loss: loss * 1,
    "by a number": lambda loss: loss / 7,
    "by a tensor": lambda loss: loss / torch.tensor(90),
    "by a tensor of fp64": lambda loss: loss / torch.tensor(90.0, dtype=torch.float64),
    "by two": lambda loss: loss / torch.tensor([2.0, 3.0]),
    "torch.div": lambda loss: torch.div(loss, 7),
    "rounding": lambda loss: torch.div(loss, 7, rounding_mode="floor") + loss,
    "from the other side": lambda loss: 7 / loss,
    "in place": lambda loss: loss.clone().div_(7),
    "twice": lambda loss: loss / 7 + loss / 3,
    "and itself": both,
    "changed in place": changed,
    "without gradients first": logged,
    "its data": lambda loss: loss.data + loss,
    "its real part": lambda loss: loss.real + loss.T,
    "by what wants a gradient": lambda loss: loss / torch.tensor(7.0, requires_grad=True),
    "added": lambda loss: loss + 1,
    "stacked": lambda loss: torch.stack([loss, loss]),
    "own function": Doubled.apply,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_has_stocks_value_and_gradients(use, head):
    expected, found = use(stocks_of(head)), use(ours_of(head))
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    wanted = head[:2]
    of_stock = torch.autograd.grad(expected.sum(), wanted)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), wanted), of_stock, rtol=1e-4, atol=1e-5)


def test_it_is_a_tensor_like_stocks(head):
    loss, stock = ours_of(head), stocks_of(head)
    assert (loss.shape, loss.dtype, loss.device, loss.dim()) == (stock.shape, stock.dtype, stock.device, 0)
    assert loss.requires_grad
    assert loss.grad_fn is not None
    assert not loss.is_leaf
    assert loss.item() == pytest.approx(stock.item(), rel=1e-6)
    assert repr(loss)[:12] == repr(stock)[:12]
    assert float(loss) == loss.item()
    assert torch.equal(pickle.loads(pickle.dumps(loss.detach())), loss)
    assert torch.equal(copy.deepcopy(loss.detach()), loss)


@pytest.mark.parametrize("way", [lambda loss: loss.backward(), torch.autograd.backward])
def test_backward_of_it_is_stocks(way, head):
    expected = torch.autograd.grad(stocks_of(head), head[:2])
    way(ours_of(head))
    torch.testing.assert_close(tuple(t.grad for t in head[:2]), expected, rtol=1e-4, atol=1e-5)


def test_it_is_computed_once(head, monkeypatch):
    calls = []
    stock = chunked_loss._loss_and_gradient
    monkeypatch.setattr(chunked_loss, "_loss_and_gradient", lambda *args: calls.append(None) or stock(*args))
    loss = ours_of(head)
    assert calls == []
    mean = loss / 7
    assert len(calls) == 8
    del loss
    assert mean.item() > 0
    assert len(calls) == 8


def test_whoever_holds_it_at_the_end_of_the_forward_holds_the_sum(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 50 * 12 * 5)
    x, w, target = torch.randn(37, 8, requires_grad=True), torch.randn(50, 8), torch.randint(0, 50, (37,))
    expected = stocks_of((x, w, target)).item()
    with taping():
        loss = ours_of((x, w, target))
        assert loss.compute is not None
    assert loss.compute is None
    target.fill_(3)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_outside_a_forward_it_is_computed_at_once(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 50 * 12 * 5)
    x, w, target = torch.randn(37, 8, requires_grad=True), torch.randn(50, 8), torch.randint(0, 50, (37,))
    like = torch.empty(37, 50, device="meta")
    loss = chunked_loss.cross_entropy(x, OfLinear(w), [], like, target, reduction="sum")
    assert type(loss) is torch.Tensor
