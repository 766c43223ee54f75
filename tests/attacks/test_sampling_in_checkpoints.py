"""Sampled linears and attention in checkpoints of the user's own, of all kinds, around whatever part of a model."""

import copy
import functools
import gc
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave import WTACRS, MemSaveConfig, patch
from hf_memsave.patching.sampled_layers import sampler_of
from support.attacks import WIDTH, Attack
from support.eager import attentions
from support.helpers import assert_same_bits, random
from support.steps import assert_same, backward, step
from support.zoo import Size, batch_for, build

SIZE = Size(hidden=32, heads=4, layers=2, batch=3, seq=16)
both_kinds = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])


def of_hidden_states(call, checkpoint, args, kwargs):
    """A call in a checkpoint; of a keyword, reentrant checkpoints see no gradient."""
    args = args or (kwargs.pop("hidden_states"),)
    return checkpoint(functools.partial(call, **kwargs), *args)


def sampled(family, device, attention=False):
    model = build(family, SIZE)
    if attention:
        model.set_attn_implementation("eager")
    model = model.to(device)
    patch(model, MemSaveConfig(linear=WTACRS(minimum=4, targets=("0", "1"), attention=attention)))
    return model


def batch_and_options(model, family, seed):
    options = {} if family == "bert" else {"use_cache": False}  # run twice, attention would append to it twice
    return {**batch_for(model, SIZE, padded=True, seed=seed), **options}


MLPS = ("BertIntermediate", "LlamaMLP", "GPT2MLP", "T5DenseActDense")


@pytest.mark.parametrize("attention", [False, True], ids=["linears", "attention"])
@pytest.mark.parametrize(
    ("family", "use_reentrant"),  # a reentrant checkpoint knows no gradient of keywords, as the encoder's output
    [("bert", True), ("bert", False), ("llama", False), ("gpt2", True), ("t5-decoder", False)],
)
def test_a_part_of_a_block_is_checkpointed(family, attention, use_reentrant, device):
    plain, again = sampled(family, device), sampled(family, device, attention)
    wanted = {type(m).__name__ for m in attentions(again)} if attention else MLPS
    kind = functools.partial(checkpoint, use_reentrant=use_reentrant)
    for module in again.modules():
        if type(module).__name__ in wanted:
            module.forward = lambda *a, call=module.forward, **k: of_hidden_states(call, kind, a, k)
    for seed in (1, 2):
        got, expected = (step(m, batch_and_options(m, family, seed)) for m in (again, plain))
        assert got.keys() == expected.keys() and all(tensor.isfinite().all() for tensor in got.values())
        if not attention:
            assert_same_bits(got["loss"], expected["loss"])
    assert sampler_of(again).step == 2


class RunAgain(torch.autograd.Function):
    """A user's checkpoint, of a function that wants the gradient of its first argument."""

    @staticmethod
    def forward(ctx, fn, x, *rest):
        ctx.fn, ctx.rest = fn, rest
        ctx.states = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        ctx.save_for_backward(x)
        return fn(x, *rest)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng():
            torch.set_rng_state(ctx.states[0])
            torch.cuda.set_rng_state_all(ctx.states[1])
            y = ctx.fn(x, *ctx.rest)
        y.backward(dy)
        return None, x.grad, *(None for _ in ctx.rest)


#: Of checkpoints.
CALLS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "own": RunAgain.apply,
}


class Outside(nn.Module):
    """Calls a block in a checkpoint of each of these kinds, one in the other: it is run again when no batch runs."""

    def __init__(self, block, kinds):
        super().__init__()
        self.inner, self.kinds = block, kinds

    def forward(self, *args, **kwargs):
        return of_hidden_states(self.inner, self.run, args, kwargs)

    def run(self, call, *args):
        for kind in self.kinds:
            call = functools.partial(CALLS[kind], call)
        return call(*args)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def checkpoint_from_outside(model, kinds):
    for parent in list(model.modules()):
        if isinstance(parent, nn.ModuleList):
            for index, block in enumerate(parent):
                if type(block).__name__.endswith(("Layer", "Block")):
                    parent[index] = Outside(block, kinds)


#: Each kind with each other one, and itself, around or in it; and each family.
CASES = [("bert", kinds) for kinds in ([(kind,) for kind in CALLS] + [*itertools.product(CALLS, repeat=2)])]
CASES += [("llama", ("reentrant",)), ("gpt2", ("own",)), ("t5-decoder", ("not reentrant",))]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "kinds", "attention"),
    [(*case, bool(i % 2)) for i, case in enumerate([*CASES, CASES[0], CASES[-1]])],
    ids=str,
)
def test_a_block_is_checkpointed_from_outside(family, kinds, attention, device):
    """It draws what its forward drew, by the batch of that; and each batch counts once."""
    model = sampled(family, device, attention)
    plain = copy.deepcopy(model)
    checkpoint_from_outside(model, kinds)
    for seed in (1, 2, 3):
        got, expected = (
            {name.replace(".inner.", "."): t for name, t in step(m, batch_and_options(plain, family, seed)).items()}
            for m in (model, plain)
        )
        for name in [name for name in expected if "EncDecAttention.k" in name or "EncDecAttention.v" in name]:
            # One tape sees all blocks, and draws once of the encoder's output; in checkpoints each block draws.
            assert got.pop(name).isfinite().all() and expected.pop(name).isfinite().all()
        assert_same(got, expected)
    assert sampler_of(model).step == sampler_of(plain).step == 3
    gc.collect()
    assert not len(sampler_of(model)._checkpointed._batches), "a batch outlives what may be run again"
    if family != "t5-decoder":
        assert_same(*(sampler_of(m).cache.state_dict() for m in (model, plain)))


@both_kinds
def test_a_whole_model_is_checkpointed(use_reentrant, device):
    """It is run again with the rows of its forward."""
    found, x = [], random(4, 64, WIDTH, device=device).requires_grad_()
    for call in (lambda model, x: model(x), functools.partial(checkpoint, use_reentrant=use_reentrant)):
        torch.manual_seed(0)
        model = Attack(lambda model, x: model.g(model.f(x).relu())).to(device)
        patch(model, MemSaveConfig(linear=WTACRS(minimum=4, targets=("f", "g"))))
        for _ in range(3):
            y = call(model, x)
            found.append({"y": y.detach(), **backward(model, y.pow(2).sum())})
    for expected, mine in zip(found[:3], found[3:], strict=True):
        assert_same(mine, expected)


@both_kinds
def test_two_batches_in_one_checkpoint(use_reentrant, device):
    """Run again, each call of the model has the tokens of its own batch."""
    found = []
    for call in (lambda both, one: both(one), functools.partial(checkpoint, use_reentrant=use_reentrant)):
        model = sampled("bert", device)
        batches = [batch_for(model, SIZE, padded=True, seed=seed) for seed in (1, 2)]
        batches[1]["attention_mask"] = batches[1]["attention_mask"].flip(0)
        masks = [batch["attention_mask"] for batch in batches]
        assert not torch.equal(*masks) and all(mask.min() == 0 for mask in masks)

        def both(one, model=model, batches=batches):
            return one * sum(model(**batch).loss for batch in batches)

        for seed in (1, 2):
            torch.manual_seed(seed)
            found.append(backward(model, call(both, torch.ones((), device=device, requires_grad=True))))
        assert sampler_of(model).step == 4
    for expected, got in zip(found[:2], found[2:], strict=True):
        assert_same(got, expected)
