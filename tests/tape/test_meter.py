"""``measure_kept``: every byte between forward and backward counts once, wherever it hides; nothing else does."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave import measure_kept
from hf_memsave.tape.meter import KINDS_OF_OPS, KeptStorage
from support.calls import Calls

ROWS, WIDTH, WIDE = 3, 8, 16
FP32 = 4
NARROW_BYTES, WIDE_BYTES = ROWS * WIDTH * FP32, ROWS * WIDE * FP32


@pytest.fixture
def x(device):
    return torch.randn(ROWS, WIDTH, device=device)


@pytest.fixture
def mlp(device):
    return nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH)).to(device)


# What counts.


def test_a_known_graph_is_counted_exactly_by_the_modules_and_kinds_of_op_that_made_it(mlp, x):
    found = measure_kept(mlp, x)
    # GELU's input; its output, for the second linear; and the output, which the caller holds.
    assert found.by_module == {"0": WIDE_BYTES, "1": WIDE_BYTES, "2": NARROW_BYTES}
    assert found.by_kind == {"linear": WIDE_BYTES + NARROW_BYTES, "activation": WIDE_BYTES}
    assert found.total == sum(found.by_kind.values())
    assert KeptStorage("1", "activation", "gelu", WIDE_BYTES) in found.storages


def test_paths_are_those_of_the_whole_model(mlp, x):
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"mlp": mlp})})
    found = measure_kept(model, x, forward=lambda x: model["encoder"]["mlp"](x))
    assert list(found.by_module) == ["encoder.mlp.0", "encoder.mlp.1", "encoder.mlp.2"]


def test_what_the_root_makes_goes_by_its_class(x):
    assert measure_kept(Calls(torch.clone), x).by_module == {"Calls": NARROW_BYTES}


def test_what_a_forward_makes_outside_the_model_says_so(mlp, x):
    found = measure_kept(mlp, x, forward=lambda x: mlp(x.clone()))
    assert found.by_module["(outside the model)"] == NARROW_BYTES


def test_kinds_and_modules_sum_to_the_total_and_come_in_the_order_of_tables(device, x):
    model = nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(device)
    found = measure_kept(model, x)
    assert len(found.storages) > 4
    assert sum(found.by_kind.values()) == sum(found.by_module.values()) == found.total
    assert list(found.by_kind) == [k for k in KINDS_OF_OPS if k in ("linear", "norm", "activation", "dropout")]


def test_a_tensor_kept_by_many_counts_once(device, x):
    q, k, v = (nn.Linear(WIDTH, 1, bias=False, device=device) for _ in range(3))
    model = Calls(lambda x: sum(f(x) for f in (q, k, v)).sum())
    assert measure_kept(model, x, forward=lambda x: model(x.clone())).total == NARROW_BYTES + FP32


def test_a_view_counts_as_its_whole_storage(device, x):
    model = Calls(lambda x: x.clone()[0])
    assert measure_kept(model, x).total == NARROW_BYTES


def test_a_tensor_that_is_not_kept_does_not_count(x):
    assert measure_kept(Calls(lambda x: (x.clone() + 1).sum()), x).total == FP32


class _OnCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, hidden):
        ctx.hidden = hidden()
        return x.sum()

    @staticmethod
    def backward(ctx, dy):
        return None, None


def test_a_tensor_hidden_on_a_ctx_counts(x):
    model = Calls(lambda x: _OnCtx.apply(x, lambda: x.detach().clone()))
    x.requires_grad_()
    assert measure_kept(model, x).total == NARROW_BYTES + FP32


def test_a_generator_state_hidden_on_a_ctx_counts(x):
    state = torch.get_rng_state()
    model = Calls(lambda x: _OnCtx.apply(x, torch.get_rng_state))
    found = measure_kept(model, x.requires_grad_())
    assert found.total == state.nbytes + FP32
    assert found.by_kind["other"] >= state.nbytes


HIDDEN = []


def in_a_closure(x):
    hidden = x.clone()
    y = x.sum()
    y.register_hook(lambda dy: dy * hidden.sum())
    return y


def in_a_global(x):
    HIDDEN.append(x.clone())
    return x.sum()


def in_an_array(x):
    HIDDEN.append(x.detach().cpu().clone().numpy())
    return x.sum()


@pytest.mark.parametrize("forward", [in_a_closure, in_a_global, in_an_array])
def test_a_tensor_hidden_counts(forward, x):
    try:
        assert measure_kept(Calls(forward), x.requires_grad_()).total == NARROW_BYTES + FP32
    finally:
        HIDDEN.clear()


def test_what_only_a_cycle_holds_does_not_count(x):
    def forward(x):
        cycle = [x.clone()]
        cycle.append(cycle)
        return x.sum()

    assert measure_kept(Calls(forward), x).total == FP32


def test_what_hooks_keep_instead_counts(mlp, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().to(torch.float64), lambda t: t.float()):
        found = measure_kept(mlp, x, forward=lambda x: mlp(x).sum())
    # Each of x, GELU's input, its output and the two weights, now in twice the bytes.
    weights = [mlp[2].weight]  # the first one's is not needed: x wants no gradient
    assert found.total == 2 * (NARROW_BYTES + 2 * WIDE_BYTES + sum(w.nbytes for w in weights)) + FP32


def checkpointed(fn, x):
    return checkpoint(fn, x, use_reentrant=False, preserve_rng_state=False)


def test_checkpoints_keep_their_input_and_nested_ones_the_outer_ones(mlp, x):
    def nested(x):
        return checkpointed(mlp, checkpointed(mlp, x))

    for inner in (mlp, nested):
        found = measure_kept(mlp, x, lambda x, inner=inner: checkpointed(inner, x.clone().requires_grad_()).sum())
        assert found.total == NARROW_BYTES + FP32


def test_a_loss_is_held_without_the_other_outputs_and_without_one_the_whole_output(mlp, x):
    def forward(x, name):
        y = mlp(x)
        return {name: y.sum(), "logits": y}

    assert measure_kept(mlp, x, lambda x: forward(x, "loss")).total == 2 * WIDE_BYTES + FP32
    assert measure_kept(mlp, x, lambda x: forward(x, "sum")).total == 2 * WIDE_BYTES + FP32 + NARROW_BYTES


# What does not.


def test_parameters_buffers_and_the_batch_do_not_count(device, x):
    model = nn.BatchNorm1d(WIDTH).to(device).eval()
    found = measure_kept(model, x, forward=lambda x: (x, *model.parameters(), *model.buffers()))
    assert found.storages == ()


def test_a_batch_that_wants_a_gradient_does_not_count(mlp, x):
    without = measure_kept(mlp, x).total
    assert measure_kept(mlp, x.requires_grad_()).total == without


def test_what_was_alive_before_does_not_count(x):
    before = torch.randn(100)
    assert measure_kept(Calls(lambda x: before * 1.0 if x is None else before), x).total == 0
