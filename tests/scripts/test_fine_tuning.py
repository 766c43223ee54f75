"""``scripts/bench/fine_tuning.py``: runs train what they say, and a loss of stock's that differs is reported."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from support.script_helpers import glue_data, load_script, pretrained
from wordpiece import train_wordpiece

pytestmark = pytest.mark.long
CHOSEN = ("exact", "WTA-CRS @0.3", "head and norms, exact")


def test_a_table_of_a_tiny_model(tmp_path, monkeypatch, capsys):
    bench = load_script("fine_tuning", monkeypatch)
    monkeypatch.setattr(bench, "METHODS", {name: bench.METHODS[name] for name in CHOSEN})
    monkeypatch.setitem(bench.TASKS, "MRPC", ("MRPC", ("--max_steps=20", "--max_seq_length=32"), "eval_f1", "F1"))
    glue_data(tmp_path)
    tokenizer = train_wordpiece(["cat hat mat sat"], 120)
    model = pretrained(tmp_path, "bert", AutoModelForSequenceClassification, tokenizer)
    places = tmp_path / "cache", tmp_path, Path(model)
    places[0].mkdir()
    runs = [("MRPC", name, seed) for name in CHOSEN for seed in (0, 1)] + [("MRPC", "stock", 0)]
    for run in runs:
        assert f"seed {run[2]}: eval_f1" in bench.train(*places, *run)
    found = {run: json.loads(bench.cached(*places, *run).read_text()) for run in runs}
    losses = {run[1]: one["losses"] for run, one in found.items() if run[2] == 0}
    assert losses["stock"] == losses["exact"] != losses["WTA-CRS @0.3"]
    kept = {run[1]: one["memsave/kept_gib"] for run, one in found.items() if "memsave/kept_gib" in one}
    assert kept["head and norms, exact"] < kept["exact"]
    bench.report(Namespace(tasks=["MRPC"], seeds=2, out=tmp_path), found)
    assert "every loss and the metric equal those of exact" in capsys.readouterr().out
    assert (tmp_path / "fine-tuning.png").stat().st_size > 10_000
    found["MRPC", "stock", 0]["losses"][0] += 1e-4
    bench.report(Namespace(tasks=["MRPC"], seeds=2, out=None), found)
    assert "differ from" in capsys.readouterr().out
