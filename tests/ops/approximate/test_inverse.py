"""``inverse``: the slope from the output, against f' in float64, over every half-precision input; and its fits."""

import json

import pytest
import torch
import torch.nn.functional as F

from hf_memsave.arch.sites import ACTIVATIONS as CLASSES
from hf_memsave.ops.approximate.elementwise import ACTIVATIONS
from hf_memsave.ops.approximate.inverse import FITS, InverseFit, slope, wide
from support.script_helpers import load_script

HALVES = (torch.bfloat16, torch.float16)
FROM_FP32 = 1e-3
FROM_HALF = 1.1  # times the error of the exact inverse
FROM_PRECISION_BIT = 1.5
AFAR = 1e-5
SLOPES = ["slope_from_output", "slope_from_precision_bit"]


@pytest.fixture
def slopes(monkeypatch):
    return load_script("slopes", monkeypatch)


@pytest.fixture(params=FITS)
def name(request):
    return request.param


def error(found, true):
    assert not found.isnan().any()
    return (found - true).abs()


def test_slope_from_fp32_is_near_the_derivative(device, slopes, name):
    x = slopes.dense().to(device)
    true = slopes.true_slope(name, x)
    for method in SLOPES:
        assert error(getattr(slopes, method)(name, x), true).max() <= FROM_FP32
    assert error(slopes.slope_from_output(name, x.double()), slopes.true_slope(name, x.double())).max() <= FROM_FP32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_slope_from_every_half_is_near_that_of_the_exact_inverse(device, slopes, name, dtype):
    x = slopes.every(dtype).to(device)
    assert len(x) == 2**16 - (2**8 if dtype == torch.bfloat16 else 2**11)
    true = slopes.true_slope(name, x)
    best = error(slopes.slope_of_exact_inverse(name, x), true).max()
    for method, factor in zip(SLOPES, (FROM_HALF, FROM_PRECISION_BIT), strict=True):
        assert error(getattr(slopes, method)(name, x), true).max() <= factor * best


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_slope_far_out_is_zero_or_one(device, slopes, name, dtype):
    x = (slopes.dense() if dtype == torch.float32 else slopes.every(dtype)).to(device)
    x = x[x.abs() >= 15]
    for method in SLOPES:
        found = getattr(slopes, method)(name, x)
        assert error(found, slopes.true_slope(name, x)).max() <= AFAR
        assert (found[x > 0] == 1).all()
        assert found[x < -30].abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_slope_is_finite_for_outputs_rounded_below_the_minimum(device, name, dtype):
    fit = FITS[name]
    lowest = torch.tensor(sum(fit.minimum), dtype=dtype, device=device)
    y = torch.stack([lowest + k * fit.ulp(dtype) for k in range(-4, 5)]).to(dtype)
    for left in (True, False):
        found = slope(wide(y), torch.full(y.shape, left, device=device), fit, fit.ulp(dtype))
        assert found.isfinite().all()
        assert (found <= 0).all() if left else (found >= 0).all()


def test_slope_of_nan_is_nan_and_of_inf_is_one(device, name):
    y = torch.tensor([float("nan"), float("inf"), torch.finfo(torch.float32).max], device=device)
    found = slope(y, torch.zeros(3, dtype=torch.bool, device=device), FITS[name], FITS[name].ulp(torch.float32))
    assert found[0].isnan()
    assert found[1:].tolist() == [1, 1]


def test_another_flavours_fit_is_caught(slopes):
    x = slopes.dense()
    fit, y = FITS["gelu"], ACTIVATIONS["gelu_tanh"](x)
    found = slope(wide(y), x < fit.turn, fit, fit.ulp(y.dtype))
    assert error(found, slopes.true_slope("gelu_tanh", x)).max() > 5 * FROM_FP32


@pytest.mark.parametrize(("name", "theirs"), [("gelu", 0.0187), ("silu", 0.0029)])
def test_invacts_own_coefficients_err_as_published(slopes, name, theirs):
    x = torch.linspace(-10, 10, 400_001)
    true = slopes.true_slope(name, x)
    assert error(slopes.invact(name, x), true).max() == pytest.approx(theirs, abs=1e-4)
    assert error(slopes.slope_from_output(name, x), true).max() < theirs / 5


def test_every_activation_has_its_own_fit():
    assert list(FITS) == list(ACTIVATIONS)
    for fit in FITS.values():
        assert len(fit.left) <= 7
        assert len(fit.right) <= 11
        assert fit.minimum[0] == torch.tensor(fit.minimum[0], dtype=torch.float32).item()


def test_the_script_makes_the_fits_again(monkeypatch, slopes):
    again = load_script("fit_inverse", monkeypatch).fit(ACTIVATIONS["silu"])
    assert again.turn == pytest.approx(FITS["silu"].turn, abs=1e-12)
    x = slopes.dense()
    before = slopes.slope_from_output("silu", x)
    monkeypatch.setitem(FITS, "silu", again)
    assert (slopes.slope_from_output("silu", x) - before).abs().max() < 1e-5


def test_a_new_activation_is_one_entry(monkeypatch, slopes):
    script = load_script("fit_inverse", monkeypatch)
    monkeypatch.setitem(ACTIVATIONS, "mish", F.mish)
    written = json.loads(json.dumps(script.rounded(script.fit(F.mish))._asdict()))
    monkeypatch.setitem(FITS, "mish", InverseFit(**written))
    x = slopes.dense()
    assert error(slopes.slope_from_output("mish", x), slopes.true_slope("mish", x)).max() <= 2e-3


def test_every_activation_that_can_be_approximated_has_a_fit():
    assert set(CLASSES.values()) == set(ACTIVATIONS) == set(FITS)
