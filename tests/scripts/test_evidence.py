"""``make evidence``: a committed figure that a fresh run does not repeat is reported, and so is a missing row."""

import re
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import evidence  # noqa: E402

TABLE = """
| model | dtype | kept | time |
| --- | --- | --- | --- |
| bert | fp32 | 1,018.0 = | 1.00 |
| bert | bf16 | 10.1 = | 2.00 |
"""
SCRIPT = "import sys\nopen(sys.argv[1] + '/planted.md', 'w').write({text!r})\nsys.exit({status})\n"


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("1,018.0", "1,007.0", "table 1, bert, fp32, kept: committed 1,018.0 =, measured 1,007.0 ="),
        ("10.1 =", "10.1 *", "table 1, bert, bf16, kept: committed 10.1 =, measured 10.1 *"),
        ("| bert | bf16 | 10.1 = | 2.00 |\n", "", "table 1, bert, bf16, kept: committed, but not measured"),
        ("| bf16 |", "| fp16 |", "table 1, bert, fp16, kept: not in the committed table"),
        ("1,018.0", "1,010.0", None),  # within 1%
        ("2.00", "7.00", None),  # a time
    ],
    ids=["figure", "word", "row missing", "row new", "within its bound", "time"],
)
def test_a_planted_wrong_figure_ends_with_status_1(tmp_path, monkeypatch, capsys, before, after, line):
    assert before in TABLE
    (tmp_path / "scripts").mkdir()
    (tmp_path / "planted.md").write_text(TABLE)
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    planted = {"planted": evidence.Evidence("planted.py {out}", 2, {"kept": (0.01, 0.0)})}
    monkeypatch.setattr(evidence, "EVIDENCE", planted)
    text = TABLE.replace(before, after)
    (tmp_path / "scripts" / "planted.py").write_text(SCRIPT.format(text=text, status=0))
    assert evidence.main(["--out", str(tmp_path / "out")]) == (line is not None)
    assert (line or "planted: 0 differences") in capsys.readouterr().out
    (tmp_path / "scripts" / "planted.py").write_text(SCRIPT.format(text=TABLE, status=3))
    assert evidence.main(["--out", str(tmp_path / "out")]) == 1
    assert "planted.py ended with status 3; see" in capsys.readouterr().out


def test_what_needs_data_is_left_out_without_it(capsys):
    assert evidence.main(["--only", "compare-llama-10m"]) == 0
    assert capsys.readouterr().out == "compare-llama-10m: left out, since it needs --data-root\n"


def test_every_committed_table_has_an_entry_and_every_entry_a_script():
    assert all((SCRIPTS / one.command.split()[0]).is_file() for one in evidence.EVIDENCE.values())
    committed = {path.stem for path in (SCRIPTS / "results").glob("*.md")}
    assert committed - evidence.EVIDENCE.keys() == {"equal-under", "mutants", "torch-versions"}  # too long
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
