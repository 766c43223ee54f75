"""``scripts/test_torch.py``: what pytest reports is what the table says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("does not apply: constraints.txt is for Python 3.11", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import test_torch as script

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><skipped message="no GPU"/></testcase>
<testcase classname="tests.b" name="three"><properties/><failure message="assert 0"/></testcase>
<testcase classname="tests.b" name="four"><error message="in a fixture"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("ends", [True, False])
def test_every_case_is_counted_once_in_both_runs(ends, tmp_path, monkeypatch):
    """But for a run that died, of which an earlier one's report tells nothing."""

    def run(command, **kwargs):
        (report,) = (argument for argument in map(str, command) if argument.startswith("--junitxml="))
        if ends or "quick" in report:
            Path(report.partition("=")[2]).write_text(REPORT)
        return subprocess.CompletedProcess(command, 1 if ends or "quick" in report else 3)

    (tmp_path / "whole.xml").write_text(REPORT)
    monkeypatch.setattr(script.subprocess, "run", run)
    found = script.tested(Path("python"), tmp_path)
    failed, runs = ["tests.b::three", "tests.b::four"], 2 if ends else 1
    assert found["failed"] == (failed * 2 if ends else [*failed, "whole: pytest ended with 3"])
    assert (found["passed"], found["skipped"]) == (runs, {"no GPU": runs})


def test_a_row_replaces_that_of_its_version(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "OUT", tmp_path / "versions.json")
    row = dict.fromkeys(("triton", "transformers", "commit", "date"), "-") | {"skipped": {"no GPU": 3}, "failed": []}
    for torch, passed in (("2.11.0", 1), ("2.9.1", 2), ("2.11.0", 3)):
        script.note(row | {"torch": torch, "passed": passed})
    assert [(r["torch"], r["passed"]) for r in json.loads(script.OUT.read_text())] == [("2.9.1", 2), ("2.11.0", 3)]
    table = (tmp_path / "versions.md").read_text()
    assert "| 2.11.0 | - | - | 3 | 3 | 0 | - | - |" in table and "- 3: no GPU" in table
