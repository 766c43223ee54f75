"""Heads that are not a plain linear, where the loss goes chunk by chunk: stock's gradients, or stock's way."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from peft import (
    BOFTConfig,
    HRAConfig,
    LilyConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    TrainableTokensConfig,
    get_peft_model,
)
from peft.helpers import rescale_adapter_scale
from torch import nn
from torch.nn.utils import parametrizations
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memsave import KeptTensorChangedError, PatchError, measure_kept, patch
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.lazy_logits import LazyLogits
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


def of(kind, **options):
    return get_peft_model(llama(), kind(target_modules=["lm_head", "q_proj"], **options)).train()


def quantized(**options):
    linears = pytest.importorskip("bitsandbytes").nn
    model = lora(**options)
    layer = model.base_model.model.lm_head
    made = linears.Linear4bit(32, 512, False, compute_dtype=torch.float32, quant_type="nf4")
    made.weight = linears.Params4bit(
        layer.base_layer.weight.detach(), requires_grad=False, quant_type="nf4", module=made
    )
    layer.base_layer = made.to("cpu")
    return model


def of_parameters():
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["lm_head.weight"], init_lora_weights=False)
    return get_peft_model(llama(), config).train()


def of_one_number():
    model = lora(lora_bias=True)
    model.base_model.model.lm_head.lora_B["default"].bias = nn.Parameter(torch.ones(1))
    return model


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


def with_tokens(config, is_tied=True):
    """A model some of whose words are trained, and have other weights than those that they replace."""
    model = build("llama", SIZE, dropout=0.0) if is_tied else llama()
    model.config.tie_word_embeddings = is_tied
    model = get_peft_model(model, config).train()
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data += torch.randn_like(parameter)
    return model


def tokens_of(layer, is_tied=True):
    options = dict(r=4, target_modules=["q_proj"], init_lora_weights=False, trainable_token_indices={layer: TOKENS})
    return with_tokens(LoraConfig(**options), is_tied)


def merged():
    model = tokens_of("embed_tokens")
    model.base_model.model.lm_head.token_adapter.merge()
    return model


def copied(is_tied=True):
    saved = dict(modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=is_tied)
    return with_tokens(LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **saved), is_tied)


#: Which words of a vocabulary are trained.
TOKENS = [3, 7, 100]
HEADS = {
    "LoRA": (lora, True),
    "DoRA": (lambda: lora(use_dora=True), True),
    "LoRA, compiled": (compiled, True),
    "DoRA on 4 bits": (lambda: quantized(use_dora=True), True),
    "LoRA on 4 bits": (quantized, True),
    "LoRA with a bias of one number": (of_one_number, True),
    "LoRA of a parameter": (of_parameters, True),
    "HRA": (lambda: of(HRAConfig, r=4), True),
    "LoRA with dropout": (lambda: lora(lora_dropout=0.5), False),
    "a copy tied to the embeddings": (copied, True),
    "tied to trained tokens": (lambda: tokens_of("embed_tokens"), True),
    "tied to trained tokens, merged": (merged, True),
    "tied to nothing but trained tokens": (
        lambda: with_tokens(TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=TOKENS)), True
    ),
    "trained tokens of the head": (lambda: tokens_of("lm_head", is_tied=False), True),
    "LoHa": (lambda: of(LoHaConfig, r=4), True),
    "LoHa, which drops ranks": (lambda: of(LoHaConfig, r=4, rank_dropout=0.5), False),
    "LoKr, which drops itself": (lambda: of(LoKrConfig, r=4, module_dropout=0.5), False),
    "BOFT, which drops blocks": (lambda: of(BOFTConfig, boft_block_size=4, boft_dropout=0.5), False),
    "Lily, which looks at all rows": (lambda: of(LilyConfig, r=4), False),
    "weight_norm": (lambda: normed(parametrizations.weight_norm), False),
    "spectral_norm": (lambda: normed(parametrizations.spectral_norm), False),
    "a weight of another class": (subclassed, False),
}  # fmt: skip


def step(model, batch):
    model.zero_grad()
    torch.manual_seed(1)
    out = model(**batch)
    out.loss.backward()
    return out


def patched_copy(model):
    ours = copy.deepcopy(model)
    patch(ours)
    return ours


def assert_same_gradients(stock, ours):
    for (name, a), b in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)


def assert_like_stock(stock, is_chunked=True):
    ours, batch = patched_copy(stock), batch_for(stock, SIZE)
    expected, out = step(stock, batch), step(ours, batch)
    assert (type(out.logits) is LazyLogits) == is_chunked
    torch.testing.assert_close(out.loss, expected.loss)
    assert_same_gradients(stock, ours)


@pytest.mark.parametrize(("make", "is_chunked"), HEADS.values(), ids=HEADS)
def test_a_head_has_stocks_gradients(make, is_chunked):
    torch._dynamo.reset()
    assert_like_stock(make(), is_chunked)


def test_a_tied_copy_keeps_what_an_untied_one_does():
    """PEFT makes it by ``Linear(*weight.shape)``: of 512 words it says 32."""
    kept = []
    for is_tied in (False, True):
        model = copied(is_tied)
        assert model.base_model.model.lm_head.out_features == (32 if is_tied else 512)
        patch(model)
        kept.append(measure_kept(model, batch_for(model, SIZE)).total)
    assert 0.99 < kept[1] / kept[0] < 1.01


@pytest.mark.parametrize("make", [copied, lambda: tokens_of("embed_tokens")], ids=["a copy", "tokens"])
def test_logits_of_a_tied_head_that_are_read_have_stocks_bits(make):
    stock = make()
    batch = batch_for(stock, SIZE)
    del batch["labels"]
    found = patched_copy(stock)(**batch).logits
    assert type(found) is LazyLogits
    assert torch.equal(found.computed(), stock(**batch).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trained_tokens_are_no_less_accurate_than_in_stock(dtype):
    stock = tokens_of("embed_tokens").to(dtype)
    gradients = []
    for model in (copy.deepcopy(stock).double(), stock, patched_copy(stock)):
        step(model, batch_for(stock, SIZE))
        gradients += [p.grad.double() for name, p in model.named_parameters() if "delta" in name]
    exact, of_stock, ours = gradients
    assert exact.shape == (3, 32)
    assert (ours - exact).norm() < 1.3 * (of_stock - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("make", [llama, lambda: lora(use_dora=True)], ids=["plain", "DoRA"])
@pytest.mark.parametrize("when", ["loss in chunks", "logits read", "logits read, hooks late"])
def test_hooks_on_parameters_run_once(make, when):
    model, calls, counts = make(), [], []
    ours = patched_copy(model)

    def hook(which):
        for name, parameter in which.named_parameters():
            if "lm_head" in name and parameter.requires_grad:
                parameter.register_hook(lambda gradient: calls.append(None) or gradient * 2)

    for which in (model, ours):
        if not when.endswith("late"):
            hook(which)
        batch = batch_for(model, SIZE)
        if "read" in when:
            del batch["labels"]
        out = which(**batch)
        if when.endswith("late"):
            hook(which)
        (out.logits.square().mean() if "read" in when else out.loss).backward()
        counts.append(len(calls))
    assert type(out.logits) is LazyLogits
    assert counts[1] == 2 * counts[0] > 0
    assert_same_gradients(model, ours)


def test_a_parameter_that_no_chunk_uses_gets_no_gradient():
    model = lora()
    model.add_adapter("other", LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.requires_grad_(True)
    assert any("other" in name and parameter.requires_grad for name, parameter in model.named_parameters())
    assert_like_stock(model)


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


@contextlib.contextmanager
def evaluating(model):
    yield model.eval()
    model.train()


@contextlib.contextmanager
def other_adapter(model):
    model.set_adapter("other")
    yield
    model.set_adapter("default")


SWITCHES = {
    "disabled": lambda model: model.disable_adapter(),
    "rescaled": lambda model: rescale_adapter_scale(model, 0.25),
    "evaluating": evaluating,
    "another adapter": other_adapter,
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("is_read", [False, True])
def test_a_head_that_was_switched_since_the_forward_is_refused(switch, is_read):
    model = lora(lora_dropout=0.5 if switch == "evaluating" else 0.0)
    model.add_adapter("other", LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    model.enable_input_require_grads()
    patch(model)
    batch = batch_for(model, SIZE)
    labels = batch.pop("labels")
    with SWITCHES[switch](model):
        logits = model(**batch).logits
        inside = model(**batch).logits.argmax()
    assert inside.numel() == 1
    assert type(logits) is LazyLogits
    with pytest.raises(KeptTensorChangedError, match=r"the head was switched: .* MemSaveConfig\(loss='stock'\)"):
        logits.argmax() if is_read else nn.functional.cross_entropy(logits.view(-1, 512), labels.view(-1))


def test_evaluating_a_head_without_dropout_is_no_switch():
    model = lora()
    patch(model)
    logits = model(**batch_for(model, SIZE)).logits
    assert type(logits) is LazyLogits
    assert model.eval()(**batch_for(model, SIZE)).logits.equal(logits)


def test_parameters_frozen_before_backward_get_no_gradient():
    model = lora()
    patch(model)
    batch = batch_for(model, SIZE)
    del batch["labels"]
    loss = model(**batch).logits.square().mean()
    frozen = model.base_model.model.lm_head.lora_A["default"].weight.requires_grad_(False)
    loss.backward()
    assert frozen.grad is None
    assert model.base_model.model.lm_head.lora_B["default"].weight.grad.any()


@pytest.mark.parametrize("make", [llama, lora])
def test_parameters_that_are_computed_get_their_gradients(make):
    model = make()
    ours = patched_copy(model)
    for which in (model, ours):
        given = {name: parameter * 1.5 for name, parameter in which.named_parameters() if parameter.requires_grad}
        torch.func.functional_call(which, given, (), batch_for(model, SIZE), tie_weights=False).loss.backward()
    assert_same_gradients(model, ours)


def test_nothing_stays_after_an_error_in_a_chunk():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            raise MemoryError

    model = lora()
    part, made = model.base_model.model.lm_head.lora_A["default"], []
    stock = part.forward

    def forward(x):
        y = stock(Failing.apply(x))
        y.register_hook(lambda dy: made.append(weakref.ref(dy.untyped_storage())))
        return y

    part.forward = forward
    patch(model)
    with contextlib.suppress(MemoryError):
        model(**batch_for(model, SIZE))
    gc.collect()
    assert len(made) == 1
    assert [ref for ref in made if ref() is not None] == []


@pytest.mark.parametrize("seq", [14, 128], ids=["products in backward", "a sum"])
def test_gradients_of_several_factors_at_once(seq, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 8192)
    size, found = Size(seq=seq), []
    for is_patched in (False, True):
        model = build("llama", size, dropout=0.0)
        if is_patched:
            patch(model)
        out = model(**batch_for(model, size))
        assert (type(out.logits) is LazyLogits) == is_patched
        (gradient,) = torch.autograd.grad(
            out.loss, [model.lm_head.weight], torch.tensor([1.0, 2.0, 3.0]), is_grads_batched=True
        )
        found.append(gradient)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


def test_a_head_without_autocast_gets_gradients_without_it_though_its_loss_has_it():
    model = llama()

    class Root(type(model)):
        def forward(self, hidden, labels):
            with torch.autocast("cpu", enabled=False):
                logits = self.lm_head(hidden)
            return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    model.__class__ = Root
    hidden, labels = torch.randn(2, 16, 32, requires_grad=True), torch.randint(0, 512, (2, 16))
    found = []
    for is_patched in (False, True):
        if is_patched:
            patch(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(hidden, labels)
        found.append(torch.autograd.grad(loss, [hidden, model.lm_head.weight]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("words", "is_lazy"), [(60, False), (64, True)])
def test_logits_of_fewer_words_than_twice_the_width_take_less_than_what_is_kept_instead(words, is_lazy):
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=words)
    )
    patch(model.train())
    ids = torch.randint(0, words, (1, 400))
    assert (type(model(input_ids=ids, labels=ids).logits) is LazyLogits) == is_lazy
