"""What a GPU is asked: planted faults are found, on CPU; a second run asks what the first has left or has wrong."""

import itertools
import json
import os
import re
import subprocess
import tarfile

import pytest
import torch

from support.script_helpers import SCRIPTS, load_script


@pytest.fixture
def bench(monkeypatch):
    """The script, with four of its rows."""
    gpu_bits = load_script("gpu_bits", monkeypatch)

    def few(rows):
        for make, kernels in itertools.product((rows.bits, rows.waits), ("deterministic", "default")):
            yield make, gpu_bits.Case("bert", setting="gate", kernels=kernels)

    monkeypatch.setattr(gpu_bits, "planned", few)
    return gpu_bits


WRONG = {
    None: [], "bit": [("bits", "deterministic"), ("bits", "default")], "error": [("bits", "default")],
    "sync": [("waits", "deterministic"), ("waits", "default")],
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_makes_its_rows_wrong_and_no_others_and_these_are_made_again(bench, fault, tmp_path, monkeypatch):
    command, plant, made = ["--smoke", "--out", str(tmp_path)], ["--plant", fault] if fault else [], []
    assert bench.main([*command, *plant]) == bool(fault)
    rows = json.loads((tmp_path / "gpu-bits.json").read_text())["rows"]
    assert [(r["kind"], r["kernels"]) for r in rows if r["verdict"].startswith("WRONG")] == WRONG[fault]
    assert len(rows) == 4 and all(float(r["kept, of stock's"]) < 0.9 for r in rows if r["kind"] == "bits")
    assert bench.main([*command, "--seconds", "-1"]) == bool(fault), "there was no time to make them again"
    monkeypatch.setattr(bench, "judged", lambda *args: made.append(args) or bench.Row("", ""))
    assert bench.main(command) == 0
    assert len(made) == [kind for kind, _ in WRONG[fault]].count("bits")
    assert len(json.loads((tmp_path / "gpu-bits.json").read_text())["rows"]) == 4


def test_every_row_is_planned_once_and_those_that_tell_most_come_first(monkeypatch):
    gpu_bits = load_script("gpu_bits", monkeypatch)
    tasks = list(dict.fromkeys(gpu_bits.planned(gpu_bits.Rows(False, None))))
    assert {case.mode for _, case in tasks[:16]} == {"bf16", "autocast"}
    assert {case.family for _, case in tasks[:16]} == set(gpu_bits.FAMILIES)
    assert all((case.setting, case.kernels) == ("exact", "deterministic") for _, case in tasks[:16])
    kinds = {make.__name__ for make, _ in tasks[:100]}
    assert kinds == {"bits", "waits", "threads", "kept"} and any(case.adapters for _, case in tasks[16:36])


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


#: Stands in for Python: notes what it is asked to run, and fails, or hangs, as the environment says.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *sys.executable*) echo "$0"; exit ;;
  "-c "*) exit ;;
esac
case "$*" in
  *repeats*) what=compile-ops ;;
  *"shapes machine"*) what=machine ;;
  *warm*) what=compile-models ;;
  *plan*) what=$(echo "$*" | grep -o "plan [a-z]*") ;;
  *bench*) what=$(echo "$*" | grep -oE "[a-z_]+.py" | head -n 1) ;;
  *pytest*) case "$PWD" in *memsave_kernels) what=kernels ;; *) what=claims ;; esac ;;
  *) exit ;;
esac
echo "$what" >> "$ASKED"
if [ "$what" = "$FAILS" ]; then exit 1; fi
if [ "$what" = "$HANGS" ]; then exec sleep 60; fi
"""
FIRST = {
    "machine", "gpu_bits.py", "compile-ops", "plan first", "kernels", "compile-models", "plan compiled",
    "ops.py", "plan liger", "claims",
}  # fmt: skip


@pytest.fixture
def check(tmp_path):
    """Runs the script with that Python: its exit status, what it printed last, and what it has asked for, in order."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*arguments, script=SCRIPTS / "gpu_check.sh", **environment):
        asked = tmp_path / "asked"
        asked.write_text("")
        where = {"PYTHON": str(python), "ASKED": str(asked), "FAILS": "none", "HANGS": "none", **environment}
        command = ["bash", str(script), *arguments]
        done = subprocess.run(command, env=os.environ | where, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr, asked.read_text().splitlines()

    return run


def test_a_second_run_asks_for_what_the_first_has_left_or_has_wrong(check, tmp_path):
    out = str(tmp_path / "out")
    status, said, asked = check("first", out, FAILS="kernels")
    assert status == 1 and "kernels: failed, exit status 1" in said
    assert set(asked) == FIRST and len(asked) == len(FIRST)
    with tarfile.open(tmp_path / "out" / "gpu-check.tgz") as packed:
        assert {"./summary.txt", "./kernels.txt", "./bits.txt", "./machine.txt"} <= set(packed.getnames())
    status, said, asked = check("second", out)
    assert status == 0 and "kernels: passed" in said
    assert FIRST - set(asked) == {"claims"}, "which have passed"
    status, said, asked = check("second", out)
    assert status == 0 and FIRST - set(asked) == {"claims", "kernels"}, "others leave their rows themselves"


@pytest.mark.long
def test_a_step_that_hangs_is_cut_and_the_others_run(check, tmp_path):
    text = (SCRIPTS / "gpu_check.sh").read_text(encoding="utf-8")
    quick = tmp_path / "scripts" / "gpu_check.sh"
    quick.parent.mkdir()
    quick.write_text(text.replace("first) limits=(30 ", "first) limits=(6 "))
    (tmp_path / "hf_memsave" / "_vendor" / "memsave_kernels").mkdir(parents=True)
    status, said, asked = check("first", str(tmp_path / "out"), script=quick, HANGS="machine")
    assert status == 1 and "machine: cut short" in said and "claims: passed" in said
    assert check("fist")[0] == 2
    status, said, asked = check("second", str(tmp_path / "none"))
    assert status == 2 and "expected the gpu-check.tgz of a first run" in said and not asked


def test_steps_end_in_time():
    text = (SCRIPTS / "gpu_check.sh").read_text(encoding="utf-8")
    for stage, most in (("first", 520), ("second", 240)):
        limits, end = re.search(rf"{stage}\) limits=\((.*)\) all=(\d+)", text).groups()
        limits = [int(limit) for limit in limits.split()]
        assert sum(limits) <= int(end) <= most and len(limits) == 7
