"""What SDPA keeps under a tape, to the byte, and for how long."""

import gc
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import BertConfig, BertForSequenceClassification

from hf_memsave import measure_kept, patch
from hf_memsave.measure.peak import count_peak
from hf_memsave.tape import Tape, table_without
from hf_memsave.tape import attention as attention_file
from support.attention import BATCH, DIM, HEADS, MASKS, SEQ, attention, bias_of, inputs, mask_of, sdpa
from support.helpers import kept, laid, nodes, only_on_cpu, random, taping
from support.tapes import watch_sweeps

U = BATCH * SEQ * HEADS * DIM * 4  # one of q, k, v and the output, in fp32
LSE = BATCH * HEADS * SEQ * 4  # the log of each row's sum, which the CPU kernel keeps
FLOAT_MASK = BATCH * SEQ * SEQ * 4


@pytest.fixture(autouse=True)
def on_cpu(device):
    only_on_cpu(device, "this count of bytes")


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

    return Tape({**table_without(), stock: lambda tape, func, args, kwargs: handler(tape, spy, args, kwargs)})


@pytest.mark.parametrize(("kind", "with_bias"), [("bool", True), ("bool", False), ("float", True)])
def test_layers_share_one_float_mask(kind, with_bias):
    """In forward as in backward, where it is remade once."""
    attend, bias = attention(mask_of(kind, "cpu")), bias_of("cpu") if with_bias else None
    x, seen = random(BATCH, SEQ, HEADS, DIM).requires_grad_(), []
    with spying(seen):
        for _ in range(3):
            x = attend(opaque(x), opaque(x), opaque(x), bias)
        assert len({mask.data_ptr() for mask in seen}) == 1
        del seen[:]
    assert sum(node.nbytes == BATCH * (HEADS if with_bias else 1) * SEQ * SEQ * 4 for node in nodes()) == 1


def test_the_float_mask_does_not_live_past_the_tape():
    q, k, v = (x.requires_grad_() for x in inputs("cpu"))
    seen = []
    with spying(seen):
        y = attention(mask_of("bool", "cpu"))(q, k, v)
    (ref,) = (StorageWeakRef(mask.untyped_storage()) for mask in seen)
    del seen[:]
    gc.collect()
    assert ref.expired()
    y.sum().backward()


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


@pytest.mark.parametrize("kind", MASKS)
def test_what_layers_share_dies_with_the_mask_and_the_bias(kind):
    bias = bias_of("cpu").permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # as T5 computes it
    mask = mask_of(kind, "cpu")
    refs = [StorageWeakRef(t.untyped_storage()) for t in (bias, mask) if t is not None]
    attend = attention(mask)
    with taping():
        loss = attend(*(x.requires_grad_() for x in inputs("cpu")), bias).sum()
    loss.backward()
    del loss, bias, mask, attend
    gc.collect()
    assert all(ref.expired() for ref in refs)


class Fused(nn.Module):
    """q, k and v of one projection, k and v copied by a cache, as in GPT-2."""

    def __init__(self, p):
        super().__init__()
        self.qkv, self.p = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), p

    def forward(self, x):
        q, k, v = (t.view(*t.shape[:2], HEADS, -1).transpose(1, 2) for t in self.qkv(x).split(HEADS * DIM, dim=2))
        k, v = (torch.cat([t[:, :, :0], t], dim=-2) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p).sum()


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_fused_projection_is_held_for_k_where_one_kernel_keeps_q(p, monkeypatch):
    found, sweeps = [], watch_sweeps(monkeypatch)
    for held in (True, False):
        if not held:
            monkeypatch.setattr(attention_file, "_held_whole", lambda tape, query: None)
        model = Fused(p)
        patch(model)
        found += [measure_kept(model, {"x": torch.randn(BATCH, SEQ, HEADS * DIM)}).total, len(sweeps)]
        sweeps.clear()
    kept, swept, kept_without, swept_without = found
    assert kept == kept_without
    assert (swept, swept_without) == ((0, 1) if p == 0 else (swept_without, swept))


# With dropout, on CPU taken apart.

S = 64


def test_of_what_is_s_by_s_one_tensor_is_kept(composed):
    heads = 2 * HEADS * S * S * 4  # fp32
    stock, ours = (kept(lambda x: sdpa(x, x, x), inputs("cpu", seq=S)[0], tape) for tape in (False, True))
    assert stock - ours == pytest.approx(2 * heads, rel=0.05)  # what dropout multiplies with, and gives
    assert composed


@pytest.mark.parametrize("wanted", [(True, False, False), (False, False, True), (True, True, True)], ids=str)
def test_the_peak_is_never_above_stocks(wanted):
    def attend(given, tape):
        with laid(tape):
            out = sdpa(*given)
        out.sum().backward()

    peaks = []
    for tape in (False, True):
        given = [x.requires_grad_(w) for x, w in zip(inputs("cpu", seq=S), wanted, strict=True)]
        attend(given, tape)  # so that gradients are there
        peaks.append(count_peak(partial(attend, given, tape)).peak)
    assert peaks[1] <= peaks[0]


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

    cases = product((torch.float32, torch.bfloat16), (False, True))
    assert [of_a_layer(*case) for case in cases] == pytest.approx([24.0, 12.05, 33.0, 14.1], abs=0.1)
