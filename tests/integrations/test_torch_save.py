"""``torch.save`` of a whole patched model: what its pickle needs, and how one is made that stock loads."""

import itertools
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_memsave import patch, unpatch
from support.steps import assert_same, gradients, patched, patched_classes, step
from support.zoo import batch_for, build

#: Loads models where the package is not installed, and trains each for one step; the last is a patched one.
LOAD = """
import sys
sys.modules["hf_memsave"] = None
import torch
for path in sys.argv[1:-1]:
    model = torch.load(path, weights_only=False)
    ids = torch.arange(5, 21)[None]
    model.eval()(input_ids=ids, labels=ids).loss.backward()
    torch.save({f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}, path + ".gradients")
try:
    torch.load(sys.argv[-1], weights_only=False)
except ModuleNotFoundError as error:
    assert "No module named 'hf_memsave" in str(error)
else:
    raise AssertionError("it was loaded")
"""


@pytest.mark.long
def test_undone_models_load_without_the_package_and_a_patched_one_asks_for_it(tmp_path):
    expected, ids = {}, torch.arange(5, 21)[None]
    for lora, how in itertools.product((False, True), (True, "tempo", "wta-crs")):
        model = build("llama")
        model = get_peft_model(model, LoraConfig(target_modules="all-linear")) if lora else model
        report = patch(model, how)
        step(model, batch_for(model))
        report.undo()
        path = tmp_path / f"{lora}, {how}.pt"
        torch.save(model, path)
        assert b"memsave" not in path.read_bytes()
        model.zero_grad()
        model.eval()(input_ids=ids, labels=ids).loss.backward()
        expected[path] = gradients(model)
    patch(model)
    torch.save(model, tmp_path / "patched.pt")
    command = [sys.executable, "-c", LOAD, *expected, tmp_path / "patched.pt"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    for path, of_path in expected.items():
        assert_same(torch.load(f"{path}.gradients"), of_path)


@pytest.mark.parametrize("how", [True, "tempo"], ids=str)
def test_with_the_package_it_comes_back_patched(how, tmp_path):
    model = patched(build("llama"), how)
    torch.save(model, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert patched_classes(other) == patched_classes(model) != {}
    assert_same(step(other, batch_for(other)), step(model, batch_for(model)))
    unpatch(other)
    assert patched_classes(other) == {}
