"""``memsave doctor``: what it prints is so, and what prevents patching ends with status 1."""

import json
from collections import Counter
from importlib.metadata import distributions, requires, version
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

import hf_memsave
from hf_memsave.cli import main
from hf_memsave.commands import doctor

TINY = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


def call(capsys, *argv: object) -> tuple[int, list[list[str]], str]:
    """Status, the words of each line of output, and errors."""
    status = main(["doctor", *map(str, argv)])
    output, error = capsys.readouterr()
    return status, [line.split() for line in output.splitlines()], error


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
    found = {"peft": [SimpleNamespace(version="0.17.1")], "torch": [*distributions(name="torch")]}
    monkeypatch.setattr(doctor, "distributions", lambda name: found.get(name, []))
    status, lines, error = call(capsys)
    assert status == 1 and "peft: expected >=0.18, got 0.17.1. Run: pip install 'peft>=0.18'" in error
    assert ["trl", "not", "installed"] in lines


@pytest.mark.parametrize(("model_type", "norm"), [("bert", "recompute"), ("vit", "recompute"), ("bert", "stock")])
def test_doctor_lists_the_sites_that_patch_finds_and_those_a_preset_leaves(model_type, norm, tmp_path, capsys):
    depth = {"num_hidden_layers": 3 if model_type == "bert" else 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **TINY, **depth}))
    (tmp_path / "memsave.yaml").write_text(f"norm: {norm}")
    status, lines, error = call(capsys, tmp_path, "--memsave", tmp_path / "memsave.yaml")
    assert (status, error) == (0, "")
    model = doctor.build_empty(AutoConfig.from_pretrained(tmp_path))
    assert all(parameter.is_meta for parameter in model.parameters()) and model.training
    sites = hf_memsave.patch(model, hf_memsave.MemSaveConfig(norm=norm)).sites
    for (op, cls), count in Counter((site.op, site.cls) for site in sites).items():
        assert [str(count), op, cls] in [line[-3:] for line in lines]
    text, blocks = " ".join(sum(lines, [])), sum(site.op == "block" for site in sites)
    others = "7 other modules" if norm == "stock" else "0 other modules"
    assert blocks == depth["num_hidden_layers"]
    assert f"1 model and {blocks} repeated blocks covered, {others} patched, 0 skipped." in text
    assert norm == "recompute" or ["7", "quiet", "LayerNorm"] in [line[-3:] for line in lines]
