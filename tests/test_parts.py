"""The two parts that the tests run in: what `make test` leaves out, `make test-all` runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILE = """
import pytest

@pytest.mark.parametrize("n", range(4))
def test_short(n): pass

@pytest.mark.long
@pytest.mark.parametrize("n", range(2))
def test_long(n): pass

@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.matrix), 2])
def test_with_more(n): pass
"""


@pytest.mark.long
def test_three_cases_of_a_short_test_come_first_and_all_others_then(tmp_path):
    (tmp_path / "test_some.py").write_text(FILE)
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text(encoding="utf-8"))
    found = {}
    for part in ("first", "rest"):
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", f"--rootdir={tmp_path}", "-m", "not matrix"]
        command += ["-o", "markers=long\nmatrix", "--part", part, str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, env=environment, check=False)
        found[part] = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    first = [f"test_short[{n}]" for n in (0, 1, 2)] + ["test_with_more[0]", "test_with_more[2]"]
    assert found["first"] == first
    assert found["rest"] == ["test_short[3]", "test_long[0]", "test_long[1]"]
