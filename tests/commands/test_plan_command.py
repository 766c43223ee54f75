"""``memsave plan``: prints what fits and how, and writes the configuration."""

import pytest
from transformers import BertConfig, BertForSequenceClassification

from hf_memsave import MemSaveConfig, patch, plan
from hf_memsave.cli import main
from support.helpers import on_stand_in

pytestmark = on_stand_in
STEP = ["--layers", "6", "--batch-size", "4", "--seq-len", "256", "--optimizer", "sgd"]


@pytest.mark.long
def test_what_fits_is_said_and_written_and_patches_a_model(tmp_path, capsys):
    command, out = ["plan", "bert", *STEP, "--out", str(tmp_path / "plan.yaml")], tmp_path / "plan.yaml"
    assert main([*command, "--budget", "30GiB"]) == 0
    said = capsys.readouterr().out
    assert "The cheapest in 30.00 GiB (32.2 GB): no product runs again" in said
    assert said.endswith(f'Use it: Trainer(..., memsave="{out}"), or hf_memsave.patch(model, "{out}").\n')
    assert MemSaveConfig.from_file(out) == MemSaveConfig()
    floor = plan(BertConfig(num_hidden_layers=6), budget="1TiB", batch_size=32, seq_len=256, optimizer="sgd")
    assert main([*command, "--budget", f"{floor.best.needed // 2**20 - 100}MiB", "--batch-size", "32"]) == 0
    config = MemSaveConfig.from_file(out)
    assert config.checkpoint or config.offload
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=6, hidden_size=64, num_attention_heads=4))
    assert patch(model, out).config == config == patch(model, str(out)).config


@pytest.mark.parametrize(
    ("kind", "fields"), [("t5", ["num_layers", "num_decoder_layers"]), ("gemma3_text", ["num_hidden_layers"])]
)
def test_layers_are_those_of_every_stack_and_a_list_by_layer_has_as_many_entries(kind, fields, monkeypatch):
    asked = []
    monkeypatch.setattr("hf_memsave.commands.plan.plan", lambda config, **options: asked.append(config) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["plan", kind, "--budget", "30GiB", "--layers", "3"])
    assert [getattr(asked[0], field) for field in fields] == [3] * len(fields)
    assert len(getattr(asked[0], "layer_types", None) or range(3)) == 3
