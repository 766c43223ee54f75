"""Checks of the checks: each plants a fault that the op tests must catch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hf_memsave.tape import current
from hf_memsave.tape.private import no_modes
from support import helpers


def wrong_gelu(x):
    """Recorded as another GELU than it is."""
    with no_modes():
        out = F.gelu(x)
        if (tape := current()) is not None:
            tape.record(out, partial(F.gelu, approximate="tanh"), (x,))
    return out


def test_a_wrong_recomputation_and_a_rounding_too_many_are_caught(device):
    with pytest.raises(AssertionError, match="gradient of the consumer: .* elements differ"):
        helpers.assert_exact(wrong_gelu, F.gelu, [helpers.random(3, 8, device=device)])
    x, weight = (helpers.random(3, 64, dtype=torch.bfloat16, device=device, seed=i) for i in (1, 2))
    with pytest.raises(AssertionError, match="output"):
        helpers.assert_exact(
            lambda x, w: (x * w * 3).to(x.dtype), lambda x, w: (x.float() * w * 3).to(x.dtype), [x, weight]
        )


class _Wrong(torch.autograd.Function):
    """Keeps a tensor on ``ctx`` unseen, and gives another gradient in each backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.hidden, ctx.calls = x.clone(), 0
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.calls += 1
        return dy * ctx.calls


def test_a_second_backward_that_differs_and_bytes_hidden_on_a_ctx_are_caught(device):
    x = helpers.random(3, 8, device=device)
    with pytest.raises(AssertionError, match="elements differ"):
        helpers.assert_backward_twice(_Wrong.apply, x)
    assert helpers.kept(_Wrong.apply, x, tape=True) == 2 * x.nbytes  # the hidden tensor, and the linear's input


#: Got, expected, and what is said.
UNEQUAL = {
    "minus zero": (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), "1 of 2 elements differ"),
    "another dtype": (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), "expected torch.float32"),
    "no gradient": (torch.zeros(2), None, "expected None"),
}


@pytest.mark.parametrize(("got", "expected", "message"), UNEQUAL.values(), ids=UNEQUAL)
def test_bits_that_differ_are_seen(got, expected, message):
    with pytest.raises(AssertionError, match=message):
        helpers.assert_same_bits(got, expected)
    nan = torch.tensor([float("nan")])
    helpers.assert_same_bits(nan, nan.clone())
