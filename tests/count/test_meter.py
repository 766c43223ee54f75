"""``measure_kept``: every byte between forward and backward counts once, wherever it hides; nothing is left behind."""

import contextlib
import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils.checkpoint import checkpoint

from hf_memsave import measure_kept
from hf_memsave.count.kept import KINDS_OF_OPS, Kept, KeptStorage
from support.helpers import Calls, generator_state

ROWS, WIDTH, WIDE = 3, 8, 16
FP32 = 4
NARROW_BYTES, WIDE_BYTES = ROWS * WIDTH * FP32, ROWS * WIDE * FP32


@pytest.fixture
def x(device):
    return torch.randn(ROWS, WIDTH, device=device)


@pytest.fixture
def mlp(device):
    return nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH)).to(device)


def test_a_known_graph_is_counted_exactly_by_the_modules_and_kinds_of_op_that_made_it(mlp, x):
    found = measure_kept(mlp, x)
    # GELU's input; its output, for the second linear; and the output, which the caller holds.
    assert found.by_module == {"0": WIDE_BYTES, "1": WIDE_BYTES, "2": NARROW_BYTES}
    assert found.by_kind == {"linear": WIDE_BYTES + NARROW_BYTES, "activation": WIDE_BYTES}
    assert found.total == sum(found.by_kind.values())
    assert KeptStorage("1", "activation", "gelu", WIDE_BYTES) in found.storages
    assert repr(found) == "Kept(480 bytes in 3 storages)"
    large = Kept((KeptStorage("0", "linear", "addmm", 3 * 2**20),))
    row = "<tr><th>{}</th><td>3.00 MiB</td></tr>"
    assert f"{row.format('linear')}{row.format('all')}</table>" in large._repr_html_()


def test_paths_are_those_of_the_whole_model_and_what_is_made_outside_says_so(mlp, x):
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"mlp": mlp})})
    found = measure_kept(model, x, forward=lambda x: model["encoder"]["mlp"](x.clone()))
    paths = [f"encoder.mlp.{i}" for i in range(3)]
    assert list(found.by_module) == ["(outside the model)", *paths]
    assert found.by_module["(outside the model)"] == NARROW_BYTES
    assert measure_kept(Calls(torch.clone), x).by_module == {"Calls": NARROW_BYTES}, "the root, by its class"


def test_kinds_and_modules_sum_to_the_total_in_the_order_of_tables_and_under_autocast_and_no_grad_too(device, x):
    model = nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(device)
    found = measure_kept(model, x)
    with torch.no_grad():
        assert measure_kept(model, x) == found, "measuring again gives the same"
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert measure_kept(model, x) == measure_kept(model, x)
    assert sum(found.by_kind.values()) == sum(found.by_module.values()) == found.total
    assert list(found.by_kind) == [k for k in KINDS_OF_OPS if k in ("linear", "norm", "activation", "dropout")]


HIDDEN = []


class OnCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, hidden):
        ctx.hidden = hidden()
        return x.sum()

    @staticmethod
    def backward(ctx, dy):
        return None, None


def in_a_closure(x):
    hidden = x.clone()
    y = x.sum()
    y.register_hook(lambda dy: dy * hidden.sum())
    return y


def in_a_cycle(x):
    cycle = [x.clone()]
    cycle.append(cycle)
    return x.sum()


#: Forward -> bytes beside the sum that it returns, or its output.
COUNTED = {
    "a view, as its whole storage": (lambda x: x.clone()[0], NARROW_BYTES - FP32),
    "by many ops, once": (lambda x: sum(map(torch.square, [x.clone()] * 3)).sum(), NARROW_BYTES),
    "what is not kept": (lambda x: (x.clone() + 1).sum(), 0),
    "on a ctx": (lambda x: OnCtx.apply(x, x.detach().clone), NARROW_BYTES),
    "a generator's state on a ctx": (lambda x: OnCtx.apply(x, torch.get_rng_state), torch.get_rng_state().nbytes),
    "in a closure": (in_a_closure, NARROW_BYTES),
    "in a global": (lambda x: HIDDEN.append(x.clone()) or x.sum(), NARROW_BYTES),
    "in an array": (lambda x: HIDDEN.append(x.detach().cpu().clone().numpy()) or x.sum(), NARROW_BYTES),
    "in a cycle, which is collected": (in_a_cycle, 0),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_hides_counts(name, x):
    forward, nbytes = COUNTED[name]
    try:
        found = measure_kept(Calls(forward), x.requires_grad_())
        assert found.total == sum(found.by_kind.values()) == nbytes + FP32
    finally:
        HIDDEN.clear()


def test_what_hooks_keep_instead_counts(mlp, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().to(torch.float64), lambda t: t.float()):
        found = measure_kept(mlp, x, forward=lambda x: mlp(x).sum())
    # Each of x, GELU's input, its output and the second weight (x wants no gradient), now in twice the bytes.
    assert found.total == 2 * (NARROW_BYTES + 2 * WIDE_BYTES + mlp[2].weight.nbytes) + FP32


def test_checkpoints_keep_their_input_and_nested_ones_the_outer_ones(mlp, x):
    checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for inner in (mlp, lambda x: checkpointed(mlp, checkpointed(mlp, x))):
        found = measure_kept(mlp, x, lambda x, inner=inner: checkpointed(inner, x.clone().requires_grad_()).sum())
        assert found.total == NARROW_BYTES + FP32


@pytest.mark.parametrize(("name", "more"), [("loss", 0), ("sum", NARROW_BYTES)])
def test_a_loss_is_held_without_the_other_outputs_and_without_one_the_whole_output(mlp, x, name, more):
    found = measure_kept(mlp, x, lambda x: {"logits": (y := mlp(x)), name: y.sum()})
    assert found.total == 2 * WIDE_BYTES + FP32 + more


def test_a_tensor_of_a_transform_that_is_held_does_not_stop_the_meter(mlp, x):
    held = []
    torch.func.vmap(lambda x: held.append(x) or x * 2)(torch.ones(3, 4))
    assert measure_kept(mlp, x).total > 0
    assert held


def test_parameters_buffers_and_the_batch_do_not_count_nor_what_was_alive_before(device, x, mlp):
    model, before = nn.BatchNorm1d(WIDTH).to(device).eval(), torch.randn(100)
    found = measure_kept(model, x, forward=lambda x: (x, before, *model.parameters(), *model.buffers()))
    assert found.storages == ()
    popped = [torch.randn(100)]
    assert measure_kept(model, x, forward=lambda x: popped.pop()).storages == (), "it dies with the output alone"
    without = measure_kept(mlp, x).total
    assert measure_kept(mlp, x.requires_grad_()).total == without


def test_a_batch_is_positional_arguments_keywords_or_the_only_argument(mlp, x):
    for batch in ((x, x), [x, x], {"a": x, "b": x}, x):
        assert measure_kept(Calls(lambda a, b=1: a + b), batch).total == NARROW_BYTES
    assert measure_kept(mlp, {"x": x}, forward=lambda x: mlp[0](x)).by_module == {"0": WIDE_BYTES}


def live_storages():
    gc.collect()
    return {o.untyped_storage()._cdata for o in gc.get_objects() if issubclass(type(o), torch.Tensor)}


@pytest.mark.parametrize("is_broken", [False, True], ids=["returns", "raises"])
def test_the_model_the_random_state_and_hooks_are_as_they_were_and_nothing_is_alive(device, mlp, x, is_broken):
    def forward(x):
        mlp(nn.functional.dropout(x))
        if is_broken:
            raise ZeroDivisionError

    def state():
        hooks = len(global_hooks._global_forward_hooks), len(global_hooks._global_forward_pre_hooks)
        gradients = [p.grad if p.grad is None else p.grad.tolist() for p in mlp.parameters()]
        return hooks, gradients, [m.training for m in mlp], generator_state(device).tolist()

    mlp(x).sum().backward()
    mlp[0].bias.grad = None
    mlp.eval()[1].train()
    before, gradients, alive = state(), [p.grad for p in mlp.parameters()], live_storages()
    with pytest.raises(ZeroDivisionError) if is_broken else contextlib.nullcontext():
        measure_kept(mlp, x, forward)
    assert live_storages() <= alive
    assert state() == before
    assert all(p.grad is gradient for p, gradient in zip(mlp.parameters(), gradients, strict=True))
