"""Whatever writes to a tensor in the forward: what was to be remade from the tensor is as it was, as in stock."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave import KeptTensorChangedError
from hf_memsave.tape.functions import CHEAP, writes
from hf_memsave.tape.table import TABLE, UNRECORDED
from support.examples import Arguments, calls_of, name_of
from support.helpers import assert_same_bits, random, taping
from support.tapes import is_remade

WRITERS = [function for function, handler in CHEAP.items() if handler is writes]
#: Named as if they wrote to a tensor, which they do not.
NOT_WRITING = {"requires_grad_", "detach_", "share_memory_", "rename_"}


def check(target, write, grad=True, may_refuse=False, what=""):
    """``write(target)`` between two that are remade from ``target``: both are as they were.

    Where no function mode sees the write, what was taken before it ``may_refuse`` instead.
    """
    expected = target.detach() * 2, target.detach() * 3
    with taping(inputs=[target]) as tape:
        taken, recorded = target.detach() * 2, target.detach() * 3
        handle = tape.pack(taken)
        assert is_remade(handle), "nothing is remade from it"
        with torch.set_grad_enabled(grad):
            write(target)
        later = tape.pack(recorded)
    with contextlib.suppress(*[KeptTensorChangedError] * may_refuse):
        assert_same_bits(handle.get(), expected[0], what)
    assert_same_bits(later.get(), expected[1], what)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_every_function_that_writes(device, grad):
    for function in WRITERS:
        for call in calls_of(function):
            args, kwargs = call(Arguments(device, frozen=True))

            def write(target, call=call, args=args[1:], kwargs=kwargs):
                call.function(target, *args, **kwargs)

            try:
                write(call(Arguments(device, frozen=True))[0][0])
            except NotImplementedError:  # no kernel
                continue
            if args[0].is_sparse:  # nothing is remade from it
                with taping():
                    write(args[0])
            else:  # no function mode sees set_
                check(args[0], write, grad, function is torch.Tensor.set_, name_of(function))


def test_every_function_that_writes_is_known():
    homes = torch, torch.Tensor, F, torch._C._nn, torch.special
    found = {name: getattr(h, name) for h in homes for name in dir(h) if name.endswith("_") and not name.endswith("__")}
    unknown = {name for name, f in found.items() if callable(f) and f not in TABLE}
    assert {name for name in unknown - NOT_WRITING if not name.startswith("_")} == set()


OTHERS = {
    "out=": lambda t: torch.add(t, 1, out=t), "out= of a view": lambda t: torch.add(t[0], 1, out=t[1]),
    "inplace= by name": lambda t: F.silu(t, inplace=True), "inplace= by place": lambda t: F.elu(t, 1.0, True),
    "inplace=, all by name": lambda t: F.hardswish(input=t, inplace=True),
    "a rectifier": lambda t: F.relu(t, inplace=True), "leaky relu": lambda t: F.leaky_relu(t, 0.1, True),
    "hardtanh": lambda t: F.hardtanh(t, inplace=True), "rrelu": lambda t: F.rrelu(t, inplace=True),
    "threshold": lambda t: F.threshold(t, 0.1, 0.5, inplace=True), "F.elu_": lambda t: F.elu_(t),
    "F.selu_": lambda t: F.selu_(t), "F.leaky_relu_": lambda t: F.leaky_relu_(t),
    "dropout": lambda t: F.dropout(t, 0.5, inplace=True), "dropout of all": lambda t: F.dropout(t, 1.0, inplace=True),
    "torch.dropout_": lambda t: torch.dropout_(t, 0.5, True),
    "alpha dropout": lambda t: F.alpha_dropout(t, 0.5, True, True),
    "feature alpha dropout": lambda t: F.feature_alpha_dropout(t, 0.5, True, True),
    "channel dropout": lambda t: F.dropout1d(t, 0.5, True, True), "a module": lambda t: nn.ReLU6(inplace=True)(t),
    "an operator": lambda t: t.__iadd__(1), "an item": lambda t: t.__setitem__((0, slice(1, 3)), 1.0),
    "a view": lambda t: t[1:].mul_(2), "a detached view": lambda t: t.detach().t().mul_(2),
    ".data": lambda t: t.data.mul_(2), ".data of a view": lambda t: t[1:].data.zero_(),
    "an unbound part": lambda t: t.unbind()[0].mul_(2), "foreach": lambda t: torch._foreach_mul_([t], 2),
    "self by name": lambda t: torch.relu_(input=t),
}  # fmt: skip
#: What is written to inside them is known only afterwards.
HIDDEN = {
    "out= of a product": lambda t: torch.mm(t, torch.eye(20, device=t.device), out=t),
    "init": lambda t: nn.init.ones_(t),
    "init from a distribution": lambda t: nn.init.normal_(t),
    "normalize": lambda t: F.normalize(t, out=t),
    "aten": lambda t: torch.ops.aten.mul_(t, 2),
}


@pytest.mark.parametrize("name", OTHERS | HIDDEN)
def test_another_way_to_write(device, name):
    """Before what is taken and after it; a hidden one may be refused. And to what was made, before it is kept."""
    write, source = (OTHERS | HIDDEN)[name], random(8, 20, device=device)
    for grad in (True, False):
        check(random(8, 20, device=device), write, grad, name in HIDDEN)
    with taping(inputs=[source]) as tape:
        y, earlier = source * 2, source * 3
        first, before = tape.pack(earlier), earlier.clone()
        write(y)
        write(earlier)
        handle, second = tape.pack(y), tape.pack(earlier)
    assert_same_bits(handle.get(), y)
    assert_same_bits(second.get(), earlier)
    with contextlib.suppress(*[KeptTensorChangedError] * (name in HIDDEN)):
        assert_same_bits(first.get(), before, "of the version before")


@pytest.mark.parametrize("left", ["activation", "dropout", "frozen", "all"])
def test_a_write_of_a_kind_that_is_left_to_stock_or_where_nothing_is_recorded(device, left):
    for name in ("inplace= by name", "a rectifier", "dropout", "an operator", ".data", "out="):
        target = random(8, 20, device=device)
        expected = target * 2
        with taping(left, inputs=[target]) as tape:
            handle = tape.pack(target * 2)
            tape.frame = tape.frame._replace(table=UNRECORDED) if left == "all" else tape.frame
            OTHERS[name](target)
        assert_same_bits(handle.get(), expected, name)


def test_what_modules_write_to(device):
    """A batch norm's running statistics, and rows of an embedding that are renormalized."""
    norm, x = nn.BatchNorm1d(20).to(device), random(8, 20, device=device)
    check(norm.running_mean, lambda _: norm(x), may_refuse=True)
    embedding = nn.Embedding(8, 20, max_norm=0.1).to(device)
    check(embedding.weight.detach(), lambda _: embedding(torch.arange(8, device=device)))


@pytest.mark.parametrize("left", [(), ("frozen",)], ids=["all", "frozen left to stock"])
def test_what_was_made_of_running_statistics_is_as_it_was(device, left):
    norm, x = nn.BatchNorm1d(20).to(device), random(8, 20, device=device)
    with taping(*left, inputs=[norm.running_var]) as tape:
        made = norm.running_var * 2
        handle, expected = tape.pack(made), made.clone()
        norm(x)
    assert_same_bits(handle.get(), expected)


def test_a_source_that_is_written_to_after_the_forward_raises(device):
    for name in ("a view", "a detached view", "out=", "an operator", "inplace= by name"):
        source = random(8, 20, device=device)
        with taping(inputs=[source]) as tape:
            handle = tape.pack(source * 2)
        OTHERS[name](source)
        with pytest.raises(KeptTensorChangedError, match="modified by an inplace operation"):
            handle.get()


@pytest.mark.parametrize("what", ["a source", "what is kept", "a kept output", "a weight", "a parameter"])
def test_a_change_after_the_forward_raises_as_in_stock(x, weight, what):
    if what == "a parameter":
        weight = nn.Parameter(weight.detach())
    with taping():
        h = x * 1
        y = torch.exp(h) if what == "a kept output" else torch.sin(h) if what == "a source" else h
        z = (y @ weight.t()).sum() if what == "a parameter" else (y @ weight).sum()
    changed = {"a source": h, "what is kept": h, "a kept output": y}.get(what, weight)
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(
        KeptTensorChangedError, match="modified by an inplace operation.*version 0 and is now at version 1"
    ):
        z.backward()


def test_a_norms_weight_is_copied_so_that_writes_through_data_do_not_matter(device):
    scale, x = nn.Parameter(random(20, device=device)), random(4, 20, device=device)
    with taping(inputs=[x]) as tape:
        y = (scale * x).detach()
        handle, expected = tape.pack(y), y.clone()
    scale.data.zero_()
    assert is_remade(handle)
    assert_same_bits(handle.get(), expected)
