"""The kernels run in Triton's interpreter, unless there is a GPU."""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "torch-ext"), str(HERE.parent), str(HERE)]
