"""``inverse``: the slope from the output, against f' in float64, over every half-precision input; and its fits."""

import json

import pytest
import torch
import torch.nn.functional as F

from hf_memsave.arch.sites import ACTIVATIONS as CLASSES
from hf_memsave.ops.approximate.inverse import ACTIVATIONS, FITS, InverseFit, slope, wide
from support.script_helpers import load_script

HALVES = (torch.bfloat16, torch.float16)
FROM_FP32 = 1e-3
#: Each way to a slope, and its largest error from halves, in those of the exact inverse.
FACTORS = {"slope_from_output": 1.1, "slope_from_precision_bit": 1.5}


@pytest.fixture
def slopes(monkeypatch):
    return load_script("slopes", monkeypatch)


@pytest.fixture(params=FITS)
def name(request):
    return request.param


def error(found, true):
    assert not found.isnan().any()
    return (found - true).abs()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_slope_is_near_the_derivative(device, slopes, name, dtype):
    """From every half there is, as near as the exact inverse's; and 0 or 1 far out."""
    x = (slopes.dense() if dtype == torch.float32 else slopes.every(dtype)).to(device)
    true, far = slopes.true_slope(name, x), x.abs() >= 15
    if dtype != torch.float32:
        assert len(x) == 2**16 - (2**8 if dtype == torch.bfloat16 else 2**11)
        best = error(slopes.slope_of_exact_inverse(name, x), true).max()
    for method, factor in FACTORS.items():
        found = getattr(slopes, method)(name, x)
        wrong = error(found, true)
        assert wrong.max() <= (FROM_FP32 if dtype == torch.float32 else factor * best)
        assert wrong[far].max() <= 1e-5
        assert (found[x >= 15] == 1).all() and found[x < -30].abs().max() <= 1e-6


def test_slope_from_fp64_is_near_the_derivative(device, slopes, name):
    x = slopes.dense().to(device).double()
    assert error(slopes.slope_from_output(name, x), slopes.true_slope(name, x)).max() <= FROM_FP32


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


@pytest.mark.parametrize(("name", "theirs"), [("gelu", 0.0187), ("silu", 0.0029)])
def test_invacts_own_coefficients_err_as_published(slopes, name, theirs):
    x = torch.linspace(-10, 10, 400_001)
    true = slopes.true_slope(name, x)
    assert error(slopes.invact(name, x), true).max() == pytest.approx(theirs, abs=1e-4)
    assert error(slopes.slope_from_output(name, x), true).max() < theirs / 5


def test_every_activation_has_its_own_fit():
    assert list(FITS) == list(ACTIVATIONS) and set(CLASSES.values()) == set(FITS)
    for fit in FITS.values():
        assert len(fit.left) <= 7 and len(fit.right) <= 11
        assert fit.minimum[0] == torch.tensor(fit.minimum[0], dtype=torch.float32).item()


def test_a_new_activation_is_one_entry(monkeypatch, slopes):
    script = load_script("fit_inverse", monkeypatch)
    monkeypatch.setitem(ACTIVATIONS, "mish", F.mish)
    written = json.loads(json.dumps(script.rounded(script.fit(F.mish))._asdict()))
    monkeypatch.setitem(FITS, "mish", InverseFit(**written))
    x = slopes.dense()
    assert error(slopes.slope_from_output("mish", x), slopes.true_slope("mish", x)).max() <= 2e-3
