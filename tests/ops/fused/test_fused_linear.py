"""Linears with fp32 parameters under autocast, fused: gradients, what is converted when, and writes in between."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from hf_memsave import MemSaveConfig, measure_kept, patch, unpatch
from hf_memsave.device import is_autocast
from hf_memsave.ops.fused import activation, dropout_norm, linear
from support import fused_linear as fused
from support import steps
from support.fused_linear import Attention, assert_near, assert_same_step, patched, step
from support.helpers import assert_same_bits, random
from support.kernels import interpreted, rounding  # noqa: F401
from support.steps import patched_copy

pytestmark = interpreted


def same_bits(ours, stock):
    for mine, theirs in zip(ours, stock, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, fused.LOW], ids=str)
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(48, 40), lambda: nn.Linear(48, 40, bias=False), lambda: Conv1D(40, 48)],
    ids=["linear", "no bias", "addmm"],
)  # fmt: skip
def test_gradients_are_nearer_to_float64_than_stocks(device, make, dtype):
    model, ratios = fused.net(device, make()), []
    for seed in range(8):
        x, dy = random(3, 50, 48, device=device, seed=seed).to(dtype), random(3, 50, 40, device=device, seed=seed + 99)

        def found(model, x=x, dy=dy):
            x = x.detach().clone().requires_grad_()
            with fused.autocast(device):
                y = model(x)
            return torch.autograd.grad(y, [x, *model.parameters()], dy.to(y.dtype))

        wide = copy.deepcopy(model).double()
        for p in wide.parameters():
            p.data = p.to(fused.LOW).double()
        into = x.to(fused.LOW).double().requires_grad_()
        exact = torch.autograd.grad(wide(into), [into, *wide.parameters()], dy.to(fused.LOW).double())
        mine, stocks = (fused.far(found(one), exact) for one in (patched(model), model))
        ratios.append([a / b for a, b in zip(mine, stocks, strict=True)])
    dx, dw, *db = torch.tensor(ratios).mean(0).tolist()
    assert dw < 0.01, "nothing is rounded to 16 bits"
    assert dx < 0.01 if dtype == torch.float32 else dx <= 1.001
    assert all(d < 0.01 for d in db)


class Calls(nn.Module):
    """A module that computes ``function(self, x)`` with its linears ``a``, ``b``, ``c`` and ``d``."""

    def __init__(self, function, sizes=((24, 24),) * 4, **options):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(*size, **options) for size in sizes)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class Bare(nn.Module):
    """``F.linear`` of parameters of these shapes."""

    def __init__(self, weight, bias=None, inputs=None):
        super().__init__()
        self.weight, self.inputs = nn.Parameter(random(*weight)), inputs
        self.bias = None if bias is None else nn.Parameter(random(*bias, seed=2))

    def forward(self, x):
        return F.linear(x[..., : self.inputs], self.weight, self.bias)


def off_inside(self, x):
    with fused.autocast(x.device, enabled=False):
        q = self.a(x)
    return self.c(q * self.b(x).float())


def written_output(self, x):
    y = self.a(x)
    y += x.sin()
    y[..., 0].mul_(2)
    return y


def of_others(self, x):
    return F.linear(input=x, weight=self.a.weight) + F.linear(x, self.a.weight * 2) + x @ self.a.weight


def three(self, x):
    return self.c((self.a(x) * self.b(x)).tanh())


def first_without_gradients(self, x):
    with torch.no_grad():
        a = self.a(x)
    return self.c((a * self.b(x)).tanh() + self.d(x))


def frozen(names):
    model = Attention()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


#: A model, and the shape of its input.
MODELS = {
    "without autocast's cache": (Attention, (5, 24)),
    "off inside": (lambda: Calls(off_inside), (5, 24)),
    "a product of others": (lambda: Calls(of_others), (5, 24)),
    "an output that is written to": (lambda: Calls(written_output), (2, 3, 24)),
    "that, of two dimensions and without bias": (lambda: Calls(written_output, bias=False), (3, 24)),
    "a weight that is used twice": (lambda: Calls(lambda self, x: self.b(self.a(self.a(x).tanh()))), (5, 24)),
    "one dimension": (lambda: Calls(lambda self, x: self.b(self.a(x).tanh())), (24,)),
    "nothing": (lambda: Calls(lambda self, x: self.b(self.a(x).tanh())), (2, 0, 24)),
    "four dimensions": (lambda: Calls(lambda self, x: self.b(self.a(x).tanh())), (1, 2, 3, 24)),
    "a bias of two dimensions": (lambda: Bare((6, 24), (1, 6)), (5, 24)),
    "a bias for each row": (lambda: Bare((6, 24), (5, 6)), (5, 24)),
    "no output": (lambda: Bare((0, 24), (0,)), (5, 24)),
    "no input": (lambda: Bare((6, 0), (6,), inputs=0), (5, 24)),
    "checkpointed": (lambda: Calls(partial(checkpoint, three, use_reentrant=False)), (5, 24)),
    "reentrant": (lambda: Calls(partial(checkpoint, three, use_reentrant=True)), (5, 24)),
    "a residual": (lambda: Calls(lambda self, x: three(self, x) + x.sin() + x), (5, 24)),
    "the first without gradients": (lambda: Calls(first_without_gradients), (5, 24)),
    **{f"frozen {names}": (partial(frozen, names), (5, 24)) for names in ("q", "k", "qkv")},
    "an input written to in place": (lambda: Attention(lambda module, x: x.mul_(0.5)), (5, 24)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_stocks(device, name):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    options = {"cache_enabled": False} if name == "without autocast's cache" else {}
    assert_same_step(make().to(device), random(*shape, device=device), device, **options)


@pytest.mark.parametrize(
    "change", [None, lambda dy: dy * 2, lambda dy: dy.mul_(2)[:], lambda dy: (dy.mul_(2), None)[1]]
)
def test_an_activation_sums_the_gradient_of_the_bias_before_it_unless_that_changes(device, change, monkeypatch):
    given, give = [], activation.give_sum
    monkeypatch.setattr(activation, "give_sum", lambda dx, db: given.append(db) or give(dx, db))
    model, batch = fused.bert(device)
    patch(model, fused.TRITON)
    found, dense = [], model.bert.encoder.layer[1].intermediate.dense
    hooks = [*filter(None, [change]), lambda dy: found.append(dy.clone())]
    dense.register_forward_hook(lambda module, args, y: [y.register_hook(hook) for hook in hooks] and None)
    with fused.autocast(device):
        model(**batch).loss.backward()
    assert len(given) == 2
    assert torch.equal(dense.bias.grad, given[0] if change is None else found[0].sum((0, 1), dtype=torch.float32))
    assert_near(given[:1], [found[0].float().sum((0, 1)) / (1 if change is None else 2)])


@pytest.mark.parametrize("make", [nn.Linear, Conv1D])
def test_the_conversions_of_a_block_are_made_at_once_and_undone_it_is_stock(device, make, made, monkeypatch):
    given, cast = [], linear._cast
    monkeypatch.setattr(linear, "_cast", lambda tape, x, dtype: given.append(x.shape) or cast(tape, x, dtype))
    model, x = Attention(make=make).to(device), random(5, 24, device=device)
    with torch.no_grad(), fused.autocast(device):
        assert_same_bits(patched(model)(x), model(x))
    assert not made, "nothing without gradients"
    ours = assert_same_step(model, x, device)
    assert made == {1: 8 + 4, 8: 2, 4: 2}, "one by one, and in the two steps after that together"
    assert make is Conv1D or len(given) == 3, "q, k and v share one; the last one is given 16 bits"
    unpatch(ours)
    same_bits(step(ours, x, device), step(model, x, device))


def test_frozen_parts_and_inputs_without_gradients_or_of_inference_mode(device):
    frozen = Attention().to(device)
    frozen.q.requires_grad_(False)
    frozen.k.bias.requires_grad_(False)
    with torch.inference_mode():
        x = random(5, 24, device=device)
    for model, given in ((frozen, x.clone()), (fused.net(device, nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2)), x)):
        found = []
        for m in (patched(model), model):
            with fused.autocast(device):
                m(given).float().cos().sum().backward()
            found.append([p.grad for p in m.parameters()])
        assert_near(*found)


def kept(model, x, config, times=1):
    """By a step after some."""
    ours = patched_copy(model, config)

    def forward(x):
        with fused.autocast(x.device):
            return ours(x).float().square().sum()

    for _ in range(times):
        forward(x).backward()
    return measure_kept(ours, {"x": x}, forward).total


def thin(self, x):
    """A thin linear is cheap to run again."""
    u = self.b(self.a(x))
    return self.c(torch.sigmoid(u) * x) * u


def test_it_keeps_what_the_torch_backend_keeps_and_no_more(device):
    model = fused.net(device, nn.LayerNorm(24), Attention(), nn.Tanh(), Attention())
    other = fused.net(device, nn.LayerNorm(128), Calls(thin, [(128, 8), (8, 128), (128, 128), (1, 1)]))
    for one, x in ((model, random(64, 24, device=device)), (other, random(64, 128, device=device))):
        assert kept(one, x, fused.TRITON, times=3) <= kept(one, x, MemSaveConfig(), times=3)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_norm_gives_the_next_linears_its_output_in_16_bits(device, p, monkeypatch):
    model, batch = fused.bert(device, p)

    def gradients(model):
        return list(steps.step(model, batch, low=fused.LOW).values())[1:]

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
    same_bits(with_low, gradients(ours))
    if not p:
        for a, b in zip(with_low, gradients(model), strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * float(b.abs().max()) + 1e-4)


def test_modes_and_subclasses_of_others_see_the_call(device):
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += func is F.linear
            return func(*args, **(kwargs or {}))

    class Meta(torch.Tensor):
        pass

    model, x = patched(Attention().to(device)), random(5, 24, device=device)
    with Counting() as mode, fused.autocast(device):
        model(x)
    assert mode.calls == 4
    with fused.autocast(device):
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
    model, x = fused.net(device, Block(make), Block(make)), random(64, 24, device=device)
    floor, again, config = patched(model), copy.deepcopy(model), MemSaveConfig(backend="triton", checkpoint="up")
    patch(again, config)
    for _ in range(3):
        same_bits(step(again, x, device), step(floor, x, device))
    assert kept(model, x, config) < 0.5 * kept(model, x, fused.TRITON)


# What is written to, fails or goes away between conversions that are shared or made ahead


@torch.no_grad()
def write_k(module, x):
    module.k.weight.mul_(1.25)


#: What happens to a module or its input between two linears.
WRITES = {
    "a weight itself": write_k,
    "data of the input": lambda module, x: x.data.mul_(0.5),
    "a weight": lambda module, x: module.k.weight.detach().mul_(1.25),
    "data of a weight": lambda module, x: module.k.weight.data.mul_(1.25),
    "another weight": lambda module, x: setattr(module.k.weight, "data", module.k.weight.data.flip(0)),
}


class Aliased(Attention):
    """Its input is written to through an alias that was made before."""

    def forward(self, x):
        data = x.data
        q = self.q(x)
        data.mul_(0.5)
        return self.o((q * self.k(x)).tanh() + self.v(x))


class Flat(Attention):
    """Its parameters lie in a buffer that is written to."""

    def __init__(self):
        super().__init__(lambda module, x: module.flat.mul_(1.5))
        self.flat = torch.cat([p.detach().flatten() for p in self.parameters()])
        for p, part in zip(self.parameters(), self.flat.split([p.numel() for p in self.parameters()]), strict=True):
            p.data = part.view_as(p)


@pytest.mark.parametrize(
    "make", [*(partial(Attention, write) for write in WRITES.values()), Aliased, Flat], ids=[*WRITES, "aliased", "flat"]
)
def test_what_is_written_to_is_converted_again(device, make):
    x, found = random(5, 24, device=device), []
    for config in (None, fused.TRITON):
        torch.manual_seed(0)
        with torch.device(device):
            model = make()
        if config is not None:
            patch(model, config)
        found.append([step(model, x, device)[0] for _ in range(4)])
    same_bits(*found)


def branching(self, x):
    self.number = getattr(self, "number", 0) + 1
    return self.c((self.a if self.number % 3 else self.b)(x).tanh())


@pytest.mark.parametrize(
    ("function", "most"),
    [(branching, 4), (lambda self, x: branching(self, self.d(x).tanh()), 6)],
    ids=["first", "later"],
)
def test_what_runs_may_change_from_step_to_step(device, made, function, most):
    stock, x = Calls(function).to(device), random(5, 24, device=device)
    ours = patched(stock)
    for _ in range(7):
        mine, theirs = (step(model, x, device) for model in (ours, stock))
        assert_same_bits(mine[0], theirs[0])
        assert [a is None for a in mine] == [b is None for b in theirs]
    assert max(made) <= most, "a conversion that was not needed is not made again"


def test_all_forwards_before_all_backwards_and_backward_twice_and_under_autocast(device):
    model, x = Attention().to(device), random(5, 24, device=device)
    expected = [g.clone() for g in step(patched(model), x, device)[2:]]
    ours = patched(model)
    with fused.autocast(device):
        losses = [ours(x * 1.5).float().cos().sum() for _ in range(2)]
        losses[1].backward(retain_graph=True)
    same_bits([p.grad for p in ours.parameters()], expected)
    ours.zero_grad()
    losses[1].backward()
    losses[0].backward()
    same_bits([p.grad for p in ours.parameters()], [2 * g for g in expected])


def test_an_optimizer_steps_within_backward(device):
    def train(model):
        optimizers = {p: torch.optim.SGD([p], 0.001) for p in model.parameters()}

        def apply(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(apply)
        for seed in range(5):
            with fused.autocast(device):
                y = model(random(5, 24, device=device, seed=seed))
            y.float().cos().sum().backward()
        return list(model.parameters())

    model = Attention().to(device)
    for mine, theirs in zip(train(patched(model)), train(copy.deepcopy(model)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-8, atol=1e-5)  # stock rounds it to 16 bits


def test_models_that_are_gone_are_forgotten(device):
    model = patched(Attention().to(device))
    for _ in range(2):
        step(model, random(5, 24, device=device), device)
    before = len(linear._forwards), len(linear._backwards)
    del model
    assert len(linear._forwards) < before[0]
    assert len(linear._backwards) < before[1]
    assert not linear._running


def test_a_backward_that_fails_leaves_nothing(device):
    model = patched(fused.net(device, *(nn.Linear(64, 64) for _ in range(4))))
    x = random(4, 64, device=device)
    for _ in range(2):
        step(model, x, device)
    hook = model[3].weight.register_hook(lambda g: 1 / 0)
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError):
            step(model, x, device)
            raise AssertionError("it did not fail")
    hook.remove()
    assert len(linear._running) <= 1
    step(patched(fused.net(device, nn.Linear(64, 64))), x, device)
    assert not linear._running


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_weight_given_other_bytes_is_the_old_one_in_backward_and_one_not_needed_may_be_written_to(device, is_needed):
    stock = Attention().to(device) if is_needed else fused.net(device, nn.Linear(24, 24))
    ours, found = patched(stock), []
    for model in (ours, stock):
        x = random(5, 24, device=device).requires_grad_(is_needed)
        with fused.autocast(device):
            y = model(x * 1.5)
        for p in model.parameters():
            if is_needed:
                p.data = p.data * 2
            else:
                p.detach().mul_(2)
        y.float().cos().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert_near(*found)
