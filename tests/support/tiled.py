"""Blocks in tiles: why one runs as a whole, and what gradients are up to the order of sums."""

from hf_memsave.patching.tiled import PLANS
from support.zoo import Size

#: More tokens than a block is tried with before it runs in tiles, and a tile's.
SIZE, TILE = Size(seq=96), 40


def reasons(model):
    """Of each plan of a block: None where it runs in tiles."""
    return [plan.why_not for m in model.modules() for plan in m.__dict__.get(PLANS, {}).values()]


def assert_tiled(model):
    assert set(reasons(model)) == {None}


def assert_near(got, expected, slack=1e-10, least=1e-6):
    """Of each tensor the error is at most ``slack`` of its norm, or of ``least`` of the largest norm."""
    assert list(got) == list(expected)
    norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        error = float((got[name].double() - tensor.double()).norm())
        assert error <= slack * max(norms[name], least * max(norms.values())), (name, error, norms[name])
