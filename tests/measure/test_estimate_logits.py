"""Estimates where logits take more than 128 MiB in fp32, so that stock's are whole and ours are never there at once."""

import pytest
import torch

from hf_memsave import MemSaveConfig
from hf_memsave.measure.inputs import make_batch
from hf_memsave.measure.layers import depth_fields
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.models import choose_head
from hf_memsave.measure.training import Training, build, trace_at
from hf_memsave.ops import chunked_loss
from support.estimated import configs, count_step
from support.helpers import halved, on_stand_in

BATCH, TOKENS, WORDS, LAYERS = 4, 128, 70_000, 2
LOGITS = BATCH * TOKENS * WORDS * 4


def config_of(family):
    config = configs()[family]
    return type(config)(**{**config.to_dict(), **dict.fromkeys(depth_fields(config), LAYERS), "vocab_size": WORDS})


def traced(config, of, memsave, on_cpu):
    """What is kept, and the peak of both passes, weights and the batch apart."""
    batch, tokens = of.batch_size, of.seq_len
    found = trace_at(config, dict.fromkeys(depth_fields(config), LAYERS), of, memsave, on_cpu=on_cpu)
    ids = sum(t.nbytes for t in make_batch(choose_head(config), config, batch, tokens).values())
    passes = max(m.live for place, m in found.trace.places.items() if place.phase != "optimizer")
    return sum(found.by_kind.values()), passes - found.trace.parameters - ids


@pytest.mark.parametrize(
    ("family", "has_lora", "is_patched"), halved(["llama", "gpt2", "t5"], [False, True], [True, False])
)
def test_a_real_step_keeps_and_peaks_as_predicted(family, has_lora, is_patched):
    config, lora, memsave = config_of(family), Lora() if has_lora else None, MemSaveConfig() if is_patched else None
    of = Training(batch_size=BATCH, seq_len=TOKENS, dtype=torch.float32, lora=lora, optimizer="sgd")
    kept, peak = traced(config, of, memsave, on_cpu=True)
    torch.manual_seed(0)
    true_kept, true_peak = count_step(build(config, of), config, of, memsave)
    assert kept == pytest.approx(true_kept.total, rel=0.01)
    assert peak == pytest.approx(true_peak, rel=0.03)


@pytest.mark.parametrize("tokens", [24, 128], ids=["the gradient of logits", "a sum and some rows"])
def test_so_do_gradients_of_a_head_that_wait_for_their_product(tokens, monkeypatch):
    """Of a width of 128 and four samples; in chunks of four rows, so that some wait."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**22)
    config, memsave = config_of("llama"), MemSaveConfig()
    of = Training(batch_size=BATCH, seq_len=tokens, dtype=torch.float32, optimizer="sgd")
    kept, peak = traced(config, of, memsave, on_cpu=True)
    torch.manual_seed(0)
    true_kept, true_peak = count_step(build(config, of), config, of, memsave)
    assert kept == pytest.approx(true_kept.total, rel=0.01)
    assert peak == pytest.approx(true_peak, rel=0.03)
    of_gradient, of_logits = 4 * WORDS * 128, 4 * WORDS * BATCH * tokens
    assert true_kept.total - min(of_gradient, of_logits) == pytest.approx(0, abs=0.3 * of_gradient)
    if not torch.cuda.is_available():  # on the stand-in two chunks run
        kept_there, peak_there = traced(config, of, memsave, on_cpu=False)
        assert (kept_there, peak_there) == pytest.approx((kept, peak), rel=0.1)


@on_stand_in
@pytest.mark.parametrize("lora", [None, Lora()], ids=["full", "LoRA"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_the_stand_in_has_whole_logits_in_stock_alone(family, lora):
    """On it parameters are fake: of another type than a head's."""
    config, gradients = config_of(family), 0 if lora else WORDS * 128 * 4  # of the head or of the embeddings
    of = Training(batch_size=BATCH, seq_len=TOKENS, dtype=torch.float32, lora=lora, optimizer="sgd")
    (_, here), (_, on_cpu), (_, stock) = (
        traced(config, of, memsave, is_cpu)
        for memsave, is_cpu in ((MemSaveConfig(), 0), (MemSaveConfig(), 1), (None, 0))
    )
    assert here == pytest.approx(on_cpu, rel=0.2)  # other attention
    assert stock > gradients + 2 * LOGITS > here
