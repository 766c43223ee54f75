"""The chunked loss: stock's to the bit while it fits; beyond, as near to float64, with one chunk at the peak."""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from hf_memsave import MemSaveConfig, patch
from hf_memsave.count.peak import count_peak
from hf_memsave.measure.fake_device import fake_device
from hf_memsave.ops.loss import chunked_loss, sums
from hf_memsave.ops.loss.head import HeadCall
from hf_memsave.ops.loss.unread import Unread
from support import accuracy
from support.accuracy import LONG, SMALL, adapted, lm, of_ours_over_stocks, step, unread
from support.fake import NoTransfers, on_fake
from support.zoo import Size, batch_for, build

MODES = {"fp32": (torch.float32, False), "bf16": (torch.bfloat16, False), "autocast": (torch.float32, True)}
of_cpu_kernels = pytest.mark.skipif(torch.cuda.is_available(), reason="figures are those of CPU kernels")


def autocast(enabled=True):
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


with_lora = partial(adapted, targets=("lm_head", "q_proj", "v_proj"))
masked_lm = partial(build, "bert", Size(layers=1), head="ForMaskedLM")


def test_a_loss_that_fits_is_stocks_to_the_bit():
    model, batch = lm("llama"), batch_for(lm("llama"), Size())
    stock, expected = step(model, batch)
    patch(model)
    out, found = step(model, batch)
    assert type(out.logits) is torch.Tensor
    assert torch.equal(out.loss, stock.loss)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


MAKERS = {family: partial(lm, family) for family in ("llama", "phi", "t5-decoder")}
MAKERS |= {"softcapped": accuracy.softcapped, "scaled": accuracy.scaled, "with_lora": with_lora}


@pytest.mark.long
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_chunks_are_as_near_to_float64_as_stock(make, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 2 * SMALL if make is with_lora else SMALL)
    accuracy.assert_as_near_as_stock(make)


#: Measured: 1.0000001, .966; with adapters 1.0000, .988 (1.058 where chunks share autocast's cast of what goes in).
@pytest.mark.long
@pytest.mark.parametrize(("make", "mode", "bound"), [
    (partial(lm, "llama"), "bf16", 1.001), (partial(lm, "llama"), "autocast", 1.0),
    (with_lora, "bf16", 1.001), (with_lora, "autocast", 1.01),
])  # fmt: skip
def test_in_low_precision_too(make, mode, bound, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 2 * SMALL if make is with_lora else SMALL)
    dtype, is_autocast = MODES[mode]
    assert of_ours_over_stocks(lambda: make(dtype=dtype), autocast(is_autocast)) <= bound


def test_a_sum_over_its_number_of_labels_has_the_gradients_of_the_mean(monkeypatch):
    """To the bit: gradients are divided by that number before they are rounded."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 50 * 10 * 5)
    x, w = (torch.randn(n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (37, 50))
    target = torch.randint(0, 50, (37,))
    target[::5] = -100
    found = []
    for reduction, count in (("mean", 1), ("sum", (target >= 0).sum())):
        loss = F.cross_entropy(unread(x, w), target, reduction=reduction)
        found.append(torch.autograd.grad(loss.float() / count, [x, w]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("count", [7, torch.tensor(100)], ids=str)
def test_gradients_are_rounded_once_whatever_the_sum_is_divided_by(count, small_chunks):
    """Divided after they were rounded, they are up to 1.11 times as far away."""
    assert of_ours_over_stocks(lambda: lm("llama", torch.bfloat16), draws=4, num_items_in_batch=count) <= 1.001


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_reduction_of_cross_entropy(reduction, monkeypatch):
    torch.manual_seed(0)
    x, w = torch.randn(37, 8, dtype=torch.float64, requires_grad=True), torch.randn(50, 8, dtype=torch.float64)
    w.requires_grad_(reduction != "none")
    target = torch.randint(0, 50, (37,))
    target[::5] = -1
    options = dict(ignore_index=-1, reduction=reduction)
    upstream = torch.randn(37 if reduction == "none" else (), dtype=torch.float64)
    wanted = [x, w] if w.requires_grad else [x]

    stock = F.cross_entropy(x @ w.T, target, **options)
    expected = torch.autograd.grad(stock, wanted, upstream)
    monkeypatch.setattr(chunked_loss, "CHUNK", 50 * 8 * 3 * 5)
    logits = unread(x, w)
    ours = F.cross_entropy(logits, target, **options)
    found = torch.autograd.grad(ours, wanted, upstream)
    torch.testing.assert_close(ours, stock, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert not logits.is_read()
    for more in ({"label_smoothing": 0.1}, {"weight": torch.rand(50, dtype=torch.float64)}):
        expected = F.cross_entropy(x @ w.T, target, **options, **more)
        torch.testing.assert_close(F.cross_entropy(logits, target, **options, **more), expected)


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}], ids=["mean", "sum"])
def test_a_batch_of_ignored_rows_alone_is_as_in_stock(options, small_chunks):
    model, batch = lm("llama"), batch_for(lm("llama"), Size())
    batch["labels"] = torch.full_like(batch["labels"], -100)
    stock, expected = step(model, batch, **options)
    patch(model)
    out, found = step(model, batch, **options)
    assert torch.equal(out.loss, stock.loss) or (stock.loss.isnan() and out.loss.isnan())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_where_it_is_not_chunked(small_chunks):
    """In evaluation; in fp16, whose loss scale would come too late; and with ``loss="stock"``."""
    model, batch = lm("llama"), batch_for(lm("llama"), Size())
    with torch.no_grad():
        expected = model(**batch)
    patch(model)
    with torch.no_grad():
        out = model(**batch)
    assert type(out.logits) is torch.Tensor
    assert torch.equal(out.logits, expected.logits)
    assert torch.equal(out.loss, expected.loss)
    with torch.autocast("cpu", torch.float16):
        assert type(model(**batch).logits) is torch.Tensor
    patch(model, MemSaveConfig(loss="stock"), replace=True)
    assert type(model(**batch).logits) is torch.Tensor


def test_a_label_that_is_no_word_is_refused_as_in_stock(small_chunks):
    stock, ours = lm("llama"), lm("llama")
    patch(ours)
    for label in (512, -101):
        batch, messages = batch_for(stock, Size()), []
        batch["labels"][0, 3] = label
        for model in (stock, ours):
            with pytest.raises(IndexError) as error:
                model(**batch)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("make", [masked_lm, lambda: lm("t5-decoder")], ids=["bert", "t5"])
def test_under_autocast_a_loss_of_logits_in_16_bits_is_in_fp32_as_stocks(make, device, small_chunks):
    model, batch, losses = make().to(device), batch_for(make().to(device), LONG), []
    for is_patched in (False, True):
        if is_patched:
            patch(model)
        with torch.autocast(device.type, torch.bfloat16):
            out = model(**batch)
        losses.append(out.loss)
        assert out.logits.dtype == torch.bfloat16
        assert (type(out.logits) is Unread) == is_patched
    stock, ours = losses
    assert ours.dtype == stock.dtype == torch.float32
    torch.testing.assert_close(ours, stock, rtol=2e-3, atol=0)
    ours.backward()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize(("make", "head", "options"), [
    (lambda: lm("llama"), "lm_head", {"num_items_in_batch": 7}), (masked_lm, "decoder", {}),
    (lambda: lm("llama"), "lm_head", {"num_items_in_batch": 7.0}),
])  # fmt: skip
def test_on_a_gpu_the_loss_is_in_fp32_too_and_the_host_waits_for_nothing(make, head, options, small_chunks):
    """On the stand-in, where a plain head's weight is of another class, logits are chunked with adapters."""
    lora = LoraConfig(r=4, target_modules=[head])
    with on_fake(lambda: get_peft_model(make(), lora), size=LONG) as (model, batch):
        patch(model)
        with NoTransfers():
            with torch.autocast(model.device.type, torch.bfloat16):
                out = model(**batch, **options)
            assert type(out.logits) is Unread
            assert out.loss.dtype == torch.float32
            out.loss.backward()


@pytest.mark.parametrize(
    ("memory", "words", "rows"),
    [(None, 128_256, 1024), (2**36, 128_256, 1024), (2**34, 128_256, 128), (None, 2000, 6656)],
)  # fmt: skip
def test_rows_of_a_chunk_fill_the_tiles_of_a_devices_products(memory, words, rows, monkeypatch):
    """On CPU as many as take 128 MiB: 104 of 128,256 words, which would fill four fifths of a tile."""
    monkeypatch.setattr(chunked_loss, "memory_of", lambda x: memory)
    seen, stock = [], HeadCall.logits
    monkeypatch.setattr(HeadCall, "logits", lambda self, x, **chunk: seen.append(len(x)) or stock(self, x, **chunk))
    with fake_device() as device:
        x, w = (torch.empty(n, 64, dtype=torch.bfloat16, device=device) for n in (9000, words))
        F.cross_entropy(unread(x.requires_grad_(), w), torch.empty(9000, dtype=torch.int64, device=device))
    assert seen == [rows, min(rows, 9000 - rows)]
    assert chunked_loss.rows_of_chunk(128_256 * 10, torch.empty(1)) == 104


def llama(words, h, tokens, layers=1):
    size = Size(hidden=h, heads=2, layers=layers)
    fields = dict(intermediate_size=2 * h, num_key_value_heads=2, vocab_size=words, max_position_embeddings=4096)
    return build("llama", size, **fields), torch.randint(0, words, (1, tokens))


def peaks_of(model, ids, mode="fp32"):
    """Of a step in stock, and of one with chunks, gradients there already."""

    def step(ids=ids):
        with autocast(MODES[mode][1]):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    peaks = []
    for is_patched in (False, True):
        if is_patched:
            patch(model)
        step(ids[:, :8])
        gc.collect()
        peaks.append(count_peak(step).peak)
    return peaks


@of_cpu_kernels
@pytest.mark.long
def test_a_step_of_32k_words_4096_tokens_and_hidden_64_peaks_at_a_thirteenth_of_stocks():
    stock, ours = peaks_of(*llama(32_000, 64, 4096, layers=2))
    assert stock >= 1.6e9
    assert ours <= 0.125e9


@of_cpu_kernels
@pytest.mark.parametrize(("mode", "tokens"), [("fp32", 250), ("bf16", 48), ("bf16", 250), ("autocast", 48)])
def test_few_tokens_of_a_trained_head_peak_no_higher_than_in_stock(mode, tokens, monkeypatch):
    """Whose gradient is what takes most."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**20)
    model, ids = llama(8192, 256, tokens)
    stock, ours = peaks_of(model.to(MODES[mode][0]), ids, mode)
    assert ours <= 1.01 * stock


def head_and_loss(words, h, tokens, trains_head=True, trains_below=True):
    """In bf16: what computes the loss of a head alone, and where it puts it."""
    w = torch.randn(words, h, dtype=torch.bfloat16, requires_grad=trains_head)
    target = torch.randint(0, words, (tokens,))
    x, held = torch.randn(tokens, h, dtype=torch.bfloat16, requires_grad=trains_below), []
    return lambda: held.append(F.cross_entropy(unread(x, w), target)) or held, held


@of_cpu_kernels
@pytest.mark.long
@pytest.mark.parametrize(("words", "tokens"), [(32_000, 512), (128_000, 128)])
def test_the_loss_keeps_two_bytes_a_hidden_unit_and_token_and_one_chunk(words, tokens, monkeypatch):
    """Of a frozen head: what is alive between forward and backward, and at the peak."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**24)
    h = 64
    run, _ = head_and_loss(words, h, tokens, trains_head=False)
    kept = count_peak(run)
    assert kept.end <= 2 * h * tokens + 64
    assert kept.peak <= chunked_loss.CHUNK + 2 * h * tokens + 16 * tokens


@of_cpu_kernels
@pytest.mark.long
def test_of_few_tokens_the_gradient_of_logits_is_kept_and_no_sum(monkeypatch):
    """Stock keeps 6 to 10 bytes a logit and peaks at 14; sums would take 6 H a word."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**24)
    words, h, tokens = 32_000, 1024, 512
    run, held = head_and_loss(words, h, tokens)
    kept = count_peak(run)
    of_logits, of_hidden = 2 * words * tokens, 2 * h * tokens
    assert kept.end <= of_logits + 2 * of_hidden + 64
    assert kept.peak <= of_logits + chunked_loss.CHUNK + 3 * of_hidden + 16 * tokens
    step = count_peak(lambda: held.pop().backward())
    block = 4 * sums._BLOCK + 4 * tokens * sums._BLOCK // h + 4 * h * tokens  # of the product; in fp32, on CPU
    assert step.peak <= 2 * words * h + block + of_hidden + 64


@of_cpu_kernels
@pytest.mark.long
def test_rows_that_wait_for_their_product_are_gone_before_the_sum_is_rounded(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**22)
    monkeypatch.setattr(sums, "_BLOCK", 2**16)
    words, h, tokens = 32_000, 256, 1024
    run, _ = head_and_loss(words, h, tokens, trains_below=False)
    assert count_peak(run).peak <= (4 + 2) * words * h + 16 * tokens
