"""The private names of PyTorch: all in one file, each there, and each answering what it is asked."""

import ast
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hf_memsave
from hf_memsave.tape import private
from support.helpers import random, taping

PACKAGE = Path(hf_memsave.__file__).parent
#: Files that watch what is kept, and are no part of training.
METERS = {"kept.py", "peak.py"}
#: Loaded only where a model is compiled: importing the compiler takes a second.
COMPILED = {"compiled.py", "partitioner.py"}
#: The versions of PyTorch that have a private name: from this one on, but for what comes later.
OLDEST = "2.9"
SINCE = {"torch._C._acc": "2.10"}
#: Public in all but name: PyTorch documents how to subclass tensors by them.
DOCUMENTED = "torch.utils._python_dispatch"


def private_names(path):
    """Dotted names of torch, with a part that begins with an underscore."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {
        name
        for name in found
        if name.startswith("torch.") and any(part.startswith("_") and part[:2] != "__" for part in name.split("."))
    }


def test_private_names_stand_in_one_file():
    for path in PACKAGE.rglob("*.py"):
        if "_vendor" not in path.parts and path.name not in METERS | COMPILED | {"private.py"}:
            assert {name for name in private_names(path) if not name.startswith(DOCUMENTED)} == set(), path.name


@pytest.mark.parametrize("folder", ["tape", "measure"])
def test_every_private_name_is_there(folder):
    names = private_names(PACKAGE / folder / "private.py")
    assert len(names) > 6
    for name in names:
        since = next((version for part, version in SINCE.items() if name.startswith(part)), OLDEST)
        try:
            reduce(getattr, name.split(".")[1:], torch)
        except AttributeError:
            assert torch.__version__ < since, name
        else:
            assert torch.__version__ >= since, f"{name} is there before {since}"


def test_innermost_hooks_and_modes_are_those_of_this_place_and_are_put_back():
    def pack(tensor):
        return tensor

    assert private.innermost_hooks() is private.innermost_mode() is None
    with saved_tensors_hooks(pack, pack):
        assert private.innermost_hooks() == (pack, pack)
        with taping() as outer:
            assert private.innermost_hooks()[0].__self__ is outer
            with taping() as inner:
                assert private.innermost_mode() is inner
            mode = private.pop_mode()
            assert mode is outer and private.innermost_mode() is None
            private.push_mode(mode)
        assert private.innermost_hooks() == (pack, pack)
    assert private.innermost_hooks() is private.innermost_mode() is None


def test_hooks_work_where_they_do_and_transforms_are_told():
    assert private.hooks_work()
    with torch.no_grad():
        assert not private.hooks_work()
    with disable_saved_tensors_hooks("not here"):
        assert not private.hooks_work()
    with torch.autograd.forward_ad.dual_level():
        assert not private.hooks_work()
    seen = []
    torch.func.grad(lambda x: seen.append((private.hooks_work(), private.in_transform())) or x.sum())(torch.ones(2))
    assert seen == [(False, True)]
    assert private.hooks_work() and not private.in_transform()


def test_it_is_told_when_autocast_lets_go_and_not_where_it_is_switched_off(device):
    with torch.autocast(device.type, torch.bfloat16):
        alive = private.autocast_cache()
        with torch.autocast(device.type, enabled=False), private.no_autocast():
            assert not private.any_autocast()
        assert private.any_autocast() and alive() is not None
        torch.clear_autocast_cache()
        assert alive() is None
        alive = private.autocast_cache()
    assert alive() is None and not torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", True)  # as without a context, at whose end it would let go
    try:
        alive = private.autocast_cache()
        with private.no_autocast():
            pass
        assert alive() is not None
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_is_one_function_in_forward_and_backward():
    seen = []

    def fn(x):
        seen.append(([*private.functions_in_forward()], private.function_in_backward()))
        return x.sin()

    def inner(x):
        return checkpoint(fn, x.cos(), use_reentrant=True)

    checkpoint(inner, random(3).requires_grad_(), use_reentrant=True).sum().backward()
    (first, none), (second, of_second), (third, of_third) = seen
    assert len(first) == 2 and none is None, "neither has gradients in the forward"
    assert len(second) == 1 and of_second is first[1] and second[0] is not first[0], "the outer one is run again"
    assert third == [] and of_third is second[0], "the inner one is run again"
    assert [*private.functions_in_forward()] == [] and private.function_in_backward() is None
    y, seen = random(3).requires_grad_().sin(), []
    y.register_hook(lambda grad: seen.append(private.function_in_backward()))
    y.sum().backward()
    assert seen == [None], "the backward of an op is no function of ours"
