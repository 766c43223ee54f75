"""SDPA with dropout, which on CPU is many functions: stock's bits and draws, and of what is [S, S] one tensor kept."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import BertConfig, BertForSequenceClassification

from hf_memsave import measure_kept, patch
from hf_memsave.measure.peak import count_peak
from hf_memsave.tape import attention as module
from support.attention import HEADS, LAYOUTS, MASKS, SEQ, attention, bias_of, inputs, mask_of
from support.helpers import DTYPES, assert_exact, assert_gradients_are_right, kept, laid, only_on_cpu, random, subsets
from support.steps import assert_same, step

P = 0.3


@pytest.fixture(autouse=True)
def composed(monkeypatch, device):
    """How often SDPA was taken apart."""
    only_on_cpu(device)
    calls, compose = [], module._composed

    def counted(*args, **kwargs):
        calls.append(None)  # not what it is given: that would keep it
        return compose(*args, **kwargs)

    monkeypatch.setattr(module, "_composed", counted)
    return calls


def and_draws(fn):
    """``fn``, and in its result what the generator gives next."""

    def call(*given):
        out = fn(*given)
        return out + torch.rand(out.shape).to(out.dtype)

    return call


def assert_is_stocks(fn, given, **options):
    assert_exact(and_draws(fn), and_draws(fn), given, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_exact(dtype, kind, layout, composed):
    for groups in (1, 2):
        fn = attention(mask_of(kind, "cpu", dtype), layout, groups, dropout=P)
        assert_is_stocks(fn, inputs("cpu", dtype, kv_heads=HEADS // groups))
    assert len(composed) == 2


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_exact_under_autocast(dtype, kind, composed):
    fn = attention(mask_of(kind, "cpu"), "rotated", 2, dropout=P)
    assert_is_stocks(fn, inputs("cpu", dtype, kv_heads=HEADS // 2), autocast=torch.bfloat16)
    assert composed


@pytest.mark.parametrize("wanted", subsets(3), ids=str)
def test_it_is_exact_for_a_subset_of_gradients(wanted, composed):
    assert_is_stocks(attention(mask_of("bool", "cpu"), dropout=P), inputs("cpu"), wanted=wanted)


@pytest.mark.parametrize("wanted", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_it_is_exact_with_a_position_bias(wanted, autocast, composed):
    fn = attention(mask_of("bool", "cpu"), dropout=P)
    given = [*inputs("cpu"), bias_of("cpu")]
    assert_is_stocks(fn, given, wanted=(True, True, True, wanted), autocast=autocast)
    assert composed


OPTIONS = {
    "causal": dict(is_causal=True),
    "causal, fewer queries": dict(is_causal=True, q=2),
    "scale": dict(scale=0.7),
    "negative scale": dict(scale=-0.7),
    "scale of minus zero": dict(scale=-0.0),
    "grouped": dict(enable_gqa=True),
    "grouped, causal": dict(enable_gqa=True, is_causal=True),
    "three dimensions": dict(flat=True),
    "nearly all dropped": dict(dropout_p=0.97),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_exact_however_it_is_called(name, dtype, composed):
    options = {"dropout_p": P} | OPTIONS[name]
    length, is_flat = options.pop("q", SEQ), options.pop("flat", False)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q[:, :length], k, v))
        if is_flat:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, **options)

    assert_is_stocks(attend, inputs("cpu", dtype, kv_heads=HEADS // (2 if "enable_gqa" in options else 1)))
    assert composed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_one_tensor_taken_thrice_are_summed_in_stocks_order(dtype, composed):
    def attend(x):
        x = x.transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=P)

    assert_is_stocks(attend, inputs("cpu", dtype)[:1])
    assert composed


def test_it_is_exact_where_halves_may_be_summed_in_half_precision(composed):
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        assert_is_stocks(attention(mask_of("float", "cpu", torch.bfloat16), dropout=P), inputs("cpu", torch.bfloat16))
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
    assert composed


def test_a_row_that_may_see_nothing_is_exact(composed):
    mask = mask_of("bool", "cpu")
    mask[0, :, 2] = False
    assert_is_stocks(attention(mask, "rotated", dropout=P), inputs("cpu"))
    assert composed


def test_it_has_the_right_gradients(composed):
    def attend(q, k, v):
        torch.manual_seed(3)
        return attention(mask_of("bool", "cpu", seq=3), "rotated", 2, dropout=P)(q, k, v)

    assert_gradients_are_right(attend, *inputs("cpu", torch.float64, HEADS // 2, seq=3, dim=2), twice=False)
    assert composed


@pytest.mark.parametrize("sizes", [dict(kv_seq=0), dict(dim=0), dict(batch=0), dict(seq=0)], ids=str)
def test_nothing_is_drawn_for_nothing(sizes, composed):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=P)

    assert_is_stocks(attend, inputs("cpu", **sizes))
    assert not composed


class Sees(TorchFunctionMode):
    """Counts calls of SDPA."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


class Seen(torch.Tensor):
    """Has a say in what is called with it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Seen.calls += func is F.scaled_dot_product_attention
        return super().__torch_function__(func, types, args, kwargs)


def test_others_who_want_to_see_the_call_see_it(composed):
    fn = attention(dropout=P)
    with Sees() as mode:
        assert_is_stocks(fn, inputs("cpu"))
    assert mode.calls == 2
    with laid(True):
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in inputs("cpu"))
        F.scaled_dot_product_attention(q.as_subclass(Seen), k, v, dropout_p=P)
        assert composed and Seen.calls == 1


def test_fake_tensors_are_taken_apart_too(composed):
    with FakeTensorMode(), laid(True):
        q, k, v = (torch.empty(2, SEQ, HEADS, 8, requires_grad=True).transpose(1, 2) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=P)
        out.sum().backward()
    assert composed and out.shape == q.shape


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_is_taken_apart_where_nothing_or_all_is_dropped(p, composed):
    assert_is_stocks(attention(mask_of("bool", "cpu"), dropout=p), inputs("cpu"))
    assert not composed


def test_what_stock_refuses_is_refused_with_its_words(composed):
    q, k, v = (x.transpose(1, 2) for x in inputs("cpu"))
    cases = {
        "mask and causal": ((q, k, v), dict(is_causal=True, attn_mask=mask_of("bool", "cpu"))),
        "a narrow key": ((q, k[..., :3], v), {}),
        "dtypes": ((q, k.half(), v), {}),
        "a mask's dtype": ((q, k, v), dict(attn_mask=mask_of("float", "cpu", torch.bfloat16))),
        "a mask's shape": ((q, k, v), dict(attn_mask=torch.zeros(5, 5))),
        "groups": ((q, k[:, :3], v[:, :3]), dict(enable_gqa=True)),
    }
    for name, (given, options) in cases.items():
        said = []
        for tape in (True, False):
            with pytest.raises(RuntimeError) as error, laid(tape):
                F.scaled_dot_product_attention(*(x.clone().requires_grad_() for x in given), dropout_p=P, **options)
            said.append(str(error.value))
        assert said[0] == said[1], name


# Bytes

S = 64


def test_of_what_is_s_by_s_one_tensor_is_kept(composed):
    heads = 2 * HEADS * S * S * 4  # fp32
    (x, *_) = inputs("cpu", seq=S)

    def attend(x):
        return F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3, dropout_p=P)

    stock, ours = kept(attend, x, tape=False), kept(attend, x, tape=True)
    assert stock - ours == pytest.approx(2 * heads, rel=0.05)  # what dropout multiplies with, and gives
    assert composed


@pytest.mark.parametrize("wanted", [(True, False, False), (False, False, True), (True, True, True)], ids=str)
def test_the_peak_is_never_above_stocks(wanted, composed):
    peaks = []
    for tape in (False, True):
        given = [x.requires_grad_(w) for x, w in zip(inputs("cpu", seq=S), wanted, strict=True)]

        def attend(given=given, tape=tape):
            with laid(tape):
                out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in given), dropout_p=P)
            out.sum().backward()

        attend()  # so that gradients are there
        peaks.append(count_peak(attend).peak)
    assert peaks[1] <= peaks[0]
    assert composed


def test_a_layer_of_bert_with_its_own_dropouts_keeps_twelve_units():
    """Ten, and the probabilities, 2u at this size; stock keeps 24. In bf16 they are fp32: 14 of 33."""
    size, batch = dict(hidden_size=256, num_attention_heads=4, intermediate_size=1024, vocab_size=100), 4
    ids = torch.randint(100, (batch, 128), generator=torch.Generator().manual_seed(0))

    def of_a_layer(dtype, is_patched):
        found = []
        for layers in (2, 4):
            model = BertForSequenceClassification(BertConfig(**size, num_hidden_layers=layers)).to(dtype).train()
            if is_patched:
                patch(model)
            found.append(measure_kept(model, {"input_ids": ids, "labels": torch.zeros(batch, dtype=torch.long)}).total)
        return (found[1] - found[0]) / 2 / (batch * 128 * 256 * dtype.itemsize)

    assert of_a_layer(torch.float32, False) == pytest.approx(24.0, abs=0.1)
    assert of_a_layer(torch.float32, True) == pytest.approx(12.05, abs=0.1)
    assert of_a_layer(torch.bfloat16, False) == pytest.approx(33.0, abs=0.1)
    assert of_a_layer(torch.bfloat16, True) == pytest.approx(14.1, abs=0.1)


# Around it


class Attends(nn.Module):
    """Self-attention between two linears, whose outcome is a loss."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).transpose(1, 3).unbind(2)
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=P if self.training else 0.0)
        return SimpleNamespace(loss=self.out(heads.transpose(1, 2).flatten(2)).square().mean())


@pytest.mark.parametrize(
    "config", [True, {"dropout": "mask"}, {"dropout": "stock"}, {"attention": "stock"}, {"offload": True}], ids=str
)
def test_a_model_that_attends_is_exact_with_each_config(config):
    torch.manual_seed(0)
    stock = Attends().train()
    ours = copy.deepcopy(stock)
    patch(ours, config)
    for seed in range(3):
        batch = {"x": random(2, 5, 16, seed=seed)}
        assert_same(step(ours, batch, seed), step(stock, batch, seed))


def test_a_mask_that_is_written_to_before_backward_is_taken_as_it_was():
    def attend(q, k, v):
        mask = torch.zeros(SEQ, SEQ)
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, dropout_p=P)
        mask.fill_(-9.0)
        return out

    assert_is_stocks(attend, inputs("cpu"))
