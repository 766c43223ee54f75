"""The codecs: unbiased, within a step, what is not finite stays, and 1% of an error is seen."""

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


#: The step of the finite numbers of a mixed block, beside that of their range in another one.
COARSER = {"int8": 4.2, "int4": 3.4}


@pytest.mark.parametrize("name", k.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf"), "min", -1e4], ids=str)
def test_what_is_far_from_the_rest_of_its_block_stays_and_the_rest_is_unbiased(odd, dtype, name):
    block, value = k.FORMATS[name].block, torch.finfo(dtype).min if odd == "min" else odd
    x = maker(dtype)(block)
    is_odd = torch.arange(block, device=DEVICE) % 5 == 1
    x[is_odd] = value
    draws = there_and_back(torch.cat([x.repeat(200), x[:7]]), name)[:-7].view(200, block).double()
    mean = draws[:, is_odd].mean(0)  # of a number between two in bfloat16, which bounds M
    torch.testing.assert_close(mean, x[is_odd].double(), equal_nan=True, rtol=0 if name == "int8" else 4e-3, atol=0)
    rest = x[~is_odd].double()
    step = COARSER[name] * (rest.max() - rest.min()) / (2 ** k.FORMATS[name].bits - 1)
    slack = torch.finfo(dtype).eps * rest.abs() + 1e-6
    assert ((draws[:, ~is_odd] - rest).abs() <= step + slack).all()
    assert ((draws[:, ~is_odd].mean(0) - rest).abs() <= 5 * step / 2 / 200**0.5 + slack).all()


@pytest.mark.parametrize("name", k.FORMATS)
def test_other_blocks_of_the_tensor_have_the_codes_they_had(name):
    x, block = maker(torch.float32)(8192), k.FORMATS[name].block
    plain = k.encode(x, name, 3)
    x[5] = float("nan")
    for found, expected in zip(k.encode(x, name, 3), plain, strict=True):
        assert torch.equal(found[1:], expected[1:]) and not torch.equal(found[:1], expected[:1])
    assert there_and_back(x, name)[:block].isnan().sum() == 1


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
