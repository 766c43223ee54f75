"""``token_log_probs`` in loops of DPO and GRPO: the numbers, gradients and errors of stock's expression."""

import pytest
import torch
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration

from hf_memsave import MeasureError, token_log_probs
from support.accuracy import adapted, lm
from support.steps import patched_copy
from support.zoo import Size, batch_for

T5 = dict(vocab_size=64, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)


def by_hand(model, batch, labels, temperature=1.0):
    logp = (model(**batch).logits.float() / temperature).log_softmax(-1)[:, :-1]
    chosen = logp.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    found = chosen, -(logp.exp() * logp).sum(-1)
    return [F.pad(x * (labels[:, 1:] >= 0), (1, 0)) for x in found]


def dpo(model, batch, labels, log_probs):
    with torch.no_grad(), model.disable_adapter():
        reference = log_probs(model, batch, labels)[0].sum(-1)
    chosen, rejected = (log_probs(model, batch, labels)[0].sum(-1) - reference).chunk(2)
    loss = F.logsigmoid(0.1 * (chosen - rejected)).mean().neg()
    loss.backward()
    return loss


def grpo(model, batch, labels, log_probs):
    with torch.no_grad():
        old, _ = log_probs(model, batch, labels, temperature=0.9)
    logp, entropy = log_probs(model, batch, labels, temperature=0.9)
    advantages, is_counted = torch.tensor([[0.7], [-1.3]]), labels >= 0
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.01 * entropy
    loss = -(gain * is_counted).sum() / is_counted.sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("loop", [dpo, grpo])
def test_a_loop_of_ones_own_is_stocks(loop, small_chunks):
    stock = adapted(targets=("q_proj", "v_proj"))
    ours = patched_copy(stock)
    labels = batch_for(stock, Size())["labels"]
    labels[0, :5] = -100
    batch = {"input_ids": batch_for(stock, Size())["input_ids"]}
    expected = loop(stock, batch, labels, by_hand)
    found = loop(ours, batch, labels, lambda *a, **k: token_log_probs(*a, entropy=True, **k))
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7)


def test_an_encoder_decoders_labels_are_its_logits_own_and_what_does_not_fit_is_refused():
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**T5))
    batch = {name: torch.randint(1, 64, (2, 6)) for name in ("input_ids", "labels")}
    for one in (model.eval(), torch.nn.DataParallel(model)):
        torch.testing.assert_close(-token_log_probs(one, batch, batch["labels"]).mean(), model(**batch).loss)
    with pytest.raises(MeasureError, match="expected a temperature above 0, got 0"):
        token_log_probs(model, batch, batch["labels"], temperature=0)
    with pytest.raises(MeasureError, match=r"expected labels of shape \(2, 16\).*got \(2, 15\).* do not shift them"):
        token_log_probs(lm("llama"), batch_for(lm("llama"), Size()), torch.zeros(2, 15, dtype=torch.int64))
