"""``scripts/gpu_check.sh`` and ``scripts/bench/gpu_bits.py``: planted faults are found, on CPU."""

import itertools
import json
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
