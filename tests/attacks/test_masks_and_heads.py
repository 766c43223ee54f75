"""Attacks on what SDPA shares and remakes: masks of another dtype, masks made of one tensor, repeated heads."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave import patch
from hf_memsave.tape.attention import attention
from support.attacks import WIDTH, assert_trains_like_stock
from support.families import build
from support.helpers import autocasting, random, taping
from support.modes import SMALL
from support.steps import assert_same, step

HEADS, LENGTH, HEAD = 4, 16, WIDTH // 4
SHAPE = (2, LENGTH, WIDTH)


def heads(x, count=HEADS):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attended(model, x, mask=None):
    query, key, value = (heads(linear(x)) for linear in (model.f, model.g, model.h))
    return x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


# Masks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_mask_in_fp32_for_a_model_in_another_dtype(dtype, device):
    distance = torch.arange(SMALL.seq) - torch.arange(SMALL.seq)[:, None]
    mask = (0.31 * distance).masked_fill(distance > 0, torch.finfo(torch.float32).min).to(device)
    ids = torch.randint(0, 64, (2, SMALL.seq), device=device)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask.expand(2, 1, -1, -1)}
    stock = build("llama", SMALL).to(device, dtype)
    ours = copy.deepcopy(stock)
    patch(ours)
    assert_same(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_mask_that_wants_a_gradient(autocast, device):
    def fn(model, x):
        return attended(model, attended(model, x, model.bias), model.bias)

    bias, context = nn.Parameter(random(LENGTH, LENGTH)), functools.partial(autocasting, device, autocast)
    assert_trains_like_stock(fn, random(*SHAPE, device=device), context, bias=bias)


def test_two_masks_are_made_of_one_that_is_written_to_in_between(device):
    def fn(model, x):
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
        everything = hidden.logical_not()
        hidden.logical_or_(torch.ones_like(hidden).tril(-4))
        window = hidden.logical_not()
        return attended(model, attended(model, x, everything), window)

    assert_trains_like_stock(fn, random(*SHAPE, device=device))


def test_the_indices_of_a_bias_are_written_to_in_between(device):
    def fn(model, x):
        rows, columns = torch.arange(LENGTH, device=device)[:, None], torch.arange(LENGTH, device=device)[None]
        for _ in range(3):
            x = attended(model, x, model.table[rows, columns])
            rows.add_(1)
        return x

    assert_trains_like_stock(fn, random(*SHAPE, device=device), table=random(40, 40))


def test_one_of_two_masks_made_alike_is_written_to(device):
    def fn(model, x):
        masks = [model.table * 0.5 for _ in range(3)]
        masks[1].add_(model.table)
        for mask in masks:
            x = attended(model, x, mask)
        return x

    assert_trains_like_stock(fn, random(*SHAPE, device=device), table=random(LENGTH, LENGTH))


def test_masks_that_differ_by_the_sign_of_nothing(device):
    def fn(model, x):
        for zero in (0.0, -0.0):
            x = attended(model, x, (model.table * zero).reciprocal().clamp(-1, 1))
        return x

    assert_trains_like_stock(fn, random(*SHAPE, device=device), table=random(LENGTH, LENGTH))


INDICES = {
    "a slice": lambda index: (slice(None), index),
    "an ellipsis": lambda index: (..., index),
    "a list": lambda index: ([[[0]], [[1]], [[2]], [[3]]], index),
}


@pytest.mark.parametrize("kind", INDICES)
def test_a_bias_is_picked_by_what_cannot_be_hashed(kind, device):
    def fn(model, x):
        for _ in range(2):
            x = attended(model, x, model.table[INDICES[kind](model.index)])
        return x

    table, index = nn.Parameter(random(HEADS, 40), requires_grad=False), torch.randint(0, 40, (LENGTH, LENGTH))
    assert_trains_like_stock(fn, random(*SHAPE, device=device), table=table, index=index)


def test_layers_share_a_mask_that_each_makes_alike(device):
    table, index = random(HEADS, 40, device=device), torch.randint(0, 40, (LENGTH, LENGTH), device=device)
    x, masks = random(2, HEADS, LENGTH, HEAD, device=device).requires_grad_(), []

    def sdpa(query, key, value, mask):
        masks.append(mask)
        return F.scaled_dot_product_attention(query, key, value, mask)

    with taping() as tape:
        for heads_of in (slice(None), slice(None), slice(0, HEADS)):
            attention(tape, sdpa, (x, x, x, tape.call(Tensor.__getitem__, table, (heads_of, index))), {})
    assert masks[0] is masks[1]
    assert masks[1] is not masks[2]


# Repeated heads under autocast


def repeated(x):
    return x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, HEADS, LENGTH, HEAD)


def by_token(x):
    return x[:, :, :, None].expand(-1, -1, -1, 2, -1).reshape(2, LENGTH, HEADS, HEAD)


WRITES = {
    "nobody": lambda key, copy: None,
    "to the copy": lambda key, copy: copy.mul_(0.7),
    "to what it copies": lambda key, copy: key.mul_(0.7),
    "to its data": lambda key, copy: key.data.mul_(0.7),
}


@pytest.mark.parametrize("writes", WRITES)
def test_repeated_heads_are_written_to(writes, device):
    def fn(model, x):
        key, value = (model.norm(heads(linear(x).float(), 2)) for linear in (model.key, model.value))
        copies = repeated(key), repeated(value)
        WRITES[writes](key, copies[0])
        return F.scaled_dot_product_attention(heads(model.f(x).float()), *copies)

    parts = {name: nn.Linear(WIDTH, WIDTH // 2) for name in ("key", "value")}
    context = functools.partial(autocasting, device, torch.bfloat16)
    assert_trains_like_stock(fn, random(*SHAPE, device=device), context, norm=nn.LayerNorm(HEAD), **parts)


VIEWS = {
    "of another order": lambda x: by_token(x.transpose(1, 2)).transpose(1, 2),
    "of a part": lambda x: repeated(x)[:, :, :, ::2],
    "of another shape": lambda x: repeated(x).view(2, 2, 2 * LENGTH, HEAD),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_repeated_heads(view, device):
    def fn(model, x):
        key, value = (VIEWS[view](model.norm(heads(part(x).float(), 2))) for part in (model.key, model.value))
        query = heads(model.f(x).float())[:, : key.shape[1], :, : key.shape[-1]]
        return F.scaled_dot_product_attention(query, key, value)

    parts = {name: nn.Linear(WIDTH, WIDTH // 2) for name in ("key", "value")}
    context = functools.partial(autocasting, device, torch.bfloat16)
    assert_trains_like_stock(fn, random(*SHAPE, device=device), context, norm=nn.LayerNorm(HEAD), **parts)
