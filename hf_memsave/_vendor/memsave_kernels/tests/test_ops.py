"""The ops as PyTorch sees them: schemas, fakes, devices, and what is refused."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import memsave_kernels as k
from cases import CASES
from cases.case import DEVICE, Case, maker


class Calls(TorchDispatchMode):
    """The calls of our ops."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == k.NAMESPACE:
            copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
            self.found.setdefault(func, copies)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_schema_and_fake(case: Case):
    args = case.inputs(maker(case.dtypes[-1]), 3, 20)
    with Calls() as calls:
        case.ours(*args)
    assert calls.found
    for op, copies in calls.found.items():
        torch.library.opcheck(op, tuple(copies), test_utils=("test_schema", "test_faketensor"))


def test_is_compiled_into_one_graph():
    def f(x, w):
        return k.gated(k.rms_norm(x, w, 1e-6), x).sum()

    x, w = torch.randn(3, 20, device=DEVICE, requires_grad=True), torch.ones(20, device=DEVICE)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(x, w)
    (dx,) = torch.autograd.grad(compiled, x)
    (expected,) = torch.autograd.grad(f(x, w), x)
    assert torch.equal(dx, expected)


REFUSALS = {
    "a style": (lambda: k.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6, "bert"), ValueError, "expected a style"),
    "an activation": (lambda: k.activate(torch.ones(2, 4), "relu"), ValueError, "expected an activation"),
    "float64": (lambda: k.rms_norm(torch.ones(2, 4).double(), torch.ones(4), 1e-6), TypeError, "expected float32"),
    "a probability": (lambda: k.lora_input(torch.ones(2, 4), 1.5, 0), ValueError, "expected a dropout probability"),
    "a long row": (lambda: k.rms_norm(torch.ones(1, 65537), torch.ones(65537), 1e-6), ValueError, "at most 65536"),
    "shapes": (lambda: k.rotary(torch.ones(2, 4), torch.ones(4), torch.ones(4)), ValueError, r"expected \[batch"),
    "strides": (lambda: k.cross_entropy_forward_(torch.ones(4, 2).T, None, None), ValueError, "expected contiguous"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name):
    call, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        call()


def test_backward_of_the_loss_runs_once():
    logits = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    loss = k.cross_entropy_(logits * 1, torch.tensor([1, 2, 3], device=DEVICE))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_that_another_op_keeps_are_refused():
    logits = torch.tanh(torch.randn(3, 8, device=DEVICE, requires_grad=True))  # keeps its output
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        k.cross_entropy_(logits, torch.tensor([1, 2, 3], device=DEVICE)).backward()


def test_says_where_it_runs():
    code = "import torch, memsave_kernels as k; k.activate(torch.ones(4, 4))"
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "activation_forward_kernel runs on a CUDA device" in run.stderr
