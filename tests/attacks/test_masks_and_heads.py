"""Attacks on what SDPA shares and remakes: masks of another dtype, masks made of one tensor, repeated heads."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.attacks import WIDTH, assert_alike, assert_trains_like_stock
from support.helpers import autocasting, random
from support.steps import step
from support.zoo import Size, build

HEADS, LENGTH, HEAD = 4, 16, WIDTH // 4
SHAPE = (2, LENGTH, WIDTH)


def heads(x, count=HEADS):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attended(model, x, mask=None):
    query, key, value = (heads(linear(x)) for linear in (model.f, model.g, model.h))
    return x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_mask_in_fp32_for_a_model_in_another_dtype(dtype, device):
    distance = torch.arange(8) - torch.arange(8)[:, None]
    mask = (0.31 * distance).masked_fill(distance > 0, torch.finfo(torch.float32).min).to(device)
    ids = torch.randint(0, 64, (2, 8), device=device)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask.expand(2, 1, -1, -1)}
    assert_alike(lambda: build("llama", Size(seq=8)).to(device, dtype), lambda model: step(model, batch))


def indices_that_are_written_to_in_between(model, x):
    rows, columns = torch.arange(LENGTH, device=x.device)[:, None], torch.arange(LENGTH, device=x.device)[None]
    for _ in range(3):
        x = attended(model, x, model.table[rows, columns])
        rows.add_(1)
    return x


def one_of_three_made_alike_is_written_to(model, x):
    masks = [model.square * 0.5 for _ in range(3)]
    masks[1].add_(model.square)
    for mask in masks:
        x = attended(model, x, mask)
    return x


def signs_of_nothing(model, x):
    """Masks that differ by them alone."""
    for zero in (0.0, -0.0):
        x = attended(model, x, (model.square * zero).reciprocal().clamp(-1, 1))
    return x


def by_what_cannot_be_hashed(model, x, index):
    for _ in range(2):
        x = attended(model, x, model.heads[index(model.index)])
    return x


PROGRAMS = (
    indices_that_are_written_to_in_between, one_of_three_made_alike_is_written_to, signs_of_nothing,
    functools.partial(by_what_cannot_be_hashed, index=lambda index: (slice(None), index)),
    functools.partial(by_what_cannot_be_hashed, index=lambda index: (..., index)),
    functools.partial(by_what_cannot_be_hashed, index=lambda index: ([[[0]], [[1]], [[2]], [[3]]], index)),
)  # fmt: skip


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: getattr(fn, "func", fn).__name__)
def test_masks(fn, autocast, device):
    torch.manual_seed(0)
    frozen = nn.Parameter(random(HEADS, 40), requires_grad=False)
    parts = dict(table=random(40, 40), square=random(LENGTH, LENGTH))
    parts |= dict(heads=frozen, index=torch.randint(0, 40, (LENGTH, LENGTH)))
    context = functools.partial(autocasting, device, autocast)
    assert_trains_like_stock(fn, random(*SHAPE, device=device), context, **parts)


def repeated(x):
    return x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, HEADS, LENGTH, HEAD)


def by_token(x):
    return x[:, :, :, None].expand(-1, -1, -1, 2, -1).reshape(2, LENGTH, HEADS, HEAD)


#: What happens to the keys of two heads and to the copy of them for four: a write, or a view of the copy.
CHANGES = {
    "nothing": lambda key, copy: copy,
    "a write to the copy": lambda key, copy: copy.mul_(0.7),
    "a write to what it copies": lambda key, copy: (key.mul_(0.7), copy)[1],
    "a write to its data": lambda key, copy: (key.data.mul_(0.7), copy)[1],
    "another order": lambda key, copy: by_token(key.transpose(1, 2)).transpose(1, 2),
    "a part": lambda key, copy: copy[:, :, :, ::2],
    "another shape": lambda key, copy: copy.view(2, 2, 2 * LENGTH, HEAD),
}


@pytest.mark.parametrize("change", CHANGES)
def test_repeated_heads(change, device):
    def fn(model, x):
        keys = [model.norm(heads(linear(x).float(), 2)) for linear in (model.key, model.value)]
        key, value = (CHANGES[change](key, repeated(key)) for key in keys)
        query = heads(model.f(x).float())[:, : key.shape[1], :, : key.shape[-1]]
        return F.scaled_dot_product_attention(query, key, value)

    parts = {name: nn.Linear(WIDTH, WIDTH // 2) for name in ("key", "value")}
    context = functools.partial(autocasting, device, torch.bfloat16)
    assert_trains_like_stock(fn, random(*SHAPE, device=device), context, norm=nn.LayerNorm(HEAD), **parts)
