"""``scripts/bench/``: that models.py and ops.py would run where there is a GPU, and techniques.py's figures."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from hf_memsave import MemSaveConfig
from support.script_helpers import load_script

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long


@pytest.fixture
def bench(monkeypatch):
    """The script, of which ``scripts`` has a namesake."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "bench")
    spec = importlib.util.spec_from_file_location("bench_models", ROOT / "scripts" / "bench" / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_method_has_a_row(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench" / "models.py", "--smoke", "--largest", "--out", tmp_path]
    methods = ["stock", "memsave, whole blocks", "memsave, offload"]
    subprocess.run([*command, "--methods", *methods], check=True, capture_output=True)
    (found,) = tmp_path.glob("largest-*.json")
    figures = json.loads(found.read_text())
    rows = [name for name in figures if ": " in name]
    assert {name.partition(": ")[2] for name in rows} == set(methods)
    assert all(figures[name]["tokens_per_second"] > 0 for name in rows)
    assert all(figures[name]["largest_batch"] == 4 and figures[name]["at_largest"]["seconds"] > 0 for name in rows)


def test_each_kernel_has_a_row(tmp_path):
    pytest.importorskip("triton")
    command = [sys.executable, ROOT / "scripts" / "bench" / "ops.py", "--smoke", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    (found,) = tmp_path.glob("ops-*.json")
    figures = json.loads(found.read_text())
    found = {name: op for shape in figures if shape != "about" for name, op in figures[shape].items()}
    assert all(op["bytes_per_second"] > 0 for op in found.values())
    assert {"RMSNorm, backward", "rotary", "the same, backward", "LoRA output", "cross-entropy"} <= found.keys()


@pytest.fixture
def techniques(monkeypatch):
    return load_script("techniques", monkeypatch)


def test_what_a_whole_model_keeps_follows_from_two_depths(techniques):
    one, two, three = (techniques.kept_at(techniques.bert(layers), 1, MemSaveConfig()) for layers in (1, 2, 3))
    assert three - two == two - one > 0


def test_few_bits_keep_less_than_exact_before_a_frozen_linear(techniques):
    settings, make = techniques.SETTINGS, techniques.MODELS["LoRA on q, v"]
    few, exact, stock = (techniques.kept_at(make(1), 1, settings[name]) for name in ("few-bit", "exact", "stock"))
    assert few < 0.8 * exact < exact < stock


def test_the_peak_of_images_falls_with_every_rung(monkeypatch):
    known = load_script("known_models", monkeypatch)
    tiny = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}
    monkeypatch.setitem(known.MODELS, "tiny", (transformers.ViTConfig(**tiny), 8, None, known.AUTOCAST))
    stock, floor, gate = (known.peak_of("tiny", *known.SETTINGS[column]) for column in [*known.SETTINGS][:3])
    assert stock > 1.2 * floor > 1.2 * 1.2 * gate
