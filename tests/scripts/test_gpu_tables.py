"""Tables of a GPU: what is expected there is what the estimate says today, and pages have it, and what was measured."""

import json
import tarfile

import pytest

from support.helpers import MATRIX, on_stand_in
from support.script_helpers import SCRIPTS, load_script

FULL = ("stock", "memsave", "gate", "block", "checkpointing")
#: Models by a part of their name, and methods.
ESTIMATED = [
    ("Llama-3-8B, LoRA", "memsave"), ("Llama-3-8B, LoRA", "gate"), ("BERT", "memsave"), ("first 8", "offload")
]  # fmt: skip
MORE = [
    *(("Llama-3-8B, LoRA", method) for method in (*FULL, "checkpointing, chunked loss")),
    *(("BERT", method) for method in FULL),
    *(("first 8", method) for method in ("stock", "memsave", "checkpointing")),
    *((name, method) for name in ("QLoRA", "8-bit", "T5", "ViT") for method in FULL),
]


def test_what_is_expected_of_a_gpu_is_what_the_estimate_says(monkeypatch):
    known = load_script("known_models", monkeypatch)
    committed = json.loads((SCRIPTS / "results" / "known-models.json").read_text())
    assert {n: set(found) for n, found in committed.items() if n != "about"} == {
        name: {method for method in known.METHODS if known.is_estimated(name, method)} for name in known.MODELS
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "method"), [*ESTIMATED, *(pytest.param(*one, marks=MATRIX) for one in MORE if one not in ESTIMATED)]
)
@on_stand_in
def test_committed_estimates_are_todays(name, method, monkeypatch):
    known = load_script("known_models", monkeypatch)
    (name,) = (one for one in known.MODELS if name in one)
    committed = json.loads((SCRIPTS / "results" / "known-models.json").read_text())
    assert known.expected(name, method) == committed[name][method]


def test_readme_has_the_committed_estimates_and_what_was_measured(monkeypatch, tmp_path):
    tables = load_script("gpu_tables", monkeypatch)
    for page, text in tables.pages(tables.RESULTS, tables.ROOT):
        assert page.read_text(encoding="utf-8") == text, "run scripts/bench/gpu_tables.py"
    known = (tables.RESULTS / "known-models.json").read_bytes()
    name = "BERT-Large, full, autocast, 32 x 512"
    found = {"expected": {"peak": 2**30, "kept": 2**29}, "peak": 12 * 2**30, "seconds": 0.25, "verdict": ""}
    about = {"machine": "A GPU, torch 2.11.0", "command": "python models.py", "commit": "abc", "date": "2026-11-28"}
    left = {"verdict": "left out: does not fit"}
    models = {f"{name}: memsave": found, f"{name}: stock": left, "about": about}
    bits = {"wrong": 1, "rows": [{}, {}]}
    ops = {"8x64": [["copy", *"  91"], ["a", "kernel", "1", "9", "0.85", "1", "1", ""]], "about": about}
    packed = tmp_path / "packed"
    packed.mkdir()
    for one, content in {"gpu-models": models, "gpu-bits": bits, "gpu-ops": ops}.items():
        (packed / f"{one}.json").write_text(json.dumps(content))
    (packed / "gpu-bits.md").write_text("a table")
    (packed / "machine.txt").write_text("what no page has")
    with tarfile.open(tmp_path / "gpu-check.tgz", "w:gz") as archive:
        archive.add(packed, ".")
    into = tmp_path / "results"
    into.mkdir()
    (into / "known-models.json").write_bytes(known)
    tables.unpack(tmp_path / "gpu-check.tgz", into)
    assert {file.name for file in into.iterdir()} == {
        "known-models.json", "gpu-models.json", "gpu-bits.json", "gpu-bits.md", "gpu-ops.json"
    }  # fmt: skip
    readme, numbers = (text for _, text in tables.pages(into, tables.ROOT))
    assert "| BERT-Large, full, 32 x 512 | 20.8 | 12.2 | 6.6 | 6.0 | 6.3 | 12.0 |" in readme
    assert f"| {name} | memsave | 1.00 | 12.00 | 0.50 |  | 250.0 |  |" in numbers
    assert f"| {name} | stock (left out: does not fit) |" in numbers and "2 rows, 1 of them wrong" in numbers
    assert "A GPU, torch 2.11.0; `python models.py`, abc, 2026-11-28" in numbers and "85% to 85%" in numbers
