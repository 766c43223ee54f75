"""``memsave plan``: prints what fits and how, and writes the configuration."""

import pytest
import torch

from hf_memsave import MemSaveConfig
from hf_memsave.cli import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
STEP = ["--layers", "6", "--batch-size", "4", "--seq-len", "256", "--optimizer", "sgd"]


def test_what_fits_is_said_and_written(tmp_path, capsys):
    out = tmp_path / "plan.yaml"
    assert main(["plan", "bert", "--budget", "30GiB", *STEP, "--out", str(out)]) == 0
    assert "The cheapest in 30.00 GiB: the floor" in capsys.readouterr().out
    assert MemSaveConfig.from_file(out) == MemSaveConfig()


def test_what_does_not_fit_is_an_error(capsys):
    assert main(["plan", "bert", "--budget", "600MiB", *STEP]) == 2
    assert "nothing fits: expected at most 600.00 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--budget", "much"], ["--budget", "1GiB", "--autocast", "bf16", "--dtype", "bf16"]]
)
def test_bad_input_is_one_line(arguments, capsys):
    assert main(["plan", "bert", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
