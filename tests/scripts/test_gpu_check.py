"""``scripts/gpu_check.sh`` and ``scripts/bench/gpu_bits.py``: planted faults are found, on CPU."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch):
    """The script, with four of its rows."""
    monkeypatch.syspath_prepend(SCRIPTS / "bench")
    import gpu_bits

    def few(rows):
        for make, kernels in itertools.product((rows.bits, rows.waits), ("deterministic", "default")):
            yield make, gpu_bits.Case("bert", setting="gate", kernels=kernels)

    monkeypatch.setattr(gpu_bits, "planned", few)
    return gpu_bits


WRONG = {
    None: [],
    "bit": [("bits", "deterministic"), ("bits", "default")],
    "error": [("bits", "default")],
    "sync": [("waits", "deterministic"), ("waits", "default")],
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_makes_its_rows_wrong_and_no_others(bench, fault, tmp_path, capsys):
    plant = ["--plant", fault] if fault else []
    assert bench.main(["--smoke", "--out", str(tmp_path), *plant]) == bool(fault)
    rows = json.loads((tmp_path / "gpu-bits.json").read_text())["rows"]
    assert [(r["kind"], r["kernels"]) for r in rows if r["verdict"].startswith("WRONG")] == WRONG[fault]
    assert len(rows) == 4 and all(float(r["kept, of stock's"]) < 0.9 for r in rows if r["kind"] == "bits")


def test_rows_before_one_that_ends_are_written(bench, tmp_path, monkeypatch):
    def ends(rows, case):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Rows, "waits", ends)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--smoke", "--out", str(tmp_path)])
    assert len(json.loads((tmp_path / "gpu-bits.json").read_text())["rows"]) == 2


@pytest.mark.parametrize(("kernels", "error", "is_wrong"), [
    ("default", 0.0, False), ("default", 0.01, True), ("deterministic", 1e-5, True), ("default", float("nan"), True),
])  # fmt: skip
def test_an_error_is_told_from_noise(bench, kernels, error, is_wrong):
    def run(seed, error=0.0):
        """Bits that stay, and two tensors with noise of .001."""
        noise = torch.randn(3, 999, generator=torch.Generator().manual_seed(seed)) * 1e-3
        noise[0] = 0
        return dict(zip("abc", (torch.ones(3, 999) + noise) * torch.tensor([[1 + error], [1], [1]]), strict=True))

    row = bench.judged([run(1), run(2), run(3)], [run(4), run(5, error)], kernels)
    assert row.verdict.startswith("WRONG: a") == is_wrong


def test_without_a_stage_it_says_which_there_are():
    done = subprocess.run(["bash", SCRIPTS / "gpu_check.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "correctness|speed|models|all" in done.stderr


@pytest.mark.long
def test_a_stage_goes_on_after_a_step_that_fails(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *ops.py*) exit 3;; esac\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    command = ["bash", SCRIPTS / "gpu_check.sh", "--smoke", "speed", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHON": python})
    assert done.returncode == 1
    assert "ops: failed, exit status 3" in done.stdout and "host: passed" in done.stdout
    assert "-memsave.txt <==" in (tmp_path / "out" / "host-profiles.txt").read_text()
