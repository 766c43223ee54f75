"""The tape's hazards: each test names one way in which a promise could give back the wrong tensor, or hold too much."""

import contextlib
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import hf_memsave
from hf_memsave import KeptTensorChangedError
from hf_memsave.tape import Tape, current, promise, promised


class Counter:
    """A recomputation that counts how often it ran."""

    def __init__(self, fn):
        self.fn, self.calls = fn, 0

    def __call__(self, *inputs):
        self.calls += 1
        return self.fn(*inputs)


@pytest.fixture
def x(device):
    return torch.randn(4, 8, device=device, requires_grad=True)


@pytest.fixture
def weight(device):
    return torch.randn(8, 8, device=device, requires_grad=True)


def is_alive(ref: StorageWeakRef) -> bool:
    gc.collect()
    return not ref.expired()


def ref_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


# What a promise frees.


def test_a_taken_promise_frees_the_tensor_and_gives_it_back(x, weight):
    with Tape():
        y = promised(torch.sin, x)
        ref = ref_of(y)
        z = (y @ weight).sum()
    del y
    assert not is_alive(ref)
    z.backward()
    torch.testing.assert_close(weight.grad, torch.sin(x.detach()).T @ torch.ones(4, 8, device=x.device), rtol=0, atol=0)


def test_without_a_tape_the_tensor_is_kept(x, weight):
    y = promised(torch.sin, x)
    ref = ref_of(y)
    z = (y @ weight).sum()
    del y
    assert is_alive(ref)
    z.backward()


def test_one_recomputation_serves_all_consumers_of_a_backward(x, weight):
    fn = Counter(torch.sin)
    with Tape():
        y = promise(torch.sin(x), fn, x)
        z = sum((y @ weight).sum() for _ in range(3))
    z.backward()
    assert fn.calls == 1


def test_promises_chain(x, weight):
    with Tape():
        a = promised(torch.sin, x)
        b = promised(torch.exp, a)
        refs = [ref_of(a), ref_of(b)]
        z = (b @ weight).sum()
    del a
    assert not is_alive(refs[0])  # b's promise holds a's promise, not a (exp itself keeps b)
    z.backward()
    expected = torch.exp(torch.sin(x.detach())).T @ torch.ones(4, 8, device=x.device)
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)


# A promise nobody took; address reuse.


def test_a_promise_nobody_took_dies_with_its_tensor(device):
    with Tape():
        x = torch.randn(4, 8, device=device, requires_grad=True) * 2
        ref = ref_of(x)
        y = promised(torch.cos, x.detach())
        del x
        assert is_alive(ref)
        del y
        assert not is_alive(ref)


def test_a_promise_holds_nothing_once_its_tape_ended(device):
    x = torch.randn(4, 8, device=device)
    ref = ref_of(x)
    with Tape():
        y = promised(torch.cos, x)
    del x
    assert not is_alive(ref)
    assert y.shape == (4, 8)


def test_a_new_tensor_at_an_old_address_is_not_promised(device):
    x, w = torch.randn(1 << 14, device=device), torch.ones(1 << 14, device=device, requires_grad=True)
    reused = 0
    for step in range(200):
        with Tape():
            y = promised(torch.sin, x)
            address = y.data_ptr()
            del y
            fresh = torch.full_like(x, float(step))
            reused += fresh.data_ptr() == address
            z = (fresh * w).sum()
        (dw,) = torch.autograd.grad(z, w)
        assert torch.equal(dw, torch.full_like(w, float(step)))
    assert reused, "the allocator never reused an address: the test tested nothing"


# Writes in place.


def test_an_output_written_before_it_is_kept_is_kept_as_it_is(x, weight):
    with Tape():
        y = promised(torch.sin, x.detach())
        y.add_(1)
        z = (y @ weight).sum()
    z.backward()
    torch.testing.assert_close(weight.grad, (torch.sin(x.detach()) + 1).T @ torch.ones(4, 8, device=x.device))


def test_an_input_written_before_its_output_is_kept_makes_no_promise(weight, device):
    x = torch.randn(4, 8, device=device)
    with Tape():
        y = promised(torch.sin, x)
        expected = y.clone()
        x.zero_()
        z = (y @ weight).sum()
    z.backward()
    torch.testing.assert_close(weight.grad, expected.T @ torch.ones(4, 8, device=device), rtol=0, atol=0)


def test_an_input_written_after_its_output_was_kept_raises(weight, device):
    x = torch.randn(4, 8, device=device)
    with Tape():
        z = (promised(torch.sin, x) @ weight).sum()
    x.zero_()
    with pytest.raises(KeptTensorChangedError, match="version 0 and is now at version 1"):
        z.backward()


def test_a_kept_tensor_written_in_place_raises_as_in_stock(x, weight):
    with Tape():
        y = x * 2
        z = (y @ weight).sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_a_kept_output_written_in_place_raises_as_in_stock(x):
    with Tape():
        y = torch.exp(x)
        z = y.sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_an_in_place_parameter_update_between_forward_and_backward_raises(x, weight):
    with Tape():
        z = (promised(torch.sin, x) @ weight).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_a_norm_weight_is_copied_so_that_writes_through_data_do_not_matter(device):
    scale = nn.Parameter(torch.rand(8, device=device))
    x, w = torch.randn(4, 8, device=device), torch.randn(8, 8, device=device, requires_grad=True)
    expected = (scale.detach() * x).T @ torch.ones(4, 8, device=device)
    with Tape():
        z = (promised(torch.mul, scale, x).detach() @ w).sum()
    scale.data.zero_()
    z.backward()
    torch.testing.assert_close(w.grad, expected, rtol=0, atol=0)


# Foreign hooks.


def test_a_promise_is_invisible_under_a_foreign_hook(x, weight):
    kept = []
    with Tape():
        y = promised(torch.sin, x.detach())
        with saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda h: h):
            z = (y @ weight).sum()
            with Tape():
                z = z + (y @ weight).sum()
    assert kept.count(y.shape) == 2  # both times as a plain tensor, through the foreign hook
    z.backward()


def test_what_is_really_kept_goes_through_the_hook_outside(x, weight):
    packed = []
    with saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda h: h), Tape():
        z = (promised(torch.sin, x.detach()) @ weight).sum()
    assert packed == [(4, 8)]  # the promise's input once; weight is not needed, as x wants no gradient
    z.backward()


def test_a_handle_of_the_outer_hook_is_fetched_once_per_backward(device, weight):
    fetched = []
    x = torch.randn(4, 8, device=device)
    with saved_tensors_hooks(lambda t: t, lambda h: fetched.append(1) or h), Tape():
        y = promised(torch.mul, x, x)  # the same tensor twice
        z = (y @ weight).sum() + (y @ weight).sum()
    z.backward()
    assert len(fetched) == 1


def test_strides_that_an_outer_hook_loses_are_restored(device, weight):
    x = torch.randn(8, 4, device=device).T
    seen = []

    def recompute(x):
        seen.append(x.stride())
        return torch.sin(x)

    with saved_tensors_hooks(lambda t: t.contiguous(), lambda h: h), Tape():
        y = promise(torch.sin(x), recompute, x)
        z = (y @ weight).sum()
    z.backward()
    assert seen == [x.stride()]
    torch.testing.assert_close(weight.grad, torch.sin(x).T @ torch.ones(4, 8, device=device), rtol=0, atol=0)


def test_the_tape_is_entered_once(x):
    with Tape() as outer, Tape() as inner:
        assert current() is outer
        assert inner.hooks is None
    assert current() is None


def test_the_tape_is_left_when_the_block_raises(x):
    with pytest.raises(ZeroDivisionError), Tape():
        raise ZeroDivisionError
    assert current() is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_promise_does_not_cross_checkpointed_frames(x, weight, reentrant):
    def block(h):
        with Tape():
            return promised(torch.sin, h @ weight)

    def run(wrap):
        h = x
        for _ in range(3):
            h = wrap(h)
        return torch.autograd.grad(h.sum(), (x, weight))

    with Tape():
        got = run(lambda h: checkpoint(block, h, use_reentrant=reentrant)) if not reentrant else None
    if reentrant:
        h = x
        with Tape():
            for _ in range(3):
                h = checkpoint(block, h, use_reentrant=True)
        h.sum().backward()
        got = (x.grad, weight.grad)
    for a, b in zip(got, run(block), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# One storage, one promise.


def test_a_part_of_a_larger_storage_is_not_promised(x, weight):
    with Tape():
        whole = torch.cat([x.detach(), x.detach()])
        part = whole[:4]
        y = promise(part, lambda x: x * 0, x.detach())
        z = (y @ weight).sum()
    z.backward()
    torch.testing.assert_close(weight.grad, x.detach().T @ torch.ones(4, 8, device=x.device), rtol=0, atol=0)


def test_an_output_that_shares_its_input_is_not_promised(x, weight):
    with Tape():
        y = promise(x.detach().view(4, 8), lambda x: x * 0, x.detach())
        z = (y @ weight).sum()
    z.backward()
    torch.testing.assert_close(weight.grad, x.detach().T @ torch.ones(4, 8, device=x.device), rtol=0, atol=0)


def test_a_bitwise_view_of_a_promised_tensor_is_kept(device):
    w = torch.randn(4, 8, device=device, dtype=torch.float16, requires_grad=True)
    with Tape():
        y = promise(torch.ones(4, 8, device=device, dtype=torch.bfloat16), lambda: 1 / 0)
        z = (y.view(torch.float16) * w).sum()
    z.backward()
    torch.testing.assert_close(w.grad, y.view(torch.float16), rtol=0, atol=0)


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y,
        lambda y: y.view(2, 16),
        lambda y: y.T,
        lambda y: y[1:, ::2],
        lambda y: y.view(4, 2, 4).transpose(0, 1),
    ],
)
def test_every_view_of_a_promised_tensor_comes_back_with_its_geometry(x, view):
    shape = view(x.detach()).shape
    w = torch.randn(shape, device=x.device, requires_grad=True)
    kept = []
    with Tape() as tape:
        y = promised(torch.sin, x.detach())
        ticket = tape.pack(view(y))
        z = (view(y) * w).sum()
    kept = tape.unpack(ticket)
    assert (kept.shape, kept.stride(), kept.storage_offset()) == (shape, view(y).stride(), view(y).storage_offset())
    z.backward()
    torch.testing.assert_close(w.grad, view(torch.sin(x.detach())), rtol=0, atol=0)


# Autocast.


def test_recomputation_runs_under_the_autocast_state_of_the_forward(device):
    a = torch.randn(4, 8, device=device)
    b = torch.randn(8, 8, device=device)
    w = torch.randn(4, 8, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16), Tape():
        y = promised(torch.matmul, a, b)
        z = (y * w).sum()
    assert y.dtype == torch.bfloat16
    expected = y.float()
    del y
    z.backward()
    torch.testing.assert_close(w.grad, expected, rtol=0, atol=0)


def test_recomputation_leaves_an_autocast_it_did_not_have(device):
    a, b = torch.randn(4, 8, device=device), torch.randn(8, 8, device=device)
    w = torch.randn(4, 8, device=device, requires_grad=True)
    with Tape():
        y = promised(torch.matmul, a, b)
        z = (y * w).sum()
    expected = y.clone()
    del y
    with torch.autocast(device.type, torch.bfloat16):
        z.backward()
    torch.testing.assert_close(w.grad, expected, rtol=0, atol=0)


# Twice, never, and by halves.


def test_retain_graph_gives_the_same_gradient_again(x, weight):
    with Tape():
        z = (promised(torch.sin, x) @ weight).sum()
    first = torch.autograd.grad(z, (x, weight), retain_graph=True)
    second = torch.autograd.grad(z, (x, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_double_backward(x, weight):
    def second(tape):
        with tape:
            z = (promised(torch.sin, x) @ weight).pow(2).sum()
        (dx,) = torch.autograd.grad(z, x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), (x, weight))

    for a, b in zip(second(Tape()), second(contextlib.nullcontext()), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_consumer_that_never_asks_does_not_keep_the_recomputed_tensor(x, device):
    w1, w2 = (torch.randn(8, 8, device=device, requires_grad=True) for _ in range(2))
    made = []

    def recompute(x):
        y = torch.sin(x)
        made.append(ref_of(y))
        return y

    with Tape():
        y = promise(torch.sin(x.detach()), recompute, x.detach())
        z = (y @ w1).sum() + (y @ w2).sum()
    torch.autograd.grad(z, w1, retain_graph=True)
    assert len(made) == 1
    assert not is_alive(made[0])
    torch.autograd.grad(z, (w1, w2))


def test_the_recomputed_tensor_dies_with_its_last_consumer(device):
    made, alive = [], []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            alive.append(not made[0].expired())
            return dy

    def recompute(x):
        y = torch.sin(x)
        made.append(ref_of(y))
        return y

    x = torch.randn(4, 8, device=device, requires_grad=True)
    weight = torch.randn(8, 8, device=device, requires_grad=True)
    with Tape():
        h = Probe.apply(x)
        z = (promise(torch.sin(h), recompute, h) @ weight).sum()
    z.backward()
    assert alive == [False]


# Cycles.


@pytest.mark.parametrize("with_backward", [True, False])
def test_memory_returns_without_the_garbage_collector(device, with_backward):
    weight = torch.randn(8, 8, device=device, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(4, 8, device=device, requires_grad=True)
        with Tape():
            h = x * 2
            y = promised(torch.exp, promised(torch.sin, h))
            z = (y @ weight).sum()
        refs = [ref_of(h), ref_of(y)]
        if with_backward:
            z.backward()
        node = weakref.ref(z)
        del h, y, z, x
        assert node() is None
        assert all(ref.expired() for ref in refs)
    finally:
        gc.enable()


# Threads.


def test_each_thread_has_its_own_tape(x, weight):
    seen = []
    with Tape():
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_backward_may_run_on_another_thread(x, weight):
    with Tape():
        z = (promised(torch.sin, x) @ weight).sum()
    thread = threading.Thread(target=z.backward)
    thread.start()
    thread.join()
    torch.testing.assert_close(weight.grad, torch.sin(x.detach()).T @ torch.ones(4, 8, device=x.device), rtol=0, atol=0)


def test_concurrent_unpacks_of_one_promise_agree(x):
    with Tape() as tape:
        y = promised(torch.sin, x.detach())
        tickets = [tape.pack(y) for _ in range(64)]
    expected, got = torch.sin(x.detach()), []
    threads = [threading.Thread(target=lambda t=t: got.append(tape.unpack(t))) for t in tickets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 64
    assert all(torch.equal(g, expected) for g in got)


# Where hooks cannot work.


def test_the_tape_steps_aside_in_torch_func(x, weight):
    def loss(x):
        with Tape():
            assert current() is None
            return (promised(torch.sin, x) @ weight.detach()).sum()

    expected = torch.autograd.grad((torch.sin(x) @ weight).sum(), x)[0]
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), expected)


def test_the_tape_steps_aside_where_hooks_are_disabled(x, weight):
    with disable_saved_tensors_hooks("not here"), Tape():
        assert current() is None
        (promised(torch.sin, x) @ weight).sum().backward()


def test_the_tape_steps_aside_without_gradients(x):
    with torch.no_grad(), Tape():
        assert current() is None


def test_the_tape_steps_aside_in_forward_mode(x):
    with torch.autograd.forward_ad.dual_level(), Tape():
        assert current() is None


def test_the_hook_outside_is_read_in_one_place():
    sources = Path(hf_memsave.__file__).parent.rglob("*.py")
    assert sum(path.read_text().count("_top_saved_tensors_default_hooks(") for path in sources) == 1
