"""The private names of PyTorch that the stand-in device needs are there."""

import ast
from functools import reduce
from pathlib import Path

import torch

from hf_memsave.measure import private


def test_every_private_name_is_there():
    tree = ast.walk(ast.parse(Path(private.__file__).read_text()))
    names = {ast.unparse(node) for node in tree if isinstance(node, ast.Attribute)}
    names = {name for name in names if name.startswith("torch.") and "._" in name and "__" not in name}
    assert len(names) > 6
    for name in names:
        reduce(getattr, name.split(".")[1:], torch)
