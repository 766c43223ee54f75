"""Cached results are of the code that made them."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "bench")]

import code_version  # noqa: E402


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of a few files that results follow from, and of some that they do not."""
    for name in ("scripts/runs.py", "scripts/evidence.py", "scripts/results/fuzz.json", "hf_memsave/config.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(code_version.ROOT / name, tmp_path / name)
    monkeypatch.setattr(code_version, "ROOT", tmp_path)
    return tmp_path


def test_it_changes_with_the_code_and_with_what_is_asked(tree):
    first = code_version.code_version()
    assert code_version.code_version() == first
    assert code_version.code_version(["--seeds"]) != first
    for name in ("scripts/runs.py", "hf_memsave/config.py"):
        before = code_version.code_version()
        (tree / name).write_text((tree / name).read_text() + "\n")
        assert code_version.code_version() != before


def test_it_does_not_change_with_results_nor_with_how_they_are_compared(tree):
    first = code_version.code_version()
    for name in ("scripts/results/fuzz.json", "scripts/evidence.py"):
        (tree / name).write_text((tree / name).read_text() + "\n")
    assert code_version.code_version() == first


def test_a_training_bench_keeps_runs_by_it(tree, tmp_path, monkeypatch):
    training = importlib.import_module("training")
    kept = []
    monkeypatch.setattr(training, "run", lambda glue, cache, *job: kept.append(cache))
    monkeypatch.setattr(training, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(training, "as_completed", list)
    monkeypatch.setattr(
        "sys.argv", ["training.py", "approximate", "--glue", "x", "--cache", str(tmp_path), "--seeds", "1"]
    )
    with pytest.raises(FileNotFoundError):  # nothing was run
        training.main()
    assert kept
    assert set(kept) == {tmp_path / code_version.code_version()}


class Inline:
    """Runs at once, here."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *args):
        function(*args)
        return self

    def result(self):
        return ""
