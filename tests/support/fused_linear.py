"""Models of linears under autocast, patched with kernels, and a step of them next to stock's."""

import torch
from torch import nn

from support.helpers import assert_same_bits
from support.kernels import TRITON
from support.steps import patched_copy
from support.zoo import Size, batch_for, build

LOW, SIZE = torch.bfloat16, Size(heads=2, seq=6)


def autocast(device, **options):
    return torch.autocast(torch.device(device).type, LOW, **options)


def net(device, *layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).to(device)


class Attention(nn.Module):
    """Three linears of one input, and one of their sum; ``between`` runs before the second."""

    def __init__(self, between=lambda module, x: None, make=nn.Linear):
        super().__init__()
        self.q, self.k, self.v, self.o = (make(24, 24) for _ in range(4))
        self.between = between

    def forward(self, x):
        q = self.q(x)
        self.between(self, x)
        return self.o((q * self.k(x)).tanh() + self.v(x))


def bert(device, dropout=0.0):
    """And its batch."""
    model = build("bert", SIZE, dropout=dropout).to(device)
    return model, batch_for(model, SIZE)


def step(model, x, device, **options):
    """The result in fp32, and gradients: of the input and of all parameters."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    with autocast(device, **options):
        y = model(x * 1.5).float()
    y.cos().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def far(found, exact):
    return [float((a.double() - b).norm() / (b.norm() or 1)) for a, b in zip(found, exact, strict=True)]


def patched(model):
    return patched_copy(model, TRITON)


def assert_same_step(model, x, device, times=3, **options):
    """The same bits forward, and gradients that differ by stock's rounding to 16 bits."""
    ours = patched(model)
    for _ in range(times):
        stock = step(model, x, device, **options)
        got = step(ours, x, device, **options)
        assert_same_bits(got[0], stock[0])
        assert [None if g is None else g.dtype for g in got] == [None if s is None else s.dtype for s in stock]
        assert_near(got[1:], stock[1:])
    return ours


def learned(model, x, device):
    """The patched model, which knows by now that q, k and v take one input."""
    ours = patched(model)
    step(ours, x, device)
    return ours


def graph(model, x, device):
    x = (x.detach().clone().requires_grad_() * 1.5).requires_grad_()
    with autocast(device):
        return x, model(x).float()


def assert_near(got, stock):
    """But for stock's rounding to 16 bits; None where stock has None."""
    for mine, theirs in zip(got, stock, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            largest = float(theirs.abs().amax()) if theirs.numel() else 0
            torch.testing.assert_close(mine, theirs, rtol=0.03, atol=0.03 * largest)


def nodes(root):
    found, left = [], [root]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.append(node)
            left += [n for n, _ in node.next_functions]
    return found
