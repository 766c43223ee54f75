"""``scripts/bench/``: models.py and ops.py would run where there is a GPU; techniques.py's figures; fine_tuning.py."""

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import transformers

from hf_memsave import MemSaveConfig
from support.script_helpers import BENCH, glue_data, load_script, pretrained
from wordpiece import train_wordpiece

pytestmark = pytest.mark.long


@pytest.fixture
def bench(monkeypatch):
    """The script, of which ``scripts`` has a namesake."""
    monkeypatch.syspath_prepend(BENCH)
    spec = importlib.util.spec_from_file_location("bench_models", BENCH / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BERT = ["--models", "BERT-Large, full, autocast, 32 x 512", "--methods"]


def test_each_method_has_a_row_and_what_was_right_is_not_made_again(bench, tmp_path, monkeypatch):
    methods = ["stock", "block", "checkpointing, offload"]
    argv = ["--smoke", "--out", str(tmp_path), *BERT, *methods]
    assert bench.main([*argv, "--largest"]) == 0
    figures = json.loads((tmp_path / "gpu-models.json").read_text())
    rows = {name.partition(": ")[2]: one for name, one in figures.items() if name != "about"}
    assert rows.keys() == set(methods)
    assert all(one["seconds"] > 0 and one["largest_batch"] == 4 and one["seconds_there"] > 0 for one in rows.values())
    assert rows["block"]["peak"] < rows["stock"]["peak"] == rows["stock"]["expected"]["peak"]
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("it is there"))
    assert bench.main(argv) == 0
    figures["about"]["machine"] = "another"
    (tmp_path / "gpu-models.json").write_text(json.dumps(figures))
    monkeypatch.setattr(bench, "run", lambda model, method, options, found: None)
    assert bench.main([*argv[:-2], "stock"]) == 0
    figures = json.loads((tmp_path / "gpu-models.json").read_text())
    assert [name for name in figures if name != "about"] == [f"{BERT[1]}: stock"], "one table is of one machine"


def test_a_peak_a_tenth_too_high_is_wrong_and_made_again_and_so_is_what_fails(bench, tmp_path, monkeypatch):
    def failing(*_):
        raise RuntimeError("a fault\nand more")

    argv = ["--smoke", "--out", str(tmp_path), *BERT, "memsave"]
    assert bench.main([*argv, "--plant"]) == 1
    (row,) = (one for name, one in json.loads((tmp_path / "gpu-models.json").read_text()).items() if name != "about")
    assert row["verdict"].startswith("WRONG: kept and peak not as estimated")
    assert row["peak"] == pytest.approx(1.1 * row["expected"]["peak"], rel=0.01)
    assert bench.main([*argv, "--seconds", "-1"]) == 1, "there was no time to make it again"
    assert bench.main(argv) == 0
    monkeypatch.setattr(bench, "run", failing)
    assert bench.main([*argv[:-1], "stock"]) == 1
    assert "WRONG: RuntimeError: a fault |" in (tmp_path / "gpu-models.md").read_text()
    monkeypatch.setattr(bench, "expectation", lambda *_: {"peak": 2**60, "kept": 0})
    assert bench.main([*argv[:-1], "stock"]) == 0, "what does not fit is not begun"
    assert "left out: does not fit" in (tmp_path / "gpu-models.md").read_text()


WRONG_KERNEL = """
import ops
case = next(one for one in ops.CASES if one.name == "activation silu")
wrong = case._replace(ours=lambda *args: tuple(1.02 * found for found in case.ours(*args)))
ops.CASES = case, wrong
import sys
assert ops.main(["--smoke", "--shapes", "8x64", "--out", sys.argv[1]]) == 1
"""


def test_each_kernel_has_a_row_and_a_wrong_result_is_told(tmp_path):
    pytest.importorskip("triton")
    where = {**os.environ, "PYTHONPATH": str(BENCH), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, BENCH / "ops.py", "--smoke", "--out", tmp_path], check=True, env=where)
    figures = json.loads((tmp_path / "gpu-ops.json").read_text())
    rows = [row for shape in figures if shape != "about" for row in figures[shape]]
    kernels = {"rms_norm_backward_kernel", "rotary_kernel", "dropout_norm_backward_kernel", "cross_entropy_kernel"}
    assert kernels <= {row[1] for row in rows} and all(float(row[2]) > 0 and row[-1] == "" for row in rows)
    subprocess.run([sys.executable, "-c", WRONG_KERNEL, tmp_path / "wrong"], check=True, env=where)
    rows = json.loads((tmp_path / "wrong" / "gpu-ops.json").read_text())["8x64"]
    assert [row[-1].partition(":")[0] for row in rows] == ["", "", "", "WRONG", "WRONG"]


def test_a_whole_model_follows_from_two_depths_and_few_bits_keep_less_before_a_frozen_linear(monkeypatch):
    techniques = load_script("techniques", monkeypatch)
    one, two, three = (techniques.kept_at(techniques.bert(layers), 1, MemSaveConfig()) for layers in (1, 2, 3))
    assert three - two == two - one > 0
    settings, make = techniques.SETTINGS, techniques.MODELS["LoRA on q, v"]
    few, exact, stock = (techniques.kept_at(make(1), 1, settings[name]) for name in ("few-bit", "exact", "stock"))
    assert few < 0.8 * exact < exact < stock


def test_the_peak_of_images_falls_with_every_rung(monkeypatch):
    known = load_script("known_models", monkeypatch)
    tiny = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}
    monkeypatch.setitem(known.MODELS, "tiny", known.Model(transformers.ViTConfig(**tiny), 8, None, known.AUTOCAST))
    stock, floor, gate = (known.expected("tiny", method)["peak"] for method in ("stock", "memsave", "gate"))
    assert stock > 1.2 * floor > 1.2 * 1.2 * gate


CHOSEN = ("exact", "WTA-CRS @0.3", "head and norms, exact")


def test_runs_train_what_they_say_and_a_loss_that_differs_is_reported(tmp_path, monkeypatch, capsys):
    bench = load_script("fine_tuning", monkeypatch)
    monkeypatch.setattr(bench, "METHODS", {name: bench.METHODS[name] for name in CHOSEN})
    monkeypatch.setitem(bench.TASKS, "MRPC", ("MRPC", ("--max_steps=20", "--max_seq_length=32"), "eval_f1", "F1"))
    glue_data(tmp_path)
    tokenizer = train_wordpiece(["cat hat mat sat"], 120)
    model = pretrained(tmp_path, "bert", transformers.AutoModelForSequenceClassification, tokenizer)
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
