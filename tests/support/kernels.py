"""Where fused ops run: on a GPU, or in Triton's interpreter; and a step of a small model with them."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from hf_memsave import MemSaveConfig
from hf_memsave.ops.fused.kernels import kernels
from support import steps
from support.zoo import Size, batch_for

TRITON = MemSaveConfig(backend="triton")
SMALL = Size(hidden=16, heads=2, layers=1, batch=2, seq=5)

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(
    not (IS_INTERPRETED or torch.cuda.is_available()), reason="runs under TRITON_INTERPRET=1, as in `make kernels`"
)


@pytest.fixture(scope="module", autouse=True)
def rounding():
    """Triton's interpreter truncates to bfloat16; a GPU rounds to nearest."""
    if IS_INTERPRETED:
        tests = Path(kernels().__file__).parents[2] / "tests"
        sys.path.append(str(tests))
        importlib.import_module("interpreter").round_to_nearest()
        sys.path.remove(str(tests))


def step(model, seed=0, size=SMALL):
    return list(steps.step(model, batch_for(model, size), seed).values())


def distance(found, exact):
    squares = [(a.double() - b.double()).square().sum() for a, b in zip(found, exact, strict=True)]
    return (sum(squares) / sum(b.double().square().sum() for b in exact)).sqrt().item()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
