"""What SDPA keeps under a tape, to the byte, and for how long."""

import gc
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memsave import measure_kept, patch
from hf_memsave.count.peak import count_peak
from hf_memsave.tape import Tape, table_without
from hf_memsave.tape.frame import Frame
from support.attention import BATCH, DIM, HEADS, SEQ, attention, bias_of, inputs, mask_of, sdpa
from support.helpers import kept, laid, nodes, on_cpu_alone, random, taping
from support.zoo import QUOTED, batch_for, build

U = BATCH * SEQ * HEADS * DIM * 4  # one of q, k, v and the output, in fp32
LSE = BATCH * HEADS * SEQ * 4  # the log of each row's sum, which the CPU kernel keeps
FLOAT_MASK = BATCH * SEQ * SEQ * 4
on_cpu = on_cpu_alone("this count of bytes")
#: Makes a tensor that nothing can remake, and keeps nothing.
opaque = torch.ops.aten.clone


def kept_by(call, tape, groups=1, layers=1, autocast=None):
    """Bytes kept by ``layers`` attentions in a row and the linear after them."""

    def attend(x):
        for _ in range(layers):
            x = call(opaque(x), opaque(x[:, :, ::groups]), opaque(x[:, :, ::groups]))
        return x.flatten(2)

    return kept(attend, random(BATCH, SEQ, HEADS, DIM), tape=tape, autocast=autocast)


def both(call, **options):
    return kept_by(call, False, **options), kept_by(call, True, **options)


def test_attention_keeps_its_output_once_and_k_and_v_as_they_were_before_they_were_repeated():
    assert both(attention(layout="rotated")) == (5 * U + LSE, 4 * U + LSE)
    assert both(attention(mask_of("float", "cpu"), groups=2), groups=2) == (4 * U + LSE, 3 * U + LSE)


def test_attention_keeps_no_float_mask_of_a_boolean_one_nor_one_made_of_a_frozen_position_bias():
    here = 3 * (4 * U + LSE)
    for kind in ("bool", "causal-bool"):
        assert both(attention(mask_of(kind, "cpu")), layers=3) == (here + 3 * FLOAT_MASK, here)
    for kind in ("bool", "float"):
        call, bias = attention(mask_of(kind, "cpu")), bias_of("cpu")
        found = both(lambda q, k, v: call(q, k, v, bias), layers=3)  # noqa: B023
        assert found == (here + 3 * BATCH * HEADS * SEQ * SEQ * 4, here)


def spying(seen):
    """A tape that shows which masks the kernel is given."""
    stock = F.scaled_dot_product_attention
    handler = table_without()[stock]

    def spy(q, k, v, mask=None, **options):
        seen.append(mask)
        return stock(q, k, v, mask, **options)

    return Tape(Frame({**table_without(), stock: lambda tape, func, args, kwargs: handler(tape, spy, args, kwargs)}))


@pytest.mark.parametrize(("kind", "with_bias"), [("bool", True), ("bool", False), ("float", True)])
def test_layers_share_one_float_mask(kind, with_bias):
    """In forward as in backward, where it is remade once."""
    attend, bias = attention(mask_of(kind, "cpu")), bias_of("cpu") if with_bias else None
    x, seen = random(BATCH, SEQ, HEADS, DIM).requires_grad_(), []
    with spying(seen):
        for _ in range(3):
            x = attend(opaque(x), opaque(x), opaque(x), bias)
        assert len({mask.data_ptr() for mask in seen}) == 1
        ref = StorageWeakRef(seen[0].untyped_storage())
        del seen[:]
    assert sum(node.nbytes == BATCH * (HEADS if with_bias else 1) * SEQ * SEQ * 4 for node in nodes()) == 1
    gc.collect()
    assert ref.expired() or kind == "float", "it lives past the tape"


def test_attention_does_not_let_v_hold_a_fused_projection():
    def attend(q, k, v):
        fused = opaque(torch.ops.aten.cat([q, k, v], 2))
        q, k, v = fused.split(HEADS, dim=2)
        return attention()(opaque(q), opaque(k), v)

    assert both(attend) == ((2 + 3 + 1) * U + LSE, 4 * U + LSE)


def test_attention_under_autocast_keeps_k_and_v_once_in_half_precision():
    """Rotated in fp32, repeated and converted: remade from what the projections gave."""
    cos, mask = random(1, SEQ, 1, DIM), mask_of("float", "cpu")

    def attend(q, k, v):
        q, k, v = (torch.ops.aten._to_copy(x, dtype=torch.bfloat16) for x in (q, k, v))
        return attention(mask, groups=2)(q * cos, k * cos, v)

    stock, here = both(attend, groups=2, autocast=torch.bfloat16)
    assert here == (U + U // 2 + U // 2 + U) // 2 + LSE + FLOAT_MASK // 2
    assert here < stock


@pytest.mark.parametrize("wanted", [(True, False, False), (False, False, True), (True, True, True)], ids=str)
def test_the_peak_is_above_stocks_by_no_more_than_what_is_kept_of_the_mask(wanted):
    """A generator's state, which no op makes, is not counted."""

    def attend(given, tape):
        with laid(tape):
            out = sdpa(*given)
        out.sum().backward()

    peaks = []
    for tape in (False, partial(taping, dropout="seed"), True):
        given = [x.requires_grad_(w) for x, w in zip(inputs("cpu", seq=64), wanted, strict=True)]
        attend(given, tape)  # so that gradients are there
        peaks.append(count_peak(partial(attend, given, tape)).peak)
    assert peaks[1] <= peaks[0]
    assert peaks[2] <= peaks[0] + BATCH * HEADS * 64 * 64 // 8


def test_a_layer_of_bert_with_its_own_dropouts_keeps_twelve_units():
    """Ten, and the probabilities, 2u at this size; stock keeps 24. In bf16 they are fp32: 14 of 33."""

    def kept_by(layers, dtype, is_patched):
        model = build("bert", replace(QUOTED, layers=layers), dtype, attention_probs_dropout_prob=0.1)
        if is_patched:
            patch(model, dropout="seed" if dtype is torch.bfloat16 else "auto")  # of which bits are 1/16, and no 1/32
        return measure_kept(model, batch_for(model, QUOTED)).total / QUOTED.u(dtype.itemsize)

    cases = [*product((torch.float32, torch.bfloat16), (False, True))]
    found = [(kept_by(4, *case) - kept_by(2, *case)) / 2 for case in cases]
    assert found == pytest.approx([24.0, 12.05, 33.0, 14.1], abs=0.1)
