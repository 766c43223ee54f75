"""Tensors that wrap others: their own storage is never read, and no function called that their class does not have."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.count.kept import storages
from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.tape import offload
from hf_memsave.tape.offload import Away, Offload
from hf_memsave.tape.tensors import is_plain
from hf_memsave.tape.wrappers import parts_of
from support.attacks import Attack, assert_alike
from support.helpers import assert_same_bits
from support.steps import assert_same, backward
from support.zoo import Size, batch_for, build

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


def kind_of(change):
    """A class of tensors, whose functions give ``change(call, func, args, kwargs)``; ``call`` runs a function."""

    class Kind(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            call = super().__torch_function__
            return change(lambda func, *args, **kwargs: call(func, types, args, kwargs), func, args, kwargs or {})

    Kind.__name__ = change.__name__
    return Kind


class Plain(torch.Tensor):
    """A class without functions of its own: what is made of it is of it."""


@kind_of
def Named(call, func, args, kwargs):
    """Hands on what it knows beside its numbers, as MONAI's and fastai's do, but from products."""
    out = call(func, *args, **kwargs)
    if isinstance(out, Named):
        out.label = next((getattr(a, "label", None) for a in args if isinstance(a, Named)), None)
    return out.as_subclass(torch.Tensor) if func is nn.functional.linear else out


@kind_of
def Louder(call, func, args, kwargs):
    """Its SiLU is another function."""
    return call(nn.functional.gelu, args[0] * 3) if func is nn.functional.silu else call(func, *args, **kwargs)


@kind_of
def Gated(call, func, args, kwargs):
    """Its GELU is gated, by what is computed without gradients."""
    out = call(func, *args, **kwargs)
    if func is not nn.functional.gelu:
        return out
    with torch.no_grad():
        gate = call(torch.sigmoid, *args)
    return out * gate


@kind_of
def Bolder(call, func, args, kwargs):
    """Three functions of a model's own tensors give more."""
    out = call(func, *args, **kwargs)
    is_more = func in (torch.Tensor.mul, nn.functional.layer_norm, nn.functional.linear)
    return call(torch.mul, out, 1.5).as_subclass(torch.Tensor) if is_more else out


class Chain(GradientCheckpointingLayer):
    """What its last function keeps is made by the one before."""

    def forward(self, x):
        return nn.functional.gelu(nn.functional.silu(x * 1.5) + 1) * x


class Chains(nn.Module):
    """Two, between linears."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)
        self.layers = nn.ModuleList([Chain(), Chain()])

    def forward(self, x):
        x = self.first(x)
        x = x.as_subclass(self.kind) if type(x) is torch.Tensor else x
        for layer in self.layers:
            x = layer(x)
        return self.last(x).pow(2).mean()


#: Not with the caller's own checkpointing where a class computes something else: docs/limits.md says why.
WAYS = ("exact", "block", "offload", "hooks")
CASES = [(kind, how) for kind in (Plain, Named) for how in (*WAYS, "checkpoint", "reentrant")]
CASES += [(kind, how) for kind in (Louder, Gated) for how in WAYS]


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_a_class_of_tensors_gets_stocks_gradients(kind, how):
    """Its functions are not asked in the backward of a loss of it: what runs again keeps what the forward kept."""

    def make():
        model = Chains().train()
        model.kind = kind
        for layer in model.layers if how in ("checkpoint", "reentrant") else ():
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=how == "reentrant")
        return model

    def run(model, ends_plain):
        hooks = saved_tensors_hooks(lambda x: x, lambda x: x) if how == "hooks" else contextlib.nullcontext()
        with hooks:
            loss = model(torch.randn(4, 8).as_subclass(kind))
        (loss.as_subclass(torch.Tensor) if ends_plain else loss).backward()
        return plain(loss, model)

    config = MemSaveConfig(checkpoint="block" if how == "block" else None, offload=how == "offload")
    for ends_plain in (True, False):
        assert_alike(make, partial(run, ends_plain=ends_plain), config)


def plain(loss, model):
    """Loss and gradients, of no class of their own."""
    return [t.detach().as_subclass(torch.Tensor) for t in (loss, *(p.grad for p in model.parameters()))]


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
        assert len(list(storages([wrapper]))) == parts


SETTINGS = {
    "exact": (MemSaveConfig(), None),
    "offload": (MemSaveConfig(offload=True), None),
    "int8": (MemSaveConfig(storage="int8"), None),
    "under a hook": (MemSaveConfig(), Offload),
    "under a hook that keeps": (MemSaveConfig(), lambda: saved_tensors_hooks(lambda t: t, lambda t: t)),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("make", [Hidden, Told])
def test_gradients_through_a_wrapper_are_stocks(make, setting, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 256)
    config, around = SETTINGS[setting]
    p = nn.Parameter(torch.linspace(-1, 1, 1024).view(64, 16))
    model = Attack(lambda model, x: (model.p * x).tanh().square(), p=p)
    x = torch.linspace(-2, 2, 16).expand(64, 16) if "keeps" in setting else torch.linspace(-2, 2, 1024).view(64, 16)

    def gradient(around=contextlib.nullcontext):
        model.zero_grad()
        with around():
            y = model(make(x))
        moved = Away.total
        y.backward(make(torch.ones(64, 16)))
        return moved, model.p.grad.inner

    _, stock = gradient()
    patch(model, config)
    moved, ours = gradient(around or contextlib.nullcontext)
    assert_same_bits(ours, stock)
    assert (moved > 0) == (make is Told and setting in ("offload", "under a hook"))


def test_a_write_through_a_wrapper_after_the_forward_is_told():
    p = nn.Parameter(torch.linspace(-1, 1, 64).view(4, 16))
    model, x = Attack(lambda model, x: (model.p * x).tanh(), p=p), Told(torch.linspace(-2, 2, 64).view(4, 16))
    patch(model)
    y = model(x)
    x.mul_(2)
    with pytest.raises(KeptTensorChangedError, match="modified by an inplace operation"):
        y.backward(Told(torch.ones(4, 16)))


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
        loss = model(**batch).loss
        away, found = Away.total, backward(model, loss)
        return away, {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}

    _, stock = step()
    patch(model)
    floor = measure_kept(model, batch).total
    patch(model, fields, replace=True)
    if setting != "offload" or torch.__version__ >= "2.11":  # before, a block's inputs live on under other hooks and
        assert measure_kept(model, batch).total <= most * floor  # a dispatch mode, the meter's; without one they do not
    for _ in range(2):
        away, ours = step()
        assert away > (0.8 * floor if setting == "offload" else -1)
        assert_same(ours, stock)


class Scaled(GradientCheckpointingLayer):
    """A scale of that class, beside activations of none: as a product's factor, a norm's weight and a linear's."""

    def __init__(self, place):
        super().__init__()
        self.place, scale = place, torch.linspace(0.5, 2, 8)
        self.first, self.gate_proj, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        weight = self.gate_proj.weight.detach()
        if place == "buffer":
            self.register_buffer("scale", scale.as_subclass(Bolder))
        if place == "parameter":
            self.scale = nn.Parameter(scale.as_subclass(Bolder))
            self.gate_proj.weight = nn.Parameter(weight.as_subclass(Bolder))

    def forward(self, x):
        scale = torch.linspace(0.5, 2, 8).as_subclass(Bolder) if self.place == "made" else self.scale
        x = nn.functional.layer_norm(self.first(x).mul(scale), (8,), scale)
        return self.last(nn.functional.silu(self.gate_proj(x)) * x)


@pytest.mark.parametrize("place", ["buffer", "parameter", "made"])
def test_a_class_of_a_models_own_tensors_has_its_say_once(place):
    def run(model):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        return plain(loss, model)

    for rung in (None, "gate"):
        make = lambda: nn.Sequential(nn.Sequential(Scaled(place), Scaled(place)))  # noqa: E731
        assert_alike(make, run, MemSaveConfig(checkpoint=rung))


@pytest.mark.parametrize("dropout", [nn.Dropout(0.2), nn.AlphaDropout(0.2)], ids=repr)
def test_dropout_of_a_wrapper_is_stocks(mesh, dropout):
    def make():
        model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), dropout, nn.Linear(8, 8))
        parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "3": RowwiseParallel()})
        return model

    def run(model):
        x = DTensor.from_local(torch.randn(2, 4, 8), mesh, [Replicate()]).requires_grad_()
        model(x).pow(2).mean().backward()
        return x.grad.full_tensor()

    assert_alike(make, run)
