"""What CUDA's autocast converts is remade by the same operations: on the stand-in for a CUDA device.

Its kernels take any dtypes; CUDA's own refuse a norm whose weight has another one than its input.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memsave.measure import private as measure_private
from hf_memsave.measure.fake_device import fake_device
from hf_memsave.measure.kernels import FP32, FP32_RESULT, LOW, WIDEST
from hf_memsave.tape import autocast, private
from hf_memsave.tape.functions import CHEAP
from hf_memsave.tape.tensors import leaves
from support.examples import Arguments, calls_of, name_of
from support.fake import DATA_ERRORS
from support.helpers import taping
from support.tapes import is_remade, sources_of, work_of

WIDTH = 16
TABLE = [function for function, handler in CHEAP.items() if not getattr(handler, "is_write", False)]
WITHIN = {
    "softmax": lambda x: F.softmax(x, -1), "softmax in fp32": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "log_softmax": lambda x: x.log_softmax(-1), "softmin": lambda x: F.softmin(x, -1), "normalize": F.normalize,
}  # fmt: skip
#: As every function of the table, but called otherwise than there, or with weights that autocast converts too.
FUNCTIONS = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b),
    "layer_norm, by name": lambda x, w, b: F.layer_norm(input=x, normalized_shape=(WIDTH,), weight=w, bias=b),
    "group_norm": lambda x, w, b: F.group_norm(x, 4, w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (WIDTH,), w),
    "1 / x": lambda x, w, b: 1 / x,
    "pow of a number": lambda x, w, b: torch.pow(2.0, x),
    "2 ** x": lambda x, w, b: 2**x,
    "softmax by name": lambda x, w, b: torch.softmax(input=x, dim=-1),
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


@pytest.mark.long
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_it_is_remade_by_the_same_operations_of_the_same_dtypes(low):
    with fake_device() as device:
        for name, function in FUNCTIONS.items():
            given = [torch.zeros(*shape, dtype=low, device=device) for shape in ((2, WIDTH, WIDTH), (WIDTH,), (WIDTH,))]
            assert is_remade_as_it_was(function, given, {}, low, name)
        for call in (call for function in TABLE[low is torch.float16 :: 2] for call in calls_of(function)):
            args, kwargs = call(Arguments(device, dtype=low))
            try:
                is_remade_as_it_was(call.function, args, kwargs, low, name_of(call.function))
            except DATA_ERRORS as error:
                assert "aten." in str(error), error  # of what counts, the shape is a number


def is_remade_as_it_was(function, args, kwargs, low, name):
    """Whether a tape gives a ticket for the result of a call under autocast; what that runs is stock's."""
    with torch.autocast("fakegpu", low):
        with Calls() as stock:
            expected = function(*args, **kwargs)
        with taping(inputs=leaves(args, kwargs)) as tape, Calls() as forward:
            y = function(*args, **kwargs)
            handle = tape.pack(y) if isinstance(y, torch.Tensor) else None
    assert forward.seen == stock.seen, name
    if handle is None or not is_remade(handle):
        return False
    with Calls() as remake:
        again = handle.get()
    views = torch.ops.aten.as_strided.default  # of what is kept under another view
    assert [one for one in remake.seen if one[0] is not views] == stock.seen, name
    assert again.dtype == y.dtype == expected.dtype, name
    return True


def test_what_converts_within_is_remade_from_16_bits():
    """A conversion to fp32 before it would be another tensor of the scores' size, which stock does not have."""
    with fake_device() as device:
        for name, function in WITHIN.items():
            x = torch.zeros(2, WIDTH, WIDTH, dtype=torch.bfloat16, device=device)
            with torch.autocast(device.type, torch.bfloat16), taping(inputs=[x]) as tape:
                handle = tape.pack(function(x))
            assert work_of(handle) == 1, name
            assert all(held.untyped_storage() is x.untyped_storage() for held in sources_of(handle)), name


@pytest.mark.parametrize("is_there", [True, False])
def test_what_autocast_has_no_kernel_for_is_not_converted(monkeypatch, is_there):
    """As rms_norm before PyTorch 2.12."""
    has = private.has_autocast
    monkeypatch.setattr(autocast, "has_autocast", lambda name, _: has(name, _) and (is_there or name != "layer_norm"))
    with fake_device() as device:
        x = torch.zeros(2, WIDTH, dtype=torch.bfloat16, device=device)
        with torch.autocast(device.type, torch.bfloat16), taping(inputs=[x]) as tape:
            handle = tape.pack(F.layer_norm(x, (WIDTH,)))
        assert work_of(handle) == (2 if is_there else 1)  # a conversion before it


def test_the_lists_of_the_stand_ins_autocast_are_cudas_as_the_dispatcher_tells(monkeypatch):
    """But for what CUDA's refuses, whatever it is called with, and what builds for CUDA alone have."""
    ops = {op for op in torch._C._dispatch_get_all_op_names() if private.is_registered(op, "AutocastCUDA")}
    names = {op.removeprefix("aten::").partition(".")[0] for op in ops if op.startswith("aten::")}
    known = {*LOW, *FP32, *FP32_RESULT, *WIDEST}
    assert names - {"binary_cross_entropy", "_cudnn_rnn"} <= known
    assert known - names <= {"rms_norm", "linalg_matrix_sqrth"}  # from PyTorch 2.12 and 2.14 on
    assert [f.name() for f in measure_private.overloads("layer_norm")] == ["aten::layer_norm"]
    monkeypatch.setattr(measure_private, "is_registered", lambda op, key: op != "aten::layer_norm")
    assert [*measure_private.overloads("layer_norm")] == []


@pytest.mark.parametrize("waits", [True, False])
def test_where_a_device_counts_a_mask_it_does_so_once(monkeypatch, waits):
    monkeypatch.setattr("hf_memsave.tape.functions.waits", lambda x: waits)
    x = torch.randn(4, 8)
    with taping(inputs=[x]) as tape:
        assert is_remade(tape.pack(x[x > 0])) != waits
        assert is_remade(tape.pack(x[torch.tensor([0, 2])]))
