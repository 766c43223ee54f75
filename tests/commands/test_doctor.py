"""``memsave doctor``: what it prints is so, and what prevents patching ends with status 1."""

import json
from collections import Counter
from importlib.metadata import requires, version
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import hf_memsave
from hf_memsave.cli import main
from hf_memsave.commands import doctor

CONFIGS = {
    "bert": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 64},
    "vit": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64},
}


def call(capsys, *argv: object) -> tuple[int, list[list[str]], str]:
    """Status, the words of each line of output, and errors."""
    status = main(["doctor", *map(str, argv)])
    output, error = capsys.readouterr()
    return status, [line.split() for line in output.splitlines()], error


@pytest.fixture
def config(tmp_path):
    def write(model_type: str, **changes: object) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": model_type, **CONFIGS[model_type], **changes}))
        return path

    return write


def test_doctor_prints_versions_and_devices(capsys):
    status, lines, error = call(capsys)
    assert (status, error) == (0, "")
    assert ["hf_memsave", hf_memsave.__version__] in lines
    bounds = dict(one.split(">=") for one in requires("hf_memsave") if ">=" in one and ";" not in one)
    for name, installed in {"torch": torch.__version__, "transformers": version("transformers")}.items():
        assert [name, installed, "(needs", f">={bounds[name]})"] in lines
    assert any(line[:1] == ["cpu"] and "bf16" in line for line in lines)
    assert any(line[:1] == (["cuda:0"] if torch.cuda.is_available() else ["cuda"]) for line in lines)
    assert lines[-1] == "Nothing found that prevents patching.".split()


def test_doctor_says_which_packages_are_too_old_or_missing(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "0.17.1" if name == "peft" else doctor._MISSING)
    status, lines, error = call(capsys)
    assert status == 1 and "peft: expected >=0.18, got 0.17.1. Run: pip install 'peft>=0.18'" in error
    assert ["trl", "not", "installed"] in lines


@pytest.mark.parametrize("model_type", CONFIGS)
def test_doctor_lists_the_sites_that_patch_finds(model_type, config, capsys):
    path = config(model_type)
    status, lines, error = call(capsys, path)
    assert (status, error) == (0, "")
    model = doctor.build_empty(AutoConfig.from_pretrained(path))
    assert all(parameter.is_meta for parameter in model.parameters()) and model.training
    sites = hf_memsave.patch(model).sites
    for (op, cls), count in Counter((site.op, site.cls) for site in sites).items():
        assert [str(count), op, cls] in [line[-3:] for line in lines]
    text = " ".join(sum(lines, []))
    blocks = sum(site.op == "block" for site in sites)
    assert blocks > 0 and f"1 model and {blocks} repeated blocks covered, 0 other modules patched, 0 skipped." in text


def test_doctor_lists_the_modules_that_a_preset_leaves_to_stock(config, capsys, monkeypatch):
    left = hf_memsave.MemSaveConfig(norm="stock")
    monkeypatch.setattr(hf_memsave.MemSaveConfig, "preset", lambda name: left)
    status, lines, _ = call(capsys, config("bert"))
    assert status == 0 and ["7", "quiet", "LayerNorm"] in [line[-3:] for line in lines]
