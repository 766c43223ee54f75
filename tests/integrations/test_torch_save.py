"""``torch.save`` of a whole patched model: what its pickle needs, and how one is made that stock loads."""

import itertools
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_memsave import patch, unpatch
from support.families import batch_for, build
from support.steps import assert_same, patched_classes, step

#: Loads models where the package is not installed, and trains each for one step.
LOAD = """
import sys
sys.modules["hf_memsave"] = None
import torch
for path in sys.argv[1:]:
    model = torch.load(path, weights_only=False)
    ids = torch.arange(5, 21)[None]
    model.eval()(input_ids=ids, labels=ids).loss.backward()
    torch.save({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, path + ".gradients")
"""


def load_without_the_package(*paths) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", LOAD, *paths]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=paths[0].parent)


def model_of(name):
    family, *lora = name.split(" with ")
    model = build(family)
    return get_peft_model(model, LoraConfig(target_modules="all-linear")) if lora else model


def test_undone_models_load_without_the_package(tmp_path):
    expected = {}
    for name, how in itertools.product(("llama", "llama with LoRA"), (True, "tempo", "wta-crs")):
        model = model_of(name)
        report = patch(model, how)
        step(model, batch_for(model))
        report.undo()
        path = tmp_path / f"{name}, {how}.pt"
        torch.save(model, path)
        assert b"memsave" not in path.read_bytes()
        ids = torch.arange(5, 21)[None]
        model.zero_grad()
        model.eval()(input_ids=ids, labels=ids).loss.backward()
        expected[path] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = load_without_the_package(*expected)
    assert found.returncode == 0, found.stderr
    for path, gradients in expected.items():
        assert_same(torch.load(f"{path}.gradients"), gradients)


def test_a_patched_model_asks_for_the_package(tmp_path):
    model = build("llama")
    patch(model)
    torch.save(model, tmp_path / "model.pt")
    found = load_without_the_package(tmp_path / "model.pt")
    assert found.returncode != 0 and "No module named 'hf_memsave" in found.stderr.splitlines()[-1]


@pytest.mark.parametrize("how", [True, "tempo"], ids=str)
def test_with_the_package_it_comes_back_patched(how, tmp_path):
    model = build("llama")
    patch(model, how)
    torch.save(model, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert patched_classes(other) == patched_classes(model) != {}
    assert_same(step(other, batch_for(other)), step(model, batch_for(model)))
    unpatch(other)
    assert patched_classes(other) == {}


def test_a_state_dict_needs_nothing(tmp_path):
    model = build("llama")
    patch(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), build("llama").state_dict())
