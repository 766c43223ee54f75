"""Attacks by long chains of cheap functions: time, recursion; and by arguments that no version tells of."""

import time

import pytest
import torch

from hf_memsave import patch
from support.attacks import WIDTH, Attack, assert_alike, assert_trains_like_stock, kept_of, trained
from support.families import build
from support.helpers import random
from support.modes import SMALL
from support.steps import step


def smoothed(steps):
    def fn(model, x):
        x = model.f(x)
        for _ in range(steps):
            x = 0.5 * x + 0.25 * (x.roll(1, 1) + x.roll(-1, 1))
        return model.g(torch.tanh(x))

    return fn


def test_a_tensor_used_three_times_a_step_takes_no_exponential_time(device):
    x = random(2, 16, WIDTH, device=device)
    seconds = []
    for steps in (6, 24):
        model = Attack(smoothed(steps)).to(device)
        patch(model)
        start = time.perf_counter()
        trained(model, x)
        seconds.append(time.perf_counter() - start)
    assert seconds[1] < 60 * seconds[0]  # at 2.4 times a step it would take 7 million times as long
    assert_trains_like_stock(smoothed(12), x)


@pytest.mark.parametrize("steps", [500, 2000])
def test_a_sum_of_many_terms(steps, device):
    def fn(model, x):
        x = model.f(x)
        total = torch.zeros((), device=x.device)
        for i in range(steps):
            total = total + x[:, i % 16].mean() * 0.01
        return model.g(x) * torch.sqrt(1 + total * total)

    assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device))


def test_what_is_made_in_inference_mode_is_given_to_blocks(device):
    ids = torch.randint(64, (2, SMALL.seq), device=device)
    with torch.inference_mode():
        mask = torch.ones(SMALL.seq, SMALL.seq, dtype=torch.bool, device=device).tril().repeat(2, 1, 1, 1)
        positions = torch.arange(SMALL.seq, device=device)[None]
    for given in ({"attention_mask": mask}, {"position_ids": positions}):
        batch = {"input_ids": ids, "labels": ids, **given}
        assert_alike(lambda: build("llama", SMALL).to(device), lambda model: step(model, batch))  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_conversion_that_the_caller_lets_go_of_is_not_kept(dtype, device):
    """Stock keeps what the model makes of its input, where that is narrower."""

    def fn(model, x):
        low = x.to(torch.bfloat16)
        return model.h(torch.sin(low).float() * model.f(low.float()))

    x = random(8, 64, WIDTH, device=device, dtype=dtype)
    mine, stock = kept_of(lambda model, x: fn(model, x.clone()), x)
    assert mine <= stock
