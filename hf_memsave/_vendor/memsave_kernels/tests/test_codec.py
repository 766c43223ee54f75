"""The codecs: unbiased, within a step, NaN for what is not finite, and 1% of an error is seen."""

import pytest
import torch

import memsave_kernels as k
from cases.case import DEVICE, maker
from interpreter import only_interpreted, round_to_nearest, watching

round_to_nearest()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def there_and_back(x, name, seed=3):
    return k.decode(*k.encode(x, name, seed), name, x.numel(), x.dtype).view(x.shape)


def reference(x, name, codes, bounds):
    """What the codes mean, in float64, and the steps of the blocks."""
    form = k.FORMATS[name]
    if form.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    low, scale = bounds.double().unsqueeze(2).unbind(1)
    values, steps = low + codes * scale, scale.expand(-1, form.block)
    return (t.reshape(-1)[: x.numel()].view(x.shape) for t in (values, steps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 512), (5, 37)], ids=str)
@pytest.mark.parametrize("name", k.FORMATS)
def test_within_a_step(name, shape, dtype):
    x = maker(dtype)(*shape)
    codes, bounds = k.encode(x, name, 3)
    values, steps = reference(x, name, codes, bounds)
    assert ((values - x.double()).abs() <= steps * 1.001).all()
    largest = {"int8": 255, "int4": 15}[name]
    assert (steps.unique() <= (x.max() - x.min()).double() / largest * 1.05).all()  # a bfloat16 and its slack
    decoded = k.decode(codes, bounds, name, x.numel(), dtype).view(shape)
    eps = torch.finfo(dtype).eps
    assert ((decoded.double() - values).abs() <= eps * values.abs() + 1e-6).all()


@pytest.mark.parametrize("name", k.FORMATS)
def test_unbiased(name):
    x = torch.linspace(-1, 2, 256, device=DEVICE).repeat(32)
    _, steps = reference(x, name, *k.encode(x, name, 0))
    total = sum(((there_and_back(x, name, seed) - x) / steps).mean() for seed in range(8)) / 8
    assert abs(total) < 5 * 0.5 / (8 * x.numel()) ** 0.5  # 5 standard deviations of a step's rounding


@pytest.mark.parametrize("name", k.FORMATS)
def test_seeds(name):
    x = maker(torch.float32)(4, 512)
    assert torch.equal(there_and_back(x, name, 1), there_and_back(x, name, 1))
    assert not torch.equal(there_and_back(x, name, 1), there_and_back(x, name, 2))


@pytest.mark.parametrize("name", k.FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_makes_nans_of_its_block(name, bad):
    x = torch.ones(1024, device=DEVICE)
    x[5] = bad
    block = k.FORMATS[name].block
    decoded = there_and_back(x, name)
    assert decoded[:block].isnan().all() and torch.allclose(decoded[block:], x[block:], rtol=0.01)


@pytest.mark.parametrize("name", k.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_numbers(name, dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest] * 300, dtype=dtype, device=DEVICE)
    decoded = there_and_back(x, name)
    assert decoded.isfinite().all()
    step = 2.05 / (2 ** k.FORMATS[name].bits - 1)
    assert ((decoded.double() - x.double()) / largest).abs().max() < step


@only_interpreted
@pytest.mark.parametrize("name", k.FORMATS)
def test_a_spoilt_store_is_seen(name):
    x = maker(torch.float32)(3, 512)
    expected = there_and_back(x, name)
    for store in [("encode_kernel", "codes_ptr"), ("encode_kernel", "bounds_ptr"), ("decode_kernel", "x_ptr")]:
        with watching(spoil=store) as watch:
            assert not torch.equal(there_and_back(x, name), expected)
        form = k.FORMATS[name]
        wanted = 2 + form.bits / 8 + 2 * (4 if form.bounds == torch.float32 else 2) / form.block
        moved = [sum(one.read.values()) + sum(one.written.values()) for one in watch.launches]
        expected_bytes = x.numel() * (wanted + 2)  # float32 here: two bytes more
        assert moved == [expected_bytes + x.itemsize, expected_bytes]  # and the last element, to fill the last block


@pytest.mark.parametrize("name", k.FORMATS)
def test_nothing(name):
    assert there_and_back(torch.empty(0, device=DEVICE), name).shape == (0,)
