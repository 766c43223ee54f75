"""The private names of PyTorch: all in one file, each there, and each answering what it is asked."""

import ast
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hf_memsave
from hf_memsave.device import STAND_IN
from hf_memsave.measure.fake_device import fake_device
from hf_memsave.tape import private
from support.helpers import random, taping

PACKAGE = Path(hf_memsave.__file__).parent
#: Files that watch what is kept, and are no part of training.
METERS = {"meter.py", "peak.py"}
#: Loaded only where a model is compiled: importing the compiler takes a second.
COMPILED = {"compiled.py"}
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


def test_a_linear_is_known_by_its_node_and_so_is_what_it_keeps():
    x, w, b = (random(*shape).requires_grad_() for shape in ((3, 4), (5, 4), (5,)))
    for y in (x @ w.t(), torch.nn.functional.linear(x, w, b), torch.nn.functional.linear(x, w)):
        assert private.is_linear(y.grad_fn)
        assert torch.equal(private.kept_input(y.grad_fn), x)
    assert private.kept_input((x @ w.detach().t()).grad_fn) is None
    for y in (torch.addmm(b, x, w.t(), alpha=2), x.exp(), torch.bmm(x[None], w.t()[None])):
        assert not private.is_linear(y.grad_fn)


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


def test_a_backward_has_a_number_and_an_end():
    numbers, events = [], []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            numbers.append(private.backward_id())
            private.after_backward(lambda: events.append("end"))
            events.append("asked")
            return dy

    assert private.backward_id() == -1
    for _ in range(2):
        x = random(3).requires_grad_()
        (Asks.apply(x) + Asks.apply(x)).sum().backward()
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3] > -1
    assert events == ["asked", "asked", "end", "end"] * 2


def test_autocast_is_switched_off_and_on_again(device):
    for enabled in (True, False):
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            assert private.any_autocast() == enabled
            with private.no_autocast():
                assert not private.any_autocast()
            assert private.any_autocast() == enabled


def test_autocast_does_not_let_go_where_it_is_switched_off():
    torch.set_autocast_enabled("cpu", True)  # as without a context, at whose end it would
    try:
        alive = private.autocast_cache()
        with private.no_autocast():
            pass
        assert alive() is not None
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
    assert alive() is None


def test_it_is_told_when_autocast_lets_go(device):
    with torch.autocast(device.type, torch.bfloat16):
        alive = private.autocast_cache()
        with torch.autocast(device.type, enabled=False):
            pass
        assert alive() is not None
        torch.clear_autocast_cache()
        assert alive() is None
        alive = private.autocast_cache()
        assert alive() is not None
    assert alive() is None
    assert not torch.is_autocast_enabled("cpu")


def test_no_dispatch_mode_sees_what_is_hidden_from_it():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode(), private.no_dispatch():
        torch.ones(3).neg()
    assert not seen


def test_the_dispatcher_tells_what_autocast_converts():
    assert private.is_registered("aten::pow.Scalar", "AutocastCUDA")
    assert not private.is_registered("aten::pow.Scalar", "AutocastCPU")
    assert not private.is_registered("aten::sum.int", "AutocastCUDA"), "which is Python's alone"
    for kind in ("cuda", STAND_IN):
        assert private.has_autocast("pow", kind) and private.has_autocast("linear", kind)
        assert not private.has_autocast("gelu", kind)
    assert private.has_autocast("linear", "cpu") and not private.has_autocast("pow", "cpu")


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", "math"])
def test_the_kernel_of_attention_is_told(kernel):
    with fake_device("flash" if kernel == "math" else kernel) as device:
        q = torch.ones(2, 4, 8, 600 if kernel == "math" else 64, dtype=torch.bfloat16, device=device)
        q = q if kernel != "math" else q[0]
        assert private.is_one_kernel(q, q, q) == (kernel != "math")
        assert private.is_cudnn(q, q, q) == (kernel == "cudnn")


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


def test_a_checkpoint_has_one_frame_and_another_run_each_time():
    seen = []

    def fn(x):
        seen.append(private.checkpoint_frame())
        return x.sin()

    y = checkpoint(fn, random(3).requires_grad_(), use_reentrant=False)
    for retain in (True, False):
        y.sum().backward(retain_graph=retain)
    (frame, *frames), runs = zip(*seen, strict=True)
    assert len(seen) == 3 and all(other is frame for other in frames) and len({*map(id, runs)}) == 3
    assert private.checkpoint_frame() == (None, None)


def test_the_backward_of_an_op_is_no_function_of_ours():
    x, seen = random(3).requires_grad_(), []
    y = x.sin()
    y.register_hook(lambda grad: seen.append(private.function_in_backward()))
    y.sum().backward()
    assert seen == [None]
