"""Ways to train: whatever is done around a forward and a backward, a patched model gives what stock gives."""

import contextlib
import copy
import functools
import gc
import io
import pickle
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hf_memsave import measure_kept, patch
from hf_memsave.ops import dropout
from support.families import Size, batch_for, build
from support.helpers import only_on_cpu
from support.steps import assert_same, gradients, step

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")

FAMILIES = ("bert", "llama", "gpt2", "t5-decoder")
CAUSAL = ("llama", "gpt2", "t5-decoder")
SMALL = Size(hidden=32, heads=4, layers=2, batch=2, seq=8)


def make(family, device="cpu"):
    """With dropout in attention too, where the family has it."""
    model = build(family, SMALL).to(device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
        for name in ("attention_dropout", "dropout"):  # LLaMA's and T5's attention hold a number
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, 0.1)
    return model


def batch_of(model, seed=1):
    return batch_for(model, SMALL, padded=True, seed=seed)


# Each mode trains a model in its way and returns what came out.


def plain(model):
    return step(model, batch_of(model))


def checkpointed(model, use_reentrant, **options):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}, **options)
    return step(model, batch_of(model))


def offloaded(model):
    with save_on_cpu():
        return step(model, batch_of(model))


def offloaded_forward(model):
    """Backward runs outside of the user's hooks."""
    model.zero_grad()
    torch.manual_seed(7)
    with save_on_cpu():
        loss = model(**batch_of(model)).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def with_hooks_of_ones_own(model):
    """Hooks that keep numbers only: no strides, no tensor identity, no storage."""
    with saved_tensors_hooks(
        lambda t: (t.detach().cpu().numpy().copy(), t.device), lambda h: torch.tensor(h[0]).to(h[1])
    ):
        return step(model, batch_of(model))


def checkpointed_and_offloaded(model):
    with save_on_cpu():
        return checkpointed(model, use_reentrant=False)


def accumulated(model):
    model.zero_grad()
    torch.manual_seed(7)
    losses = []
    for seed in range(3):
        loss = model(**batch_of(model, seed)).loss / 3
        loss.backward()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **gradients(model)}


def two_forwards_then_two_backwards(model):
    model.zero_grad()
    torch.manual_seed(7)
    losses = [model(**batch_of(model, seed)).loss for seed in (1, 2)]
    for loss in losses:
        loss.backward()
    return {"losses": torch.stack([loss.detach() for loss in losses]), **gradients(model)}


def two_forwards_one_backward(model):
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**batch_of(model, 1)).loss + model(**batch_of(model, 2)).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def optimized(model):
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for seed in range(3):
        model(**batch_of(model, seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def generated_in_between(model):
    first = step(model, batch_of(model))
    ids = batch_of(model)["input_ids"][:1]
    outputs = {}
    for mode in ("train", "eval"):
        getattr(model, mode)()
        if model.can_generate():
            torch.manual_seed(3)
            outputs[mode] = model.generate(ids, max_new_tokens=4, do_sample=False, num_beams=1, eos_token_id=None)
        else:
            with torch.no_grad():
                outputs[mode] = model(input_ids=ids).logits
    return {f"first.{k}": v for k, v in first.items()} | outputs | step(model.train(), batch_of(model, 2), seed=8)


def copied(model):
    twin = copy.deepcopy(model)
    return {f"copy.{k}": v for k, v in step(twin, batch_of(twin)).items()} | step(model, batch_of(model))


def pickled(model):
    return plain(pickle.loads(pickle.dumps(model)))


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return plain(torch.load(file, weights_only=False))


def backward_twice(model):
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**batch_of(model)).loss
    loss.backward(retain_graph=True)
    once = {f"once.{k}": v for k, v in gradients(model).items()}
    loss.backward()
    return {**once, **gradients(model)}


def some_gradients_then_all(model):
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**batch_of(model)).loss
    subset = list(model.parameters())[-3:]
    some = torch.autograd.grad(loss, subset, retain_graph=True, allow_unused=True)
    loss.backward()
    return {f"some.{i}": g for i, g in enumerate(some) if g is not None} | gradients(model)


def gradient_penalty(model):
    """A gradient of gradients."""
    model.zero_grad()
    torch.manual_seed(7)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no double backward
        loss = model(**batch_of(model)).loss
        wanted = [p for p in model.parameters() if p.requires_grad]
        first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        penalty = sum(g.square().sum() for g in first if g is not None)
        (loss + penalty).backward()
    return {"loss": loss.detach(), "penalty": penalty.detach(), **gradients(model)}


def checkpointed_by_hand(model, use_reentrant):
    """The user's own checkpoint around one submodule inside a block."""
    for module in model.modules():
        if type(module).__name__ in ("BertIntermediate", "LlamaMLP", "GPT2MLP", "T5DenseActDense"):
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=use_reentrant)
    return step(model, batch_of(model))


def in_eval_mode(model):
    return step(model.eval(), batch_of(model))


def without_gradients(model):
    torch.manual_seed(7)
    with torch.no_grad():
        return {"logits": model(**batch_of(model)).logits}


def in_inference_mode(model):
    with torch.inference_mode():
        logits = model.eval()(**batch_of(model)).logits
    return {"logits": logits.clone()}


def with_hidden_states(model):
    model.zero_grad()
    torch.manual_seed(7)
    output = model(**batch_of(model), output_hidden_states=True)
    hidden = output.hidden_states if "hidden_states" in output else output.decoder_hidden_states
    assert len(hidden) == 3
    loss = output.loss + sum(h.square().mean() for h in hidden)
    loss.backward()
    return {"loss": loss.detach(), **{f"hidden.{i}": h.detach() for i, h in enumerate(hidden)}, **gradients(model)}


def with_frozen_parameters(model):
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 == 0)
    return plain(model)


def from_embeddings(model):
    """The input itself wants a gradient."""
    batch = batch_of(model)
    ids = batch.pop("input_ids")
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    return {**step(model, batch | {"inputs_embeds": embedded}), "input": embedded.grad}


def with_adapters(model):
    """LoRA put around the patched linears."""
    torch.manual_seed(5)
    model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return step(model, batch_of(model.get_base_model()))


def scaled(model):
    """fp16 with a GradScaler whose first scale overflows: one skipped step, then real ones."""
    device = model.device.type
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**40, backoff_factor=2.0**-30)
    start = [p.detach().clone() for p in model.parameters()]
    moved, scales = [], []
    for seed in range(3):
        with torch.autocast(device, torch.float16):
            loss = model(**batch_of(model, seed)).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True)))
    assert moved == [False, True, True]
    return {"scales": torch.tensor(scales), **dict(model.named_parameters())}


MODES = {
    "plain": plain,
    "reentrant checkpointing": functools.partial(checkpointed, use_reentrant=True),
    "non-reentrant checkpointing": functools.partial(checkpointed, use_reentrant=False),
    "every second layer checkpointed": functools.partial(checkpointed, use_reentrant=False, every_n_layers=2),
    "save_on_cpu": offloaded,
    "save_on_cpu in forward only": offloaded_forward,
    "checkpointing under save_on_cpu": checkpointed_and_offloaded,
    "hooks of one's own": with_hooks_of_ones_own,
    "reentrant checkpoint by hand": functools.partial(checkpointed_by_hand, use_reentrant=True),
    "non-reentrant checkpoint by hand": functools.partial(checkpointed_by_hand, use_reentrant=False),
    "gradient accumulation": accumulated,
    "two forwards, two backwards": two_forwards_then_two_backwards,
    "two forwards, one backward": two_forwards_one_backward,
    "AdamW": optimized,
    "generate in between": generated_in_between,
    "deepcopy": copied,
    "pickle": pickled,
    "torch.save": saved_whole,
    "backward twice": backward_twice,
    "some gradients, then all": some_gradients_then_all,
    "gradient penalty": gradient_penalty,
    "eval mode": in_eval_mode,
    "hidden states": with_hidden_states,
    "frozen parameters": with_frozen_parameters,
    "inputs_embeds": from_embeddings,
    "adapters": with_adapters,
    "GradScaler": scaled,
}
WITHOUT_GRADIENTS = {"no_grad": without_gradients, "inference_mode": in_inference_mode}


@pytest.mark.parametrize("mode", MODES | WITHOUT_GRADIENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_stock(family, mode, device):
    stock = make(family, device)
    ours = copy.deepcopy(stock)
    patch(ours)
    run = (MODES | WITHOUT_GRADIENTS)[mode]
    expected = run(stock)
    assert_same(run(ours), expected)


@pytest.mark.parametrize("mode", [m for m in MODES if "by hand" not in m and m != "eval mode"])
def test_a_wrong_recomputation_is_seen(mode, monkeypatch):
    """Each mode above does go through our promises: one that gives other numbers back is caught."""
    right = dropout._redraw
    monkeypatch.setattr(dropout, "_redraw", lambda *args, **kwargs: right(*args, **kwargs).neg_())
    stock = make("bert")
    ours = copy.deepcopy(stock)
    patch(ours)
    expected = MODES[mode](stock)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(MODES[mode](ours), expected)


def test_unpickling_makes_our_attention_known(monkeypatch, device):
    """As in a process that has never patched a model."""
    model = make("bert", device)
    expected = step(model, batch_of(model))
    patch(model)
    pickled_model = pickle.dumps(model)
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, "memsave")
    loaded = pickle.loads(pickled_model)
    assert_same(step(loaded, batch_of(loaded)), expected)


# The cache


@pytest.mark.parametrize("family", CAUSAL)
def test_training_makes_no_cache(family, device):
    model = make(family, device)
    assert model(**batch_of(model)).past_key_values is not None  # stock's waste
    patch(model)
    assert model(**batch_of(model)).past_key_values is None


@pytest.mark.parametrize("family", CAUSAL)
def test_training_makes_a_cache_when_asked_to(family, device):
    stock = make(family, device)
    ours = copy.deepcopy(stock)
    patch(ours)
    caches = []
    for model in (ours, stock):
        torch.manual_seed(7)
        cache = model(**batch_of(model), use_cache=True).past_key_values
        layers = getattr(cache, "self_attention_cache", cache).layers
        caches.append({f"{i}.{n}": getattr(x, n).detach() for i, x in enumerate(layers) for n in ("keys", "values")})
    assert len(caches[0]) == 4
    assert_same(*caches)
    assert_same(step(ours, batch_of(ours), use_cache=True), step(stock, batch_of(stock), use_cache=True))


@pytest.mark.parametrize("how", ["eval", "no_grad"])
@pytest.mark.parametrize("family", CAUSAL)
def test_a_cache_is_made_as_ever_outside_of_training(family, how, device):
    model = make(family, device)
    patch(model)
    if how == "eval":
        model.eval()
    with torch.no_grad() if how == "no_grad" else contextlib.nullcontext():
        assert model(**batch_of(model)).past_key_values is not None


def test_a_cache_given_by_the_user_is_used(device):
    stock = make("llama", device).eval()
    ours = copy.deepcopy(stock)
    patch(ours)
    results = []
    for model in (ours, stock):
        ids = batch_of(model)["input_ids"]
        with torch.no_grad():
            cache = model(input_ids=ids[:, :5]).past_key_values
        model.train()
        torch.manual_seed(7)
        output = model(input_ids=ids[:, 5:], past_key_values=cache)
        assert output.past_key_values is cache
        results.append({"logits": output.logits.detach(), "length": torch.tensor(cache.get_seq_length())})
    assert results[0]["length"] == SMALL.seq
    assert_same(*results)


# Transforms


def test_compile_takes_the_patched_model_whole(device):
    only_on_cpu(device)
    model = build("llama", replace(SMALL, layers=1))
    expected = step(model, batch_of(model))
    patch(model)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        model.zero_grad()
        loss = compiled(**batch_of(model)).loss
        loss.backward()
    finally:
        torch._dynamo.reset()
    assert_same({"loss": loss.detach(), **gradients(model)}, expected)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_functional_grad_sees_the_patched_model(family, device):
    only_on_cpu(device)
    stock = make(family).eval()
    ours = copy.deepcopy(stock)
    patch(ours)

    def loss(parameters, model):
        return functional_call(model, parameters, kwargs=batch_for(model, SMALL)).loss

    results = [torch.func.grad(loss)(dict(m.named_parameters()), m) for m in (ours, stock)]
    assert_same(*results)


def test_functional_call_with_other_parameters_trains_those(device):
    stock = make("llama", device)
    ours = copy.deepcopy(stock)
    patch(ours)
    results = []
    for model in (ours, stock):
        scale = torch.ones((), device=device, requires_grad=True)
        torch.manual_seed(7)
        doubled = {name: p.detach() * 2 * scale for name, p in model.named_parameters()}
        loss = functional_call(model, doubled, kwargs=batch_of(model)).loss
        loss.backward()
        results.append({"loss": loss.detach(), "scale": scale.grad})
    assert_same(*results)


def test_per_sample_gradients_of_a_patched_layer(device):
    stock = make("bert", device).eval()
    ours = copy.deepcopy(stock)
    patch(ours)
    x = torch.randn(3, 5, SMALL.hidden, device=device)

    def loss(parameters, x, layer):
        return functional_call(layer, parameters, (x,)).square().sum()

    results = []
    for model in (ours, stock):
        layer = model.bert.encoder.layer[0].intermediate
        results.append(
            torch.func.vmap(torch.func.grad(loss), (None, 0, None))(dict(layer.named_parameters()), x, layer)
        )
    assert_same(*results)


# Memory


class Alive(TorchDispatchMode):
    """Bytes of the storages that ops made since, and that are alive: in Python, in C++, wherever."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return output

    def total(self):
        return sum(nbytes for ref, nbytes in self.made.values() if not ref.expired())


@contextlib.contextmanager
def no_cycle_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


AROUND = {
    "plain": lambda model: contextlib.nullcontext(),
    "reentrant": lambda model: _enable(model, True),
    "non-reentrant": lambda model: _enable(model, False),
    "save_on_cpu": lambda model: save_on_cpu(),
}


def _enable(model, use_reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return contextlib.nullcontext()


def alive_after_each_step(model, around, backward):
    """Bytes alive with the loss, and without, of two steps."""
    batch = batch_of(model)
    during, left = [], []
    with no_cycle_collection(), Alive() as alive, AROUND[around](model):
        for _ in range(2):
            loss = model(**batch).loss
            during.append(alive.total())
            if backward:
                loss.backward()
                model.zero_grad(set_to_none=True)
            del loss
            left.append(alive.total())
    return during, left


@pytest.mark.parametrize("backward", [True, False], ids=["backward", "no backward"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_outlives_the_loss(family, around, backward, device):
    """Reference counts alone free it all: no cycle, no registry."""
    model = make(family, device)
    stock = copy.deepcopy(model)
    patch(model)
    during, left = alive_after_each_step(model, around, backward)
    assert min(during) > 5_000
    if around == "save_on_cpu" and not backward:  # on CPU, an op that keeps its own output then owns itself: torch's
        assert left[-1] <= alive_after_each_step(stock, around, backward)[1][-1]
    else:
        assert left[1] == left[0]
        assert left[0] <= 256  # a constant that an op has cached


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_keeps_no_more_than_stock_under_checkpointing(family, use_reentrant, device):
    size = Size(hidden=64, batch=4, seq=32)  # so that a generator's state is less than a mask
    model = build(family, size).to(device)
    batch = batch_for(model, size)
    everything = measure_kept(model, batch).total
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    stock = measure_kept(model, batch).total
    patch(model)
    assert measure_kept(model, batch).total <= stock < everything


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_without_gradients_leaves_nothing_behind(family, device):
    model = make(family, device)
    patch(model)
    ids = batch_of(model)["input_ids"]
    with no_cycle_collection(), Alive() as alive, torch.no_grad():
        for _ in range(2):
            model(input_ids=ids, **({"decoder_input_ids": ids} if family.startswith("t5") else {}))
    assert alive.total() <= 256
