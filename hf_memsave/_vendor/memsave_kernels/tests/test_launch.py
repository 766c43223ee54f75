"""A launch of a compiled kernel, without a GPU: what is compiled again, and what a launch calls."""

import os
import subprocess
import sys
from pathlib import Path

#: Triton compiles and launches nothing, and tensors say that they are on a GPU. A check prints what went wrong.
STAND_IN = """
import sys
sys.path[:0] = ["torch-ext"]
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from memsave_kernels import _launch
from memsave_kernels.dropout_norm import dropout_norm_backward_kernel as kernel

class Active:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 7)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

def compiled(self, grid):
    def compile(*args, **constants):
        made = object.__new__(CompiledKernel)
        made.module, made.function, made.packed_metadata, made.src, made.name = 1, 2, (3,), None, "kernel"
        made._run = lambda *args: calls.append(args)
        kernels.append(made)
        return made
    return compile

driver.set_active(Active())
JITFunction.__getitem__ = compiled
torch.Tensor.is_cuda, torch.Tensor.get_device = True, lambda self: 0
_launch._current_device = lambda: 0
kernels, calls = [], []
x = torch.empty(64, 16, dtype=torch.bfloat16)
seed, threshold = _launch.Long(3), _launch.Long(5)
constants = {"N": 16, "DROPS": True, "TILES": 1, "ROWS": 1, "COLUMNS": 16}

def launch(*changes, rows=64, **others):
    args = [x] * 14 + [seed, threshold, rows]
    for place, value in changes:
        args[place] = value
    _launch.launch(kernel, (8,), tuple(args), constants | others)
    return args
"""

CALLS = """
args = launch()
assert len(kernels) == 1 and not calls
entered = []
sys.setprofile(lambda frame, event, arg: entered.append(frame.f_code.co_name) if event == "call" else None)
launch()
sys.setprofile(None)
kernels[0][8, 1, 1](*args, *constants.values())
ours, tritons = calls
assert ours[:6] == tritons[:6] and ours[6:9] == (None,) * 3, (ours[:9], tritons[:9])
assert len(ours) == len(tritons) and all(a is b for a, b in zip(ours[9:], tritons[9:]))
print(len(kernels), sum(name not in ("launch", "<lambda>") for name in entered))
"""

KEYS = """
binder = kernel.create_binder()[-1]
odd = torch.empty(64 * 16 + 1, dtype=torch.bfloat16)[1:].view(64, 16)
variants = [
    [], [(0, x.float())], [(0, odd)], [(1, odd)], [(1, None)], [(13, None)], [(12, None), (13, None)],
    *([(16, n)] for n in (1, 16, 17, 18, 2**31, 2**31 + 1, 2**40)), [(14, _launch.Long(1))], [(15, _launch.Long(16))],
]
print(len({str(binder(*launch(*changes), **constants)[1]) for changes in variants * 2}), len(kernels))
launch(N=15), launch(DROPS=False)
print(len(kernels))
"""


def run(code):
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": ""}
    command, here = [sys.executable, "-c", STAND_IN + code], Path(__file__).parents[1]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(map(int, done.stdout.split()))


def test_a_launch_calls_what_triton_would_and_no_other_function():
    assert run(CALLS) == [1, 0]


def test_what_triton_specializes_to_is_compiled_again_and_nothing_else():
    by_triton, ours, with_other_constants = run(KEYS)
    assert ours == by_triton > 8
    assert with_other_constants == ours + 2
