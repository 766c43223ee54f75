"""Where there is a GPU the tests run on it: none hands a kernel a tensor from elsewhere, or watches the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

#: As on a GPU whose kernels do nothing: a test may fail, but not for where its tensors are.
ON_A_GPU = """
import json, os, sys
import pytest, torch
sys.path[:0] = sys.argv[1:3]
torch.cuda.is_available = lambda: True
import cases.case, interpreter
from memsave_kernels import _launch
cases.case.DEVICE = "meta"
launching, strays = set(), set()

def test():
    return os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]

def stray(*args):
    strays.add(test())
    raise RuntimeError

def launch(kernel, grid, args, *rest):
    launching.add(test())
    if any(isinstance(a, torch.Tensor) and a.device.type != "meta" for a in args):
        stray()

_launch.launch_elsewhere = launch
interpreter.Watch.__init__ = stray
files = [f"{sys.argv[1]}/test_{name}.py" for name in sys.argv[3:]]
pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", *files])
print(json.dumps([len(launching), sorted(strays)]))
"""


def test_every_tensor_is_where_kernels_run():
    files = ("codec", "draw", "dropout", "every_value", "numbers", "ops")
    command = [sys.executable, "-c", ON_A_GPU, HERE, HERE.parent / "torch-ext", *files]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    launching, strays = json.loads(run.stdout.splitlines()[-1])
    assert launching > 100, run.stdout + run.stderr
    assert strays == []
