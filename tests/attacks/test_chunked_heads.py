"""Heads that are not a plain linear, where the loss goes chunk by chunk: stock's gradients, or stock's way."""

import contextlib
import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from peft import BOFTConfig, LilyConfig, LoHaConfig, LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from peft.helpers import rescale_adapter_scale
from torch import nn
from torch.nn.utils import parametrizations

from hf_memsave import KeptTensorChangedError, PatchError, patch
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.unread import Unread
from support.steps import gradients, patched, patched_copy, step
from support.zoo import Size, batch_for, build

SIZE = Size(seq=32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 50000)


def llama():
    return build("llama", SIZE, tie_word_embeddings=False)


def tied():
    return build("llama", SIZE, tie_word_embeddings=True)


def adapted(kind, make=llama, targets=("lm_head", "q_proj"), **options):
    model = get_peft_model(make(), kind(target_modules=list(targets), **options)).train()
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:  # words that have other weights than those that they replace
            parameter.data += torch.randn_like(parameter)
    return model


def lora(**options):
    return adapted(LoraConfig, r=4, init_lora_weights=False, **options)


def head_of(model):
    return model.base_model.model.lm_head


def compiled():
    model = lora()
    for module in head_of(model).modules():
        if isinstance(module, nn.Linear):
            module.compile(backend="eager")
    return model


def quantized(**options):
    linears = pytest.importorskip("bitsandbytes").nn
    model = lora(**options)
    layer = head_of(model)
    made = linears.Linear4bit(32, 512, False, compute_dtype=torch.float32, quant_type="nf4")
    weight = layer.base_layer.weight.detach()
    made.weight = linears.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
    layer.base_layer = made.to("cpu")
    return model


def of_one_number():
    model = lora(lora_bias=True)
    head_of(model).lora_B["default"].bias = nn.Parameter(torch.ones(1))
    return model


def training(model, is_trained):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
    return model


def with_another(**options):
    model = lora(**options)
    model.add_adapter("other", LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    return model


def spectral():
    model = llama()
    parametrizations.spectral_norm(model.lm_head)
    return model


class Scaled(torch.Tensor):
    """A weight whose linear is another function."""

    def __deepcopy__(self, memo):
        return nn.Parameter(self.as_subclass(torch.Tensor).detach().clone().as_subclass(Scaled))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        return out * 2 if func is nn.functional.linear else out


def subclassed():
    model = llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone().as_subclass(Scaled))
    return model


def tokens_of(layer, make=tied):
    return lora(make=make, targets=["q_proj"], trainable_token_indices={layer: TOKENS})


def merged():
    model = tokens_of("embed_tokens")
    head_of(model).token_adapter.merge()
    return model


def copied():
    """PEFT makes the copy by ``Linear(*weight.shape)``: of 512 words, its ``out_features`` says 32."""
    saved = dict(modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    return lora(make=tied, targets=["q_proj"], **saved)


#: Which words of a vocabulary are trained.
TOKENS = [3, 7, 100]
HEADS = {
    "frozen": (lambda: training(llama(), lambda name: name != "lm_head.weight"), True),
    "all frozen but it": (lambda: training(llama(), lambda name: name == "lm_head.weight"), True),
    "LoRA": (lora, True),
    "DoRA": (partial(lora, use_dora=True), True),
    "LoRA, compiled": (compiled, True),
    "DoRA on 4 bits": (partial(quantized, use_dora=True), True),
    "LoRA on 4 bits": (quantized, True),
    "LoRA with a bias of one number": (of_one_number, True),
    "LoRA, and another that no chunk uses": (lambda: training(with_another(), lambda name: "lora" in name), True),
    "LoRA of a parameter": (partial(lora, targets=["q_proj"], target_parameters=["lm_head.weight"]), True),
    "LoRA with dropout": (partial(lora, lora_dropout=0.5), False),
    "a copy tied to the embeddings": (copied, True),
    "tied to trained tokens": (partial(tokens_of, "embed_tokens"), True),
    "tied to trained tokens, merged": (merged, True),
    "tied to nothing but trained tokens": (
        partial(adapted, TrainableTokensConfig, tied, ["embed_tokens"], token_indices=TOKENS), True
    ),
    "trained tokens of the head": (partial(tokens_of, "lm_head", llama), True),
    "LoHa": (partial(adapted, LoHaConfig, r=4), True),
    "LoHa, which drops ranks": (partial(adapted, LoHaConfig, r=4, rank_dropout=0.5), False),
    "BOFT, which drops blocks": (partial(adapted, BOFTConfig, boft_block_size=4, boft_dropout=0.5), False),
    "Lily, which looks at all rows": (partial(adapted, LilyConfig, r=4), False),
    "spectral_norm": (spectral, False),
    "a weight of another class": (subclassed, False),
}  # fmt: skip


def assert_same_gradients(stock, ours):
    torch.testing.assert_close(gradients(ours), gradients(stock), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("make", "is_chunked"), HEADS.values(), ids=HEADS)
def test_a_head_has_stocks_gradients(make, is_chunked):
    torch._dynamo.reset()
    stock = make()
    ours, batch = patched_copy(stock), batch_for(stock, SIZE)
    expected, found = step(stock, batch), step(ours, batch)
    torch.testing.assert_close(found["loss"], expected["loss"])
    assert_same_gradients(stock, ours)
    assert (type(ours(**batch).logits) is Unread) == is_chunked


@pytest.mark.parametrize("make", [copied, lambda: tokens_of("embed_tokens")], ids=["a copy", "tokens"])
def test_logits_of_a_tied_head_that_are_read_have_stocks_bits(make):
    stock = make()
    batch = batch_for(stock, SIZE)
    del batch["labels"]
    found = patched_copy(stock)(**batch).logits
    assert type(found) is Unread
    assert torch.equal(found.numbers(), stock(**batch).logits)


def test_trained_tokens_are_no_less_accurate_than_in_stock():
    stock, found = tokens_of("embed_tokens").to(torch.bfloat16), []
    for model in (copy.deepcopy(stock).double(), stock, patched_copy(stock)):
        step(model, batch_for(stock, SIZE))
        found += [p.grad.double() for name, p in model.named_parameters() if "delta" in name]
    exact, of_stock, ours = found
    assert exact.shape == (3, 32)
    assert (ours - exact).norm() < 1.3 * (of_stock - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize(
    ("make", "when"),
    [(llama, "loss in chunks"), (lambda: lora(use_dora=True), "logits read"), (llama, "logits read, hooks late")],
)
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
    assert type(out.logits) is Unread
    assert counts[1] == 2 * counts[0] > 0
    assert_same_gradients(model, ours)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_head_that_uses_what_is_not_its_own_is_refused(is_read):
    model = lora()
    linear, others = head_of(model).base_layer, model.base_model.model.model.layers[0].mlp.up_proj
    others.weight.requires_grad_(True)
    linear.forward = lambda x: nn.functional.linear(x, linear.weight) * others.weight.sum()
    patch(model)
    batch = batch_for(model, SIZE)
    labels = batch.pop("labels")
    logits = model(**batch).logits
    assert type(logits) is Unread
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


@pytest.mark.parametrize(("switch", "is_read"), [
    (PeftModel.disable_adapter, False), (partial(rescale_adapter_scale, multiplier=0.25), True),
    (evaluating, False), (other_adapter, True),
])  # fmt: skip
def test_a_head_that_was_switched_since_the_forward_is_refused(switch, is_read):
    model = with_another(lora_dropout=0.5 if switch is evaluating else 0.0)
    model.enable_input_require_grads()
    patch(model)
    batch = batch_for(model, SIZE)
    labels = batch.pop("labels")
    with switch(model):
        logits = model(**batch).logits
        assert model(**batch).logits.argmax().numel() == 1
    assert type(logits) is Unread
    with pytest.raises(KeptTensorChangedError, match=r"the head was switched: .* MemSaveConfig\(loss='stock'\)"):
        logits.argmax() if is_read else nn.functional.cross_entropy(logits.view(-1, 512), labels.view(-1))


def test_evaluating_is_no_switch_without_dropout_and_what_is_frozen_before_backward_gets_no_gradient():
    model = patched(lora())
    logits = model(**batch_for(model, SIZE)).logits
    assert type(logits) is Unread
    assert model.eval()(**batch_for(model, SIZE)).logits.equal(logits)
    loss = logits.square().mean()
    frozen = head_of(model).lora_A["default"].weight.requires_grad_(False)
    loss.backward()
    assert frozen.grad is None
    assert head_of(model).lora_B["default"].weight.grad.any()


def test_parameters_that_are_computed_get_their_gradients():
    model = lora()
    ours = patched_copy(model)
    for which in (model, ours):
        given = {name: parameter * 1.5 for name, parameter in which.named_parameters() if parameter.requires_grad}
        torch.func.functional_call(which, given, (), batch_for(model, SIZE), tie_weights=False).loss.backward()
    assert_same_gradients(model, ours)


def test_nothing_stays_after_an_error_in_a_chunk():
    def fail(dy):
        raise MemoryError

    model = lora()
    part, made = head_of(model).lora_A["default"], []
    stock = part.forward

    def forward(x):
        x = x.clone()
        x.register_hook(fail)
        y = stock(x)
        y.register_hook(lambda dy: made.append(weakref.ref(dy.untyped_storage())))
        return y

    part.forward = forward
    patch(model)
    with contextlib.suppress(MemoryError):
        model(**batch_for(model, SIZE))
    gc.collect()
    assert [ref() for ref in made] == [None]


@pytest.mark.parametrize("seq", [14, 128], ids=["products in backward", "a sum"])
def test_gradients_of_several_factors_at_once(seq, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 8192)
    size, found = Size(seq=seq), []
    for model in (stock := build("llama", size), patched_copy(stock)):
        out = model(**batch_for(model, size))
        assert (type(out.logits) is Unread) == (model is not stock)
        factors = torch.tensor([1.0, 2.0, 3.0])
        found += torch.autograd.grad(out.loss, [model.lm_head.weight], factors, is_grads_batched=True)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


def test_a_head_without_autocast_gets_gradients_without_it_though_its_loss_has_it():
    model = llama()

    class Root(type(model)):
        def forward(self, hidden, labels):
            with torch.autocast("cpu", enabled=False):
                logits = self.lm_head(hidden)
            return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    model.__class__ = Root
    hidden, labels, found = torch.randn(2, 16, 32, requires_grad=True), torch.randint(0, 512, (2, 16)), []
    for root in (model, patched_copy(model)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = root(hidden, labels)
        found.append(torch.autograd.grad(loss, [hidden, root.lm_head.weight]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("words", "is_lazy"), [(60, False), (64, True)])
def test_logits_of_fewer_words_than_twice_the_width_take_less_than_what_is_kept_instead(words, is_lazy):
    model = patched(build("llama", Size(layers=1), vocab_size=words))
    ids = torch.randint(0, words, (1, 400))
    assert (type(model(input_ids=ids, labels=ids).logits) is Unread) == is_lazy
