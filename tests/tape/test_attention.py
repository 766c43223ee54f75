"""SDPA as Transformers calls it, under a tape: stock's bits; q, k, v and the output once, and one mask per forward."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from support.attention import BATCH, DIM, HEADS, LAYOUTS, MASKS, SEQ, attention, bias_of, inputs, mask_of
from support.helpers import (
    DTYPES,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_no_worse_than_eager,
    assert_same_bits,
    only_on_cpu,
    random,
    subsets,
    taping,
)


def assert_is_stocks(fn, given, **options):
    only_on_cpu(given[0].device)
    assert_exact(fn, fn, given, **options)


# The same bits.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_exact(device, dtype, kind, layout):
    for groups in (1, 2, 4):
        fn = attention(mask_of(kind, device, dtype), layout, groups)
        assert_is_stocks(fn, inputs(device, dtype, kv_heads=HEADS // groups))


@pytest.mark.parametrize("wanted", subsets(3), ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_is_exact_for_a_subset_of_gradients(device, groups, wanted):
    fn = attention(mask_of("bool", device), "rotated", groups)
    assert_is_stocks(fn, inputs(device, kv_heads=HEADS // groups), wanted=wanted)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.float32, torch.float32, torch.bfloat16)],
    ids=["fp32", "bf16", "rotated-in-fp32"],
)
def test_attention_is_exact_under_autocast(device, dtypes, groups, kind):
    given = [x.to(dtype) for x, dtype in zip(inputs(device, kv_heads=HEADS // groups), dtypes, strict=True)]
    assert_is_stocks(attention(mask_of(kind, device), "rotated", groups), given, autocast=torch.bfloat16)


@pytest.mark.parametrize("options", [dict(is_causal=True), dict(scaling=0.25), dict(dropout=0.3)], ids=str)
@pytest.mark.parametrize("kv_seq", [3, SEQ, 9])
def test_attention_is_exact_with_options(device, options, kv_seq):
    for kind in ("none",) if "is_causal" in options else MASKS:
        for groups in (1, 2):
            fn = attention(mask_of(kind, device, kv_seq=kv_seq), "rotated", groups, **options)
            assert_is_stocks(fn, inputs(device, kv_heads=HEADS // groups, kv_seq=kv_seq))


@pytest.mark.parametrize("wanted", [(True, True, True, True), (True, True, True, False), (False, False, False, True)])
@pytest.mark.parametrize("kv_seq", [3, SEQ])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_attention_with_a_position_bias_is_exact(device, is_causal, kv_seq, wanted):
    for kind in MASKS:
        fn = attention(mask_of(kind, device, kv_seq=kv_seq), is_causal=is_causal)
        assert_is_stocks(fn, [*inputs(device, kv_seq=kv_seq), bias_of(device, kv_seq=kv_seq)], wanted=wanted)


@pytest.mark.parametrize("wanted", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_with_a_position_bias_is_exact_in_half_precision(device, dtype, autocast, wanted):
    for kind in MASKS:
        fn = attention(mask_of(kind, device, dtype))
        given = [*inputs(device, dtype if autocast is None else torch.bfloat16), bias_of(device, dtype)]
        assert_is_stocks(fn, given, wanted=(True, True, True, wanted), autocast=autocast)


@pytest.mark.parametrize("sizes", [dict(batch=1), dict(dim=5), dict(seq=7, dim=1), dict(seq=1, kv_seq=SEQ)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_is_exact_for_odd_shapes(device, groups, sizes):
    for layout in LAYOUTS:
        assert_is_stocks(attention(layout=layout, groups=groups), inputs(device, kv_heads=HEADS // groups, **sizes))


def test_attention_of_a_row_that_may_see_nothing_is_exact(device):
    mask = mask_of("bool", device)
    mask[0, :, 2] = False
    assert_is_stocks(attention(mask, "rotated"), inputs(device))


def test_attention_takes_a_mask_made_in_inference_mode(device):
    with torch.inference_mode():
        mask = mask_of("bool", device)
    assert_is_stocks(attention(mask), inputs(device))


@pytest.mark.parametrize("call", ["names", "places"])
def test_attention_is_exact_however_it_is_called(device, call):
    def attend(q, k, v):
        mask = mask_of("bool", device)
        if call == "places":
            return F.scaled_dot_product_attention(q, k, v, mask, 0.0, False)
        return F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask, dropout_p=0.0, scale=0.3)

    assert_is_stocks(lambda *given: attend(*[x.transpose(1, 2) for x in given]), inputs(device))


# Layers that share.


@pytest.mark.parametrize("wanted", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_layers_that_share_a_mask_and_a_bias_are_exact(device, kind, wanted):
    fn, causal = attention(mask_of(kind, device)), attention(is_causal=True)

    def layers(q, k, v, bias):
        bias = bias.permute(0, 3, 1, 2)  # not contiguous, as T5 computes it
        return causal(fn(fn(fn(q, k, v, bias), k, v, bias), k, v), k, v, bias)

    bias = bias_of(device).permute(0, 2, 3, 1).contiguous()
    assert_is_stocks(layers, [*inputs(device), bias], wanted=(True, True, True, wanted))


@pytest.mark.parametrize(("kind", "with_bias"), [("bool", True), ("bool", False), ("float", True)])
def test_a_mask_that_changes_between_layers_is_not_confused_with_what_it_was(device, with_bias, kind):
    def layers(q, k, v):
        mask, bias = mask_of(kind, device), bias_of(device) if with_bias else None
        attend = attention(mask)
        first = attend(q, k, v, bias)
        mask[0, :, :, 0] = mask[1, 0, 0, -1]
        return attend(first, k, v, bias)

    assert_is_stocks(layers, inputs(device))


@pytest.mark.parametrize("autocast", [(True, False), (False, True)], ids=["wider", "narrower"])
@pytest.mark.parametrize("wanted", [True, False], ids=["trained", "frozen"])
def test_layers_of_two_dtypes_that_share_a_mask_and_a_bias_are_exact(device, wanted, autocast):
    attend = attention(mask_of("bool", device))

    def layers(x, k, v, bias):
        for enabled in autocast:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
                x = (attend(x, k, v, bias) + attend(x, k, v)).float()
        return x

    assert_is_stocks(layers, [*inputs(device), bias_of(device)], wanted=(True, True, True, wanted))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rotated", [True, False], ids=["q and k rotated", "three views"])
def test_attention_on_a_fused_projection_is_exact(device, rotated, groups):
    widths = [HEADS * DIM, HEADS * DIM // groups, HEADS * DIM // groups]
    module = SimpleNamespace(is_causal=False, num_key_value_groups=groups)
    for kind in MASKS:
        mask = mask_of(kind, device)

        def attend(qkv):
            q, k, v = (x.view(BATCH, SEQ, -1, DIM).transpose(1, 2) for x in qkv.split(widths, dim=-1))
            q, k = (q.cos(), k.cos()) if rotated else (q, k)
            return sdpa_attention_forward(module, q, k, v, mask)[0]  # noqa: B023

        assert_is_stocks(attend, [random(BATCH, SEQ, sum(widths), device=device)])


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_no_worse_than_eager(device, dtype, kind):
    def attend(q, k, v):  # a float mask must have q's dtype
        mask = mask_of(kind, device)
        return attention(mask.to(q.dtype) if kind == "float" else mask, "rotated", 2)(q, k, v)

    assert_no_worse_than_eager(attend, attend, inputs(device, dtype, kv_heads=HEADS // 2))


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_has_the_right_gradients(device, groups):
    # Once: PyTorch's fused kernels have no second derivative.
    given = inputs(device, torch.float64, HEADS // groups, seq=3, dim=2)
    assert_gradients_are_right(attention(mask_of("bool", device, seq=3), "rotated", groups), *given, twice=False)


@pytest.mark.parametrize("kind", MASKS)
def test_attention_runs_backward_twice(device, kind):
    assert_backward_twice(attention(mask_of(kind, device), "rotated", 2), *inputs(device, kv_heads=HEADS // 2))


def test_attention_is_stock_without_gradients(device):
    fn, given = attention(mask_of("bool", device), "rotated"), inputs(device)
    with taping(), torch.no_grad():
        assert_same_bits(fn(*given), fn(*given))
