"""The table of planted faults, and what runs it: a fault that no test sees, or that is none, is told."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mutants

SOURCE = "import math\n\n\ndef area(r):\n    return math.pi * r**2\n\n\ndef around(r):\n    return 2 * math.pi * r\n"
TESTS = "from hf_memsave import area\n\n\ndef test_area():\n    assert 3 < area(1) < 4\n"
#: Snippet, what is in its place, tests, and what is said of the mutant.
CASES = {
    "seen": ("math.pi  * r**2", "r", "test_area.py", "killed tests/test_area.py::test_area"),
    "unseen": ("2 * math.pi * r", "0", "test_area.py", "passed"),
    "gone": ("math.tau", "0", "test_area.py", "to be stated again: its snippet occurs 0 times"),
    "twice": ("math.pi", "0", "test_area.py", "to be stated again: its snippet occurs 2 times"),
    "no import": ("import math", "import nothing_of_this_name", "test_area.py", "error"),
}


def test_the_table_says_what_to_plant_and_who_sees_it():
    table = mutants.read(mutants.ROOT / "tests" / "mutants.yaml")
    assert len({mutant.name for mutant in table}) == len(table) >= 60
    assert all(mutant.old != mutant.new and mutant.fault.endswith(".") for mutant in table)
    assert all(mutants.arguments(mutant.tests, mutants.ROOT) for mutant in table)


@pytest.mark.long
def test_a_mutant_is_killed_by_a_test_that_fails_and_by_nothing_else(tmp_path):
    for name, text in {"hf_memsave/__init__.py": SOURCE, "tests/test_area.py": TESTS}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    table = [dict(name=n, fault="", old=old, new=new, tests=tests) for n, (old, new, tests, _) in CASES.items()]
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(table))
    code = "import sys; from mutants import Path, main; sys.exit(main(sys.argv[2:], Path(sys.argv[1]), ['hypothesis']))"
    given = [tmp_path, "--table", tmp_path / "table.yaml", "--out", tmp_path / "out.md", "--jobs", "2"]
    command, folder = [sys.executable, "-c", code, *given], Path(mutants.__file__).parent
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    for name, (*_, said) in CASES.items():
        assert f"{name}: {said}" in run.stdout, run.stdout + run.stderr
    assert run.returncode == 1 and "1 of 5 mutants are killed" in (tmp_path / "out.md").read_text()
    assert (tmp_path / "hf_memsave/__init__.py").read_text() == SOURCE
