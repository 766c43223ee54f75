"""SDPA as Transformers calls it, under a tape, with dropout (on CPU many functions) and without: stock's bits."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from support import helpers
from support.attention import BATCH, DIM, HEADS, LAYOUTS, MASKS, SEQ, attention, bias_of, inputs, mask_of, sdpa

P = 0.3
FP32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
#: Without dropout, and with, which is taken apart on CPU alone.
both = pytest.mark.parametrize("p", [0.0, P])


@pytest.fixture
def device(device, request):
    has_dropout = hasattr(request.node, "callspec") and request.node.callspec.params.get("p")
    return CPU if has_dropout else device


def assert_is_stocks(fn, given, **options):
    helpers.only_on_cpu(given[0].device)
    helpers.assert_exact(helpers.then_draws(fn), helpers.then_draws(fn), given, **options)


@both
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", MASKS)
def test_attention_is_exact(device, kind, groups, p, composed):
    """In every dtype and layout, under autocast, with options, and without some of the gradients."""
    heads = HEADS // groups
    for dtype, layout in product(helpers.DTYPES, LAYOUTS):
        fn = attention(mask_of(kind, device, dtype), layout, groups, dropout=p)
        assert_is_stocks(fn, inputs(device, dtype, heads))
    fn = attention(mask_of(kind, device), "rotated", groups, dropout=p)
    for wanted in helpers.subsets(3):
        assert_is_stocks(fn, inputs(device, kv_heads=heads), wanted=wanted)
    for dtypes in ((FP32, FP32, FP32), (BF16, BF16, BF16), (FP32, FP32, BF16)):  # q and k are rotated in fp32
        given = [x.to(dtype) for x, dtype in zip(inputs(device, kv_heads=heads), dtypes, strict=True)]
        assert_is_stocks(fn, given, autocast=BF16)
    for kv_seq, options in product((3, SEQ, 9), [dict(is_causal=True)] * (kind == "none") + [dict(scaling=0.25)]):
        fn = attention(mask_of(kind, device, kv_seq=kv_seq), "rotated", groups, dropout=p, **options)
        assert_is_stocks(fn, inputs(device, kv_heads=heads, kv_seq=kv_seq))
    assert (len(composed) >= 2 * len(helpers.DTYPES)) == (p > 0)


@both
@pytest.mark.parametrize("wanted", [(True, True, True, True), (True, True, True, False), (False, False, False, True)])
def test_attention_with_a_position_bias_is_exact(device, wanted, p):
    for kind, is_causal, kv_seq in product(MASKS, (True, False), (3, SEQ)):
        fn = attention(mask_of(kind, device, kv_seq=kv_seq), is_causal=is_causal, dropout=p)
        assert_is_stocks(fn, [*inputs(device, kv_seq=kv_seq), bias_of(device, kv_seq=kv_seq)], wanted=wanted)
    for kind, dtype, autocast in product(MASKS, (FP32, BF16), (None, BF16)):
        given = [*inputs(device, dtype if autocast is None else BF16), bias_of(device, dtype)]
        assert_is_stocks(attention(mask_of(kind, device, dtype), dropout=p), given, wanted=wanted, autocast=autocast)


OPTIONS = {
    "causal": dict(is_causal=True), "causal, fewer queries": dict(is_causal=True, q=2),
    "mask and scale": dict(scale=0.3, is_masked=True), "negative scale": dict(scale=-0.7),
    "scale of minus zero": dict(scale=-0.0), "grouped": dict(enable_gqa=True),
    "grouped, causal": dict(enable_gqa=True, is_causal=True), "three dimensions": dict(flat=True),
    "nearly all dropped": dict(dropout_p=0.97),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_is_exact_however_it_is_called(device, name, p):
    helpers.only_on_cpu(device)
    options = {"dropout_p": p} | OPTIONS[name]
    length, is_flat = options.pop("q", SEQ), options.pop("flat", False)
    if options.pop("is_masked", False):
        options["attn_mask"] = mask_of("bool", device)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q[:, :length], k, v))
        if is_flat:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        by_name = F.scaled_dot_product_attention(query=q, key=k, value=v, **options)
        return by_name if "enable_gqa" in options else by_name + F.scaled_dot_product_attention(q, k, v, None, p, False)

    for dtype in helpers.DTYPES:
        assert_is_stocks(attend, inputs(device, dtype, kv_heads=HEADS // (2 if "enable_gqa" in options else 1)))


@both
def test_attention_is_exact_for_odd_shapes_and_masks(device, p):
    sizes = dict(batch=1), dict(dim=5), dict(seq=7, dim=1), dict(seq=1, kv_seq=SEQ)
    for groups, options, layout in product((1, 2), sizes, LAYOUTS):
        given = inputs(device, kv_heads=HEADS // groups, **options)
        assert_is_stocks(attention(layout=layout, groups=groups, dropout=p), given)
    mask = mask_of("bool", device)
    mask[0, :, 2] = False  # a row that may see nothing
    assert_is_stocks(attention(mask, "rotated", dropout=p), inputs(device))
    with torch.inference_mode():
        mask = mask_of("bool", device)
    assert_is_stocks(attention(mask, dropout=p), inputs(device))
    for dtype in helpers.DTYPES:  # the gradients of one tensor are summed in stock's order
        assert_is_stocks(lambda x: sdpa(x, x, x, p=p), inputs(device, dtype)[:1])


def test_it_is_exact_where_halves_may_be_summed_in_half_precision():
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        assert_is_stocks(attention(mask_of("float", CPU, BF16), dropout=P), inputs(CPU, BF16))
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@pytest.mark.parametrize(("groups", "p"), [(1, 0.0), (2, 0.0), (2, P)])
def test_attention_runs_backward_twice_and_without_gradients(device, groups, p):
    for kind in MASKS:
        fn = attention(mask_of(kind, device), "rotated", groups, dropout=p)
        helpers.assert_backward_twice(fn, *inputs(device, kv_heads=HEADS // groups))
    found = []
    for tape in (True, False):
        torch.manual_seed(3)
        with helpers.laid(tape), torch.no_grad():
            found.append(fn(*inputs(device, kv_heads=HEADS // groups)))
    helpers.assert_same_bits(*found)


@pytest.mark.parametrize("wanted", [True, False], ids=["trained", "frozen"])
def test_layers_that_share_a_mask_and_a_bias_are_exact(device, wanted):
    """In one dtype, and where autocast is on for the first or for the second one."""
    bias = bias_of(device).permute(0, 2, 3, 1).contiguous()
    for kind in ("bool", "float"):
        fn, causal = attention(mask_of(kind, device)), attention(is_causal=True)

        def layers(q, k, v, bias, fn=fn, causal=causal):
            bias = bias.permute(0, 3, 1, 2)  # not contiguous, as T5 computes it
            return causal(fn(fn(fn(q, k, v, bias), k, v, bias), k, v), k, v, bias)

        assert_is_stocks(layers, [*inputs(device), bias], wanted=(True, True, True, wanted))
    attend = attention(mask_of("bool", device))
    for autocast in ((True, False), (False, True)):

        def of_two_dtypes(x, k, v, bias, autocast=autocast):
            for enabled in autocast:
                with torch.autocast(device.type, dtype=BF16, enabled=enabled):
                    x = (attend(x, k, v, bias) + attend(x, k, v)).float()
            return x

        assert_is_stocks(of_two_dtypes, [*inputs(device), bias_of(device)], wanted=(True, True, True, wanted))


def test_a_mask_that_changes_after_a_layer_is_not_confused_with_what_it_was(device):
    for kind, with_bias in (("bool", True), ("bool", False), ("float", True)):

        def layers(q, k, v, kind=kind, with_bias=with_bias):
            mask, bias = mask_of(kind, device), bias_of(device) if with_bias else None
            attend = attention(mask)
            first = attend(q, k, v, bias)
            mask[0, :, :, 0] = mask[1, 0, 0, -1]
            return attend(first, k, v, bias)

        assert_is_stocks(layers, inputs(device))

    def last(q, k, v):  # taken apart, where stock keeps no mask
        mask = torch.zeros(SEQ, SEQ)
        out = sdpa(q, k, v, attn_mask=mask)
        mask.fill_(-9.0)
        return out

    assert_is_stocks(last, inputs(CPU))


def test_attention_on_a_fused_projection_is_exact(device):
    for kind, is_rotated, groups in product(MASKS, (True, False), (1, 2)):
        widths = [HEADS * DIM, HEADS * DIM // groups, HEADS * DIM // groups]
        module = SimpleNamespace(is_causal=False, num_key_value_groups=groups)

        def attend(qkv, mask=mask_of(kind, device), rotated=is_rotated, widths=widths, module=module):  # noqa: B008
            q, k, v = (x.view(BATCH, SEQ, -1, DIM).transpose(1, 2) for x in qkv.split(widths, dim=-1))
            q, k = (q.cos(), k.cos()) if rotated else (q, k)
            return sdpa_attention_forward(module, q, k, v, mask)[0]

        assert_is_stocks(attend, [helpers.random(BATCH, SEQ, sum(widths), device=device)])


@pytest.mark.parametrize("sizes", [dict(kv_seq=0), dict(dim=0), dict(batch=0), dict(seq=0)], ids=str)
def test_nothing_is_taken_apart_where_nothing_or_all_is_dropped(sizes, composed):
    assert_is_stocks(sdpa, inputs(CPU, **sizes))
    for p in (0.0, 1.0):
        assert_is_stocks(attention(mask_of("bool", CPU), dropout=p), inputs(CPU))
    assert not composed


class Sees(TorchFunctionMode):
    """Counts calls of SDPA."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        Sees.calls += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


class Seen(torch.Tensor):
    """Has a say in what is called with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Sees.calls += func is F.scaled_dot_product_attention
        return super().__torch_function__(func, types, args, kwargs)


def test_modes_and_classes_see_the_call_and_fake_tensors_are_taken_apart_too(composed):
    before = Sees.calls
    with Sees():
        assert_is_stocks(attention(dropout=P), inputs(CPU))
    assert Sees.calls == before + 2
    with helpers.laid(True):
        q, k, v = (x.requires_grad_() for x in inputs(CPU))
        sdpa(q.as_subclass(Seen), k, v)
    assert Sees.calls == before + 3 and composed
    composed.clear()
    with FakeTensorMode(), helpers.laid(True):
        out = sdpa(*(torch.empty(2, SEQ, HEADS, 8, requires_grad=True) for _ in range(3)))
        out.sum().backward()
    assert composed and out.shape == (2, HEADS, SEQ, 8)


def test_what_stock_refuses_is_refused_with_its_words():
    q, k, v = inputs(CPU)
    cases = {
        "mask and causal": ((q, k, v), dict(is_causal=True, attn_mask=mask_of("bool", CPU))),
        "a narrow key": ((q, k[..., :3], v), {}),
        "dtypes": ((q, k.half(), v), {}),
        "a mask's dtype": ((q, k, v), dict(attn_mask=mask_of("float", CPU, BF16))),
        "a mask's shape": ((q, k, v), dict(attn_mask=torch.zeros(5, 5))),
        "groups": ((q, k[:, :, :3], v[:, :, :3]), dict(enable_gqa=True)),
    }
    for name, (given, options) in cases.items():
        said = []
        for tape in (True, False):
            with pytest.raises(RuntimeError) as error, helpers.laid(tape):
                sdpa(*(x.clone().requires_grad_() for x in given), **options)
            said.append(str(error.value))
        assert said[0] == said[1], name
