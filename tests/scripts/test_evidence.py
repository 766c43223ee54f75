"""``make evidence``: a committed figure that a fresh run does not repeat is reported, and so is a missing row."""

import re
from pathlib import Path

import pytest

import evidence

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_every_committed_table_has_an_entry_and_every_entry_a_script():
    assert all((SCRIPTS / one.command.split()[0]).is_file() for one in evidence.EVIDENCE.values())
    committed = {path.stem for path in (SCRIPTS / "results").glob("*.md")}
    others = {"command-times", "cpus", "equal-under", "mutants", "torch-versions"}  # too long
    assert others <= committed - evidence.EVIDENCE.keys() <= others | {"gpu-bits", "gpu-models", "gpu-ops"}
    assert evidence.EVIDENCE.keys() <= committed


COMPARED = [name for name in evidence.EVIDENCE if name not in ("fuzz", "host-time")]


@pytest.mark.parametrize("name", COMPARED)
def test_a_wrong_figure_planted_in_a_copy_of_each_table_is_seen(name):
    one = evidence.EVIDENCE[name]
    text = (SCRIPTS / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert evidence.differences(text, text, one) == []
    figures = [cell for cell in evidence.cells(text, one).values() if re.search(r"\d\.\d", cell)]
    for figure in figures[:: max(1, len(figures) // 5)]:
        wrong = re.sub(r"\d[\d.,]*", "98765", figure, count=1)
        assert evidence.differences(text, text.replace(f"| {figure} |", f"| {wrong} |"), one), figure
