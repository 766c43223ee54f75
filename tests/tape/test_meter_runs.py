"""``measure_kept`` as it runs a model: how it is called, and that it leaves nothing behind."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from hf_memsave import measure_kept
from support.calls import Calls
from support.helpers import generator_state

ROWS, WIDTH, WIDE = 3, 8, 16
FP32 = 4
NARROW_BYTES, WIDE_BYTES = ROWS * WIDTH * FP32, ROWS * WIDE * FP32


@pytest.fixture
def x(device):
    return torch.randn(ROWS, WIDTH, device=device)


@pytest.fixture
def mlp(device):
    return nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH)).to(device)


def live_storages():
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return {t.untyped_storage()._cdata for t in tensors}


# How it is called.


def test_a_batch_is_positional_arguments_keywords_or_the_only_argument(x):
    def add(a, b=1):
        return a + b

    for batch in ((x, x), [x, x], {"a": x, "b": x}, x):
        assert measure_kept(Calls(add), batch).total == NARROW_BYTES


def test_a_forward_of_ones_own_is_called_instead(mlp, x):
    assert measure_kept(mlp, {"x": x}, forward=lambda x: mlp[0](x)).by_module == {"0": WIDE_BYTES}


def test_gradients_are_on_whatever_the_caller_says(mlp, x):
    expected = measure_kept(mlp, x)
    with torch.no_grad():
        assert measure_kept(mlp, x) == expected


def test_measuring_again_gives_the_same(device, x):
    model = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Dropout(0.5), nn.Linear(WIDE, WIDTH)).to(device)
    assert measure_kept(model, x) == measure_kept(model, x)


def test_measuring_again_under_autocast_gives_the_same(device, mlp, x):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert measure_kept(mlp, x) == measure_kept(mlp, x)


# What it leaves behind.


@pytest.mark.parametrize("is_broken", [False, True], ids=["returns", "raises"])
def test_the_random_state_and_hooks_are_as_they_were(device, x, is_broken):
    def forward(x):
        nn.functional.dropout(x)
        if is_broken:
            raise ZeroDivisionError

    def state():
        hooks = len(global_hooks._global_forward_hooks), len(global_hooks._global_forward_pre_hooks)
        return hooks, generator_state(device).tolist()

    before = state()
    with pytest.raises(ZeroDivisionError) if is_broken else contextlib.nullcontext():
        measure_kept(nn.Dropout(0.5), x, forward)
    assert state() == before


def test_gradients_are_as_they_were(mlp, x):
    mlp(x).sum().backward()
    mlp[0].bias.grad = None
    before = {name: p.grad if p.grad is None else p.grad.clone() for name, p in mlp.named_parameters()}
    measure_kept(mlp, x)
    for name, p in mlp.named_parameters():
        assert p.grad is before[name] or torch.equal(p.grad, before[name])


def test_the_mode_is_as_it_was(mlp, x):
    mlp.eval()
    mlp[1].train()
    measure_kept(mlp, x)
    assert [m.training for m in mlp] == [False, True, False]


def test_nothing_is_alive_afterwards(mlp, x):
    before = live_storages()
    measure_kept(mlp, x)
    assert live_storages() <= before
