"""Attacks by tensors that look the same: views of one parameter, conjugates; and by what indexes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from hf_memsave import KeptTensorChangedError
from hf_memsave.tape.tape import Tape
from support.attacks import WIDTH, assert_trains_like_stock
from support.helpers import only_on_cpu, random

#: As before the forward, where no tape sees it.
DATA = torch.Tensor.data.__get__

VIEWS = {
    "transposed": lambda p: (p, p.T),
    "every second row": lambda p: (p[: WIDTH // 2].repeat(2, 1), p[::2].repeat(2, 1)),
    "every second": lambda p: (p.view(-1)[:WIDTH], p.view(-1)[: 2 * WIDTH : 2]),
}


@pytest.mark.parametrize("views", VIEWS)
def test_two_views_of_one_parameter(views, device):
    def fn(model, x):
        x = model.f(x)
        first, second = VIEWS[views](model.p)
        return model.g(x * first) + model.g(x * second)

    assert_trains_like_stock(fn, random(4, WIDTH, WIDTH, device=device), p=nn.Parameter(random(WIDTH, WIDTH)))


@pytest.mark.parametrize("index", [lambda order: order, lambda order: (slice(None), order)], ids=["alone", "in tuple"])
def test_an_array_that_indexes_is_shuffled_later(index, device):
    def fn(model, x):
        order, random_state = np.arange(16), np.random.RandomState(0)
        x = model.f(x)
        for _ in range(3):
            random_state.shuffle(order)
            x = x + torch.tanh(model.g(torch.sin(x)[index(order)]))
        return x

    assert_trains_like_stock(fn, random(16, 16, WIDTH, device=device))


COMPLEX = {
    "a conjugate and itself": lambda a, v: (torch.mul(a.conj(), 2) @ v).abs() + (a @ v).abs(),
    "times its conjugate": lambda a, v: (a * a.conj()).real,
    "an imaginary part of a conjugate": lambda a, v: (a * 1j).conj().imag.sin() * (a * 1j).imag.exp(),
}


@pytest.mark.parametrize("context", [torch.enable_grad, save_on_cpu], ids=["no hook", "offload"])
@pytest.mark.parametrize("name", COMPLEX)
def test_conjugates(name, context, device):
    only_on_cpu(device)

    def fn(model, x):
        return COMPLEX[name](model.f(x).to(torch.complex64) * (2 + 1j), model.v)

    weight = torch.complex(random(WIDTH, WIDTH), random(WIDTH, WIDTH, seed=1))
    assert_trains_like_stock(fn, random(2, 16, WIDTH), context, v=weight)


@pytest.mark.parametrize("name", ["chunks", "data"])
def test_a_tensor_with_a_version_of_its_own_is_written_to_before_backward(name):
    model = nn.Linear(WIDTH, 2 * WIDTH)
    with Tape({}):
        first, second = torch.unsafe_chunk(model(random(16, WIDTH)), 2, dim=-1)
        if name == "data":
            second = DATA(first)
        loss = (first * model.weight.sum() * first).sum() + (second * model.weight.sum() * second).sum()
    second.detach().mul_(2)
    with pytest.raises(KeptTensorChangedError):
        loss.backward()
