"""Submodules in rows: which ran so and which whole, and what gradients are up to the order of sums."""

from hf_memsave.patching.rows import reasons
from hf_memsave.patching.swap import stock_class
from support.zoo import Size

#: More tokens than a part of them has.
SIZE, TILE = Size(seq=96), 40


def in_rows(model):
    """The names of the classes whose modules ran in rows, each time that one was called in another state."""
    return {stock_class(m).__name__ for m in model.modules() if "" in reasons(m)}


def whole(model):
    """The name of each class of which modules ran whole -> why."""
    return {stock_class(m).__name__: why for m in model.modules() for why in reasons(m) if why}


def assert_near(got, expected, slack=1e-10, least=1e-6):
    """Of each tensor the error is at most ``slack`` of its norm, or of ``least`` of the largest norm."""
    assert list(got) == list(expected)
    norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        error = float((got[name].double() - tensor.double()).norm())
        assert error <= slack * max(norms[name], least * max(norms.values())), (name, error, norms[name])
