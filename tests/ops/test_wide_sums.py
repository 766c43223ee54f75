"""Gradients summed over calls: each product added in fp32, and autograd's own where that is not all there is."""

import pytest
import torch
import torch.nn.functional as F

from hf_memsave.ops import wide_sums
from hf_memsave.ops.wide_sums import WideSums

CHUNKS = 16


def tensors(*shapes, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def summed(function, x, parameters, dy):
    """The sums of chunks, before they are rounded."""
    sums = WideSums(parameters, torch.float32)
    for part, gradient in zip(x.chunk(CHUNKS), dy.chunk(CHUNKS), strict=True):
        with torch.enable_grad(), sums:
            here = part.detach().requires_grad_()
            y = function(here, *parameters)
        sums.backward(y, here, gradient.to(y.dtype))
    return [sums.sums[id(p)] for p in parameters]


def in_float64(function, x, parameters, dy):
    wide = [p.detach().double().requires_grad_() for p in parameters]
    return torch.autograd.grad(function(x.detach().double(), *wide), wide, dy.double())


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


HEADS = {
    "a linear": lambda x, w, a, b: F.linear(x, w),
    "its weight by name": lambda x, w, a, b: F.linear(x, weight=w),
    "LoRA beside it": lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b),
    "called twice": lambda x, w, a, b: F.linear(x, w) + F.linear(x * 2, w),
    "three dimensions": lambda x, w, a, b: F.linear(x.unflatten(0, (2, -1)), w).flatten(0, 1),
}


@pytest.mark.parametrize("head", HEADS)
def test_sums_of_linears_are_not_rounded(head, device):
    x, w, a, b, dy = (t.to(device) for t in tensors((256, 16), (32, 16), (4, 16), (32, 4), (256, 32)))
    parameters = [p.detach().requires_grad_() for p in (w, a, b)]
    found = summed(HEADS[head], x, parameters, dy)
    (exact,) = in_float64(lambda x, w: HEADS[head](x, w, *(p.detach().double() for p in parameters[1:])), x, [w], dy)
    assert found[0].dtype == torch.float32
    assert error(found[0], exact) < 1e-6  # rounded to bf16 it is 1.6e-3 off
    if head != "LoRA beside it":
        assert not found[1].any() and not found[2].any()


ELSEWHERE = {
    "a sum": lambda x, w: F.linear(x, w) + w.sum(1),
    "a product": lambda x, w: F.linear(x, w) + x @ w.t(),
    "that alone": lambda x, w: x @ w.t(),
    "the bias of another": lambda x, w: F.linear(x, w) + F.linear(x, torch.ones(32, 16, dtype=x.dtype), w[:, 0]),
}


@pytest.mark.parametrize("head", ELSEWHERE)
def test_a_weight_that_other_functions_take_gets_all_of_its_gradient(head):
    function = ELSEWHERE[head]
    x, w, dy = tensors((256, 16), (32, 16), (256, 32), dtype=torch.float32)
    exact = in_float64(function, x, [w], dy)
    assert error(summed(function, x, [w], dy)[0], exact[0]) < 1e-5


def test_under_autocast_the_rounding_is_that_of_its_casts_alone():
    x, w, dy = tensors((256, 16), (32, 16), (256, 32), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = summed(F.linear, x, [w], dy)
    exact = dy.bfloat16().double().t() @ x.bfloat16().double()
    assert error(found, exact) < 1e-6


def test_a_bias_is_summed_over_many_calls_without_loss():
    x, w, b = tensors((4096, 2), (64, 2), (64,), dtype=torch.float32)
    dy = torch.rand(4096, 64) + 1
    sums = WideSums([b], torch.float32)
    for part, gradient in zip(x.split(1), dy.split(1), strict=True):
        with torch.enable_grad(), sums:
            here = part.detach().requires_grad_()
            y = F.linear(here, w, b)
        sums.backward(y, here, gradient)
    assert error(sums.rounded()[0], dy.double().sum(0)) < 5e-8  # one after the other in fp32: 1e-6


def test_where_products_come_in_fp32_they_are_added_block_by_block(monkeypatch):
    x, w, dy = tensors((256, 16), (33, 16), (256, 33))
    asked = []

    def mm(a, b, out_dtype):
        asked.append(a.shape)
        return a.to(out_dtype) @ b.to(out_dtype)

    monkeypatch.setattr(wide_sums, "has_wide_products", lambda tensor: True)
    monkeypatch.setattr(wide_sums, "_BLOCK", 8 * 16)
    monkeypatch.setattr(torch, "mm", mm)
    (found,) = summed(F.linear, x, [w], dy)
    assert error(found, in_float64(F.linear, x, [w], dy)[0]) < 1e-6
    assert {shape[0] for shape in asked} == {8, 1}
