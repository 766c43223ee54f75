"""``memsave estimate``: prints a table, says whether it fits, and what would."""

import json

import pytest

from hf_memsave.cli import main
from support.helpers import on_stand_in

pytestmark = on_stand_in
SMALL = {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 99}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, "num_hidden_layers": 5}))
    return str(path)


@pytest.mark.long
def test_it_prints_and_writes(config, tmp_path, capsys):
    assert main(["estimate", config, "--seq-len", "32", "--json", str(tmp_path / "out.json")]) == 0
    assert "bert, 5 layers" in capsys.readouterr().out
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["stock"]["peak"] >= figures["patched"]["peak"] > 0
    assert figures["fits"] is None


@pytest.mark.long
def test_it_says_what_fits(config, tmp_path, capsys):
    options = ["estimate", config, "--seq-len", "32", "--memory", "1GiB", "--json", str(tmp_path / "out.json")]
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "Fits in 1.00 GiB." in out
    largest = json.loads((tmp_path / "out.json").read_text())["largest"]
    assert largest["patched"]["batch_size"] > largest["stock"]["batch_size"] > 1
    assert largest["stock"]["seq_len"] == 512
    assert main([*options[:4], "--memory", "100MiB"]) == 1
    assert "Does not fit in 0.10 GiB." in capsys.readouterr().out
