"""Writes that versions tell of: in every spelling, beside hooks and checkpoints, and after the forward."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from hf_memsave import KeptTensorChangedError, MemSaveConfig
from hf_memsave.tape import offload
from support.attacks import WIDTH, Attack, Block, assert_alike, assert_trains_like_stock, kept_of, pair
from support.helpers import autocasting, nbytes, nodes, random
from support.steps import assert_same, backward, patched
from support.zoo import Size, build


@torch.library.custom_op("hf_memsave_tests::scale_", mutates_args={"x"})
def scale_(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


@torch.library.custom_op("hf_memsave_tests::scale_all_", mutates_args={"xs"})
def scale_all_(by: float, xs: list[torch.Tensor]) -> None:
    for x in xs:
        x.mul_(by)


WRITES = {
    "method": lambda x: x.mul_(2), "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "foreach, of two lists": lambda x: torch._foreach_copy_([x], [x + 1]),
    "overload": lambda x: torch.ops.aten.mul_.Tensor(x, 2.0), "packet": lambda x: torch.ops.aten.add_(x, 1.0),
    "out": lambda x: torch.ops.aten.mul.out(x, x, out=x), "custom": lambda x: scale_(x, 2.0),
    "custom, by name": lambda x: scale_(by=2.0, x=x), "custom, of a list": lambda x: scale_all_(2.0, [x]),
    "vmap": lambda x: torch.vmap(lambda row: row.mul_(2))(x),
}  # fmt: skip
CONFIGS = MemSaveConfig(), MemSaveConfig(activation="stock", norm="stock", dropout="stock")


@pytest.mark.parametrize(("with_gradients", "config"), [(True, CONFIGS[0]), (False, CONFIGS[1])])
@pytest.mark.parametrize("name", WRITES)
def test_every_spelling_of_a_write_is_seen(name, with_gradients, config, device):
    """Stock keeps the fp32 copy of what is written to; the tape keeps what that was made from."""

    def fn(model, x):
        h = model.low(x.bfloat16())
        y = model.g(h.float())
        with torch.set_grad_enabled(with_gradients):
            WRITES[name](h.detach())
        return y.pow(2).mean() + h.float().mean()

    low = nn.Linear(WIDTH, WIDTH).bfloat16()  # three steps: also where a forward has shown what is never asked for
    assert_trains_like_stock(fn, random(64, WIDTH, device=device), config=config, steps=3, low=low)


def copied():
    return saved_tensors_hooks(torch.clone, lambda kept: kept)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_what_a_checkpointed_block_touched_by_a_closure(is_checkpointed, device):
    def fn(model, x):
        position = model.f(x).detach()
        out = model.o(torch.cat([position, position * 2, position * 3], -1))
        x = model.g(x)
        x = checkpoint(lambda x: model.block(x, position), x, use_reentrant=False) if is_checkpointed else x
        position.add_(0)
        return x + out

    block = Block(lambda block, x, p: x + torch.tanh(block.f(x + p)))
    assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device), block=block)


@pytest.mark.parametrize("context", [torch.enable_grad, copied], ids=["no hook", "hook"])
def test_beside_a_hook_data_is_taken_after_a_write_and_a_thin_product_runs_under_autocast(context, device):
    """The version of ``.data`` starts again: it must not be taken for what was kept before the write."""

    def taken(model, x):
        a = model.f(x)
        first = model.g(a)
        a.detach().add_(1)
        return first.detach() + model.h(a.data)

    def thin(model, x):
        x = model.f(x)
        with context():
            x = model.wide(model.thin(x)).sin()
        return model.h(x[..., :WIDTH])

    x, low = random(2, 16, WIDTH, device=device), functools.partial(autocasting, device, torch.bfloat16)
    assert_trains_like_stock(taken, x, context)
    assert_trains_like_stock(thin, x, low, thin=nn.Linear(WIDTH, 4), wide=nn.Linear(4, 2 * WIDTH))


class Scribbles(torch.autograd.Function):
    """Its backward writes to what it kept."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos_()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_backward_writes_to_what_a_hook_keeps_for_others_too(is_first, device):
    """Stock has a copy for each of them; ours one for all: it is right, or says so."""

    def fn(model, x):
        x = model.f(x)
        parts = [lambda: Scribbles.apply(x), lambda: x.sin()]
        first, second = (part() for part in (parts if is_first else parts[::-1]))
        return model.g(first * 2 + second)

    try:
        assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device), copied)
    except KeptTensorChangedError as error:
        assert "written to by the backward" in str(error)


@pytest.mark.parametrize("parts", ["parameter", "early", "inside", "early, parameter", "early, inside"])
def test_what_was_distrusted_before_a_checkpoint_is_kept_as_when_it_runs_again(parts, device):
    """What is distrusted in the forward is not when the block runs again, in backward: it must keep the same."""

    def fn(model, x):
        x = model.f(x)
        if "parameter" in parts:
            model.block.scale.data.mul_(0.5)
        if "early" in parts:
            x = x * 2
            x.data.add_(1)
        run = (lambda x: model.block(x.data)) if "inside" in parts else model.block
        return checkpoint(run, x, use_reentrant=False)

    block = Block(lambda block, x: x + block.down(F.silu(block.f(block.norm(x) * block.scale))))
    block.norm, block.down, block.scale = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
    assert_trains_like_stock(fn, random(4, WIDTH, device=device), steps=3, block=block)


def test_what_is_kept_is_no_more_than_in_stock(device):
    """What cannot be remade after a write does not count as let go of; of a table a row is kept."""

    def written(model, x):
        a = model.f(x)
        out = model.g(a * 2).sum()
        a.mul_(3)
        return out + model.h(a.double().float()).sum()

    def row(model, x):
        rows = model.table[torch.arange(16, device=x.device)]
        return model.g(rows * x.mean(0))

    mine, stock = kept_of(written, random(8, 64, WIDTH, device=device))
    assert mine <= stock
    table = nn.Parameter(random(5000, WIDTH), requires_grad=False)
    mine, stock = kept_of(row, random(2, 16, WIDTH, device=device), table=table)
    assert mine <= stock < nbytes(table)


def test_a_source_that_later_depends_on_what_is_remade_from_it(device):
    """What held it held then, by its graph, itself: for ever."""
    model = patched(nn.Sequential(Attack(lambda model, x: x.repeat(1, 16)), nn.Linear(64, 1)).to(device))
    source = torch.randn(8, 4, device=device)
    source.add_(model(source))
    del source
    assert not nodes()


def test_a_buffer_written_through_data_between_forward_and_backward(device):
    """Vector quantization: rows of a buffer, which an average of what was seen replaces."""

    def run(model):
        losses = []
        for seed in range(2):  # the second forward comes before the backward of the first
            losses.append(model(random(16, WIDTH, device=device, seed=seed)).pow(2).mean())
            model.codes.data.mul_(3)
        return backward(model, sum(losses))

    def make():
        read = lambda model, x: model.f(x) * model.codes[model.rows]  # noqa: E731
        return Attack(read, codes=random(64, WIDTH), rows=torch.arange(16)).to(device)

    assert_alike(make, run)


def test_a_buffer_that_is_replaced_is_let_go_of(device):
    """A queue of keys: what was read of it is kept, as in stock, and not the queue."""

    def read(model, x):
        keys = model.f(x)
        out = keys * model.codes[model.rows]
        model.codes = torch.cat([model.codes[len(keys) :], keys.detach()])
        return out

    model, _ = pair(read, device, codes=torch.randn(4096, WIDTH), rows=torch.arange(16))
    for _ in range(2):
        queue = StorageWeakRef(model.codes.untyped_storage())
        loss = model(random(16, WIDTH, device=device)).sum()
        assert queue.expired()
        loss.backward()


def test_offload_copies_again_what_was_written_through_data(monkeypatch, device):
    """As any hook that copies; what was kept before is as it was then."""
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 256)

    def write(model, x):
        h = model.f(x)
        y = h.sin()
        h.data.mul_(2)
        return y + h.sin()

    found = []
    for model, hooks in zip(pair(write, device, {"offload": True}), (torch.enable_grad, copied), strict=True):
        with hooks():
            loss = model(random(64, WIDTH, device=device)).sum()
        found.append(backward(model, loss))
    assert_same(*found)


@pytest.mark.parametrize(("family", "name", "attention"), [
    ("llama", "attention_mask", "sdpa"), ("llama", "attention_mask", "eager"),
    ("t5-decoder", "attention_mask", "sdpa"), ("llama", "labels", "eager"),
])  # fmt: skip
def test_one_tensor_of_a_batch_is_filled_for_every_forward_of_a_backward(family, name, attention, device):
    def make():
        model = build(family, Size(seq=8)).to(device)
        model.set_attn_implementation(attention)
        return model

    def run(model):
        ids = torch.randint(5, 20, (2, 8), device=device)
        batch, losses = {"attention_mask": torch.ones_like(ids), "labels": ids.clone()}, []
        for number in range(3):
            batch[name][:, :number] = 0
            batch[name][:, number:] = 1
            losses.append(model(input_ids=ids.clone(), **batch).loss)
        return backward(model, sum(losses))

    assert_alike(make, run)
