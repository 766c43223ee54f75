"""``wta_crs``: stock's bits in all but the weight gradient, and that from the rows that the sampler drew."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch
from hf_memsave.ops.sampled.wta_crs import LAYER
from hf_memsave.patching.sampled_layers import sampler_of
from support.helpers import assert_same_bits, autocasting, nbytes, random
from support.pairs import pairwise
from support.steps import patched_copy

IN, OUT = 6, 5
LAYERS = {
    "linear": lambda: nn.Linear(IN, OUT),
    "no bias": lambda: nn.Linear(IN, OUT, bias=False),
    "conv1d": lambda: Conv1D(OUT, IN),
}
VIEWS = {
    "2-D": lambda x: x.flatten(0, 1), "3-D": lambda x: x, "4-D": lambda x: x.view(2, 2, *x.shape[1:]),
    "transposed": lambda x: x.transpose(0, 1), "sliced": lambda x: torch.cat([x, x], -1)[..., IN:],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
}  # fmt: skip
#: Stock's Conv1D takes contiguous input only.
CASES = [
    case for case in pairwise(LAYERS, ["fp32", "bf16", "autocast"], VIEWS) if case[0] != "conv1d" or "-D" in case[2]
]


def twins(device, dtype=torch.float32, layer="linear", **options):
    torch.manual_seed(0)
    stock = nn.Sequential(LAYERS[layer]()).to(device, dtype).train()
    if layer == "conv1d":
        nn.init.normal_(stock[0].bias)
    return patched_copy(stock, MemSaveConfig(linear=WTACRS(minimum=1, **options))), stock


def run(model, x, view=VIEWS["3-D"], autocast=None, device="cpu"):
    model.zero_grad()
    x = x.clone().requires_grad_()
    with autocasting(torch.device(device), autocast):
        y = model(view(x * 1))
    y.backward(random(*y.shape, dtype=y.dtype, device=y.device, seed=3))
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("layer", "mode", "view"), CASES)
def test_all_but_the_weight_gradient_has_stocks_bits(device, layer, mode, view):
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    low = torch.bfloat16 if mode == "autocast" else None
    mine, stock = twins(device, dtype, layer)
    x = random(4, 8, IN, dtype=dtype, device=device)
    got, expected = (run(model, x, VIEWS[view], low, device) for model in (mine, stock))
    assert_same_bits(got[0], expected[0], "output")
    assert_same_bits(got[1], expected[1], "gradient of the input")
    for name, gradient in expected[2].items():
        if name.endswith("bias"):
            assert_same_bits(got[2][name], gradient, name)
        else:
            assert got[2][name].dtype == gradient.dtype
            assert not torch.equal(got[2][name], gradient), "nothing was sampled"


@pytest.mark.parametrize("layer", LAYERS)
def test_the_weight_gradient_is_that_of_the_drawn_rows(device, layer):
    (mine, _), drawn = twins(device, layer=layer), []
    sampler = sampler_of(mine)
    draw = sampler.draw
    sampler.draw = lambda *args: drawn.append(draw(*args)) or drawn[0]
    x = random(4, 8, IN, device=device)
    dz = random(4, 8, OUT, device=device, seed=3).flatten(0, 1)
    weight = run(mine, x)[2]["0.weight"]
    index, scale = drawn[0]
    expected = (dz[index] * scale[:, None]).T @ x.flatten(0, 1)[index]
    torch.testing.assert_close(weight, expected.T if layer == "conv1d" else expected)


@pytest.mark.parametrize("why", ["frozen", "eval", "layer in eval", "no grad", "enough rows", "few tokens", "minimum"])
def test_what_is_not_sampled_is_stock_to_the_bit(device, why):
    mine, stock = twins(device, budget=1.0 if why == "enough rows" else 0.3)
    x = random(1, 1, IN, device=device) if why == "few tokens" else random(4, 8, IN, device=device)
    if why == "minimum":  # of as many tokens as there are
        patch(mine, MemSaveConfig(linear=WTACRS(minimum=32)), replace=True)
    for model in (mine, stock):
        if why == "frozen":
            model[0].weight.requires_grad_(False)
        if why == "eval":
            model.eval()
        if why == "layer in eval":
            model[0].eval()
    if why == "no grad":
        with torch.no_grad():
            assert_same_bits(mine(x), stock(x))
        return
    (*got, of_mine), (*expected, of_stock) = run(mine, x), run(stock, x)
    for a, b in zip((*got, *of_mine.values()), (*expected, *of_stock.values()), strict=True):
        assert_same_bits(a, b)


class Attention(nn.Module):
    """Three linears that share an input, and something that keeps it or not."""

    def __init__(self, how):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.norm, self.how = nn.LayerNorm(64), how

    def forward(self, x):
        x = self.norm(x) if self.how == "remade" else torch.ops.aten.clone(x)  # which nothing can remake
        if self.how.startswith("kept"):
            x = torch.sigmoid(x)
        if self.how.endswith("written"):
            y = self.layers[0](x)
            return {"loss": y.sum() + self.layers[1](x.mul_(-3)).sum()}
        return {"loss": sum(layer(x).sum() for layer in self.layers)}


def attention(how, device, dtype=torch.float32):
    torch.manual_seed(0)
    model = Attention(how).to(device, dtype).train()
    patch(model, MemSaveConfig(linear=WTACRS(budget=0.25, targets=("layers",))))
    return model


@pytest.mark.parametrize(
    ("how", "dtype"),
    [("remade", torch.float32), ("kept", torch.bfloat16), ("free", torch.float32), ("free", torch.bfloat16)],
)
def test_q_k_and_v_share_one_draw_and_kept_are_indices_and_scales_or_one_set_of_rows(device, how, dtype):
    x = random(4, 32, 64, dtype=dtype, device=device).requires_grad_()
    model, draws = attention(how, device, dtype), []
    sampler = sampler_of(model)
    draw = sampler.draw
    sampler.draw = lambda *args: draws.append(args[0]) or draw(*args)
    sampled = measure_kept(model, x).total
    assert draws == ["layers.0"]
    patch(model, replace=True)
    exact = measure_kept(model, x).total
    k = 32
    mask = nbytes(x[..., 0].bool())  # that all tokens are real
    if how == "free":
        assert exact - sampled == nbytes(x) - k * (64 * dtype.itemsize + 4) - mask
    else:
        assert sampled - exact == 8 * k + mask


def test_the_rows_of_a_changed_input_are_drawn_again(device):
    model, x = attention("written", device), random(4, 32, 64, device=device).requires_grad_()
    model(x)["loss"].backward()
    drawn = model.layers[1].weight.grad[0]
    with torch.no_grad():
        assert F.cosine_similarity(drawn, (-3 * x).sum((0, 1)), dim=0) > 0.2


@pytest.mark.parametrize("of", ["a sum", "a square"])
def test_a_second_backward_gives_the_same_bits_and_a_second_derivative_raises(device, of):
    mine, _ = twins(device)
    x = random(4, 6, IN, device=device).requires_grad_()
    y = mine(x)
    y = y.sum() if of == "a sum" else y.square().sum()  # of a sum, the incoming gradient requires none
    first, again, third = (torch.autograd.grad(y, list(mine.parameters()), retain_graph=True) for _ in range(3))
    for a, b, c in zip(first, again, third, strict=True):
        assert_same_bits(b, a)
        assert_same_bits(c, a)
    gradients = torch.autograd.grad(y, [x, mine[0].weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(gradient.square().sum() for gradient in gradients).backward()


def test_a_changed_input_raises_as_in_stock(device):
    model = attention("kept, then written", device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(random(4, 32, 64, device=device).requires_grad_())["loss"].backward()


@pytest.mark.parametrize(("where", "odd"), [("input", torch.nan), ("gradient", torch.nan), ("gradient", torch.inf)])
def test_what_is_not_finite_is_passed_on_and_not_learned(device, where, odd):
    mine, _ = twins(device, budget=0.5)
    x, dz = random(4, 8, IN, device=device), random(4, 8, OUT, device=device, seed=3)
    mine(x).backward(dz)
    before = sampler_of(mine).cache.state_dict()
    mine.zero_grad()
    (x if where == "input" else dz)[1, 2, 3] = odd
    mine(x).backward(dz)
    gradient = mine[0].weight.grad if where == "input" else mine[0].bias.grad
    assert not gradient.isfinite().all()
    profiles = [t for t in sampler_of(mine).cache.state_dict().values() if t.is_floating_point()]
    assert all(t.isfinite().all() for t in profiles)
    if where == "gradient":
        assert all(torch.equal(t, before[name]) for name, t in sampler_of(mine).cache.state_dict().items())


def test_each_step_draws_rows_of_its_own_and_the_models_generators_are_untouched(device):
    (mine, stock), x = twins(device, cache=None), random(4, 8, IN, device=device)
    before = torch.get_rng_state()
    first, second, exact = (run(model, x)[2]["0.weight"] for model in (mine, mine, stock))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second) and not torch.equal(first, exact)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_draws_the_same_and_learns_for_itself(device, how):
    mine, _ = twins(device)
    x = random(4, 8, IN, device=device)
    run(mine, x)
    other = copy.deepcopy(mine) if how == "deepcopy" else pickle.loads(pickle.dumps(mine))
    assert sampler_of(other) is not sampler_of(mine)
    assert other[0].__dict__[LAYER].sampler is sampler_of(other)
    assert_same_bits(run(other, x)[2]["0.weight"], run(mine, x)[2]["0.weight"])
    run(other, x)
    assert sampler_of(other).step == sampler_of(mine).step + 1
