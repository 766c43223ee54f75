"""The fused rotary embedding: as near to float64 as stock, and no other function is changed."""

import copy
import functools
import importlib
import inspect
import types
from functools import partial

import pytest
import torch

from hf_memsave import MemSaveConfig, patch
from hf_memsave.arch import fused
from hf_memsave.arch.fused import fused_of
from hf_memsave.ops.fused import rotary
from hf_memsave.ops.fused.kernels import kernels
from support.kernels import SMALL, interpreted, rounding, same, step  # noqa: F401
from support.zoo import batch_for, build

TRITON = MemSaveConfig(backend="triton", norm="stock", activation="stock")
LAYOUTS = {
    "heads first": dict(dim=1), "heads last": dict(dim=2), "one table for the batch": dict(tables=1),
    "of a part of each head": dict(width=12), "as attention lays it out": dict(is_transposed=True),
    "few heads": dict(keys=1),
}  # fmt: skip


def modeling(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def inputs(device, dtype, of_tables=None, dim=1, tables=2, width=8, is_transposed=False, keys=3, seed=0):
    """Queries of three heads, keys, and the cosines and sines of 8 elements a head."""
    torch.manual_seed(seed)
    made = []
    for heads in (3, keys):
        shape = (2, 5, heads, width) if dim == 2 or is_transposed else (2, heads, 5, width)
        x = torch.randn(shape, device=device).to(dtype)
        made.append(x.transpose(1, 2) if is_transposed else x)
    angles = torch.randn(tables, 5, 8, device=device)
    return [*made, angles.cos().to(of_tables or dtype), angles.sin().to(of_tables or dtype)], dim


def turned(function, tensors, dim):
    """Queries and keys, turned; and for some gradients that come in theirs, and those of tables that learn."""
    q, k = (x.detach().requires_grad_() for x in tensors[:2])
    found = function(q, k, *tensors[2:], unsqueeze_dim=dim)
    torch.manual_seed(9)
    incoming = [torch.randn(x.shape).to(x) for x in found]
    return [*found, *torch.autograd.grad(found, (q, k, *(x for x in tensors[2:] if x.requires_grad)), incoming)]


@interpreted
@pytest.mark.parametrize(("layout", "dtypes"), [
    *((layout, "bfloat16 float32") for layout in LAYOUTS),
    *(("heads first", f"{dtype} {dtype}") for dtype in ("float32", "bfloat16", "float16")),
])  # fmt: skip
def test_rotary_turns_as_stock(layout, dtypes, device):
    """How near it is to float64, the vendored kernels' own tests say."""
    dtype, of_tables = (getattr(torch, name) for name in dtypes.split())
    tensors, dim = inputs(device, dtype, of_tables, **LAYOUTS[layout])
    stock = modeling("phi3" if "part" in layout else "llama").apply_rotary_pos_emb
    found, expected = (turned(f, tensors, dim) for f in (partial(rotary.apply, stock), stock))
    slack = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=slack, atol=slack)
    assert dtype is torch.float32 or not all(map(torch.equal, found, expected)), "no kernel ran"


@interpreted
@pytest.mark.parametrize("change", [
    lambda q, k, cos, sin: (q, k, cos.requires_grad_(), sin),
    lambda q, k, cos, sin: (q, k, cos[..., :1], sin[..., :1]), lambda q, k, cos, sin: (q, k[0], cos[:1], sin[:1]),
    lambda q, k, cos, sin: (q, k, cos[:, :1], sin[:, :1]), lambda q, k, cos, sin: (q.double(), k, cos, sin),
], ids=["a table learns", "one for a head", "three dimensions", "one for all tokens", "float64"])  # fmt: skip
def test_what_only_broadcasting_can_do_is_left_to_stock(change, device):
    tensors, dim = inputs(device, torch.float32)
    tensors = change(*tensors)
    stock = modeling("llama").apply_rotary_pos_emb
    ours, expected = (turned(f, tensors, dim) for f in (partial(rotary.apply, stock), stock))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@interpreted
def test_only_the_patched_model_has_it_and_until_undone(device, monkeypatch):
    launches, forward = [], kernels().rotary_forward
    monkeypatch.setattr(kernels(), "rotary_forward", lambda *args: launches.append(1) or forward(*args))
    module = modeling("llama")
    names = dict(vars(module))
    model, other = (build("llama", SMALL, dropout=0.0).to(device) for _ in range(2))
    stock = step(model)
    report = patch(model, TRITON)

    def count(one):
        del launches[:]
        found = step(one)
        torch.testing.assert_close(found, stock)
        return len(launches)

    assert "fused_rotary" in str(report)
    assert [count(model), count(copy.deepcopy(model)), count(other)] == [2, 2, 0]
    assert dict(vars(module)) == names
    report.undo()
    assert count(model) == 0


@interpreted
def test_a_function_that_another_tool_puts_there_later_runs(device, monkeypatch):
    model, other = (build("llama", SMALL, dropout=0.0).to(device) for _ in range(2))
    patch(model, TRITON)
    monkeypatch.setattr(modeling("llama"), "apply_rotary_pos_emb", lambda q, k, cos, sin: (2 * q, k))
    assert same(step(model), step(other))


def test_a_class_is_known_by_the_code_that_its_forward_calls(monkeypatch):
    def op(name, cls):
        return getattr(fused_of(getattr(modeling(name), cls)), "op", None)

    for name, cls in [("llama", "LlamaAttention"), ("phi3", "Phi3Attention"), ("stablelm", "StableLmAttention")]:
        assert op(name, cls) == "fused_rotary"
    for name, cls in [("olmo2", "Olmo2Attention"), ("cohere", "CohereAttention"), ("bert", "BertSelfAttention")]:
        assert op(name, cls) is None  # in the dtype of the tables; of neighbours, not of halves; none
    halves = modeling("qwen2").rotate_half
    constants = tuple(4 if constant == 2 else constant for constant in halves.__code__.co_consts)
    quarters = types.FunctionType(halves.__code__.replace(co_consts=constants), halves.__globals__)
    for other in (lambda x: -x, quarters):
        monkeypatch.setattr(modeling("qwen2"), "rotate_half", other)
        fused._fused_of.cache_clear()
        assert op("qwen2", "Qwen2Attention") is None
    fused._fused_of.cache_clear()


@interpreted
def test_a_forward_that_a_class_got_while_its_models_are_patched_runs(device, monkeypatch):
    """As in stock, where a class is looked up at each call."""
    model = build("llama", SMALL).to(device)
    batch, cls = batch_for(model, SMALL), modeling("llama").LlamaAttention
    patch(model, TRITON)
    model(**batch)
    stock, calls = cls.forward, []

    def forward(self, *args, **kwargs):
        calls.append(self)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", forward)
    model(**batch)
    assert calls == [model.model.layers[0].self_attn]


@interpreted
def test_a_forward_behind_a_decorator_is_fused_too(monkeypatch):
    """As in Transformers from 5.24 on, whose decorator renames an argument."""
    cls = modeling("llama").LlamaAttention
    forward = inspect.unwrap(cls.forward)

    @functools.wraps(forward)
    def decorated(*args, **kwargs):
        return forward(*args, **kwargs)

    calls = []
    monkeypatch.setattr(rotary, "apply", lambda stock, *args, **kwargs: calls.append(stock) or stock(*args, **kwargs))
    monkeypatch.setattr(cls, "forward", decorated)
    monkeypatch.setattr(rotary, "_turning", functools.cache(rotary._turning.__wrapped__))
    assert fused_of(cls).op == "fused_rotary"
    model = build("llama", SMALL)
    patch(model, TRITON)
    model(**batch_for(model, SMALL))
    assert calls == [modeling("llama").apply_rotary_pos_emb]
