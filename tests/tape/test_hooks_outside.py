"""The tape beside the saved-tensor hooks of others: checkpointing, CPU offload, another tape, the user's own."""

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_memsave import patch
from hf_memsave.tape import Tape, current, private, table_without
from hf_memsave.tape.frame import Frame
from support.helpers import assert_same_bits, laid, nodes, random, taping
from support.steps import assert_same, backward
from support.tapes import of_ones


def test_what_is_remade_is_invisible_under_a_foreign_hook(x, weight):
    kept = []
    with taping(inputs=[x]):
        y = torch.sin(x.detach())
        with saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda h: h):
            z = (y @ weight).sum()
            with taping():
                z = z + (y @ weight).sum()
    assert kept.count(y.shape) == 2  # both times as a plain tensor, through the foreign hook
    z.backward()
    assert_same_bits(weight.grad, 2 * of_ones(y))


def test_what_is_kept_goes_through_the_hook_outside_and_is_fetched_once_per_backward(x, weight):
    packed, fetched = [], []
    hooks = saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda h: fetched.append(1) or h)
    with hooks, taping():
        h = x.detach().sigmoid()
        z = (h @ weight + torch.sin(h) @ weight + torch.cos(h) @ weight).sum()
    assert packed == [(4, 20)]  # h once; weight is not needed, as x wants no gradient
    z.backward(retain_graph=True)
    assert_same_bits(weight.grad, of_ones(torch.cos(h)) + of_ones(torch.sin(h)) + of_ones(h))
    assert len(fetched) == 1
    z.backward()
    assert len(fetched) == 2


def test_strides_that_a_hook_outside_loses_are_restored(device, weight):
    x, seen = random(20, 4, device=device).T, []

    def fn(x):
        seen.append(x.stride())
        return torch.sin(x)

    with saved_tensors_hooks(lambda t: t.contiguous(), lambda h: h), Tape(Frame({}), inputs=[x]) as tape:
        y = fn(x)
        tape.record(y, fn, (x,))
        z = (y @ weight).sum()
    z.backward()
    assert seen == [x.stride()] * 2
    assert_same_bits(weight.grad, of_ones(torch.sin(x)))


def test_the_innermost_tape_is_the_current_one_until_its_block_ends_or_raises():
    with taping() as outer:
        with taping() as inner:
            assert current() is inner
        assert current() is outer
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            assert current() is None
            with taping() as beyond:
                assert current() is beyond
    assert current() is None
    with pytest.raises(ZeroDivisionError), taping():
        raise ZeroDivisionError
    assert current() is None
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_nothing_crosses_from_one_checkpointed_block_into_the_next_which_keeps_nothing_but_its_inputs(
    x, weight, use_reentrant
):
    def block(h, tape=True):
        with laid(tape):
            return torch.sin(h @ weight) * h.cos()

    def once(h):
        with taping():
            return torch.sin(torch.exp(h) @ weight)

    with taping():
        y = checkpoint(once, x * 1, use_reentrant=use_reentrant)
    assert not nodes()
    y.sum().backward()

    def run(tape):
        h = x
        with laid(tape):
            for _ in range(3):
                h = checkpoint(block, h, use_reentrant=use_reentrant) if tape else block(h, False)
        x.grad = weight.grad = None
        h.sum().backward()
        return x.grad, weight.grad

    for mine, stock in zip(run(True), run(False), strict=True):
        assert_same_bits(mine, stock)


PACKED = {"itself": lambda t: t, "an int": id, "a list": lambda t: [t], "a dict": lambda t: {"t": t}}


@pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED)
def test_a_hook_outside_a_patched_model_packs_what_it_likes(model, x, pack):
    """In the first step too, which is counted."""
    stock = backward(model, model(x).sum())
    patch(model)
    for _ in range(2):
        held = {}

        def keep(tensor, held=held):
            packed = pack(tensor)
            held[id(packed)] = packed, tensor
            return packed

        with saved_tensors_hooks(keep, lambda packed, held=held: held[id(packed)][1]):
            loss = model(x).sum()
        assert_same(backward(model, loss), stock)


NO_HOOKS = {
    "disabled hooks": lambda: disable_saved_tensors_hooks("not here"),
    "no gradients": torch.no_grad,
    "forward mode": torch.autograd.forward_ad.dual_level,
}


@pytest.fixture
def model(device):
    return nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 1)).to(device)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("where", [*NO_HOOKS, "tracing"])
def test_a_patched_model_lays_no_tape(model, x, where):
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(current()))
    patch(model)
    with NO_HOOKS.get(where, contextlib.nullcontext)():
        torch.jit.trace(model, x) if where == "tracing" else model(x)
    assert set(seen) == {None}
    model(x)
    assert isinstance(seen[-1], Tape)


def test_a_tape_that_cannot_be_laid_leaves_nothing_behind():
    """Inputs that it cannot look at raise: hooks and modes are as they were before."""
    inputs = (1 / 0 for _ in range(1))
    with save_on_cpu():
        before = private.innermost_hooks(), private.innermost_mode()
        with pytest.raises(ZeroDivisionError), Tape(Frame(table_without()), inputs=inputs):
            pass
        assert (private.innermost_hooks(), private.innermost_mode()) == before
    assert private.innermost_hooks() is None
