"""What is alive after a step: nothing of ours, however the step was run, and without the cycle collector."""

import contextlib
import copy
import gc

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memsave import measure_kept, patch
from support.families import Size, batch_for, build
from support.modes import FAMILIES, batch_of, make

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")


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
