"""Every function of the table of cheap functions, under a tape: stock's bits and strides from no more bytes.

A new function needs its arguments in ``support/examples.py``, and nothing here. What is written to meanwhile:
``test_writes.py``.
"""

import contextlib

import torch
from torch import Tensor, nn

from hf_memsave import measure_kept
from hf_memsave.tape.functions import CHEAP
from hf_memsave.tape.tensors import leaves
from support.examples import Arguments, calls_of, consumed, every
from support.helpers import LAYOUTS, assert_same_bits, is_remade, only_on_cpu, random, taping

FUNCTIONS = [function for function, handler in CHEAP.items() if not getattr(handler, "is_write", False)]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def step(call, a, tape):
    """The call, a consumer that keeps its result, and a backward."""
    args, kwargs = call(a)
    with taping() if tape else contextlib.nullcontext():
        y = call.function(*args, **kwargs)
        if not isinstance(y, Tensor):  # Tensor.type() is a string
            y = a.x
        z, weight = consumed(y)
    try:
        z.backward(random(*z.shape, dtype=z.dtype, device=z.device, seed=22))
    except RuntimeError as error:
        assert "is not implemented" in str(error)  # floor_divide has no derivative
    return y.detach(), [weight.grad, *(leaf.grad for leaf in a.leaves)]


def assert_is_stocks(function, device, **options):
    only_on_cpu(device)
    for call in calls_of(function):
        (y, mine), (expected, stock) = (step(call, Arguments(device, **options), tape) for tape in (True, False))
        assert_same_bits(y, expected)
        assert y.stride() == expected.stride()
        for i, (gradient, theirs) in enumerate(zip(mine, stock, strict=True)):
            assert_same_bits(gradient, theirs, f"gradient {i}")


@every(FUNCTIONS)
def test_it_has_stocks_bits(device, function):
    for dtype in DTYPES:
        assert_is_stocks(function, device, dtype=dtype)


@every(FUNCTIONS)
def test_it_has_stocks_bits_and_strides_for_views(device, function):
    for view in LAYOUTS.values():
        assert_is_stocks(function, device, view=view)


@every(FUNCTIONS)
def test_it_has_stocks_bits_where_its_arguments_want_no_gradient(device, function):
    assert_is_stocks(function, device, frozen=True)


def made(y, inputs):
    """Whether ``y`` lies in a storage of its own."""
    addresses = {t.untyped_storage().data_ptr() for t in inputs}
    return isinstance(y, Tensor) and y.untyped_storage().data_ptr() not in addresses


@every(FUNCTIONS)
def test_it_and_views_of_it_are_remade_as_they_were(device, function):
    for call in calls_of(function):
        for view in (None, *LAYOUTS.values()):
            args, kwargs = call(Arguments(device, view=view))
            inputs = leaves(args, kwargs)
            with taping(inputs=inputs) as tape:
                y = function(*args, **kwargs)
                if not made(y, inputs):
                    continue
                views = [y, y.transpose(0, -1), y[1:], y[..., 1:]]
                handles = [tape.pack(part) for part in views]
            for part, handle in zip(views, handles, strict=True):
                assert is_remade(handle), "kept, though all that it was made from is there"
                again = handle.get()
                assert again.data_ptr() != part.data_ptr()
                assert (again.stride(), again.storage_offset()) == (part.stride(), part.storage_offset())
                assert_same_bits(again, part)


class Keeping(nn.Module):
    """All calls of a function, and products that keep their results."""

    def __init__(self, function, producer, tape):
        super().__init__()
        self.function, self.producer, self.tape = function, producer, tape
        self.made = 0

    def forward(self, x):
        total = 0
        with taping() if self.tape else contextlib.nullcontext():
            for call in calls_of(self.function):
                args, kwargs = call(Arguments(x.device, producer=self.producer))
                inputs = leaves(args, kwargs)
                y = self.function(*args, **kwargs)
                if made(y, inputs):
                    self.made += y.untyped_storage().nbytes()
                    self.made -= sum(t.nbytes for t in inputs if not t.is_floating_point())  # which nobody else keeps
                    total = total + consumed(y)[0].sum() + sum(t.sum() for t in inputs if t.requires_grad)
        return {"loss": total}


@every(FUNCTIONS)
def test_it_keeps_no_more_than_stock_and_nothing_of_its_own_where_its_arguments_are_kept(device, function):
    x = random(1, device=device)
    for producer in (torch.clone, torch.sigmoid):  # the second keeps what it makes
        mine, stock = (Keeping(function, producer, tape) for tape in (True, False))
        freed = measure_kept(stock, x).total - measure_kept(mine, x).total
        assert freed >= (mine.made if producer is torch.sigmoid else 0), producer
