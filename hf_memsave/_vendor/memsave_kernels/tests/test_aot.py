"""Compiled for three architectures without a GPU: within the limits, and red for a spill and for a lost hint."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": ""}


def run(*args):
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


@pytest.mark.long
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_every_kernel_is_within_its_limits(architecture):
    done = run("aot/check.py", f"--sm={architecture}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") > 20


PLANTED = """
import sys
sys.path[:0] = ["aot"]
import check
(launch,) = check.record(check.LAUNCHES["rms_norm_backward_again"])
limits = check.read()["rms_norm_backward_again"]["sm_90"]
for how in ({}, {"maxnreg": 24}, {"is_aligned": False}):
    print("; ".join(check.faults(check.build(launch, 90, **how), limits)) or "ok")
"""


def test_a_spill_and_a_lost_hint_are_seen():
    done = run("-c", PLANTED)
    assert done.returncode == 0, done.stderr
    right, spilled, narrow = done.stdout.splitlines()
    assert right == "ok"
    assert "bytes of stack" in spilled
    assert "narrow loads" in narrow and "narrow stores" in narrow and "0 wide" in narrow


COVERED = """
import sys
sys.path[:0] = ["aot"]
import check
print(*{launch.kernel.__name__ for call in check.LAUNCHES.values() for launch in check.record(call)})
print("agree" if check.NAMES == sorted(check.read()) else "differ")
"""


def test_every_kernel_has_limits():
    written = set()
    for file in (ROOT / "torch-ext" / "memsave_kernels").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                written.add(node.name)
    done = run("-c", COVERED)
    assert done.returncode == 0, done.stderr
    launched, agree = done.stdout.splitlines()
    assert set(launched.split()) == written
    assert agree == "agree"


SPECIALIZED = """
import sys
sys.path[:0] = ["aot", "torch-ext"]
from memsave_kernels import lora
params = {p.name: (p.annotation_type, p.do_not_specialize) for p in lora.lora_input_kernel.params}
print(params["seed"], params["threshold"])
"""


def test_no_kernel_is_compiled_again_for_a_seed():
    done = run("-c", SPECIALIZED)
    assert done.stdout.strip() == "('i64', True) ('i64', True)", done.stdout + done.stderr
