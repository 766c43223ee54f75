"""PyTorch's own list of elementwise operations, and which of their spellings a tape's table lacks: printed as JSON.

A program of its own, for PyTorch's module forbids a process to set any flag of a backend.
"""

import importlib
import json
import sys
import unittest
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_memsave.tape.table import TABLE, UNRECORDED

#: Of an operation, what gives a new tensor, and what writes to its first argument.
NEW, WRITES = ("op", "method_variant", "operator_variant"), ("inplace_variant", "inplace_operator_variant")


class Called(TorchFunctionMode):
    """The first function that is called under it, as a tape would see it."""

    def __init__(self):
        super().__init__()
        self.first = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.first = self.first or func
        return func(*args, **(kwargs or {}))


def lacking(op):
    """The kinds of spelling of an operation, with a function that is not in the table."""
    if "jiterator" in op.name:
        return ["op"]
    dtype = next(d for d in (torch.float32, torch.int64, *op.dtypes) if d in op.dtypes)
    sample, found = next(iter(op.sample_inputs("cpu", dtype))), []
    for kind in (*NEW, *WRITES, "aliases"):
        if kind == "aliases":
            spellings = [f for alias in op.aliases for f in (alias.op, alias.method_variant)]
        else:
            spellings = [getattr(op, kind)]
        for spelling in filter(None, spellings):
            x = sample.input.clone() if isinstance(sample.input, Tensor) else sample.input
            with Called() as called:
                try:
                    spelling(x, *sample.args, **sample.kwargs)
                except RuntimeError as error:
                    if "result" not in str(error):  # in place, into a narrower dtype
                        raise
            if called.first not in (UNRECORDED if kind in WRITES else TABLE):
                found.append(kind)
    return found


def database(name):
    """A module of PyTorch's that lists what its tests test."""
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # not needed to read a list
    return importlib.import_module(f"torch.testing._internal.{name}")


def main():
    """Print the name of each elementwise operation, with the spellings of it that the table lacks."""
    ops, found = database("common_methods_invocations"), {}
    for op in ops.op_db:
        if isinstance(op, (ops.UnaryUfuncInfo, ops.BinaryUfuncInfo)):
            found.setdefault(op.name, []).extend(lacking(op))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
