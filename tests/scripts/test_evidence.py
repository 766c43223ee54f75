"""``make evidence``: a committed figure that a fresh run does not repeat is reported, and so is a missing row."""

import importlib
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import code_version  # noqa: E402
import evidence  # noqa: E402
from evidence_compare import MACHINE, Bound, differences, tables  # noqa: E402

COMMITTED = """
# Bytes

| model | dtype | kept | time |
| --- | --- | --- | --- |
| bert | fp32 | 1,018.0 = | 1.00 |
| bert | bf16 | 10.1 = | 2.00 |

| model | dtype | kept | time |
|---|---|---|---|
| bert | fp32 | -3e-04 | 1.00 |
"""
BOUNDS = {"kept": Bound(relative=0.01), "time": MACHINE}
#: Prints the table, and ends as asked.
SCRIPT = (
    "import sys\nopen(sys.argv[1] + '/planted.md', 'w').write(open(sys.argv[2]).read())\nsys.exit(int(sys.argv[3]))\n"
)


def found(measured, **how):
    return differences(COMMITTED, measured, 2, BOUNDS, **how)


def test_figures_within_their_bounds_agree_and_those_without_one_must_be_equal():
    measured = COMMITTED.replace("1,018.0", "1,010.0").replace("2.00", "7.00")
    assert found(measured) == ([], 3)
    lines, figures = differences(COMMITTED, COMMITTED.replace("2.00", "2.01"), 2, {})
    assert figures == 6
    assert lines == ["bert, bf16: time: committed 2.00, measured 2.01, expected equal"]
    part = COMMITTED.replace("| bert | bf16 | 10.1 = | 2.00 |\n", "")
    assert found(part, partly=True) == ([], 2)
    assert "no figure was compared" in found("", partly=True)[0][0]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("1,018.0", "1,007.0", "bert, fp32: kept: committed 1,018.0 =, measured 1,007.0 =, expected within 0.01 of it"),
        ("10.1 =", "10.1 *", "bert, bf16: kept: committed 10.1 =, measured 10.1 *, expected within 0.01 of it"),
        ("-3e-04", "3e-04", "bert, fp32: kept: committed -3e-04, measured 3e-04, expected within 0.01 of it"),
        ("| bert | bf16 | 10.1 = | 2.00 |\n", "", "bert, bf16: committed, but not measured"),
        ("| bf16 |", "| fp16 |", "bert, fp16: not in the committed table"),
        ("| kept |", "| held |", "bert, fp32: not in the committed table"),
    ],
    ids=["figure", "word", "sign", "row missing", "row new", "column"],
)
def test_what_does_not_agree_is_reported(before, after, line):
    assert line in found(COMMITTED.replace(before, after))[0]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A script of one table, of which ``fresh.md`` is what it measures."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "planted.py").write_text(SCRIPT)
    (tmp_path / "planted.md").write_text(COMMITTED)
    (tmp_path / "fresh.md").write_text(COMMITTED)
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(code_version, "ROOT", tmp_path)

    def run(status=0, command=None, **how):
        command = command or f"planted.py {{out}} {tmp_path / 'fresh.md'} {status}"
        one = evidence.Evidence("planted", command, names=2, bounds=BOUNDS, table=tmp_path / "planted.md", **how)
        monkeypatch.setattr(evidence, "EVIDENCE", (one,))
        return evidence.main(["--only", "planted", "--out", str(tmp_path / "out")])

    return run


def test_a_planted_wrong_figure_ends_with_status_1(planted, tmp_path, capsys):
    assert planted() == 0
    assert "planted: 0 differences, 3 figures" in capsys.readouterr().out
    (tmp_path / "planted.md").write_text(COMMITTED.replace("10.1", "9.1"))
    assert planted() == 1
    output = capsys.readouterr().out
    assert "bert, bf16: kept: committed 9.1 =, measured 10.1 =" in output and "Not as committed: planted." in output
    assert "running" not in output  # only the comparison is made again


@pytest.mark.parametrize(
    ("changed", "is_repeated"),
    [("scripts/planted.py", True), ("hf_memsave/config/config.py", True), ("scripts/evidence_compare.py", False),
     ("scripts/evidence.py", False), ("scripts/results/fuzz.json", False)],
)  # fmt: skip
def test_a_run_is_repeated_where_the_code_is_another(planted, tmp_path, capsys, changed, is_repeated):
    """But not where it is compared otherwise."""
    assert planted() == 0 and "running" in capsys.readouterr().out
    assert planted() == 0 and "running" not in capsys.readouterr().out
    (tmp_path / changed).parent.mkdir(parents=True, exist_ok=True)
    with (tmp_path / changed).open("a") as file:
        file.write("# another\n")
    assert planted() == 0 and ("running" in capsys.readouterr().out) == is_repeated
    assert code_version.code_version(["--seeds"]) != code_version.code_version()


def test_a_training_bench_keeps_runs_by_their_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS / "bench")
    training, kept = importlib.import_module("training"), []

    class Inline(ThreadPoolExecutor):
        def __init__(self, *args, **kwargs):
            super().__init__(1)

    monkeypatch.setattr(training, "run", lambda glue, cache, *job: kept.append(cache) or "")
    monkeypatch.setattr(training, "ProcessPoolExecutor", Inline)
    argv = ["training.py", "approximate", "--glue", "x", "--cache", str(tmp_path), "--seeds", "1"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(FileNotFoundError):  # nothing was run
        training.main()
    assert kept and set(kept) == {tmp_path / code_version.code_version()}


def test_words_that_chance_chooses_between_agree(planted, tmp_path):
    (tmp_path / "planted.md").write_text(COMMITTED.replace("10.1 =", "10.1 stock differs from itself"))
    assert planted() == 1
    assert planted(chance={"stock differs from itself": "="}) == 0
    (tmp_path / "planted.md").write_text(COMMITTED.replace("10.1 =", "10.1 DIFFERS"))
    assert planted(chance={"stock differs from itself": "="}) == 1


NOISY = "| m | score |\n| --- | --- |\n| a | 0.70 ± 0.03 |\n"


@pytest.mark.parametrize(("score", "agrees"), [("0.86 ± 0.04", True), ("0.88 ± 0.40", False), ("0.52 ± 0.04", False)])
def test_figures_with_standard_errors_may_be_so_many_of_their_difference_apart(score, agrees):
    fresh = NOISY.replace("0.70 ± 0.03", score)  # of the difference: 0.042
    lines, figures = differences(NOISY, fresh, 1, {"score": Bound(errors=4)})
    assert figures == 1 and (not lines) is agrees
    assert agrees or lines == [f"a: score: committed 0.70 ± 0.03, measured {score}, expected within 4 standard errors"]


@pytest.mark.parametrize(
    ("here", "measured", "status"),
    [("CPU A (family 1, model 2)", "1.40", 1), ("CPU A (family 1, model 3)", "1.40", 0),
     ("CPU A (family 1, model 3)", "2.10", 1), ("CPU A (family 1, model 3)", "0.45", 1), ("no CPU", "1.40", 1)],
    ids=["same", "another", "another, far", "another, too quick", "unnamed"],
)  # fmt: skip
def test_ratios_of_times_are_compared_less_closely_on_another_cpu(
    planted, tmp_path, monkeypatch, here, measured, status
):
    table = COMMITTED + "\nCPU A (family 1, model 2)\n"
    (tmp_path / "planted.md").write_text(table)
    (tmp_path / "fresh.md").write_text(table.replace("1.00", measured).replace("CPU A (family 1, model 2)", here))
    monkeypatch.setitem(BOUNDS, "time", evidence._TIME)
    assert planted() == status


def test_scripts_run_beside_each_other_only_where_they_may(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "sleeper.py").write_text(
        "import sys, time\nopen(sys.argv[1], 'a').write('+')\ntime.sleep(1)\nopen(sys.argv[1], 'a').write('-')\n"
    )
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(code_version, "ROOT", tmp_path)
    command = f"sleeper.py {tmp_path / 'events'}"
    rows = [evidence.Evidence(f"row{i}", f"{command} {i}", beside=i > 1) for i in range(4)]
    monkeypatch.setattr(evidence, "EVIDENCE", tuple(rows))
    assert evidence.main(["--out", str(tmp_path / "out"), "--jobs", "2"]) == 0
    assert (tmp_path / "events").read_text() == "+-+-++--"


def test_a_script_that_fails_is_reported_and_run_again(planted, capsys):
    for _ in range(2):
        assert planted(status=3) == 1
        output = capsys.readouterr().out
        assert "planted.py ended with status 3; see" in output and "running" in output


def test_what_needs_data_is_left_out_without_it_and_the_list_names_every_script(planted, capsys):
    assert planted(command="planted.py {glue} {out}") == 0
    assert capsys.readouterr().out == "planted: left out, since it needs --data-root\n"
    assert evidence.main(["--list"]) == 0
    assert capsys.readouterr().out == "planted: python scripts/planted.py {glue} {out}\n"


def test_every_entry_names_a_script_and_columns_that_its_committed_table_has():
    for one in evidence.EVIDENCE:
        assert (SCRIPTS / one.command.split()[0]).is_file()
        if one.table is not None:
            rows = tables(one.table.read_text(encoding="utf-8"), one.names)
            assert rows and all(len(cells) == len(key[0]) - one.names for key, cells in rows.items()), one.name
    committed = {path.stem for path in (SCRIPTS / "results").glob("*.md")}
    known = {one.table.stem for one in evidence.EVIDENCE if one.table is not None} | {"fuzz", "threads"}
    assert committed - known == {"equal-under", "mutants", "torch-versions"}  # too long, or too large


@pytest.mark.parametrize("one", [one for one in evidence.EVIDENCE if one.table], ids=lambda one: one.name)
def test_a_wrong_figure_planted_in_a_copy_of_each_table_is_seen(one):
    """In each column in turn, in all rows, far beyond what a run may differ by; but for figures of the machine."""
    text = one.table.read_text(encoding="utf-8")
    how = dict(names=one.names, bounds=one.bounds, partly=one.partly)
    assert differences(text, text, **how)[0] == []
    for (header, *_), cells in tables(text, one.names).items():
        for place, (column, cell) in enumerate(zip(header[one.names :], cells, strict=True), start=one.names + 1):
            bound = next((b for pattern, b in one.bounds.items() if fnmatchcase(column, pattern)), Bound())
            if bound is not MACHINE and re.search(r"\d", cell):
                assert differences(text, planted_in(text, place), **how)[0], column


def planted_in(text, place):
    """The text, with another first number in this cell of each line of a table."""

    def wrong(line):
        cells = line.split("|")
        if line.startswith("|") and len(cells) > place and not set(line) <= set("|-: "):
            cells[place] = re.sub(r"\d[\d.,]*", "98765", cells[place], count=1)
        return "|".join(cells)

    return "\n".join(map(wrong, text.splitlines()))
