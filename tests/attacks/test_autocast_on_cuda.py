"""What CUDA's autocast converts to fp32 is remade from what it was converted to: on the stand-in for a CUDA device.

Its kernels take any dtypes; CUDA's own refuse a norm whose weight has another one than its input.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memsave.measure.fake_device import fake_device
from hf_memsave.tape.handles import Ticket
from support.helpers import taping

WIDTH = 16
FUNCTIONS = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b),
    "layer_norm, by name": lambda x, w, b: F.layer_norm(input=x, normalized_shape=(WIDTH,), weight=w, bias=b),
    "torch.layer_norm": lambda x, w, b: torch.layer_norm(x, (WIDTH,), w, b),
    "group_norm": lambda x, w, b: F.group_norm(x, 4, w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (WIDTH,), w),
    "1 / x": lambda x, w, b: 1 / x,
    "2.0 / x": lambda x, w, b: 2.0 / x,
    "pow of a number": lambda x, w, b: torch.pow(2.0, x),
    "2 ** x": lambda x, w, b: 2**x,
    "softmax by name": lambda x, w, b: torch.softmax(input=x, dim=-1),
    "exp": lambda x, w, b: torch.exp(x),
    "erfc": lambda x, w, b: torch.erfc(x),
}
#: What hands on the same numbers.
NEUTRAL = "_to_copy clone detach view alias".split()


class Calls(TorchDispatchMode):
    """The operations that compute, each with the dtypes of its floating-point tensors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten" and func.overloadpacket.__name__ not in NEUTRAL:
            tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
            self.seen.append((func, *(x.dtype for x in tensors if x.is_floating_point())))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_it_is_remade_by_the_same_operations_of_the_same_dtypes(function, low):
    with fake_device() as device:
        x, w, b = (torch.zeros(*shape, dtype=low, device=device) for shape in ((2, WIDTH, WIDTH), (WIDTH,), (WIDTH,)))
        with torch.autocast(device.type, low):
            with Calls() as stock:
                expected = function(x, w, b)
            with taping(inputs=[x, w, b]) as tape, Calls() as forward:
                y = function(x, w, b)
                handle = tape.pack(y)
        assert isinstance(handle, Ticket)
        with Calls() as remake:
            again = handle.get()
    assert forward.seen == stock.seen == remake.seen and stock.seen
    assert again.dtype == y.dtype == expected.dtype


@pytest.mark.parametrize("waits", [True, False])
def test_where_a_device_counts_a_mask_it_does_so_once(monkeypatch, waits):
    monkeypatch.setattr("hf_memsave.tape.functions.waits", lambda x: waits)
    x = torch.randn(4, 8)
    with taping(inputs=[x]) as tape:
        assert isinstance(tape.pack(x[x > 0]), Ticket) != waits
        assert isinstance(tape.pack(x[torch.tensor([0, 2])]), Ticket)
