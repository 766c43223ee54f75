"""The chunked loss where numbers are narrow or the host may not wait: stock's dtype, and no copy."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForMaskedLM

from hf_memsave import patch
from hf_memsave.ops.lazy_logits import LazyLogits
from support.accuracy import LONG, lm
from support.fake import NoTransfers, on_fake
from support.families import batch_for


def masked_lm():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=512)
    return BertForMaskedLM(BertConfig(**sizes)).train()


def with_adapters(model, head):
    """So that logits are chunked on the stand-in, where a plain head's parameters are of another class."""
    return get_peft_model(model, LoraConfig(r=4, target_modules=[head])).train()


@pytest.mark.parametrize("make", [masked_lm, lambda: lm("t5-decoder")], ids=["bert", "t5"])
def test_under_autocast_a_loss_of_logits_in_16_bits_is_in_fp32_as_stocks(make, device, small_chunks):
    model, batch = make().to(device), batch_for(make().to(device), LONG)
    losses = []
    for is_patched in (False, True):
        if is_patched:
            patch(model)
        with torch.autocast(device.type, torch.bfloat16):
            out = model(**batch)
        losses.append(out.loss)
        assert out.logits.dtype == torch.bfloat16
        assert (type(out.logits) is LazyLogits) == is_patched
    stock, ours = losses
    assert ours.dtype == stock.dtype == torch.float32
    torch.testing.assert_close(ours, stock, rtol=2e-3, atol=0)
    ours.backward()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "head"), [(masked_lm, "decoder"), (lambda: lm("t5-decoder"), "lm_head")], ids=["bert", "t5"]
)
def test_on_a_gpu_too(make, head, small_chunks):
    for is_patched in (False, True):
        with on_fake(lambda: with_adapters(make(), head), size=LONG) as (model, batch):
            if is_patched:
                patch(model)
            with torch.autocast(model.device.type, torch.bfloat16):
                out = model(**batch)
            assert (type(out.logits) is LazyLogits) == is_patched
            assert out.loss.dtype == torch.float32


@pytest.mark.parametrize("divisor", [7, 7.0])
def test_a_number_that_divides_makes_the_host_wait_for_nothing(divisor, small_chunks):
    with on_fake(lambda: with_adapters(lm("llama"), "lm_head"), size=LONG) as (model, batch):
        patch(model)
        with NoTransfers():
            out = model(**batch, num_items_in_batch=divisor)
            assert type(out.logits) is LazyLogits
            out.loss.backward()
