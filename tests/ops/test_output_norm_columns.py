"""``norm="output"``: columns whose output does not tell the input, what follows sees, and that no host waits."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memsave.config import MemSaveConfig
from hf_memsave.ops import output_norm as output_norm_file
from hf_memsave.ops.output_norm import is_well
from support.helpers import assert_same_bits, assert_same_result, kept, only_on_cpu, random, run, taping
from support.output_norms import (
    DTYPES,
    HALVES,
    KINDS,
    assert_at_most_twice_as_wrong,
    errors,
    from_output,
    gradients,
    incoming,
    plain,
    true_norm,
    truth_of,
)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def all_well(weight, bias):
    return torch.ones_like(weight, dtype=torch.bool)


def from_y_alone(z, weight, bias):
    return (z if bias is None else z - bias) / weight


def as_normed(z, weight, bias):
    return z


@pytest.mark.parametrize(
    "fault", [None, ("is_well", all_well), ("_normed", from_y_alone), ("_normed", as_normed)],
    ids=["none", "no column keeps its input", "backward takes all for y", "backward takes all for normed"],
)  # fmt: skip
def test_output_norm_would_be_wrong_without_telling_columns_apart(device, monkeypatch, fault):
    module = plain("layer_norm", device, keeps=2)
    module.bias.data[:2] = 1000
    x = random(64, 16, device=device)
    dy = incoming("layer_norm", x, 0.5)
    truth = truth_of("layer_norm", module, x, dy)
    stock = errors(gradients(module, module, x, dy)[1], truth)
    if fault is not None:
        monkeypatch.setattr(output_norm_file, *fault)
    _, got = gradients(module, from_output(module), x, dy)
    worst = max(mine / theirs for mine, theirs in zip(errors(got, truth), stock, strict=True))
    assert worst < 2 if fault is None else worst > 50


def seen(fn, x):
    """The output, as a product after it has it in backward."""
    with taping():
        y = fn(x.detach().clone().requires_grad_())
        factor = torch.ones_like(y).requires_grad_()
        product = y * factor
    return torch.autograd.grad(product.sum(), factor)[0]


@pytest.mark.parametrize("plant", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_what_follows_output_norm_sees_y_in_backward(device, kind, dtype, plant, monkeypatch):
    """Its bits; of a LayerNorm of halves in the columns that keep x̂, at most 1.4 times as far from the truth."""
    only_on_cpu(device)
    if plant:
        monkeypatch.setattr(output_norm_file, "_again", lambda z, *rest: z.clone())
    module, x = plain(kind, device, dtype, width=64, keeps=16), random(64, 64, dtype=dtype, device=device)
    if kind == "layer_norm":
        module.bias.data[:8] = 1.01  # of γ = 1: that nearest to what is told from y
    got, stock = (seen(f, x) for f in (from_output(module), module))
    assert_same_bits(got[:, 16:], stock[:, 16:])
    if plant:
        assert (got[:, :16] != stock[:, :16]).all()
    elif kind == "layer_norm" and dtype in HALVES:
        assert ((got - stock).abs().double() <= torch.finfo(dtype).eps * (stock.abs() + module.bias.abs())).all()
        truth = true_norm(kind, x.double(), module.weight.double(), module.bias.double())
        for columns in (slice(8), slice(8, 16)):
            mine, theirs = ((y - truth)[:, columns].norm() for y in (got, stock))
            assert mine <= 1.4 * theirs
    else:
        assert_same_bits(got, stock)


class NoQuestions(TorchDispatchMode):
    """Raises where a number, or how many there are of a kind, becomes known to the program."""

    ASKING = frozenset({"_local_scalar_dense", "nonzero", "nonzero_numpy", "is_nonzero", "equal", "masked_select"})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in self.ASKING or any(i is not None and i.dtype == torch.bool for i in indices):
            raise AssertionError(f"{name} asks for numbers")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keeps", [0, 3, 16])
def test_output_norm_asks_for_no_number(device, kind, keeps):
    """Nor do all steps of a norm whose columns change, for which CUDA's host would wait."""
    module, x = plain(kind, device, keeps=keeps), random(4, 16, device=device).requires_grad_()
    after = nn.Linear(16, 2).to(device)
    with NoQuestions():
        for _ in range(2):
            with taping():
                loss = after(from_output(module)(x)).square().sum()
            loss.backward()
            with torch.no_grad():
                module.weight[5:7] = 0
    with pytest.raises(AssertionError, match="nonzero asks"), NoQuestions():
        is_well(module.weight.detach(), None).nonzero()


def test_columns_in_need_change_between_steps(device, kind):
    """As an optimizer moves γ, and as somebody sets it to 0 and back."""
    module, x = plain(kind, device, width=768), random(64, 768, device=device)
    dy = incoming(kind, x, 0.5)
    for number in range(6):
        got = assert_at_most_twice_as_wrong(kind, module, x, dy)
        with torch.no_grad():
            module.weight[number::7] = 0.0 if number % 2 else 1.0
            module.weight[number + 1 :: 5].sub_(0.01 * got[1][number + 1 :: 5])
            if kind == "layer_norm":
                module.bias[number::3].mul_(4)
    assert not is_well(module.weight, getattr(module, "bias", None)).all()


def test_output_norm_finds_the_columns_in_need():
    tiny = torch.finfo(torch.float16).tiny
    weight = torch.tensor([1, -1, 1, -1, 0, 4 * tiny, 8 * tiny, float("nan"), 1], dtype=torch.float16)
    bias = torch.tensor([1, -1, 1.01, -1.01, 0, 0, 0, 0, float("nan")], dtype=torch.float16)
    assert is_well(weight, bias).logical_not().nonzero().flatten().tolist() == [2, 3, 4, 5, 7, 8]
    assert is_well(weight, None).logical_not().nonzero().flatten().tolist() == [4, 5, 7]


def test_the_next_linear_keeps_no_output_of_output_norm(device, kind):
    """But γ and β once more."""
    module, x = plain(kind, device, keeps=2), random(3, 5, 16, device=device)
    alone = kept(from_output(module), x, tape=True, linear=False)
    assert kept(from_output(module), x, tape=True) == alone + sum(p.nbytes for p in module.parameters())


def test_what_follows_makes_y_again_where_its_vectors_are_freed(device, kind):
    """As FSDP2 frees them after the forward, and has them again for the norm's own backward."""
    module, x = plain(kind, device, keeps=2), random(12, 16, device=device)
    after = nn.Linear(16, 2).to(device)
    whole = {p: p.detach().clone() for p in module.parameters()}

    def gather(gradient):
        for p, values in whole.items():
            p.untyped_storage().resize_(values.nbytes)
            p.data.copy_(values)

    def step(frees):
        leaf = x.clone().requires_grad_()
        with taping():
            y = from_output(module)(leaf)
            loss = after(y).square().sum()
        y.register_hook(gather)
        for p in whole if frees else ():
            p.untyped_storage().resize_(0)
        return torch.autograd.grad(loss, [leaf, *module.parameters(), *after.parameters()])

    for freed, there in zip(step(True), step(False), strict=True):
        assert_same_bits(freed, there)


def test_a_norm_of_wrapped_vectors_is_stock(device, kind, monkeypatch):
    """As those of DTensor are, of which the tape makes nothing again."""
    module, x = plain(kind, device, keeps=2), random(3, 16, device=device)
    module.weight = nn.Parameter(TwoTensor(module.weight.detach(), module.weight.detach()))
    monkeypatch.setattr(output_norm_file, "output_norm", None)
    with taping():
        y = from_output(module)(x)
    assert_same_bits(y.a, module(x).a)


def assert_is_exact(module, x, autocast=None, tape=True, **options):
    norm = from_output(module, **options)
    assert_same_result(run(norm, [x], tape=tape, autocast=autocast), run(module, [x], autocast=autocast))
    assert kept(norm, x, tape, autocast=autocast) == kept(module, x, tape, autocast=autocast)


@pytest.mark.parametrize("why", ["dtype", "autocast", "alone", "no tape"])
def test_output_norm_recomputes_where_its_output_would_not_do(device, kind, why):
    """Where what follows would keep y beside z, it keeps what stock does."""
    only_on_cpu(device)
    half = torch.bfloat16
    module = plain(kind, device, half if why == "autocast" else torch.float32, keeps=2)
    x = random(3, 16, dtype=half if why in ("dtype", "autocast") else torch.float32, device=device)
    if why == "dtype" and kind != "layer_norm":
        pytest.skip("does not apply: its output is of the wider dtype")
    alone = {"config": MemSaveConfig(norm="output")} if why == "alone" else {}
    assert_is_exact(module, x, half if why == "autocast" else None, tape=why != "no tape", **alone)


@pytest.mark.parametrize("share", [1, 0.4, 1e-3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_norm_is_finite_where_its_output_is_not(device, kind, dtype, share):
    """γ is so large that γ x̂ overflows, and what follows is bounded."""
    module = plain(kind, device, dtype)
    module.weight.data[:2] = share * torch.finfo(dtype).max
    x = random(8, 16, dtype=dtype, device=device)
    y, got = gradients(module, lambda x: torch.tanh(from_output(module)(x)), x, torch.ones_like(x))
    assert y.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in got)


def test_output_norm_is_stock_where_its_input_is_kept_anyway(device, kind):
    module, x = plain(kind, device).requires_grad_(False), random(3, 5, 16, device=device)
    mine, exact = (kept(lambda x: f(x.tanh()), x, tape=True, linear=False) for f in (from_output(module), module))  # noqa: B023
    assert mine == exact
    got, stock = (run(lambda x: f(x.tanh()), [x], tape=True) for f in (from_output(module), module))  # noqa: B023
    assert_same_result(got, stock)
