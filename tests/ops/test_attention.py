"""``attention``: the bits of stock SDPA attention; q, k, v and the output are kept once, and one mask per forward."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_memsave.ops import attention as op
from hf_memsave.ops.attention import attention
from hf_memsave.tape import Tape
from support.helpers import (
    DTYPES,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_no_worse_than_eager,
    assert_same_bits,
    assert_same_result,
    bits,
    kept,
    only_on_cpu,
    random,
    run,
    subsets,
)

BATCH, HEADS, SEQ, DIM = 2, 4, 6, 8
MASKS = ("none", "bool", "causal-bool", "float")
LAYOUTS = {
    "projected": lambda x: x.transpose(1, 2),  # a view of a linear's output
    "rotated": lambda x: x.transpose(1, 2).contiguous(),  # after rotary embeddings
}


def inputs(device, dtype=torch.float32, kv_heads=HEADS, seq=SEQ, kv_seq=None, dim=DIM, batch=BATCH):
    """q, k and v as projections make them, ``[batch, seq, heads, dim]``."""
    kv_seq = seq if kv_seq is None else kv_seq
    shapes = [(batch, seq, HEADS, dim), (batch, kv_seq, kv_heads, dim), (batch, kv_seq, kv_heads, dim)]
    return [random(*shape, dtype=dtype, device=device, seed=10 + i) for i, shape in enumerate(shapes)]


def mask_of(kind, device, dtype=torch.float32, seq=SEQ, kv_seq=None):
    """A mask ``[batch, 1, seq, kv_seq]`` as Transformers makes it, with padding at the end of the second sequence."""
    kv_seq = seq if kv_seq is None else kv_seq
    if kind == "none":
        return None
    mask = torch.ones(BATCH, 1, seq, kv_seq, dtype=torch.bool, device=device)
    mask[1, :, :, kv_seq - 2 :] = False
    if kind == "causal-bool":
        mask &= torch.ones(seq, kv_seq, dtype=torch.bool, device=device).tril()
    if kind == "float":
        return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, torch.finfo(dtype).min)
    return mask


def functions(mask=None, layout="projected", groups=1, is_causal=False, **options):
    """Ours and stock's, as functions of q, k, v and perhaps a position bias."""
    module = SimpleNamespace(is_causal=is_causal, num_key_value_groups=groups)
    view = LAYOUTS[layout]

    def function(call):
        def attend(q, k, v, bias=None):
            return call(module, view(q), view(k), view(v), mask, position_bias=bias, **options)[0]

        return attend

    return function(attention), function(sdpa_attention_forward)


def bias_of(device, dtype=torch.float32, seq=SEQ, kv_seq=None):
    """T5's position bias ``[1, heads, seq, kv_seq]``."""
    return random(1, HEADS, seq, seq if kv_seq is None else kv_seq, dtype=dtype, device=device, seed=20)


# The same bits.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_exact(device, dtype, kind, layout):
    only_on_cpu(device)
    assert_exact(*functions(mask_of(kind, device, dtype), layout), inputs(device, dtype))


@pytest.mark.parametrize("wanted", subsets(3), ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_is_exact_for_a_subset_of_gradients(device, groups, wanted):
    only_on_cpu(device)
    pair = functions(mask_of("bool", device), "rotated", groups)
    assert_exact(*pair, inputs(device, kv_heads=HEADS // groups), wanted=wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_with_fewer_kv_heads_is_exact(device, dtype, kind, groups, layout):
    only_on_cpu(device)
    pair = functions(mask_of(kind, device, dtype), layout, groups)
    assert_exact(*pair, inputs(device, dtype, kv_heads=HEADS // groups))


@pytest.mark.parametrize("by_argument", [True, False], ids=["argument", "module"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 2])
def test_causal_attention_is_exact(device, groups, layout, by_argument):
    only_on_cpu(device)
    ours, stock = functions(layout=layout, groups=groups, is_causal=True)
    if by_argument:
        module = SimpleNamespace(is_causal=False, num_key_value_groups=groups)

        def with_argument(call):
            view = LAYOUTS[layout]
            return lambda q, k, v: call(module, view(q), view(k), view(v), None, is_causal=True)[0]

        ours, stock = with_argument(attention), with_argument(sdpa_attention_forward)
    given = inputs(device, kv_heads=HEADS // groups)
    assert_exact(ours, stock, given)
    not_causal = run(functions(layout=layout, groups=groups)[1], given)
    assert not torch.equal(bits(run(ours, given).output), bits(not_causal.output)), "it was not causal"


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("kv_seq", [3, 9])
def test_cross_attention_is_exact(device, kv_seq, kind):
    only_on_cpu(device)
    assert_exact(*functions(mask_of(kind, device, kv_seq=kv_seq)), inputs(device, kv_seq=kv_seq))


@pytest.mark.parametrize("kv_seq", [3, 9])
def test_causal_cross_attention_is_exact(device, kv_seq):
    only_on_cpu(device)
    assert_exact(*functions(is_causal=True), inputs(device, kv_seq=kv_seq))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.float32, torch.float32, torch.bfloat16)],
    ids=["fp32", "bf16", "rotated-in-fp32"],
)
def test_attention_is_exact_under_autocast(device, dtypes, groups, kind):
    only_on_cpu(device)
    given = [x.to(dtype) for x, dtype in zip(inputs(device, kv_heads=HEADS // groups), dtypes, strict=True)]
    pair = functions(mask_of(kind, device), "rotated", groups)
    assert_exact(*pair, given, autocast=torch.bfloat16)


@pytest.mark.parametrize("wanted", [(True, True, True, True), (True, True, True, False), (False, False, False, True)])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kind", MASKS)
def test_attention_with_a_position_bias_is_exact(device, kind, is_causal, wanted):
    only_on_cpu(device)
    pair = functions(mask_of(kind, device), is_causal=is_causal)
    assert_exact(*pair, [*inputs(device), bias_of(device)], wanted=wanted)


@pytest.mark.parametrize("wanted", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_with_a_position_bias_is_exact_in_half_precision(device, dtype, autocast, kind, wanted):
    only_on_cpu(device)
    mask = mask_of(kind, device, dtype)
    given = [*inputs(device, torch.bfloat16), bias_of(device, dtype)]
    if autocast is None and (dtype != torch.bfloat16):
        given = [x.to(dtype) for x in given]
    assert_exact(*functions(mask), given, wanted=(True, True, True, wanted), autocast=autocast)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kv_seq", [3, 9])
@pytest.mark.parametrize("kind", ["none", "bool"])
def test_cross_attention_with_a_position_bias_is_exact(device, kind, kv_seq, is_causal):
    only_on_cpu(device)
    pair = functions(mask_of(kind, device, kv_seq=kv_seq), is_causal=is_causal)
    given = [*inputs(device, kv_seq=kv_seq), bias_of(device, kv_seq=kv_seq)]
    assert_exact(*pair, given, wanted=(True, True, True, False))


@pytest.mark.parametrize("wanted", [True, False], ids=["trained", "frozen"])
def test_layers_that_share_a_position_bias_are_exact(device, wanted):
    only_on_cpu(device)
    mask = mask_of("bool", device)

    def layers(call):
        return lambda q, k, v, bias: call(call(call(q, k, v, bias), k, v, bias), k, v, bias)

    ours, stock = functions(mask)
    given = [*inputs(device), bias_of(device)]
    assert_exact(layers(ours), layers(stock), given, wanted=(True, True, True, wanted))


def test_layers_that_share_a_mask_are_exact(device):
    only_on_cpu(device)
    ours, stock = functions(mask_of("bool", device), "rotated")
    given = inputs(device)
    assert_exact(lambda q, k, v: ours(ours(q, k, v), k, v), lambda q, k, v: stock(stock(q, k, v), k, v), given)


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "mask"])
def test_a_mask_that_changes_between_layers_is_not_confused_with_what_it_was(device, with_bias):
    only_on_cpu(device)

    def layers(call):
        def two(q, k, v):
            mask = mask_of("bool", device)
            bias = bias_of(device) if with_bias else None
            attend = functions(mask)[0 if call is attention else 1]
            first = attend(q, k, v, bias)
            mask[0, :, :, 0] = False
            return attend(first, k, v, bias)

        return two

    assert_exact(layers(attention), layers(sdpa_attention_forward), inputs(device))


@pytest.mark.parametrize("autocast", [(True, False), (False, True)], ids=["wider", "narrower"])
@pytest.mark.parametrize("wanted", [True, False], ids=["trained", "frozen"])
def test_layers_of_two_dtypes_that_share_a_mask_and_a_bias_are_exact(device, wanted, autocast):
    only_on_cpu(device)
    mask = mask_of("bool", device)

    def layers(call):
        def two(x, k, v, bias):
            for enabled in autocast:
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
                    x = (call(x, k, v, bias) + call(x, k, v)).float()
            return x

        return two

    ours, stock = functions(mask)
    assert_exact(layers(ours), layers(stock), [*inputs(device), bias_of(device)], wanted=(True, True, True, wanted))


@pytest.mark.parametrize("wanted", [True, False], ids=["trained", "frozen"])
def test_a_causal_and_a_full_layer_that_share_a_bias_are_exact(device, wanted):
    only_on_cpu(device)
    full, causal = functions(), functions(is_causal=True)

    def layers(i):
        def two(q, k, v, bias):
            bias = bias.permute(0, 3, 1, 2)  # not contiguous, as T5 computes it
            return causal[i](full[i](q, k, v, bias), k, v, bias)

        return two

    bias = bias_of(device).permute(0, 2, 3, 1).contiguous()
    assert_exact(layers(0), layers(1), [*inputs(device), bias], wanted=(True, True, True, wanted))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("rotated", [True, False], ids=["q and k rotated", "three views"])
def test_attention_on_a_fused_projection_is_exact(device, rotated, kind, groups):
    only_on_cpu(device)
    mask = mask_of(kind, device)
    module = SimpleNamespace(is_causal=False, num_key_value_groups=groups)
    widths = [HEADS * DIM, HEADS * DIM // groups, HEADS * DIM // groups]

    def fused(call):
        def attend(qkv):
            q, k, v = (x.view(BATCH, SEQ, -1, DIM).transpose(1, 2) for x in qkv.split(widths, dim=-1))
            if rotated:
                q, k = q.cos(), k.cos()
            return call(module, q, k, v, mask)[0]

        return attend

    given = [random(BATCH, SEQ, sum(widths), device=device)]
    assert_exact(fused(attention), fused(sdpa_attention_forward), given)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_dropout_is_exact(device, groups, kind):
    only_on_cpu(device)
    pair = functions(mask_of(kind, device), "rotated", groups, dropout=0.3)
    assert_exact(*pair, inputs(device, kv_heads=HEADS // groups))


@pytest.mark.parametrize("kind", MASKS)
def test_attention_with_a_scale_is_exact(device, kind):
    only_on_cpu(device)
    assert_exact(*functions(mask_of(kind, device), scaling=0.25), inputs(device))


def test_attention_of_a_row_that_may_see_nothing_is_exact(device):
    only_on_cpu(device)
    mask = mask_of("bool", device)
    mask[0, :, 2] = False
    assert_exact(*functions(mask, "rotated"), inputs(device))


@pytest.mark.parametrize("kind", ["none", "bool"])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_of_one_token_is_exact(device, groups, kind):
    only_on_cpu(device)
    mask = mask_of(kind, device, seq=1, kv_seq=SEQ)
    assert_exact(*functions(mask, "rotated", groups), inputs(device, seq=1, kv_seq=SEQ, kv_heads=HEADS // groups))


@pytest.mark.parametrize("sizes", [dict(batch=1), dict(dim=5), dict(seq=7, dim=1), dict(seq=2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_is_exact_for_odd_shapes(device, layout, sizes):
    only_on_cpu(device)
    assert_exact(*functions(layout=layout), inputs(device, **sizes))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_no_worse_than_eager(device, dtype, kind, groups):
    mask = mask_of(kind, device, torch.float32)
    ours, stock = functions(mask, "rotated", groups)

    def in_its_dtype(call):  # a float mask must have q's dtype
        return lambda q, k, v: functions(mask.to(q.dtype), "rotated", groups)[call](q, k, v)

    if kind == "float":
        ours, stock = in_its_dtype(0), in_its_dtype(1)
    assert_no_worse_than_eager(ours, stock, inputs(device, dtype, kv_heads=HEADS // groups))


def test_attention_takes_a_mask_made_in_inference_mode(device):
    only_on_cpu(device)
    with torch.inference_mode():
        mask = mask_of("bool", device)
    assert_exact(*functions(mask), inputs(device))


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_has_the_right_gradients(device, groups):
    # Once: PyTorch's fused kernels have no second derivative.
    ours, _ = functions(mask_of("bool", device, seq=3), "rotated", groups)
    given = inputs(device, torch.float64, HEADS // groups, seq=3, dim=2)
    assert_gradients_are_right(ours, *given, twice=False)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_runs_backward_twice(device, groups, kind):
    ours, _ = functions(mask_of(kind, device), "rotated", groups)
    assert_backward_twice(ours, *inputs(device, kv_heads=HEADS // groups))


# Where stock must run.


def test_attention_is_stock_without_a_tape(device):
    ours, stock = functions(mask_of("bool", device), "rotated", 2)
    given = inputs(device, kv_heads=HEADS // 2)
    assert_same_result(run(ours, given), run(stock, given))


def test_attention_is_stock_without_gradients(device):
    ours, stock = functions(mask_of("bool", device), "rotated", 2)
    given = inputs(device, kv_heads=HEADS // 2)
    with Tape(), torch.no_grad():
        assert_same_bits(ours(*given), stock(*given))


@pytest.mark.parametrize("kwargs", [dict(softcap=30.0)], ids=str)
def test_attention_refuses_what_stock_refuses(device, kwargs):
    ours, _ = functions(**kwargs)
    with Tape(), pytest.raises(ValueError, match="softcap"):
        ours(*(x.requires_grad_() for x in inputs(device)))


def test_attention_is_registered_with_the_masks_of_sdpa():
    op.register()
    assert AttentionInterface()[op.NAME] is attention
    assert AttentionMaskInterface()[op.NAME] is sdpa_mask


# What is kept.

U = BATCH * SEQ * HEADS * DIM * 4  # one of q, k, v and the output, in fp32
LSE = BATCH * HEADS * SEQ * 4  # the log of each row's sum, which the CPU kernel keeps
FLOAT_MASK = BATCH * SEQ * SEQ * 4


def kept_by(call, device, groups=1, layers=1, rotated=True):
    """Bytes kept by ``layers`` attentions in a row and the linear after them."""

    def attend(x):
        for _ in range(layers):
            q = LAYOUTS["rotated" if rotated else "projected"](x.clone())
            k, v = (x[:, :, ::groups].clone().transpose(1, 2) for _ in range(2))
            x = call(*(t.transpose(1, 2) for t in (q, k, v)))
        return x.flatten(2)

    return kept(attend, random(BATCH, SEQ, HEADS, DIM, device=device), tape=True)


def layout_free(mask=None, groups=1, **options):
    """Ours and stock's on q, k, v ``[batch, seq, heads, dim]`` in whatever order they lie in memory."""
    module = SimpleNamespace(is_causal=False, num_key_value_groups=groups)

    def function(call):
        return lambda q, k, v: call(module, *(t.transpose(1, 2) for t in (q, k, v)), mask, **options)[0]

    return function(attention), function(sdpa_attention_forward)


def test_attention_keeps_its_output_once(device):
    only_on_cpu(device, "this count of bytes")
    ours, stock = layout_free()
    assert kept_by(stock, device) == 5 * U + LSE
    assert kept_by(ours, device) == 4 * U + LSE


def test_attention_keeps_k_and_v_as_they_were_before_they_were_repeated(device):
    only_on_cpu(device, "this count of bytes")
    ours, stock = layout_free(mask_of("float", device), groups=2)
    assert kept_by(stock, device, groups=2, rotated=False) == 4 * U + LSE
    assert kept_by(ours, device, groups=2, rotated=False) == 3 * U + LSE


def test_attention_keeps_one_float_mask_for_all_layers(device):
    only_on_cpu(device, "this count of bytes")
    ours, stock = layout_free(mask_of("bool", device))
    assert kept_by(stock, device, layers=3, rotated=False) == 3 * (4 * U + LSE + FLOAT_MASK)
    assert kept_by(ours, device, layers=3, rotated=False) == 3 * (4 * U + LSE) + FLOAT_MASK


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_attention_keeps_one_mask_with_a_frozen_position_bias_for_all_layers(device, kind):
    only_on_cpu(device, "this count of bytes")
    bias = bias_of(device)
    made = BATCH * HEADS * SEQ * SEQ * 4
    ours, stock = layout_free(mask_of(kind, device), position_bias=bias)
    assert kept_by(stock, device, layers=3, rotated=False) == 3 * (4 * U + LSE + made)
    assert kept_by(ours, device, layers=3, rotated=False) == 3 * (4 * U + LSE) + made


def kept_by_fused(call, device):
    def attend(x):
        fused = torch.cat([x, x, x], dim=-1).clone()
        q, k, v = (t.view(BATCH, SEQ, HEADS, DIM) for t in fused.split(HEADS * DIM, dim=-1))
        return call(q.clone(), k.clone(), v).flatten(2)

    return kept(attend, random(BATCH, SEQ, HEADS * DIM, device=device), tape=True)


def test_attention_does_not_let_v_hold_a_fused_projection(device):
    only_on_cpu(device, "this count of bytes")
    ours, stock = layout_free()
    assert kept_by_fused(stock, device) == (2 + 3 + 1) * U + LSE
    assert kept_by_fused(ours, device) == 4 * U + LSE


def test_attention_under_autocast_keeps_repeated_k_and_v_once_in_half_precision(device):
    only_on_cpu(device, "this count of bytes")
    ours, _ = layout_free(mask_of("float", device), groups=2)

    def attend(x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return ours(x.clone(), x[:, :, ::2].clone(), x[:, :, ::2].clone()).flatten(2)

    x = random(BATCH, SEQ, HEADS, DIM, device=device)
    mask_in_half = FLOAT_MASK // 2
    assert kept(attend, x, tape=True) == 3 * U // 2 + LSE + mask_in_half


@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
@pytest.mark.parametrize("kind", MASKS)
def test_what_layers_share_dies_with_the_mask_and_the_bias(device, kind, layout):
    bias = bias_of(device)
    if layout == "permuted":  # as T5 computes it
        bias = bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    mask = mask_of(kind, device)
    refs = [StorageWeakRef(t.untyped_storage()) for t in (bias, mask) if t is not None]
    ours = functions(mask)[0]
    with Tape():
        loss = ours(*(x.requires_grad_() for x in inputs(device)), bias).sum()
    loss.backward()
    del loss, bias, mask, ours
    gc.collect()
    assert all(ref.expired() for ref in refs)


def test_the_float_mask_dies_with_the_mask(device):
    mask = mask_of("bool", device)
    ref = StorageWeakRef(mask.untyped_storage())
    ours = functions(mask)[0]
    with Tape():
        loss = ours(*(x.requires_grad_() for x in inputs(device))).sum()
    loss.backward()
    del loss, mask, ours
    gc.collect()
    assert ref.expired()
