"""Rungs and offload where models bring caches, and where what is kept is odd or is written to."""

import pytest
import torch
from peft import PrefixTuningConfig, TaskType, get_peft_model
from torch import nn

from hf_memsave import MemSaveConfig
from hf_memsave.tape import offload
from hf_memsave.tape.offload import Offload
from support.attacks import WIDTH, Block, assert_alike
from support.steps import backward, step
from support.zoo import batch_for, build

BLOCK = MemSaveConfig(checkpoint="block")


def lm(family="llama"):
    return build(family, dropout=0.0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_prefix_is_not_lost_in_blocks_that_run_again(family):
    prefix = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    assert_alike(lambda: get_peft_model(lm(family), prefix).train(), lambda m: step(m, batch_for(m)), BLOCK)


def test_a_cache_that_is_asked_for_is_filled_and_read():
    def run(model):
        ids = batch_for(model)["input_ids"]
        cache = model(input_ids=ids[:, :8], use_cache=True).past_key_values
        return backward(model, model(input_ids=ids[:, 8:], labels=ids[:, 8:], past_key_values=cache).loss)

    assert_alike(lm, run, BLOCK)


def test_generate_in_training_mode_gives_stocks_tokens():
    def run(model):
        ids = batch_for(model)["input_ids"][:, :4]
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        return {"tokens": tokens, "some": torch.ones(1)}

    assert_alike(lm, run, BLOCK)


def test_any_view_comes_back_as_it_was(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 256)
    conjugated = torch.randn(64, 64, dtype=torch.complex64).conj()
    of_odd_bytes = torch.zeros(4097, dtype=torch.uint8)[:4096].view(torch.float32).fill_(3.0)
    for x in (conjugated, conjugated.imag, of_odd_bytes):
        found = []
        for hooks in (Offload, torch.enable_grad):
            w = torch.ones_like(x.resolve_conj().resolve_neg()).requires_grad_()
            with hooks():
                y = (w * x).sum()
            y.abs().backward()
            found.append(w.grad)
        assert torch.equal(*found)


@pytest.mark.parametrize("rung", ["o_proj", None])
@pytest.mark.parametrize("is_read", [False, True], ids=["never asked for", "asked for at each step"])
def test_a_long_chain_of_cheap_functions_is_no_endless_recursion(is_read, rung):
    """A scan over time: a node that builds on all steps before would nest a call for each."""

    def scan(block, x):
        h, gate = block.o_proj(x), block.f(x).mul(0.1)
        for _ in range(400):
            h = h * gate + gate if is_read else h * 0.99 + 0.01
        return h * gate

    def make():
        block = Block(scan)
        block.o_proj = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), block).train()

    assert_alike(make, lambda model: step(model, torch.ones(4, 8, WIDTH)), MemSaveConfig(checkpoint=rung))
