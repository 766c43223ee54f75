"""Tensors that wrap others: their own storage is never read, and no function called that their class does not have."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.measure.peak import storages
from hf_memsave.tape import offload
from hf_memsave.tape.offload import Away, Offload
from hf_memsave.tape.tensors import is_plain
from hf_memsave.tape.wrappers import parts_of
from support.families import Size, batch_for, build
from support.helpers import assert_same_bits

SIZE = Size()


class Hidden(torch.Tensor):
    """A wrapper that does not tell what it wraps, and has neither expand nor as_strided."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("expand", "as_strided", "set_"):
            raise NotImplementedError(func)
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Hidden) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))


class Told(Hidden):
    """One that does."""

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, shape, stride):
        return Told(inner["inner"])


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_what_is_plain(mesh):
    x = torch.randn(4)
    for plain in (x, nn.Parameter(x), nn.Buffer(x)):
        assert is_plain(plain)
        assert parts_of(plain)[0] is plain
    d = DTensor.from_local(x, mesh, [Replicate()])
    for wrapper, parts in ((Hidden(x), 0), (Told(x), 1), (Told(Told(x)), 1), (Told(Hidden(x)), 0), (d, 1)):
        assert not is_plain(wrapper)
        assert [part.data_ptr() for part in parts_of(wrapper)] == [x.data_ptr()] * parts
        assert len(list(storages(wrapper))) == parts


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 1024).view(64, 16))

    def forward(self, x):
        return (self.weight * x).tanh().square()


SETTINGS = {
    "exact": (MemSaveConfig(), None),
    "offload": (MemSaveConfig(offload=True), None),
    "int8": (MemSaveConfig(storage="int8"), None),
    "under a hook": (MemSaveConfig(), Offload),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("make", [Hidden, Told])
def test_gradients_through_a_wrapper_are_stocks(make, setting, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 256)
    config, around = SETTINGS[setting]
    model, x = Body(), torch.linspace(-2, 2, 1024).view(64, 16)

    def gradient(around=contextlib.nullcontext):
        model.zero_grad()
        with around():
            y = model(make(x))
        moved = Away.total
        y.backward(make(torch.ones(64, 16)))
        return moved, model.weight.grad.inner

    _, stock = gradient()
    patch(model, config)
    moved, ours = gradient(around or contextlib.nullcontext)
    assert_same_bits(ours, stock)
    assert (moved > 0) == (make is Told and "exact" != setting != "int8")


def test_an_expanded_wrapper_is_kept_under_a_hook_as_it_is():
    model, x = Body(), Hidden(torch.linspace(-2, 2, 16).expand(64, 16))

    def gradient():
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = model(x)
        y.backward(Hidden(torch.ones(64, 16)))
        return model.weight.grad.inner

    stock = gradient()
    patch(model)
    assert_same_bits(gradient(), stock)


def parallel(mesh):
    model = build("llama", SIZE)
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {**{name: ColwiseParallel() for name in columns}, "self_attn.o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {**plan, "mlp.down_proj": RowwiseParallel()})
    return model


#: Of what the floor keeps, how much each keeps.
TENSOR_PARALLEL = {"exact": ({}, 1), "gate": ({"checkpoint": "gate"}, 0.7), "offload": ({"offload": True}, 1.01)}


@pytest.mark.parametrize("setting", TENSOR_PARALLEL)
def test_a_step_under_tensor_parallelism_is_stocks_and_keeps_less(setting, mesh, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 256)
    model, (fields, most) = parallel(mesh), TENSOR_PARALLEL[setting]
    batch = batch_for(model, SIZE)

    def step():
        model.zero_grad()
        loss = model(**batch).loss
        away = Away.total
        loss.backward()
        return away, [loss.detach(), *(whole(p.grad) for p in model.parameters())]

    _, stock = step()
    patch(model)
    floor = measure_kept(model, batch).total
    patch(model, fields, replace=True)
    assert measure_kept(model, batch).total <= most * floor
    for _ in range(2):
        away, ours = step()
        assert away > (0.8 * floor if setting == "offload" else -1)
        for mine, theirs in zip(ours, stock, strict=True):
            assert_same_bits(mine, theirs)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
