"""``sign_bit``: an activation and its linear that keep one tensor; stock's output, and a rounding error as stated."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from hf_memsave.errors import PatchError
from hf_memsave.ops.approximate.inverse import ACTIVATIONS, FITS, slope, wide
from hf_memsave.ops.approximate.sign_bit import SignBit, offset, sign_bit
from support.helpers import DTYPES, assert_same_bits, autocasting, kept, nbytes, random
from support.pairs import pairwise
from support.script_helpers import load_script
from support.slopes import SLOPE, assert_errs_by_slope

HALVES = (torch.bfloat16, torch.float16)


def given(*shape, dtype=torch.float32, device="cpu"):
    return [random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate((shape, (4, 8), (4,)))]


def gradients(fn, x, weight, bias, dz):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    z = fn(*leaves)
    return z.detach(), *torch.autograd.grad(z, leaves, dz)


def both(name, x, weight, bias, dz):
    forward = ACTIVATIONS[name]
    mine = gradients(lambda x, w, b: sign_bit(x, name, forward, w, b), x, weight, bias, dz)
    return mine, gradients(lambda x, w, b: F.linear(forward(x), w, b), x, weight, bias, dz)


@pytest.mark.parametrize(("name", "dtype", "shape"), pairwise(ACTIVATIONS, DTYPES, [(6, 8), (2, 3, 8), (8,), (0, 8)]))
def test_sign_bit_output_and_bias_gradient_are_stocks(device, name, dtype, shape):
    x, weight, bias = given(*shape, dtype=dtype, device=device)
    dz = random(*shape[:-1], 4, dtype=dtype, device=device, seed=5)
    mine, stock = both(name, 3 * x, weight, bias, dz)
    assert_same_bits(mine[0], stock[0], "output")
    assert_input_gradient(mine[1], name, 3 * x, weight, dz)
    assert_bias_gradient(mine[3], dz)


def assert_input_gradient(dx, name, x, weight, dz, low=None):
    """The slope's error, and the rounding of both products: in ``dz``'s dtype (``low`` under autocast) and in x's."""
    exact, size = dz.double() @ weight.double(), dz.double().abs() @ weight.double().abs()
    leaf = x.double().requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS[name](leaf).sum(), leaf)
    rounding = (len(weight) * torch.finfo(low or dz.dtype).eps + 2 * torch.finfo(x.dtype).eps) * size
    assert_errs_by_slope(dx, exact * slope, exact, SLOPE[x.dtype], 1.2 * rounding)


def assert_bias_gradient(db, dz):
    """Rounded at most once for each row, and once more."""
    rows = dz.double().reshape(-1, dz.shape[-1])
    room = (len(rows) + 1) * torch.finfo(dz.dtype).eps * rows.abs().sum(0)
    assert ((db.double() - rows.sum(0)).abs() <= room).all()


@pytest.mark.parametrize(("name", "dtype"), pairwise(ACTIVATIONS, [torch.float32, *HALVES]))
def test_sign_bit_weight_gradient_errs_as_stated_and_x_alone_is_kept(device, name, dtype):
    x, weight, bias = given(64, 8, dtype=dtype, device=device)
    dz = random(64, 4, dtype=dtype, device=device, seed=5)
    found = both(name, 3 * x, weight, bias, dz)[0][2]
    y = ACTIVATIONS[name](3 * x).double()
    exact, size = dz.double().T @ y, dz.double().abs().T @ (y.abs() - offset(FITS[name]))
    epsilon = torch.finfo(dtype).eps
    rounding = epsilon * (64 if dtype == torch.float32 else 1) * (dz.double().abs().T @ y.abs())  # of the product
    assert ((found.double() - exact).abs() <= epsilon * size + rounding).all()
    weight = torch.nn.Parameter(weight)
    assert kept(lambda x: sign_bit(x, name, ACTIVATIONS[name], weight), x, tape=False, linear=False) == nbytes(x)


@pytest.mark.parametrize(("name", "dtype"), pairwise(ACTIVATIONS, HALVES))
def test_sign_bit_slope_from_every_half(device, name, dtype, monkeypatch):
    slopes = load_script("slopes", monkeypatch)
    x = slopes.every(dtype).to(device)
    fit, forward = FITS[name], ACTIVATIONS[name]
    true = slopes.true_slope(name, x)
    weight = torch.ones(1, 1, dtype=dtype, device=device)
    leaf = x.clone().unsqueeze(1).requires_grad_()
    (dx,) = torch.autograd.grad(sign_bit(leaf, name, forward, weight).sum(), leaf)
    best = (slopes.slope_of_exact_inverse(name, x) - true).abs().max()
    rounding = torch.finfo(dtype).eps * 1.13 / 2
    assert not dx.isnan().any()
    assert (dx.squeeze(1).double() - true).abs().max() <= 1.2 * best + rounding
    # Every y is above the offset, so its sign is free to hold the indicator.
    y = forward(x)
    assert (y > offset(fit)).all()
    k = wide(y - offset(fit)) + offset(fit)
    assert (slope(k, x < fit.turn, fit, fit.ulp(dtype)) - true).abs().max() <= 1.2 * best


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_sign_bit_computes_what_is_wanted(device, wanted):
    tensors = dict(zip(("x", "weight"), given(6, 8, device=device), strict=False))
    tensors[wanted].requires_grad_()
    sign_bit(tensors["x"], "silu", F.silu, tensors["weight"]).sum().backward()
    assert [name for name, tensor in tensors.items() if tensor.grad is not None] == [wanted]


def test_sign_bit_under_autocast(device):
    x, weight, bias = given(6, 8, device=device)
    dz = random(6, 4, dtype=torch.bfloat16, device=device)
    with autocasting(device, torch.bfloat16):
        mine, stock = both("gelu", x, weight, bias, dz)
    assert_same_bits(mine[0], stock[0], "output")
    assert {t.dtype for t in (*mine[1:], *stock[1:])} == {torch.float32}
    assert_input_gradient(mine[1], "gelu", x, weight, dz, low=torch.bfloat16)
    y, size = F.gelu(x.double()), dz.double().abs().T @ (F.gelu(x.double()).abs() - offset(FITS["gelu"]))
    room = (2 + len(x)) * torch.finfo(torch.bfloat16).eps * size
    assert ((mine[2].double() - dz.double().T @ y).abs() <= room).all()
    assert_bias_gradient(mine[3], dz)


@pytest.mark.parametrize("change", [None, "lora", "hook", "pre-hook"])
def test_sign_bit_as_a_layer_runs_what_was_made_of_its_linear(device, change):
    """Parameters and gradients of the two layers that it is made of."""
    stock = torch.nn.Sequential(torch.nn.GELU(approximate="tanh"), torch.nn.Linear(8, 4)).to(device)
    layer, x = SignBit(*stock), random(6, 8, device=device).requires_grad_()
    assert {id(p) for p in layer.parameters()} == {id(p) for p in stock.parameters()}
    model = torch.nn.Sequential(layer)
    if change == "lora":
        model = get_peft_model(model, LoraConfig(target_modules=["linear"], init_lora_weights=False))
    elif change == "hook":
        layer.linear.register_forward_hook(lambda module, args, output: 2 * output)
    elif change == "pre-hook":
        layer.linear.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert_same_bits(model(x), layer.linear(layer.activation(x)))
    dz = random(6, 4, device=device, seed=1)
    model(x).backward(dz)
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    if change is None:
        weight, bias = stock[1].weight, stock[1].bias
        made = gradients(lambda x, w, b: sign_bit(x, "gelu_tanh", stock[0], w, b), x, weight, bias, dz)
        for mine, expected in zip((x, weight, bias), made[1:], strict=True):
            assert_same_bits(mine.grad, expected)


def test_sign_bit_refuses_double_backward_and_what_it_cannot_take(device):
    x, weight, _ = given(6, 8, device=device)
    (dx,) = torch.autograd.grad(sign_bit(x.requires_grad_(), "gelu", F.gelu, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
    for activation in (torch.nn.ReLU(), torch.nn.SiLU(inplace=True)):
        with pytest.raises(PatchError, match=r"one of gelu, .* with inplace=False, got .*LU\(.* Use nn.Sequential"):
            SignBit(activation, torch.nn.Linear(8, 4))
