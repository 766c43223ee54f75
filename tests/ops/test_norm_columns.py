"""Which columns a norm from its output keeps the input of, where the host waits for the device as for CUDA."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from hf_memsave import MemSaveConfig, patch
from hf_memsave import device as devices
from hf_memsave.ops import norm_columns
from hf_memsave.ops.norm_columns import columns_of, in_need
from support.helpers import assert_same_bits, random, taping
from support.norms import KINDS, from_output, module_of, plain, vectors

RATE = 2**-7
OUTPUT = MemSaveConfig(norm="output")


@pytest.fixture
def settled(monkeypatch):
    """Every device tells a step later: how many norms settled their room at a time, and when an optimizer stepped."""
    found, settle, find = [], norm_columns._Room.settle, norm_columns._find

    def settling(room, state):
        if found[-1] != "step":
            found[-1] += 1
        settle(room, state)

    monkeypatch.setattr(norm_columns, "waits", lambda x: True)
    monkeypatch.setattr(devices, "tells_later", lambda x: True)
    monkeypatch.setattr(devices, "later", lambda x: x.clone)
    monkeypatch.setattr(norm_columns, "_rooms", weakref.WeakKeyDictionary())
    monkeypatch.setattr(norm_columns, "_questions", devices.Questions())
    monkeypatch.setattr(norm_columns._Room, "settle", settling)
    monkeypatch.setattr(norm_columns, "_find", lambda modules: found.append(0) or find(modules))
    hook = register_optimizer_step_pre_hook(lambda *args: found.append("step"))
    yield found
    hook.remove()


def found_in(module):
    """The columns that a forward of its own keeps the input of."""
    with taping():
        return columns_of(module, module.weight, getattr(module, "bias", None)).tolist()


def stack(kind, width=256):
    """A model of linears and norms."""
    norms = [plain(kind, width=width) for _ in range(3)]
    return nn.Sequential(*(layer for norm in norms for layer in (norm, nn.Linear(width, width))))


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_asked_together_and_each_keeps_what_it_needs(settled, kind):
    modules = [module_of(kind, *vectors(10.0 if kind == "layer_norm" else 0, "mixed", 64, torch.float32, "cpu"))]
    modules += [plain(kind, width=256, keeps=n) for n in (0, 3)]
    for _ in range(2):
        with taping():
            for module in modules:
                weight, bias = norm_columns.vectors(module)
                needed, columns = in_need(weight, bias).tolist(), columns_of(module, weight, bias).tolist()
                assert set(needed) <= set(columns)
                spare = 1 + len(weight) // norm_columns.SPARE
                assert len(columns) == len(set(columns)) == min(len(needed) + spare, len(weight) // norm_columns.SHARE)
    assert settled == [1, 1, 1, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_columns_come_to_be_in_need_while_an_optimizer_steps(settled, kind, checkpointed, accumulated):
    stock = stack(kind)
    ours = copy.deepcopy(stock)
    patch(ours, OUTPUT)
    optimizers = [torch.optim.SGD(model.parameters(), RATE) for model in (stock, ours)]
    for step in range(12):
        losses = {stock: 0, ours: 0}
        for batch in range(accumulated):
            x = random(8, 256, seed=2 * step + batch)
            for model in losses:
                y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
                losses[model] = losses[model] + y.square().mean()
        for loss in losses.values():  # all forwards before all backwards
            loss.backward()
        for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        for model, optimizer in zip((stock, ours), optimizers, strict=True):
            with torch.no_grad():
                for norm in model[::2]:
                    vector = norm.bias if kind == "layer_norm" else norm.weight
                    until = vector[: step + 1] - (2 if kind == "layer_norm" else 0)
                    vector.grad[: step + 1] = until / RATE  # so it gets there, and stays
            optimizer.step()
            optimizer.zero_grad()
    needed = [len(in_need(*norm_columns.vectors(norm))) for norm in ours[::2]]
    assert min(needed) >= 12
    first = settled.index("step")
    assert sum(settled[:first]) == 3
    assert set(settled[first:]) == {0, "step"}, "nobody waited after the first step's forwards"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_changed_by_hand_is_asked_for_at_once(settled, kind, caplog):
    module = plain(kind, width=256)
    x = random(4, 256).requires_grad_()
    with taping():
        from_output(module)(x)
        with torch.no_grad():
            module.weight[3:30] = 0
        y = from_output(module)(x)
    got = torch.autograd.grad(y.cos().sum(), (x, module.weight))
    torch.testing.assert_close(got, torch.autograd.grad(module(x).cos().sum(), (x, module.weight)))
    assert settled == [1, 1]
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with torch.no_grad():
        module.weight[:3] = 0
    optimizer.step()
    with taping():
        from_output(module)(x)
    assert settled == [1, 1, "step", 1], "a step after it does not hide the change"
    assert not caplog.records


class Pruning(torch.optim.Optimizer):
    """Sets the first ``columns`` of everything to 0, in one step."""

    def __init__(self, params, columns):
        super().__init__(params, {"columns": columns})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p[: group["columns"]] = 0


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_more_than_there_is_room_for_are_told_and_kept_from_then_on(settled, kind, caplog):
    module = plain(kind, width=256)
    x, dy = random(4, 256).requires_grad_(), random(4, 256, seed=1)

    def both():
        with taping():
            y = from_output(module)(x)
        mine, stock = (torch.autograd.grad(out, (x, module.weight), dy) for out in (y, module(x)))
        return mine, stock

    torch.testing.assert_close(*both())
    Pruning([module.weight], 20).step()
    mine, stock = both()
    assert all(g.isfinite().all() for g in mine)
    torch.testing.assert_close(mine[0][:, 20:], stock[0][:, 20:])
    torch.testing.assert_close(mine[1][20:], stock[1][20:])
    assert not caplog.records
    torch.testing.assert_close(*both())
    assert "in 1 norms, one step brought more columns" in caplog.text
    caplog.clear()
    torch.testing.assert_close(*both())
    assert settled == [1, "step", 0, 1, 0] and not caplog.records


def test_there_is_room_for_the_neediest(settled):
    module = plain("layer_norm", width=256)
    found_in(module)
    Pruning([module.bias], 256).step()
    with torch.no_grad():
        module.weight.data.fill_(1)
        module.bias.data[10:20] = torch.arange(2.0, 12)
        module.bias.data[30] = float("nan")
        module.weight.data[40] = 0
    assert found_in(module) in ([30, 40, 19], [40, 30, 19])


def test_too_many_are_made_again_from_the_input_until_they_are_fewer(settled):
    module = plain("rms_norm", width=256, keeps=33)
    x = random(4, 256).requires_grad_()
    for _ in range(2):
        with taping():
            y = from_output(module)(x)
        assert_same_bits(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(module(x).sum(), x)[0])
    with torch.no_grad():
        module.weight[:3] = 1
    assert len(found_in(module)) == 32
    assert settled == [1, 0, 1]


def test_a_block_that_runs_again_keeps_as_many_though_the_optimizer_of_another_has_stepped(settled):
    module, other = plain("rms_norm", width=256), plain("rms_norm", width=256)
    x = random(4, 256).requires_grad_()

    def block(x):
        with taping():
            return from_output(module)(from_output(other)(x))

    y = checkpoint(block, x, use_reentrant=False)
    Pruning([plain("rms_norm", width=256).weight], 3).step()
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_frozen_norms_are_settled_once(settled):
    model = stack("rms_norm").requires_grad_(False)
    model[1].requires_grad_()
    patch(model, OUTPUT)
    optimizer = torch.optim.AdamW(model[1].parameters())
    for _ in range(3):
        model(random(4, 256)).sum().backward()
        optimizer.step()
    assert sum(n for n in settled if n != "step") == 2, "the first one's output needs no gradient"


def test_questions_do_not_pile_up_without_an_optimizer(settled):
    module = plain("rms_norm", width=256)
    for _ in range(5):
        found_in(module)
        with torch.no_grad():
            module.weight.mul_(0.9)
    assert len(norm_columns._questions._open) == 1
    assert settled == 5 * [1]


def test_an_optimizer_that_failed_says_nothing_of_what_came_after(settled):
    module = plain("rms_norm", width=256)
    found_in(module)
    optimizer = Pruning([module.weight], None)
    del optimizer.param_groups[0]["columns"]
    with pytest.raises(KeyError):
        optimizer.step()
    with torch.no_grad():
        module.weight[:9] = 0
    found_in(module)
    assert settled == [1, "step", 1]


def test_one_of_another_dtype_or_sharded_is_not_asked(settled):
    here, low, elsewhere, freed = (plain("rms_norm", dtype=d) for d in (torch.float32, torch.bfloat16, *2 * [None]))
    elsewhere.to("meta")
    freed.weight.untyped_storage().resize_(0)
    for module in (low, elsewhere, freed):
        norm_columns._rooms[module] = norm_columns._Room(16)
    found_in(here)
    assert settled == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_in_need_ranks_above_1(dtype):
    tiny = torch.finfo(dtype).tiny
    inf, nan = float("inf"), float("nan")
    weight = torch.tensor([1, -1, 1, -1, 0, 4 * tiny, 8 * tiny, nan, 1, inf, 1, 0], dtype=dtype)
    bias = torch.tensor([1, -1, 1.01, -1.01, 0, 0, 0, 0, nan, 1, inf, inf], dtype=dtype)
    rank = norm_columns._rank(weight, bias)
    assert (rank <= 1).logical_not().nonzero().flatten().tolist() == in_need(weight, bias).tolist()
    assert in_need(weight, None).tolist() == [4, 5, 7, 9, 11]


def test_a_norm_that_is_gone_is_forgotten(settled):
    module = plain("rms_norm")
    found_in(module)
    del module
    assert not norm_columns._rooms
    F.layer_norm(random(2, 2), (2,))
    norm_columns._questions.hear()
