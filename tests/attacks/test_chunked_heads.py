"""Heads that are not a plain linear, where the loss goes chunk by chunk: stock's gradients, or stock's way."""

import copy

import pytest
import torch
from peft import HRAConfig, LilyConfig, LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations

from hf_memsave import PatchError, patch
from hf_memsave.ops import chunked_loss
from hf_memsave.ops.lazy_logits import LazyLogits
from support.families import Size, batch_for, build

SIZE = Size(seq=32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 50000)


def llama():
    model = build("llama", SIZE, dropout=0.0)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def lora(**options):
    config = LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False, **options)
    return get_peft_model(llama(), config).train()


def compiled():
    model = lora()
    for name, module in model.named_modules():
        if "lm_head" in name and isinstance(module, nn.Linear):
            module.compile(backend="eager")
    return model


def hra():
    return get_peft_model(llama(), HRAConfig(r=4, target_modules=["lm_head", "q_proj"])).train()


def lily():
    return get_peft_model(llama(), LilyConfig(r=4, target_modules=["lm_head", "q_proj"])).train()


def normed(way):
    model = llama()
    way(model.lm_head)
    return model


def scaled(weight):
    """A weight whose linear is another function."""
    found = weight.detach().clone().as_subclass(Scaled)
    return nn.Parameter(found)


class Scaled(torch.Tensor):
    def __deepcopy__(self, memo):
        return scaled(self.as_subclass(torch.Tensor))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        return out * 2 if func is nn.functional.linear else out


def subclassed():
    model = llama()
    model.lm_head.weight = scaled(model.lm_head.weight)
    return model


HEADS = {
    "LoRA": (lora, True),
    "DoRA": (lambda: lora(use_dora=True), True),
    "LoRA, compiled": (compiled, True),
    "HRA": (hra, True),
    "Lily, which looks at all rows": (lily, False),
    "weight_norm": (lambda: normed(parametrizations.weight_norm), False),
    "spectral_norm": (lambda: normed(parametrizations.spectral_norm), False),
    "a weight of another class": (subclassed, False),
}


def step(model, batch):
    model.zero_grad()
    torch.manual_seed(1)
    out = model(**batch)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_like_stock(stock, is_chunked):
    ours = copy.deepcopy(stock)
    patch(ours)
    batch = batch_for(stock, SIZE)
    (expected, gradients), (out, found) = step(stock, batch), step(ours, batch)
    assert (type(out.logits) is LazyLogits) == is_chunked
    torch.testing.assert_close(out.loss, expected.loss)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("make", "is_chunked"), HEADS.values(), ids=HEADS)
def test_a_head_has_stocks_gradients(make, is_chunked):
    torch._dynamo.reset()
    assert_like_stock(make(), is_chunked)


@pytest.mark.parametrize(("head", "is_chunked"), [("plain", True), ("DoRA", False)])
def test_hooks_on_parameters_run_once(head, is_chunked):
    model = llama() if head == "plain" else lora(use_dora=True)
    ours, calls = copy.deepcopy(model), []
    for which in (model, ours):
        for name, parameter in which.named_parameters():
            if "lm_head" in name and parameter.requires_grad:
                parameter.register_hook(lambda gradient: calls.append(None) or gradient * 2)
    patch(ours)
    batch = batch_for(model, SIZE)
    _, gradients = step(model, batch)
    of_stock = len(calls)
    out, found = step(ours, batch)
    assert (type(out.logits) is LazyLogits) == is_chunked
    assert len(calls) == 2 * of_stock > 0
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_parameter_that_no_chunk_uses_gets_no_gradient():
    model = lora()
    model.add_adapter("other", LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.requires_grad_(True)
    assert any("other" in name and parameter.requires_grad for name, parameter in model.named_parameters())
    assert_like_stock(model, True)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_head_that_uses_what_is_not_its_own_is_refused(is_read):
    model = lora()
    linear, others = model.base_model.model.lm_head.base_layer, model.base_model.model.model.layers[0].mlp.up_proj
    others.weight.requires_grad_(True)
    linear.forward = lambda x: nn.functional.linear(x, linear.weight) * others.weight.sum()
    patch(model)
    batch = batch_for(model, SIZE)
    labels = batch.pop("labels")
    logits = model(**batch).logits
    assert type(logits) is LazyLogits
    with pytest.raises(PatchError, match=r"would get none\. Use MemSaveConfig\(loss='stock'\)"):
        (logits.square().mean() if is_read else model(**batch, labels=labels).loss).backward()
