"""``memsave demo``: the same losses stock and patched, or exit status 1."""

import re
import subprocess
import sys

import pytest
import torch

from hf_memsave import patch
from hf_memsave.cli import main
from hf_memsave.commands import demo

pytest.importorskip("matplotlib")


@pytest.mark.long
def test_demo_quick_ends_well_and_learns(tmp_path):
    command = [sys.executable, "-m", "hf_memsave.cli", "demo", "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "agree to the last bit in all 70 losses" in done.stdout and "has not learned" not in done.stdout
    rows = [row.split() for row in re.findall(r"^.* ((?:stock|patched) +\d.*%.*)$", done.stdout, flags=re.MULTILINE)]
    assert [row[0] for row in rows] == ["stock", "patched"] * 2
    for (_, *stock), (_, *patched) in (rows[:2], rows[2:]):
        assert stock[:3] == patched[:3]  # final loss, dev accuracy, majority
        _, accuracy, majority, _, freed, _ = (float(cell.rstrip("%")) for cell in patched)
        assert accuracy > 85 and majority < 60 and freed > 41
    assert (tmp_path / "demo.png").stat().st_size > 10_000


@pytest.mark.long
def test_demo_without_matplotlib_draws_nothing_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--steps", "2"]) == 0 and list(tmp_path.iterdir()) == []
    output = " ".join(capsys.readouterr().out.split())
    assert "No picture: that needs matplotlib. Run: pip install 'hf_memsave[plot]'" in output
    assert "agree to the last bit in all 2 losses" in output


@pytest.mark.long
def test_demo_fails_when_a_loss_or_only_a_weight_differs(tmp_path, capsys, monkeypatch):
    def faulty_patch(model):
        patch(model)
        model.base_model.get_input_embeddings().weight.data.mul_(1.01)

    monkeypatch.setattr(demo, "patch", faulty_patch)
    assert main(["demo", "--steps", "2", "--out", str(tmp_path / "demo.png")]) == 1
    output, error = capsys.readouterr()
    assert re.search(r"memsave demo: BERT: the loss of step 1 is .* stock and .* patched", error)
    assert "agree" not in output
    run, other = (demo.Run([0.5], {"w": torch.tensor([0.0, n])}, 0.5, None, 0.1) for n in (0.0, 1e-9))
    assert demo.difference(run, run) is None and demo.difference(run, other) == "w differs after training"


def test_generated_labels_follow_the_rule_and_depend_on_the_seed_alone():
    task, same, other = (demo.generated_task(200, seed) for seed in (1, 1, 2))
    assert 0.5 <= task.majority < 0.6
    for example in task.train:
        fact, claim = task.tokenizer.decode(example["input_ids"]).removeprefix("[CLS]").split("[SEP]")[:2]
        said, claimed = (next(i for i, n in enumerate(demo.NUMBERS) if n in text.split()) for text in (fact, claim))
        assert example["labels"] == (said > claimed)
    assert (task.train, task.dev) == (same.train, same.dev) and task.train != other.train
