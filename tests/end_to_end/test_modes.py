"""Ways to train: whatever is done around a forward and a backward, a patched model gives and leaves what stock does."""

import contextlib
import copy
import gc
import pickle
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.arch.versions import cache_name
from hf_memsave.patching.swap import _CLASSES
from hf_memsave.tape.content import Content
from support.families import Size, batch_for, build
from support.helpers import only_on_cpu
from support.modes import CAUSAL, FAMILIES, MODES, SMALL, WITHOUT_GRADIENTS, batch_of, make
from support.steps import assert_same, step

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")


def pair(family, device="cpu", config=True):
    """Ours and stock, with the same weights."""
    stock = make(family, device)
    ours = copy.deepcopy(stock)
    patch(ours, config)
    return ours, stock


@pytest.mark.parametrize("mode", MODES | WITHOUT_GRADIENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_stock(family, mode, device):
    ours, stock = pair(family, device)
    run = (MODES | WITHOUT_GRADIENTS)[mode]
    expected = run(stock)
    assert_same(run(ours), expected)


def negative(tensor):
    return -tensor if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("mode", [m for m in MODES if "by hand" not in m and m != "eval mode"])
def test_a_wrong_recomputation_is_seen(mode, monkeypatch):
    """Each mode above does remake tensors in backward: other numbers than those of forward are caught."""
    right = Content._run
    monkeypatch.setattr(Content, "_run", lambda node: negative(right(node)))
    ours, stock = pair("bert")
    expected = MODES[mode](stock)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(MODES[mode](ours), expected)


def test_a_pickled_model_trains_in_a_process_that_has_never_patched_one(device):
    model = make("bert", device)
    expected = step(model, batch_of(model))
    patch(model)
    pickled = pickle.dumps(model)
    _CLASSES.clear()
    loaded = pickle.loads(pickled)
    assert type(loaded) is not type(model)
    assert_same(step(loaded, batch_of(loaded)), expected)


# What is alive after a step: nothing of ours, however the step was run, and without the cycle collector.


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


def alive_after_each_step(model, around, backward):
    """Bytes alive with the loss, and without, of two steps."""
    if around.endswith("reentrant"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": around == "reentrant"})
    batch, during, left = batch_of(model), [], []
    context = save_on_cpu() if around == "save_on_cpu" else contextlib.nullcontext()
    with no_cycle_collection(), Alive() as alive, context:
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
@pytest.mark.parametrize("around", ["plain", "reentrant", "non-reentrant", "save_on_cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_outlives_the_loss(family, around, backward, device):
    """Reference counts alone free it all: no cycle, no registry."""
    ours, stock = pair(family, device)
    during, left = alive_after_each_step(ours, around, backward)
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
    model, _ = pair(family, device)
    ids = batch_of(model)["input_ids"]
    with no_cycle_collection(), Alive() as alive, torch.no_grad():
        for _ in range(2):
            model(input_ids=ids, **({"decoder_input_ids": ids} if family.startswith("t5") else {}))
    assert alive.total() <= 256


# Caches of keys and values: `use_cache` is left alone, and a patched model makes and takes stock's.


def in_training(model, options):
    """Keys and values by layer, none where there is no cache; and a step."""
    torch.manual_seed(7)
    cache = model(**batch_of(model), **options).past_key_values
    layers = getattr(cache, "self_attention_cache", cache).layers if cache is not None else []
    tensors = {f"{i}.{n}": getattr(x, n).detach() for i, x in enumerate(layers) for n in ("keys", "values")}
    return tensors | step(model, batch_of(model), **options), len(tensors)


@pytest.mark.parametrize("options", [{}, {"use_cache": True}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("family", CAUSAL)
def test_training_makes_the_cache_that_stock_makes(family, options, device):
    (mine, count), (theirs, of_stock) = (in_training(model, options) for model in pair(family, device))
    assert count == of_stock == (0 if options.get("use_cache") is False else 4)
    assert_same(mine, theirs)


@pytest.mark.parametrize("family", CAUSAL)
def test_a_cache_is_made_as_ever_outside_of_training(family, device):
    model, _ = pair(family, device)
    with torch.no_grad():
        assert model(**batch_of(model)).past_key_values is not None
    assert model.eval()(**batch_of(model)).past_key_values is not None


@pytest.mark.parametrize("checkpoint", [None, "block"])
def test_a_cache_given_by_the_user_is_used(checkpoint, device):
    results = []
    for model in pair("llama", device, MemSaveConfig(checkpoint=checkpoint)):
        ids = batch_of(model)["input_ids"]
        with torch.no_grad():
            cache = model.eval()(input_ids=ids[:, :5]).past_key_values
        model.train()
        torch.manual_seed(7)
        output = model(input_ids=ids[:, 5:], **{cache_name(model): cache})
        assert output.past_key_values is cache
        results.append({"logits": output.logits.detach(), "length": torch.tensor(cache.get_seq_length())})
    assert results[0]["length"] == SMALL.seq
    assert_same(*results)


# Transforms of PyTorch over a whole patched model.


def test_compile_takes_the_patched_model_whole(device):
    only_on_cpu(device)
    model = build("llama", replace(SMALL, layers=1))
    found = []
    for change in (lambda model: model, patch):
        change(model)
        torch._dynamo.reset()
        try:
            found.append(step(torch.compile(model, backend="aot_eager", fullgraph=True), batch_of(model)))
        finally:
            torch._dynamo.reset()
    assert_same(*reversed(found))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_functional_grad_sees_the_patched_model(family, device):
    only_on_cpu(device)

    def loss(parameters, model):
        return functional_call(model, parameters, kwargs=batch_for(model, SMALL)).loss

    models = [model.eval() for model in pair(family)]
    assert_same(*(torch.func.grad(loss)(dict(model.named_parameters()), model) for model in models))


def test_functional_call_with_other_parameters_trains_those(device):
    results = []
    for model in pair("llama", device):
        scale = torch.ones((), device=device, requires_grad=True)
        torch.manual_seed(7)
        doubled = {name: p.detach() * 2 * scale for name, p in model.named_parameters()}
        loss = functional_call(model, doubled, kwargs=batch_of(model)).loss
        loss.backward()
        results.append({"loss": loss.detach(), "scale": scale.grad})
    assert_same(*results)


def test_per_sample_gradients_of_a_patched_layer(device):
    x, results = torch.randn(3, 5, SMALL.hidden, device=device), []

    def loss(parameters, x, layer):
        return functional_call(layer, parameters, (x,)).square().sum()

    for model in pair("bert", device):
        layer = model.eval().bert.encoder.layer[0].intermediate
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, None))
        results.append(each(dict(layer.named_parameters()), x, layer))
    assert_same(*results)
