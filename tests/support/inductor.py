"""Inductor without its code: joint passes and partitioner run, and their graphs are interpreted op by op."""

import contextlib
import functools

import pytest
import torch
from torch import fx
from torch._functorch import config as functorch
from torch._inductor import compile_fx, inductor_prims
from torch.utils import cpp_extension


class _Interpreted(fx.Interpreter):
    """Random numbers are a function of their seed, as in Inductor's kernels (its own ops draw others each time)."""

    def call_function(self, target, args, kwargs):
        if target is inductor_prims.random:
            size, seed, mode = args
            return getattr(torch, mode)(size, generator=torch.Generator().manual_seed(seed.item()))
        return super().call_function(target, args, kwargs)


def _interpret(graph, inputs, **kwargs):
    def run(inputs):
        taken = list(inputs)
        inputs.clear()
        return _Interpreted(graph).run(*taken)

    run._boxed_call = True
    return run


@contextlib.contextmanager
def interpreted(monkeypatch):
    """Have all that Inductor compiles interpreted."""
    compile = functools.partial(compile_fx.compile_fx, inner_compile=_interpret)
    monkeypatch.setattr(compile_fx, "compile_fx", compile)
    torch._dynamo.reset()
    with functorch.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def no_codegen(monkeypatch):
    with interpreted(monkeypatch):
        yield


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """PyTorch's, by a path without spaces: Inductor links by no other."""
    (tmp_path / "lib").symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(tmp_path / "lib"))
