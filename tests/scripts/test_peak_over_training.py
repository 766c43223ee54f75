"""A smaller run of the bench: over a Trainer's run with evaluation, the counted peak falls by what is avoided."""

import sys
from pathlib import Path

import pytest
import torch

from support.helpers import halved

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="figures are those of CPU kernels")


@pytest.fixture(scope="module")
def bench():
    folder = str(ROOT / "scripts" / "bench")
    sys.path.insert(0, folder)
    import peak_over_training

    yield peak_over_training
    sys.path.remove(folder)


@pytest.mark.long
@pytest.mark.parametrize(("name", "padding"), halved(["bert", "llama", "llama-lora"], ["fixed", "dynamic"]))
def test_the_peak_of_a_run_falls_by_what_is_avoided(bench, name, padding):
    stock, ours = (bench.measured(name, padding, is_patched, steps=4) for is_patched in (False, True))
    assert ours.avoided > 0
    assert stock.counted - ours.counted >= 0.8 * ours.avoided
