"""The table of cheap functions, under a tape: stock's bits and strides from no more bytes, and no wrong one in hazards.

One call of each kind (its handler, and what stock keeps) is asked what it keeps, and has its arguments or its result
written to. A new function needs its arguments in ``support/examples.py``, and nothing here.
"""

import json
import operator
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave import KeptTensorChangedError, measure_kept
from hf_memsave.tape.functions import CHEAP, MAY_ALIAS, NEW, NEW_FUNCTIONAL, named
from hf_memsave.tape.tensors import leaves
from support.examples import Arguments, calls_of, consumed, name_of
from support.helpers import LAYOUTS, assert_same_bits, laid, only_on_cpu, random, taping
from support.steps import patched_copy
from support.tapes import is_remade, sources_of

CALLS = [c for f, handler in CHEAP.items() if not getattr(handler, "is_write", False) for c in calls_of(f)]
#: How each is called: every dtype, every layout, and arguments that want no gradient.
OPTIONS = [
    dict(dtype=torch.float32), dict(dtype=torch.bfloat16, view=LAYOUTS["transposed"]),
    dict(dtype=torch.float64, view=LAYOUTS["sliced"]), dict(dtype=torch.float32, view=LAYOUTS["expanded"]),
    dict(dtype=torch.bfloat16, view=LAYOUTS["offset"], frozen=True),
]  # fmt: skip


def step(call, a, tape):
    """The call, a consumer that keeps its result, and two backwards."""
    args, kwargs = call(a)
    with laid(tape):
        y = call.function(*args, **kwargs)
        if not isinstance(y, Tensor):  # Tensor.type() is a string
            y = a.x
        z, weight = consumed(y)
    dz, found = random(*z.shape, dtype=z.dtype, device=z.device, seed=22), []
    inputs = [weight, *(leaf for leaf in a.leaves if leaf.requires_grad)]
    for _ in range(2):
        try:
            found += torch.autograd.grad(z, inputs, dz, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            assert "not implemented" in str(error)  # floor_divide has no derivative
    return y.detach(), found


def test_every_name_in_a_list_is_a_functions():
    """A misspelt one would do nothing."""
    for names, homes in ((NEW, (torch, Tensor, torch.special)), (NEW_FUNCTIONAL, (F,)), (MAY_ALIAS, (torch, Tensor))):
        assert [name for name in names if not list(named([name], *homes))] == []


def test_every_function_has_stocks_bits_and_strides(device):
    only_on_cpu(device)
    for call, options in product(CALLS, OPTIONS):
        (y, mine), (expected, stock) = (step(call, Arguments(device, **options), tape) for tape in (True, False))
        what = f"{name_of(call.function)} {options}"
        assert_same_bits(y, expected, what)
        assert y.stride() == expected.stride(), what
        for i, (gradient, theirs) in enumerate(zip(mine, stock, strict=True)):
            assert_same_bits(gradient, theirs, f"gradient {i} of {what}")


def is_made(y, inputs):
    addresses = {t.untyped_storage().data_ptr() for t in inputs}
    return isinstance(y, Tensor) and y.untyped_storage().data_ptr() not in addresses


def test_every_function_and_views_of_it_are_remade_as_they_were(device):
    for call, view in product(CALLS, (None, LAYOUTS["transposed"], LAYOUTS["expanded"], LAYOUTS["offset"])):
        args, kwargs = call(Arguments(device, view=view))
        inputs, what = leaves(args, kwargs), name_of(call.function)
        with taping(inputs=inputs) as tape:
            y = call.function(*args, **kwargs)
            if not is_made(y, inputs):
                continue
            views = [y, y.transpose(0, -1), y[1:], y[..., 1:]]
            handles = [tape.pack(part) for part in views]
        for part, handle in zip(views, handles, strict=True):
            assert is_remade(handle), f"{what} is kept, though all that it was made from is there"
            again = handle.get()
            assert again.data_ptr() != part.data_ptr()
            assert (again.stride(), again.storage_offset()) == (part.stride(), part.storage_offset()), what
            assert_same_bits(again, part, what)


def test_a_list_that_changes_later_is_as_it_was(device):
    for call in CALLS:
        args, kwargs = call(Arguments(device, frozen=True))
        tuples = [x for x in args if isinstance(x, tuple)]
        lists = [x for given in (args, kwargs.values(), *tuples) for x in given if isinstance(x, list)]
        with taping(inputs=leaves(args, kwargs)) as tape:
            y = call.function(*args, **kwargs)
            if not lists:
                continue
            expected = y.clone()
            for found in lists:
                found.clear()
            handle = tape.pack(y)
            for found in lists:
                found.append(1)
        assert_same_bits(handle.get(), expected, name_of(call.function))


def kind_of(call):
    """Its handler, which of its tensors stock keeps for it, and what it gives."""
    args, kwargs = call(Arguments(torch.device("cpu")))
    inputs, kept = leaves(args, kwargs), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = call.function(*args, **kwargs)
    addresses = [x.untyped_storage().data_ptr() for x in (*inputs, *[y] * isinstance(y, Tensor))]
    places = {t.untyped_storage().data_ptr() for t in kept}
    which = tuple(address in places for address in addresses), bool(places - {*addresses})
    has_list = any(isinstance(a, (list, tuple)) for a in args)
    given = (y.dtype, y.requires_grad) if isinstance(y, Tensor) else None
    return CHEAP[call.function].__qualname__, *which, has_list, given


KINDS = {kind_of(call): call for call in reversed(CALLS)}.values()
every_kind = pytest.mark.parametrize("call", [*KINDS][::-1], ids=lambda call: name_of(call.function))


class Keeping(nn.Module):
    """A call, and products that keep its result."""

    def __init__(self, call, producer, tape):
        super().__init__()
        self.call, self.producer, self.tape = call, producer, tape
        self.made = 0

    def forward(self, x):
        with laid(self.tape):
            args, kwargs = self.call(Arguments(x.device, producer=self.producer))
            inputs = leaves(args, kwargs)
            y = self.call.function(*args, **kwargs)
            if not is_made(y, inputs):
                return {"loss": x.sum()}
            self.made = y.untyped_storage().nbytes()
            self.made -= sum(t.nbytes for t in inputs if not t.is_floating_point())  # which no other keeps
            return {"loss": consumed(y)[0].sum() + sum(t.sum() for t in inputs if t.requires_grad)}


@every_kind
def test_it_keeps_no_more_than_stock_and_nothing_of_its_own_where_its_arguments_are_kept(device, call):
    x = random(1, device=device)
    for producer in (torch.clone, torch.sigmoid):  # the second keeps what it makes
        mine, stock = (Keeping(call, producer, tape) for tape in (True, False))
        freed = measure_kept(stock, x).total - measure_kept(mine, x).total
        assert freed >= (mine.made if producer is torch.sigmoid else 0), producer


def overwrite(tensors, is_recorded):
    with torch.set_grad_enabled(is_recorded):
        for tensor in tensors:
            tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)


def cloned(argument):
    if isinstance(argument, (list, tuple)):
        return type(argument)([cloned(a) for a in argument])
    return argument.clone(memory_format=torch.preserve_format) if isinstance(argument, Tensor) else argument


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


def outcome(call, a, what, when, is_recorded, consumers, tape, apart=False):
    """Gradients, or the error, of a call and consumers that keep its result, with a write at one point in between.

    It is to the "arguments" or the "result", and "before" that is taken, "inside" the forward or "after" it; ``apart``,
    each function gets copies of its own, so that none can matter.
    """
    args, kwargs = given, named = call(a)
    if apart:
        args, kwargs = cloned(given), {name: cloned(argument) for name, argument in named.items()}
    with laid(tape):
        y = call.function(*args, **kwargs)
        if not isinstance(y, Tensor):
            return []
        y = y.clone() if apart else y
        targets = {"arguments": leaves(given, named), "result": [y], "": []}[what]
        try:
            overwrite(targets if when == "before" else [], is_recorded)
            outputs, weights = zip(*[consumer(y.clone() if apart else y) for consumer in consumers], strict=True)
            overwrite(targets if when == "inside" else [], is_recorded)
            overwrite(targets if when == "after" else [], False)
        except RuntimeError as error:  # such as of a view of a tensor that several elements share
            return error
    seeds = [random(*z.shape, dtype=z.dtype, device=z.device, seed=22) for z in outputs]
    try:
        return torch.autograd.grad(outputs, [*weights, *a.leaves], seeds, allow_unused=True)
    except RuntimeError as error:
        return error


def assert_stocks_or_refused(device, call, what="", when="", is_recorded=True, consumers=(consumed,)):
    """Where stock gives gradients they have its bits, though after the forward, unseen, it may refuse; else either."""

    def run(**options):
        return outcome(call, Arguments(device), what, when, is_recorded, consumers, **options)

    mine, stock = run(tape=True), run(tape=False)
    if isinstance(stock, Exception):
        if isinstance(mine, RuntimeError):
            return
        stock = run(tape=False, apart=True)
    elif when == "after" and isinstance(mine, KeptTensorChangedError):
        return
    told = f"{what} written {when}, recorded: {is_recorded}, for {[consumer.__name__ for consumer in consumers]}"
    if isinstance(mine, Exception):
        raise AssertionError(told) from mine
    for i, (gradient, expected) in enumerate(zip(mine, stock, strict=True)):
        assert_same_bits(gradient, expected, f"gradient {i}, {told}")


@every_kind
def test_a_write_is_stocks_or_refused(device, call):
    only_on_cpu(device)
    for point in product(("arguments", "result"), ("before", "inside", "after"), (True, False)):
        assert_stocks_or_refused(device, call, *point)
    for consumers in ((consumed, scribbled), (scribbled, consumed)):  # one writes to what it kept, in its backward
        assert_stocks_or_refused(device, call, consumers=consumers)


#: Elementwise operations of PyTorch that the table leaves out -> why.
REFUSED = {
    "positive conj real imag": "an argument, or a view of it: nothing is made",
    "max min": "of one tensor, a reduction; of two, `maximum` and `minimum` are in the table",
    "conj_physical": "of real numbers, its argument",
    "cdouble chalf": "of dtypes that no model computes in",
    "frexp": "two tensors at once",
    "nn.functional.rrelu": "draws",
    "jiterator_unary jiterator_binary jiterator_binary_return_by_ref": "the caller's own kernel",
    "igamma igammac mvlgamma polygamma special.polygamma special.zeta": "a series: of many passes' time",
    **{
        f"special.{name}": "no derivative: no activation passes through it"
        for name in """airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1
        modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0
        chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
        hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w""".split()
    },
}


@pytest.mark.long
def test_every_elementwise_operation_of_pytorch_is_in_the_table_or_refused():
    """In every spelling that PyTorch's own tests know: function, method, operator, in place, aliases."""
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "support.op_infos"], cwd=tests, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lacking = json.loads(done.stdout.splitlines()[-1])
    assert len(lacking) > 100
    refused = {name for names in REFUSED for name in names.split()}
    assert {name: spellings for name, spellings in lacking.items() if spellings and name not in refused} == {}
    assert {name for name in refused if lacking.get(name) == []} == set()


@pytest.mark.parametrize(
    "write",
    [lambda x, y: torch.bitwise_left_shift(x, 1, out=y), lambda x, y: operator.ilshift(y, 1),
     lambda x, y: y.bitwise_right_shift_(x)],
    ids=["into", "in place", "method"],
)  # fmt: skip
def test_what_was_made_of_numbers_that_are_shifted_later_is_as_it_was(write):
    x, y = torch.arange(6), torch.arange(6) + 3
    z = y.clone()
    with taping(inputs=[x, z]) as tape:
        made = (z >> 1) & 3
        expected, handle = made.clone(), tape.pack(made)
        assert is_remade(handle)
        write(x, z)
    assert_same_bits(handle.get(), expected)


def test_what_autocast_converts_on_a_processor_is_remade_in_the_dtype_that_it_had():
    x, weight, low = random(4, 6), random(1, seed=1), random(4, 6, seed=2).to(torch.bfloat16)
    for function, args in ((F.prelu, (x, weight)), (torch.prelu, (x, weight)), (torch.polar, (low.abs(), low))):
        with torch.autocast("cpu", torch.bfloat16), taping(inputs=args) as tape:
            y = function(*args)
            handle = tape.pack(y)
        assert is_remade(handle) and handle.get().dtype == y.dtype
        assert torch.equal(handle.get(), y)


@pytest.mark.parametrize("convert", [Tensor.type_as, Tensor.to], ids=name_of)
def test_of_a_tensor_that_is_there_for_its_dtype_nothing_is_held(device, convert):
    x, other = random(4, 6, device=device), random(8, 6, device=device).bfloat16()
    with taping(inputs=[x]) as tape:
        handle = tape.pack(convert(x, other))
    assert is_remade(handle) and [source.data_ptr() for source in sources_of(handle)] == [x.data_ptr()]
    assert_same_bits(handle.get(), x.bfloat16())


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, lambda size: torch.full(size, 2.0)])
def test_numbers_are_made_again_on_the_device_that_they_were_on(make):
    with taping() as tape:
        made = make((4, 6))
        handle = tape.pack(made)
    with torch.device("meta"):
        again = handle.get()
    assert is_remade(handle)
    assert_same_bits(again, made)


class Packed(nn.Module):
    """A frozen linear of four bits, eight to an integer, unpacked as GPTQ's and AWQ's are, and a trained adapter."""

    def __init__(self, width, shift):
        super().__init__()
        numbers = torch.arange(width // 8 * width, dtype=torch.int32).view(width // 8, 1, width)
        self.register_buffer("packed", (numbers * 2654435).int())
        self.register_buffer("scales", random(1, width) / 16)
        self.register_buffer("places", torch.arange(0, 32, 4, dtype=torch.int32).view(1, 8, 1))
        self.down, self.up, self.shift = nn.Linear(width, 2), nn.Linear(2, width), shift

    def forward(self, x):
        numbers = self.shift(self.packed, self.places) & 15
        weight = (numbers.reshape(x.shape[-1], -1) - 8) * self.scales
        return x @ weight + self.up(self.down(x))


@pytest.mark.parametrize("shift", [operator.rshift, torch.bitwise_right_shift, Tensor.bitwise_right_shift], ids=name_of)
def test_weights_that_are_unpacked_by_shifts_are_not_kept(device, shift):
    width, x = 64, random(4, 64, device=device)
    torch.manual_seed(0)
    stock = nn.Sequential(Packed(width, shift), Packed(width, shift)).to(device)
    ours = patched_copy(stock)
    freed = measure_kept(stock, x).total - measure_kept(ours, x).total
    assert freed >= width * width * 4 - width * 4  # of the second layer, less a copy of its scales
    gradients = []
    for model in (stock, ours):
        model(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for mine, expected in zip(*gradients, strict=True):
        assert_same_bits(mine, expected)
