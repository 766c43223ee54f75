"""Every function of the table of cheap functions, where its arguments or its result are written to meanwhile.

Where stock gives gradients, they have stock's bits: what the tape sees written to is as it was. Only after the forward,
where it does not see it, may it refuse. Where stock refuses, it refuses, or is right.
"""

import contextlib
from itertools import product

import torch
from torch import Tensor

from hf_memsave import KeptTensorChangedError
from hf_memsave.tape.functions import CHEAP
from hf_memsave.tape.tensors import leaves
from support.examples import Arguments, calls_of, consumed, every
from support.helpers import assert_same_bits, only_on_cpu, random, taping

FUNCTIONS = [function for function, handler in CHEAP.items() if not getattr(handler, "is_write", False)]


def overwrite(tensor):
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.add_(1)


def written(tensors, is_recorded):
    with torch.set_grad_enabled(is_recorded):
        for tensor in tensors:
            overwrite(tensor)


def cloned(argument):
    if isinstance(argument, (list, tuple)):
        return type(argument)([cloned(a) for a in argument])
    return argument.clone(memory_format=torch.preserve_format) if isinstance(argument, Tensor) else argument


class Program:
    """A call, consumers that keep its result, and something done to tensors at one point in between.

    Args:
        what: "arguments" or "result": what is written to.
        when: "before", "inside" or "after": the result is taken, in the forward, or after it.
        is_recorded: Whether the write is for autograd to see, too.
        consumers: Each gives what goes into the loss, and a leaf.
    """

    def __init__(self, call, device, what="", when="", is_recorded=True, consumers=(consumed,)):
        self.call, self.device, self.what, self.when, self.is_recorded = call, device, what, when, is_recorded
        self.consumers = consumers

    def __str__(self):
        written = f"{self.what} written {self.when}, recorded: {self.is_recorded}" if self.what else "nothing written"
        return f"{self.call.function}, {written}, for {[consumer.__name__ for consumer in self.consumers]}"

    def outcome(self, tape, apart=False):
        """Gradients, or the error; ``apart``: each function gets copies of its own, so that no write can matter."""
        a = Arguments(self.device)
        args, kwargs = given, named = self.call(a)
        if apart:
            args, kwargs = cloned(given), {name: cloned(argument) for name, argument in named.items()}
        with taping() if tape else contextlib.nullcontext():
            y = self.call.function(*args, **kwargs)
            if not isinstance(y, Tensor):
                return []
            y = y.clone() if apart else y
            targets = {"arguments": leaves(given, named), "result": [y], "": []}[self.what]
            try:
                if self.when == "before":
                    written(targets, self.is_recorded)
                outputs, weights = zip(
                    *[consumer(y.clone() if apart else y) for consumer in self.consumers], strict=True
                )
                if self.when == "inside":
                    written(targets, self.is_recorded)
                if self.when == "after":
                    written(targets, is_recorded=False)
            except RuntimeError as error:  # such as of a view of a tensor that several elements share
                return error
        seeds = [random(*z.shape, dtype=z.dtype, device=z.device, seed=22) for z in outputs]
        try:
            return torch.autograd.grad(outputs, [*weights, *a.leaves], seeds, allow_unused=True)
        except RuntimeError as error:
            return error


def assert_stocks_or_refused(program):
    mine, stock = program.outcome(tape=True), program.outcome(tape=False)
    if isinstance(stock, Exception):
        if isinstance(mine, RuntimeError):
            return
        stock = program.outcome(tape=False, apart=True)
    elif program.when == "after" and isinstance(mine, KeptTensorChangedError):
        return
    if isinstance(mine, Exception):
        raise AssertionError(str(program)) from mine
    for i, (gradient, expected) in enumerate(zip(mine, stock, strict=True)):
        assert_same_bits(gradient, expected, f"gradient {i} of {program}")


@every(FUNCTIONS)
def test_a_write_is_stocks_or_refused(device, function):
    only_on_cpu(device)
    for call in calls_of(function):
        for point in product(("arguments", "result"), ("before", "inside", "after"), (True, False)):
            assert_stocks_or_refused(Program(call, device, *point))


class Scribbles(torch.autograd.Function):
    """Its backward writes to what it kept."""

    @staticmethod
    def forward(ctx, y, weight):
        ctx.save_for_backward(y)
        return y * weight

    @staticmethod
    def backward(ctx, dz):
        (y,) = ctx.saved_tensors
        dweight = (dz * y).to(dz.dtype)
        if y.stride() == () or 0 not in y.stride():
            y.zero_()
        return None, dweight


def scribbled(y):
    weight = torch.ones(y.shape, device=y.device, requires_grad=True)
    return Scribbles.apply(y, weight), weight


@every(FUNCTIONS)
def test_a_consumer_that_writes_to_what_it_kept_spoils_nothing_for_others(device, function):
    only_on_cpu(device)
    for call in calls_of(function):
        for consumers in ((consumed, scribbled), (scribbled, consumed)):
            assert_stocks_or_refused(Program(call, device, consumers=consumers))


@every(FUNCTIONS)
def test_a_list_that_changes_later_is_as_it_was(device, function):
    only_on_cpu(device)
    for call in calls_of(function):
        a = Arguments(device, frozen=True)
        args, kwargs = call(a)
        with taping() as tape:
            y = function(*args, **kwargs)
            if not isinstance(y, Tensor):
                continue
            lists = [x for x in (*args, *kwargs.values()) if isinstance(x, list)]
            lists += [x for arg in args if isinstance(arg, tuple) for x in arg if isinstance(x, list)]
            expected = y.clone()
            for found in lists:
                found.clear()
            handle = tape.pack(y)
            for found in lists:
                found.append(1)
        assert_same_bits(handle.get(), expected)


@every(FUNCTIONS)
def test_a_second_backward_gives_the_bits_of_the_first(device, function):
    for call in calls_of(function):
        a = Arguments(device)
        args, kwargs = call(a)
        with taping():
            y = function(*args, **kwargs)
            if not isinstance(y, Tensor) or "NotImplemented" in str(y.grad_fn):
                continue  # no derivative
            z, weight = consumed(y)
        first, second = (
            torch.autograd.grad(z.sum(), [weight, *a.leaves], allow_unused=True, retain_graph=True) for _ in range(2)
        )
        for mine, before in zip(second, first, strict=True):
            assert_same_bits(mine, before)
