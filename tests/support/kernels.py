"""Where fused ops run: on a GPU, or in Triton's interpreter."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from hf_memsave.ops.fused.kernels import kernels

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
