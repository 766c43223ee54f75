"""Committed tables: a figure that a fresh run does not repeat is reported; the papers'; what is expected of a GPU."""

import json
import re
import sys
import tarfile
from functools import partial

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import evidence
from support.helpers import chosen, on_stand_in
from support.script_helpers import BENCH, SCRIPTS, load_script

sys.path.insert(0, str(BENCH))

import papers
from paper_tables.rows import COLUMNS, GB, STOCK, Row, deep_trace, forward_peak, result_of, text_trace


def test_every_committed_table_has_an_entry_and_every_entry_a_script():
    assert all((SCRIPTS / one.command.split()[0]).is_file() for one in evidence.EVIDENCE.values())
    committed = {path.stem for path in (SCRIPTS / "results").glob("*.md")}
    others = {"command-times", "cpus", "equal-under", "mutants", "torch-versions"}  # too long
    assert others <= committed - evidence.EVIDENCE.keys() <= others | {"gpu-bits", "gpu-models", "gpu-ops"}
    assert evidence.EVIDENCE.keys() <= committed


@pytest.mark.parametrize("name", [name for name in evidence.EVIDENCE if name not in evidence.TIMES_ALONE])
def test_a_wrong_figure_planted_in_a_copy_of_each_table_is_seen(name):
    one = evidence.EVIDENCE[name]
    text = (SCRIPTS / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert evidence.differences(text, text, one) == []
    figures = [cell for cell in evidence.cells(text, one).values() if re.search(r"\d\.\d", cell)]
    for figure in figures[:: max(1, len(figures) // 5)]:
        wrong = re.sub(r"\d[\d.,]*", "98765", figure, count=1)
        assert evidence.differences(text, text.replace(f"| {figure} |", f"| {wrong} |"), one), figure


CONFIG = BertConfig(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)


def bert(config):
    return BertForSequenceClassification._from_config(config, attn_implementation="eager").train()


def inputs(batch, device):
    ids = torch.empty(batch, 32, dtype=torch.int64, device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0].clone()}


BERT = partial(bert, CONFIG)
BATCHES = {batch: partial(inputs, batch) for batch in (8, 32)}  # made once: equal questions are answered once


def peak(batch, setting=STOCK):
    return forward_peak(BERT, BATCHES[batch], setting)


def test_the_peak_of_a_model_grows_with_the_batch_and_is_the_estimate_of_its_configuration():
    assert peak(8) < peak(32)
    assert peak(32, COLUMNS["exact"]) < peak(32)
    step = {"dtype": "fp32", "optimizer": "adamw_fused", "attention": "eager", "padded": True}
    found = deep_trace(CONFIG, bert, BATCHES[32])
    assert found.peak == pytest.approx(text_trace(CONFIG, STOCK, batch=32, tokens=32, **step).peak, rel=0.01)


@pytest.mark.parametrize("off", [1.0, 0.95, 1.2], ids=str)
def test_a_wrong_figure_is_reported(off):
    stock = peak(32) / GB
    row = Row(
        table="1", work="BERT", stock=off * stock, method="a method", figure=0.01 * off * stock,
        measure=lambda setting: peak(32, setting) / GB, here=COLUMNS["exact"], columns=("exact",),
    )  # fmt: skip
    result = result_of(row)
    assert result.distance == pytest.approx(100 / off - 100)
    assert f"{int(abs(100 / off - 100) <= 10)} are within 10% with today's" in papers.count_line([result])
    assert result.behind == ["the paper's"] and "`exact`: the paper's" in papers.cells(result)  # a hundredth of stock


FULL = ("stock", "memsave", "gate", "block", "checkpointing")
#: Models by a part of their name, and methods.
ESTIMATED = [
    ("Llama-3-8B, LoRA", "memsave"), ("Llama-3-8B, LoRA", "gate"), ("BERT", "memsave"), ("first 8", "offload")
]  # fmt: skip
EVERY = [
    *(("Llama-3-8B, LoRA", method) for method in (*FULL, "checkpointing, chunked loss")),
    *(("BERT", method) for method in FULL),
    *(("first 8", method) for method in ("stock", "memsave", "checkpointing", "offload")),
    *((name, method) for name in ("QLoRA", "8-bit", "T5", "ViT") for method in FULL),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "method"), chosen(EVERY, ESTIMATED))
@on_stand_in
def test_committed_estimates_are_todays(name, method, monkeypatch):
    known = load_script("known_models", monkeypatch)
    (name,) = (one for one in known.MODELS if name in one)
    committed = json.loads((SCRIPTS / "results" / "known-models.json").read_text())
    assert known.expected(name, method) == committed[name][method]


def test_all_estimates_are_committed_and_readme_has_them_and_what_was_measured(monkeypatch, tmp_path):
    tables, estimated = load_script("pages", monkeypatch), load_script("known_models", monkeypatch)
    for page, text in tables.pages(tables.RESULTS, tables.ROOT):
        assert page.read_text(encoding="utf-8") == text, "run scripts/bench/pages.py"
    known = (tables.RESULTS / "known-models.json").read_bytes()
    assert {n: set(found) for n, found in json.loads(known).items() if n != "about"} == {
        name: {one for one in estimated.METHODS if estimated.is_estimated(name, one)} for name in estimated.MODELS
    }
    name = "BERT-Large, full, autocast, 32 x 512"
    found = {"expected": {"peak": 2**30, "kept": 2**29}, "peak": 12 * 2**30, "seconds": 0.25, "verdict": ""}
    about = {"machine": "A GPU, torch 2.11.0", "command": "python models.py", "commit": "abc", "date": "2026-11-28"}
    left = {"verdict": "left out: does not fit"}
    models = {f"{name}: memsave": found, f"{name}: stock": left, "about": about}
    bits = {"wrong": 1, "rows": [{}, {}]}
    ops = {"8x64": [["copy", *"  91"], ["a", "kernel", "1", "9", "0.85", "1", "1", ""]], "about": about}
    (packed := tmp_path / "packed").mkdir()
    for one, content in {"gpu-models": models, "gpu-bits": bits, "gpu-ops": ops}.items():
        (packed / f"{one}.json").write_text(json.dumps(content))
    (packed / "gpu-bits.md").write_text("a table")
    (packed / "machine.txt").write_text("what no page has")
    with tarfile.open(tmp_path / "gpu-check.tgz", "w:gz") as archive:
        archive.add(packed, ".")
    (into := tmp_path / "results").mkdir()
    for file in ("known-models.json", "ways-to-keep-less.json", "long-context.json", "longest.json", "host-time.md"):
        (into / file).write_bytes((tables.RESULTS / file).read_bytes())
    tables.unpack(tmp_path / "gpu-check.tgz", into)
    assert {file.name for file in into.glob("gpu-*")} == {
        "gpu-models.json", "gpu-bits.json", "gpu-bits.md", "gpu-ops.json"
    }  # fmt: skip
    readme, numbers, *_ = (text for _, text in tables.pages(into, tables.ROOT))
    assert "| [measured](docs/numbers.md#on-a-gpu) |  |  |  |  | 12.0 |  |  |  |  |" in readme
    assert f"| {name} | memsave | 1.00 | 12.00 | 0.50 |  | 250.0 |  |" in numbers
    assert f"| {name} | stock (left out: does not fit) |" in numbers and "2 rows, 1 of them wrong" in numbers
    assert "A GPU, torch 2.11.0; `python models.py`, abc, 2026-11-28" in numbers and "85% to 85%" in numbers
