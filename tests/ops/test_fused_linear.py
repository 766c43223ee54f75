"""Linears with fp32 parameters under autocast, fused: gradients, what is converted when, and who writes in between."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import BertConfig, BertForSequenceClassification
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from hf_memsave import MemSaveConfig, measure_kept, patch, unpatch
from hf_memsave.device import is_autocast
from hf_memsave.ops.fused import dropout_norm, linear
from support.fused_linear import LOW, TRITON, Attention, assert_same_step, autocast, far, net, patched, step
from support.helpers import assert_same_bits, random
from support.kernels import interpreted, rounding  # noqa: F401

pytestmark = interpreted


@pytest.mark.parametrize("dtype", [torch.float32, LOW], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_gradients_are_nearer_to_float64_than_stocks(device, kind, bias, dtype):
    if kind == "addmm" and not bias:
        pytest.skip("does not apply: it has one")
    layer = nn.Linear(48, 40, bias=bias) if kind == "linear" else Conv1D(40, 48)
    model = net(device, layer)
    ratios = []
    for seed in range(12):
        x, dy = random(3, 50, 48, device=device, seed=seed).to(dtype), random(3, 50, 40, device=device, seed=seed + 99)

        def found(model, x=x, dy=dy):
            x = x.detach().clone().requires_grad_()
            with autocast(device):
                y = model(x)
            return torch.autograd.grad(y, [x, *model.parameters()], dy.to(y.dtype))

        wide = copy.deepcopy(model).double()
        for p in wide.parameters():
            p.data = p.to(LOW).double()
        into = x.to(LOW).double().requires_grad_()
        exact = torch.autograd.grad(wide(into), [into, *wide.parameters()], dy.to(LOW).double())
        ratios.append([a / b for a, b in zip(far(found(patched(model)), exact), far(found(model), exact), strict=True)])
    dx, dw, *db = torch.tensor(ratios).mean(0).tolist()
    assert dw < 0.01, "nothing is rounded to 16 bits"
    assert dx < 0.01 if dtype == torch.float32 else dx <= 1.001
    assert all(d < 0.01 for d in db)


@pytest.mark.parametrize("make", [nn.Linear, Conv1D])
def test_a_step_is_stocks_with_the_conversions_of_a_block_at_once(device, make, made):
    assert_same_step(Attention(make=make).to(device), random(5, 24, device=device), device)
    assert made == {1: 8 + 4, 8: 2, 4: 2}, "one by one, and in the two steps after that together"


def test_an_input_is_converted_once(device, monkeypatch):
    given, cast = [], linear._cast
    monkeypatch.setattr(linear, "_cast", lambda tape, x, dtype: given.append(x.shape) or cast(tape, x, dtype))
    model = patched(Attention().to(device))
    step(model, random(5, 24, device=device), device)
    assert len(given) == 1, "q, k and v share one; the last one is given 16 bits"


@pytest.mark.parametrize("options", [{"cache_enabled": False}, {"enabled": False}], ids=str)
def test_other_autocasts(device, options):
    assert_same_step(Attention().to(device), random(5, 24, device=device), device, **options)


def test_autocast_that_is_off_inside(device):
    class Off(Attention):
        def forward(self, x):
            with autocast(device, enabled=False):
                q = self.q(x)
            return self.o(q * self.k(x).float() + self.v(x))

    assert_same_step(Off().to(device), random(5, 24, device=device), device)


def test_backward_under_autocast(device):
    model, x = patched(Attention().to(device)), random(5, 24, device=device)
    outside = step(model, x, device)
    model.zero_grad()
    with autocast(device):
        model(x * 1.5).float().cos().sum().backward()
    for p, g in zip(model.parameters(), outside[2:], strict=True):
        assert_same_bits(p.grad, g)


def test_frozen_parts_and_inputs_without_gradients(device):
    model = Attention().to(device)
    model.q.requires_grad_(False)
    model.k.bias.requires_grad_(False)
    ours = patched(model)
    x = random(5, 24, device=device)
    for m in (model, ours):
        with autocast(device):
            m(x).float().cos().sum().backward()
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.03, atol=0.05)


@pytest.mark.parametrize("shape", [(24,), (0, 24), (2, 0, 24), (1, 2, 3, 24)], ids=str)
def test_odd_shapes(device, shape):
    assert_same_step(net(device, nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2)), random(*shape, device=device), device)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 24), (2, 3, 24), (1, 2, 3, 24)], ids=str)
def test_its_output_may_be_written_to(device, shape, bias):
    class Written(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y += x.sin()
            y[..., 0].mul_(2)
            return y

    assert_same_step(net(device, Written(24, 24, bias=bias)), random(*shape, device=device), device)


def test_nothing_is_converted_where_nobody_differentiates(device, made):
    model, x = Attention().to(device), random(5, 24, device=device)
    ours = patched(model)
    with torch.no_grad(), autocast(device):
        assert_same_bits(ours(x), model(x))
    assert not made


def test_it_keeps_what_the_torch_backend_keeps_and_no_more(device):
    model, x = net(device, nn.LayerNorm(24), Attention(), nn.Tanh(), Attention()), random(64, 24, device=device)

    def kept(config):
        ours = copy.deepcopy(model)
        patch(ours, config)

        def forward(x):
            with autocast(device):
                return ours(x).float().sum()

        forward(x).backward()
        return measure_kept(ours, {"x": x}, forward).total

    assert kept(TRITON) <= kept(MemSaveConfig())


def test_second_derivatives_are_refused(device):
    model = patched(net(device, nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)))
    x = random(5, 24, device=device).requires_grad_()
    with autocast(device):
        y = model(x)
    (dx,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()


def test_undone_it_is_stock(device):
    model, x = Attention().to(device), random(5, 24, device=device)
    ours = patched(model)
    step(ours, x, device)
    unpatch(ours)
    for mine, theirs in zip(step(ours, x, device), step(model, x, device), strict=True):
        assert_same_bits(mine, theirs)


def test_a_product_of_others_is_stocks(device):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(random(24, 24, device=device))

        def forward(self, x):
            return F.linear(input=x, weight=self.weight) + F.linear(x, self.weight * 2) + x @ self.weight

    assert_same_step(Functional().to(device), random(5, 24, device=device), device)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_norm_gives_the_next_linears_its_output_in_16_bits(device, p, monkeypatch):
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50,
        hidden_dropout_prob=p, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).to(device).train()
    batch = {"input_ids": torch.arange(12, device=device).view(2, 6), "labels": torch.tensor([0, 1], device=device)}

    def gradients(model):
        torch.manual_seed(1)
        model.zero_grad()
        with autocast(device):
            model(**batch).loss.backward()
        return [q.grad.clone() for q in model.parameters()]

    ours = patched(model)
    monkeypatch.setattr(dropout_norm, "widens", lambda x, _: is_autocast(x))  # CPU's autocast leaves norms in 16 bits
    own, given = [], []
    cast, give_low = linear._cast, dropout_norm.give_low
    monkeypatch.setattr(linear, "_cast", lambda tape, x, dtype: own.append(x.shape) or cast(tape, x, dtype))
    monkeypatch.setattr(dropout_norm, "give_low", lambda *args: given.append(args) or give_low(*args))
    with_low = gradients(ours)
    assert len(given) == 4
    assert len(own) == 2, "the embeddings' norm, and the first token's"
    monkeypatch.setattr(dropout_norm, "give_low", lambda *args: None)
    for a, b in zip(with_low, gradients(ours), strict=True):
        assert_same_bits(a, b)
    if not p:
        for a, b in zip(with_low, gradients(model), strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * float(b.abs().max()) + 1e-4)


class Bare(nn.Module):
    """``F.linear`` of parameters of these shapes."""

    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight = nn.Parameter(random(*weight))
        self.bias = None if bias is None else nn.Parameter(random(*bias, seed=2))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("weight", "bias"), [((6, 24), (1, 6)), ((6, 24), (5, 6)), ((0, 24), (0,)), ((6, 24), (6,))], ids=str
)
def test_odd_parameters(device, weight, bias):
    assert_same_step(Bare(weight, bias).to(device), random(5, 24, device=device), device)


def test_a_weight_without_inputs(device):
    class Nothing(Bare):
        def forward(self, x):
            return super().forward(x[:, :0])

    assert_same_step(Nothing((6, 0), (6,)).to(device), random(5, 24, device=device), device)


def test_an_input_of_inference_mode(device):
    model = net(device, nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))
    with torch.inference_mode():
        x = random(5, 24, device=device)
    for m in (model, ours := patched(model)):
        with autocast(device):
            m(x).float().cos().sum().backward()
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.03, atol=0.05)


def test_a_thin_linear_is_made_again(device):
    class Thin(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(128, 8), nn.Linear(8, 128), nn.Linear(128, 128)

        def forward(self, x):
            u = self.b(self.a(x))
            return self.c(torch.sigmoid(u) * x) * u

    x = random(64, 128, device=device)

    def kept(config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(128), Thin()).to(device)
        patch(model, config)

        def forward(x):
            with autocast(device):
                return model(x).float().square().sum()

        for _ in range(3):
            forward(x).backward()
        return measure_kept(model, {"x": x}, forward).total

    assert kept(TRITON) <= kept(MemSaveConfig())


def test_modes_and_subclasses_of_others_see_the_call(device):
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += func is F.linear
            return func(*args, **(kwargs or {}))

    class Meta(torch.Tensor):
        pass

    model, x = patched(Attention().to(device)), random(5, 24, device=device)
    with Counting() as mode, autocast(device):
        model(x)
    assert mode.calls == 4
    with autocast(device):
        assert type(model(x.as_subclass(Meta))) is Meta


class Block(GradientCheckpointingLayer):
    """An MLP, of linears or of GPT-2's ``Conv1D``."""

    def __init__(self, make):
        super().__init__()
        sizes = [(24, 96), (96, 24)] if make is nn.Linear else [(96, 24), (24, 96)]
        self.c_fc, self.c_proj = (make(*size) for size in sizes)

    def forward(self, x):
        return self.c_proj(self.c_fc(x).tanh())


@pytest.mark.parametrize("make", [nn.Linear, Conv1D])
def test_linears_below_the_floor_run_again(device, make):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(make), Block(make)).to(device), random(64, 24, device=device)
    floor, again = patched(model), copy.deepcopy(model)
    patch(again, MemSaveConfig(backend="triton", checkpoint="up"))
    for _ in range(3):
        for got, expected in zip(step(again, x, device), step(floor, x, device), strict=True):
            assert_same_bits(got, expected)

    def kept(ours):
        def forward(x):
            with autocast(device):
                return ours(x).float().sum()

        return measure_kept(ours, (x,), forward).total

    assert kept(again) < 0.5 * kept(floor)
