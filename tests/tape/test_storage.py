"""``storage="int8" | "int4"``: what still has to be kept, in fewer bits; unbiased, shared, and nobody else's draws."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch
from hf_memsave.tape.quantize import FORMATS, decode, encode
from hf_memsave.tape.storage import Encoder
from support.families import Size, batch_for, build
from support.helpers import only_on_cpu, random, taping
from support.steps import assert_same, gradients, state_of, step

SIZE = Size(hidden=64, heads=4, layers=2, batch=4, seq=64)
KINDS = tuple(FORMATS)
#: Largest relative error of all gradients together: measured .007 to .018 and .09 to .13.
LIMITS = {"int8": 0.03, "int4": 0.2}
#: Bytes kept, relative to exact: measured at most .35, .58 (int8, fp32 and bf16) and .27, .48 (int4).
SHARES = {
    ("int8", torch.float32): 0.37, ("int8", torch.bfloat16): 0.6,
    ("int4", torch.float32): 0.3, ("int4", torch.bfloat16): 0.5,
}  # fmt: skip


#: Tells the draws of all encoders apart.
FORWARDS = itertools.count()


def encoder(kind):
    return Encoder(kind, 0, next(FORWARDS))


def trip(x, kind, generator=None):
    codes, bounds = encode(x.reshape(-1), FORMATS[kind], generator)
    return decode(codes, bounds, FORMATS[kind], x.numel(), x.dtype).view(x.shape)


def flat(results):
    return torch.cat([value.flatten().double() for name, value in results.items() if name != "loss"])


def states(model):
    """Less the identity of the config, of which a patched model gets its own copy."""
    return {name: (cls, attention, own) for name, (cls, _, attention, own) in state_of(model).items()}


def error(got, exact):
    return float((flat(got) - flat(exact)).norm() / flat(exact).norm())


def sigmas(draws, truth):
    """The largest distance of the mean of ``draws`` from ``truth``, in its standard deviations."""
    spread = draws.std(0).clamp_min(1e-9) / len(draws) ** 0.5
    return float(((draws.mean(0) - truth).abs() / (spread + 1e-6 * truth.abs())).max())


# The code.


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_code_has_the_size_it_claims_and_bounded_errors(kind, dtype):
    x = random(1000, dtype=dtype)
    form = FORMATS[kind]
    codes, bounds = encode(x, form)
    blocks = -(-1000 // form.block)
    assert codes.nbytes == blocks * form.block * form.bits // 8
    assert bounds.nbytes == blocks * 2 * form.bounds.itemsize
    assert (trip(x, kind).double() - x.double()).abs().max() < 7.5 / 2**form.bits + 0.04 * (dtype != torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-42, 65504.0], ids=str)
def test_a_constant_stays(kind, value):
    for dtype in (torch.float32, torch.float16):
        x = torch.full((300,), value, dtype=dtype)
        got = trip(x, kind)
        assert got.isfinite().all()
        torch.testing.assert_close(got, x, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_makes_nans_of_its_block_alone(kind, bad):
    x = random(1000)
    x[10] = bad
    got = trip(x, kind)
    assert got[: FORMATS[kind].block].isnan().all() and got[FORMATS[kind].block :].isfinite().all()


# The tape.


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_gradient_of_a_linear_is_unbiased(kind):
    x, weight = random(64, 16), random(8, 16, seed=1).requires_grad_()
    dz, codec, draws = random(64, 8, seed=2), encoder(kind), []
    for _ in range(2000):
        h = x.clone().requires_grad_() * 1
        with taping(codec=codec):
            z = F.linear(h, weight)
        draws.append(torch.autograd.grad(z, weight, dz)[0].double())
    truth = dz.double().T @ x.double()
    assert sigmas(torch.stack(draws), truth) < 5
    assert torch.stack(draws).std(0).min() > 0, "nothing was coded"


def test_one_code_for_all_views_and_none_for_what_is_small_or_a_parameter(monkeypatch):
    coded = []
    monkeypatch.setattr(
        "hf_memsave.tape.storage.encode", lambda x, *rest: (coded.append(x.numel()), encode(x, *rest))[1]
    )
    weights = [nn.Parameter(random(64, 64, seed=i)) for i in range(3)]
    with taping(codec=encoder("int8")):
        h = random(2, 32, 64).requires_grad_() * 1
        q, k, v = (F.linear(h, w) for w in weights)
        small = h[:1, :4, :4].contiguous() * 1
        loss = q.sum() + k.sum() + v.sum() + (h.transpose(0, 1) * 3).square().sum() + small.square().sum()
        loss = loss + weights[0].t().square().sum() + weights[0].bfloat16().square().sum()
    assert coded == [h.numel()]  # once for its three linears, and for 3 h, which is made of it
    loss.backward()


def test_a_small_part_of_a_large_tensor_does_not_pin_it(device):
    class First(nn.Module):
        def forward(self, x):
            with taping(codec=encoder("int8")):
                return (x * 1)[:, 0].square().sum()

    assert measure_kept(First(), random(16, 64, 64).requires_grad_().to(device)).total < 16 * 64 * 1.2 + 100


def test_a_tensor_changed_after_it_was_coded_is_of_before():
    weight = random(64, 64, seed=1).requires_grad_()
    h = random(64, 64).requires_grad_() * 1
    with taping(codec=encoder("int8")):
        z = F.linear(h, weight)
    before = h.detach().clone()
    with torch.no_grad():
        h.zero_()
    z.backward(torch.eye(64))
    torch.testing.assert_close(weight.grad, before, rtol=0, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_sdpas_softmax_is_computed_again_from_8_bits_at_least(kind):
    q, k, v = (random(2, 4, 64, 16, seed=i).requires_grad_() for i in range(3))
    mask = torch.zeros(64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), torch.finfo(torch.float32).min)
    mask = mask.requires_grad_() * 1  # as T5's, whose bias is trained
    ours, exact = [], []
    for codec, into in ((None, exact), (encoder(kind), ours)):
        for _ in range(1 if codec is None else 20):
            with taping(codec=codec):
                o = F.scaled_dot_product_attention(3 * q, 3 * k, v * 1, attn_mask=mask)
            into.append(torch.autograd.grad(o, (q, k, v), random(*o.shape, seed=5)))
    for mine, (truth,) in zip(zip(*ours, strict=True), zip(*exact, strict=True), strict=True):
        assert (torch.stack(mine).mean(0) - truth).norm() < 0.02 * truth.norm()
        assert (mine[0] - truth).norm() > 0


# Models.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["bert", "llama", "t5-encoder"])
def test_families_keep_less_and_err_little(device, family, dtype):
    model = build(family, SIZE, dtype).to(device)
    batch = batch_for(model, SIZE)
    patch(model)
    exact, kept = step(model, batch), measure_kept(model, batch).total
    totals = []
    for kind in KINDS:
        patch(model, MemSaveConfig(storage=kind))
        got = step(model, batch)
        assert torch.equal(got["loss"], exact["loss"]), "forward is exact"
        draws = [flat(step(model, batch)) for _ in range(4)]
        assert 0 < error(got, exact) < LIMITS[kind]
        mean = sum(draws) / 4
        assert (mean - flat(exact)).norm() < 0.75 * (draws[0] - flat(exact)).norm(), "errors are of one kind"
        totals.append(measure_kept(model, batch).total)
        assert totals[-1] < SHARES[kind, dtype] * kept
    assert totals[1] < totals[0]


@pytest.mark.parametrize("options", [{"activation": "invert"}, {"activation": "few_bit"}, {"dropout": "mask"}], ids=str)
def test_beside_other_ways_to_keep_less(device, options):
    model = build("bert", SIZE).to(device)
    batch = batch_for(model, SIZE)
    patch(model, MemSaveConfig(**options))
    exact, kept = step(model, batch), measure_kept(model, batch).total
    patch(model, MemSaveConfig(**options, storage="int8"))
    assert error(step(model, batch), exact) < 0.05
    assert measure_kept(model, batch).total < 0.5 * kept


def test_drawn_rows_are_stored_in_int8_too(device):
    only_on_cpu(device)
    model = build("t5-encoder", SIZE, dropout=0.0)
    batch = batch_for(model, SIZE)
    patch(model)
    exact = step(model, batch)
    patch(model, MemSaveConfig(linear=WTACRS(budget=0.3)))
    sampled = measure_kept(model, batch).total
    patch(model, MemSaveConfig(linear=WTACRS(budget=0.3), storage="int8"))
    assert measure_kept(model, batch).total < 0.4 * sampled
    draws = [flat(step(model, batch)) for _ in range(32)]
    one, mean = ((d - flat(exact)).norm() for d in (draws[0], sum(draws) / 32))
    assert mean < 0.3 * one, "32 draws err by 1/√32 of one, if without bias"


def test_the_output_of_a_sampled_linear_is_coded(device):
    model = build("bert", SIZE).to(device)
    patch(model, MemSaveConfig(storage="int8"))
    exact = measure_kept(model, batch_for(model, SIZE)).total
    patch(model, MemSaveConfig(linear=WTACRS(budget=0.3), storage="int8"))
    assert measure_kept(model, batch_for(model, SIZE)).total < 1.05 * exact


def test_with_nf4_and_lora(device, tmp_path):
    pytest.importorskip("bitsandbytes")
    only_on_cpu(device)
    build("llama", SIZE, torch.bfloat16).save_pretrained(tmp_path)
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
    batch = batch_for(model, SIZE)
    patch(model)
    exact, kept = step(model, batch), measure_kept(model, batch).total
    patch(model, MemSaveConfig(storage="int8"))
    assert 0 < error(step(model, batch), exact) < 0.05
    assert measure_kept(model, batch).total < 0.7 * kept


def test_checkpointing_offload_a_second_backward_and_nans(device):
    model = build("llama", SIZE, dropout=0.0).to(device)
    batch = batch_for(model, SIZE)
    patch(model)
    exact = step(model, batch)
    patch(model, MemSaveConfig(storage="int8"))
    with torch.autograd.graph.save_on_cpu():
        assert 0 < error(step(model, batch), exact) < LIMITS["int8"]
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    loss.backward()
    assert_same(gradients(model), first)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert 0 < error(step(model, batch), exact) < LIMITS["int8"]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = float("nan")
    assert flat(step(model, batch)).isnan().any()


def test_draws_follow_the_seed_and_leave_the_models_alone(device):
    def run(seed):
        torch.manual_seed(seed)
        model = build("llama", SIZE, dropout=0.0).to(device)
        patch(model, MemSaveConfig(storage="int4"))
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        first = gradients_of(model)
        assert torch.equal(torch.get_rng_state(), before)
        return first, gradients_of(model)

    def gradients_of(model):
        model.zero_grad()
        model(**batch_for(model, SIZE)).loss.backward()
        return gradients(model)

    first, second = run(3)
    for got, expected in zip(run(3), (first, second), strict=True):
        assert_same(got, expected)
    assert error(second, first) > 0.01, "two steps share their draws"
    assert error(run(4)[0], first) > 0.01


def test_undo_copies_and_the_report(device):
    model = build("bert", SIZE).to(device)
    batch, before = batch_for(model, SIZE), states(model)
    stock = step(model, batch)
    report = patch(model, MemSaveConfig(storage="int4"))
    assert "activations that have to be kept are kept in 4 bits: gradients are approximate" in str(report)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert 0 < error(step(copied, batch), stock) < LIMITS["int4"]
    patch(model)
    assert "approximate" not in str(patch(model))
    assert_same(step(model, batch), stock)
    patch(model, MemSaveConfig(storage="int4")).undo()
    assert states(model) == before
    assert_same(step(model, batch), stock)
