"""``scripts/bench/models.py --smoke`` and ``scripts/gpu_check.sh``: that they would run, where there is a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long


def test_each_method_has_a_row(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench" / "models.py", "--smoke", "--steps", "1", "--out", tmp_path]
    methods = ["stock", "memsave, whole blocks", "memsave, offload"]
    subprocess.run([*command, "--methods", *methods], check=True, capture_output=True)
    (found,) = tmp_path.glob("models-*.json")
    figures = json.loads(found.read_text())
    figures = figures.get("results", figures)
    rows = [name for name in figures if ": " in name]
    assert {name.partition(": ")[2] for name in rows} == set(methods)
    assert all(figures[name]["tokens_per_second"] > 0 for name in rows)
    assert all(figures[name]["largest_batch"] == 4 and figures[name]["at_largest"]["seconds"] > 0 for name in rows)


def test_each_kernel_has_a_row(tmp_path):
    pytest.importorskip("triton")
    command = [sys.executable, ROOT / "scripts" / "bench" / "ops.py", "--smoke", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    (found,) = tmp_path.glob("ops-*.json")
    figures = json.loads(found.read_text())
    assert all(figures[name]["bytes_per_second"] > 0 for name in figures if name != "about")
    assert {"RMSNorm, backward", "rotary", "the same, backward", "LoRA output"} <= figures.keys()


def test_without_a_gpu_it_says_what_to_do():
    command = [sys.executable, ROOT / "scripts" / "bench" / "models.py", "--models", "bert-large", "--methods", "stock"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    )
    assert done.returncode == 2
    assert "Use --smoke" in done.stderr


def test_the_shell_script_is_valid():
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / "gpu_check.sh")], check=True)
