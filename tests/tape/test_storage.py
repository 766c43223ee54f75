"""``storage="int8" | "int4"``: what still has to be kept, in fewer bits: unbiased, shared, and by draws of its own."""

import itertools
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave import MemSaveConfig, measure_kept
from hf_memsave.tape.bits import CODERS
from hf_memsave.tape.codecs import Encoder
from hf_memsave.tape.quantize import FORMATS, decode, encode
from support.attacks import WIDTH, pair
from support.helpers import DTYPES, Calls, assert_same_bits, random, taping
from support.slopes import assert_has_slope_of
from support.steps import assert_same, step

KINDS = tuple(FORMATS)
#: Tells the draws of all encoders apart.
FORWARDS = itertools.count()


def encoder(kind):
    return Encoder(kind, 0, next(FORWARDS))


def trip(x, kind, generator=None):
    codes, bounds = encode(x.reshape(-1), FORMATS[kind], generator)
    return CODERS.decode(codes, bounds, FORMATS[kind], x.numel(), x.dtype).view(x.shape)


def assert_is_decoded(got, x, kind):
    """Each element is less than a step of its block from ``x``, and together they are as long along ``x`` as it is."""
    form = FORMATS[kind]
    true, mine = (F.pad(t.double().flatten(), (0, -x.numel() % form.block)).view(-1, form.block) for t in (x, got))
    spare = torch.finfo(form.bounds).eps  # of bounds that are rounded outwards
    low, high = true.aminmax(dim=1, keepdim=True)
    step = (high - low + 2 * spare * (low.abs() + high.abs())) * (1 + 2 * spare) / (2**form.bits - 1)
    rounding = max(torch.finfo(dtype).eps for dtype in (x.dtype, torch.float32)) * true.abs()
    assert ((mine - true).abs() <= step + rounding).all()
    largest_variance = (step / 2) ** 2 + (rounding / 2) ** 2
    assert_has_slope_of(got, x, 5 * float((largest_variance * true**2).sum().sqrt() / true.square().sum()))


def sigmas(draws, truth):
    """The largest distance of the mean of ``draws`` from ``truth``, in its standard deviations."""
    spread = draws.std(0).clamp_min(1e-9) / len(draws) ** 0.5
    return float(((draws.mean(0) - truth).abs() / (spread + 1e-6 * truth.abs())).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_is_unbiased_and_a_rounding_is_not(kind):
    x, generator = random(100), torch.Generator().manual_seed(1)
    form = FORMATS[kind]
    padded = torch.cat([x, x[-1:].expand(-len(x) % form.block)])
    many = padded.repeat(20_000)  # whole blocks: each copy has bounds of its own
    codes, bounds = encode(many, form, generator)
    draws = decode(codes, bounds, form, len(many), x.dtype).view(20_000, -1)[:, : len(x)].double()
    assert sigmas(draws, x.double()) < 5
    low, scale = bounds.float().unbind(1)
    step = scale.max()
    assert (draws - x).abs().max() < 1.001 * step
    assert sigmas(draws - float(step) / 20, x.double()) > 5, "a planted bias of a twentieth of a step goes unseen"


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_and_what_is_decoded_have_the_size_they_claim(kind):
    form = FORMATS[kind]
    for dtype, size in product(DTYPES, (256, 999, 1000, 1025)):
        codes, bounds = encode(random(size, dtype=dtype), form)
        blocks = -(-size // form.block)
        assert codes.nbytes == blocks * form.block * form.bits // 8
        assert bounds.nbytes == blocks * 2 * (8 if dtype is torch.float64 else form.bounds.itemsize)
        x = decode(codes, bounds, form, size, dtype)
        assert x.untyped_storage().nbytes() == x.nbytes == size * dtype.itemsize


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_errs_by_less_than_a_step(kind):
    for dtype, (seed, size) in product(DTYPES, enumerate((65_536, 65_537, 100_000))):
        x = random(size, dtype=dtype, seed=seed)
        assert_is_decoded(trip(x, kind), x, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_stays(kind):
    for value, dtype in product((0.0, 1.0, -3.0, 1e-42, 65504.0, "min", "max"), DTYPES):
        x = torch.full((300,), value if isinstance(value, float) else getattr(torch.finfo(dtype), value), dtype=dtype)
        got = trip(x, kind)
        assert got.isfinite().all()
        share = 3 * torch.finfo(FORMATS[kind].bounds).eps + torch.finfo(dtype).eps
        torch.testing.assert_close(got, x, rtol=share, atol=2 * torch.finfo(dtype).tiny)


#: The step of a finite number in a mixed block, beside that of its range in another one.
COARSER = {"int8": 4.2, "int4": 3.4}


def many(x, kind, draws=400):
    """``x``, whole blocks, and what it is decoded to, by draw, in fp64."""
    x = F.pad(x, (0, -len(x) % FORMATS[kind].block), value=float(x[-1]))
    return x.double(), trip(x.repeat(draws), kind, torch.Generator().manual_seed(0)).view(draws, -1).double()


def assert_unbiased_within(x, draws, step):
    """Less than ``step`` from ``x``, and their mean not far from it; beside the rounding to x's dtype and to fp32."""
    slack = 2 * max(torch.finfo(x.dtype).eps, 2**-23) * x.abs().double()
    assert ((draws - x.double()).abs() <= step + slack).all()
    assert ((draws.mean(0) - x.double()).abs() <= 5 * (step / 2) / len(draws) ** 0.5 + slack).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_and_its_block_is_unbiased(kind):
    for bad, dtype in product((torch.nan, torch.inf, -torch.inf), DTYPES):
        x = random(FORMATS[kind].block, dtype=dtype)
        x[3::7], x[5] = bad, -torch.inf
        _, draws = many(x, kind)
        finite = x.isfinite()
        assert (draws[:, ~finite].nan_to_num(7.0) == x[~finite].double().nan_to_num(7.0)).all()
        step = COARSER[kind] * float(x[finite].max() - x[finite].min()) / (2 ** FORMATS[kind].bits - 1)
        assert_unbiased_within(x[finite], draws[:, finite], step)
        everything = torch.full((1000,), bad, dtype=dtype)
        assert torch.equal(trip(everything, kind).nan_to_num(7.0), everything.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_masks_numbers_leave_the_others_in_their_block_as_fine(kind, dtype):
    block, form = FORMATS[kind].block, torch.finfo(dtype)
    for value in [value for value in (form.min, -1e30, -1e9, -1e4, 1e9) if abs(value) <= form.max]:
        x, far = random(block, dtype=dtype), torch.arange(block) % 3 == 0
        x[far] = value
        _, draws = many(x, kind)
        share = torch.finfo(torch.bfloat16).eps if kind == "int4" else 0  # of M's rounding; it is unbiased, too
        share = 0 if value == form.min or dtype is torch.float64 else share
        assert ((draws[:, far] / x[far].double()).mean(0) - 1).abs().max() <= share
        step = COARSER[kind] * float(x[~far].max() - x[~far].min()) / (2 ** FORMATS[kind].bits - 1)
        assert_unbiased_within(x[~far], draws[:, ~far], step)
        whole = torch.full((3 * block,), value, dtype=dtype)  # above a causal mask's diagonal, say
        assert (trip(whole, kind) / whole - 1).abs().max() <= torch.finfo(FORMATS[kind].bounds).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_whose_range_overflows_stay_finite_and_unbiased(kind, dtype):
    largest = torch.finfo(dtype).max
    for share in (1.0, 0.9, 0.51, 0.49):
        x = (torch.linspace(-share, share, FORMATS[kind].block, dtype=torch.float64) * largest).to(dtype)
        x, draws = many(x, kind)
        step = 2 * share / (2 ** FORMATS[kind].bits - 1)
        slack = 0.0 if dtype is torch.float64 else 2 * torch.finfo(FORMATS[kind].bounds).eps  # bounds round outwards
        assert draws.isfinite().all()
        assert ((draws / largest - x / largest).abs() <= step + torch.finfo(dtype).eps + slack).all()
        bias = (draws / largest).mean(0) - x / largest
        assert (bias.abs() <= 5 * step / 2 / len(draws) ** 0.5 + torch.finfo(dtype).eps + slack).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_gradient_of_a_linear_is_unbiased(kind):
    x, weight = random(64, 16), random(8, 16, seed=1).requires_grad_()
    dz, codec, draws = random(64, 8, seed=2), encoder(kind), []
    for _ in range(1000):
        h = x.clone().requires_grad_() * 1
        with taping(codec=codec, coders=CODERS):
            z = F.linear(h, weight)
        draws.append(torch.autograd.grad(z, weight, dz)[0].double())
    truth = dz.double().T @ x.double()
    assert sigmas(torch.stack(draws), truth) < 5
    assert torch.stack(draws).std(0).min() > 0, "nothing was coded"


def test_one_code_for_all_views_and_none_for_what_is_small_or_a_parameter(monkeypatch):
    coded = []
    counting = CODERS._replace(encode=lambda x, *rest: (coded.append(x.numel()), encode(x, *rest))[1])
    monkeypatch.setitem(globals(), "CODERS", counting)
    weights = [nn.Parameter(random(64, 64, seed=i)) for i in range(3)]
    with taping(codec=encoder("int8"), coders=CODERS):
        h = random(2, 32, 64).requires_grad_() * 1
        q, k, v = (F.linear(h, w) for w in weights)
        small = h[0, :4] @ weights[0].detach()
        loss = q.sum() + k.sum() + v.sum() + (h.transpose(0, 1) * 3).square().sum() + small.square().sum()
        loss = loss + weights[0].t().square().sum() + weights[0].bfloat16().square().sum()
    assert coded == [h.numel()]  # once for its three linears, and for 3 h, which is made of it
    loss.backward()


def test_a_small_part_of_a_large_tensor_does_not_pin_it(device):
    def first(x):
        with taping(codec=encoder("int8"), coders=CODERS):
            return (x * 1)[:, 0].square().sum()

    assert measure_kept(Calls(first), random(16, 64, 64).requires_grad_().to(device)).total < 16 * 64 * 1.2 + 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_changed_after_it_was_coded_is_of_before(kind):
    for dtype in DTYPES:
        weight = random(1024, 64, dtype=dtype, seed=1).requires_grad_()
        h = random(1024, 64, dtype=dtype).requires_grad_() * 1
        with taping(codec=encoder(kind), coders=CODERS):
            z = F.linear(h, weight)
        before = h.detach().clone()
        with torch.no_grad():
            h.zero_()
        z.backward(torch.eye(1024, dtype=dtype))
        assert not torch.equal(weight.grad, before)
        assert_is_decoded(weight.grad, before, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sdpas_softmax_is_computed_again_from_8_bits_at_least(kind, dtype):
    q, k, v = (random(2, 4, 64, 16, dtype=dtype, seed=i).requires_grad_() for i in range(3))
    mask = torch.zeros(64, 64, dtype=dtype)
    mask = mask.masked_fill(torch.ones(64, 64).triu(1).bool(), torch.finfo(dtype).min)
    mask = mask.requires_grad_() * 1  # as T5's, whose bias is trained
    ours, exact = [], []
    for codec, into in ((None, exact), (encoder(kind), ours)):
        for _ in range(1 if codec is None else 20):
            with taping(codec=codec, coders=CODERS):
                o = F.scaled_dot_product_attention(3 * q, 3 * k, v * 1, attn_mask=mask)
            into.append(torch.autograd.grad(o, (q, k, v), random(*o.shape, dtype=dtype, seed=5)))
    assert all((mine - truth).norm() > 0 for mine, truth in zip(ours[0], exact[0], strict=True))
    mean = [torch.stack(mine).mean(0) for mine in zip(*ours, strict=True)]
    for mine, truth in zip(mean, exact[0], strict=True):  # measured: .005 and .0005 at most
        assert (mine - truth).norm() < 0.007 * truth.norm()
        assert_has_slope_of(mine, truth, 0.002)


# What lies beside a view in its storage, and numbers as large as they get.

REST = (float("nan"), float("inf"), -float("inf"), 1e10, -3e38)


#: A buffer's shape, and the part of it that a tensor is put into.
VIEWS = {
    "left half of each row": (lambda x: (*x.shape[:-1], 2 * WIDTH), lambda buffer: buffer[..., :WIDTH]),
    "first half of the memory": (lambda x: (2 * len(x), *x.shape[1:]), lambda buffer: buffer[: len(buffer) // 2]),
    "every second": (lambda x: (*x.shape, 2), lambda buffer: buffer[..., 0]),
    "in another order": (lambda x: (2 * WIDTH, *x.shape[:-1]), lambda buffer: buffer[:WIDTH].movedim(0, -1)),
}


def placed(x, view, rest):
    if view == "joined":  # no buffer: what follows in the storage was made with it
        return torch.cat([x, torch.full_like(x, rest)], -1)[..., :WIDTH]
    shape, part = VIEWS[view]
    buffer = x.new_full(shape(x), rest)
    part(buffer).copy_(x)
    return part(buffer)


def of_view(view, config, rest, device):
    return pair(lambda model, x: model.g(placed(model.f(x), view, rest)).sin(), device, config)[0]


@pytest.mark.parametrize("view", [*VIEWS, "joined"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_view_is_coded_and_the_rest_of_its_storage_is_not(kind, view, device):
    config, x = MemSaveConfig(storage=kind), random(16, 8, WIDTH, device=device)
    expected = step(of_view(view, config, 0.0, device), x)
    for rest in REST:
        assert_same(step(of_view(view, config, rest, device), x), expected)
    before, after = (measure_kept(of_view(view, each, 0.0, device), x).total for each in (True, config))
    assert after < before - x.nbytes // 2


@pytest.mark.parametrize("kind", KINDS)
def test_large_numbers_change_nothing_for_other_blocks_and_stay_beside_what_is_not_finite(kind, device):
    form = FORMATS[kind]
    x = random(4 * form.block, device=device)
    y = x.clone()
    y[: form.block] *= 1e38
    found = [decode(*encode(t, form, torch.Generator(device).manual_seed(0)), form, t.numel(), t.dtype) for t in (x, y)]
    assert_same_bits(found[1][form.block :], found[0][form.block :])
    for bad in (torch.nan, torch.inf, -torch.inf):
        largest = x.sign() * torch.finfo(torch.float32).max
        largest[form.block + 3] = bad
        got = decode(*encode(largest, form), form, x.numel(), x.dtype)
        torch.testing.assert_close(got, largest, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_that_repeats_a_part_is_not_the_whole_storage(kind, device):
    """Expanded to as many elements as its storage has: its code is none of the storage."""

    def repeated(model, x):
        h = model.f(x)
        return h[:, :1].expand_as(h).sin() + 2 * h.sin()

    models = pair(repeated, device, MemSaveConfig(storage=kind))
    got, expected = (step(model, 3 * random(16, 8, WIDTH, device=device))["f.weight.grad"] for model in models)
    assert (got - expected).norm() <= {"int8": 0.02, "int4": 0.3}[kind] * expected.norm()
