"""What other code does beside a step: statistics, interrupts, observers, weights swapped, checkpointing switched."""

import cProfile
import itertools
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn, overrides
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import KeptTensorChangedError, measure_kept, patch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.count.peak import count_peak
from hf_memsave.tape import Tape, private
from support.attacks import assert_alike
from support.helpers import autocasting, random
from support.lora import adapted
from support.script_helpers import load_script
from support.steps import assert_same, backward, step
from support.zoo import Size, batch_for, build

SIZE = Size()
BATCH = batch_for(build("llama"))
BLOCK = {"checkpoint": "block"}


def llama(**config):
    model = build("llama")
    if config:
        patch(model, **config)
    return model


def leaves_of(model):
    return [module for module in model.modules() if not list(module.children())]


def norm(_, __, out):
    if isinstance(out, torch.Tensor) and out.is_floating_point():
        out.norm().item(), out.std().item()


def left_behind():
    return private.innermost_hooks() is not None, private.count_modes()


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    left = left_behind()
    while private.innermost_hooks() is not None:
        private.pop_hooks()
    while private.count_modes():
        private.pop_mode()
    assert left == (False, 0)


@pytest.mark.parametrize("config", [{"norm": "recompute"}, {"checkpoint": "gate"}, BLOCK], ids=str)
@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_statistics_whose_graph_is_dropped_change_no_byte(family, config):
    found = []
    for is_watched in (False, True):
        model, batch = build(family), batch_for(build(family))
        patch(model, **config)
        for module in leaves_of(model) if is_watched else ():
            module.register_forward_hook(norm)
        torch.manual_seed(1)
        kept = measure_kept(model, batch).total
        model(**batch).loss.backward()  # of which decisions are learned
        peak = count_peak(lambda model=model, batch=batch: model(**batch).loss.backward()).peak
        found.append((kept, peak))
    (kept, peak), (kept_watched, peak_watched) = found
    assert kept_watched <= 1.01 * kept
    assert peak_watched <= 1.02 * peak


def interrupted(monkeypatch, owner, name, number, run):
    """``run()``, in which that call of a method is interrupted before it begins."""
    stock, count = getattr(owner, name), itertools.count(1)

    def call(*args):
        if next(count) == number:
            raise KeyboardInterrupt
        stock(*args)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(owner, name, call)
        run()


@pytest.mark.parametrize("config", [{"norm": "recompute"}, BLOCK, {"offload": True}], ids=str)
def test_an_interrupt_as_pytorch_puts_a_mode_back_leaves_nothing(config, monkeypatch):
    expected = step(llama(), BATCH)
    for number in range(1, 6):
        model = llama(**config)
        step(model, BATCH)
        interrupted(monkeypatch, overrides, "_push_mode", number, partial(step, model, BATCH))
        assert left_behind() == (False, 0)
        assert_same(step(model, BATCH), expected)


@pytest.mark.long
@pytest.mark.parametrize("setting", ["exact", "block", "offload"])
def test_a_step_that_is_interrupted_anywhere_is_as_if_it_had_not_been(setting, monkeypatch):
    found = load_script("interrupts", monkeypatch).interrupt(setting, count=40)
    assert found[""] == 40 and set(found) <= {"", "not interrupted"}, found


@pytest.mark.parametrize("number", [1, 2, 3])  # the ends of two blocks, and of the model
def test_leftovers_of_a_tape_whose_end_was_interrupted_are_taken_off(number, monkeypatch):
    expected, model = step(llama(), BATCH), llama(**BLOCK)
    step(model, BATCH)
    interrupted(monkeypatch, Tape, "__exit__", number, lambda: model(**BATCH))
    assert_same(step(model, BATCH), expected)
    assert left_behind() == (False, 0)


def test_a_block_runs_again_without_hooks_that_only_observed():
    expected = step(llama(), BATCH)
    model, seen = llama(**BLOCK), []
    handles = [m.register_forward_hook(lambda m, *_: seen.append(m)) for m in leaves_of(model)]
    loss = model(**BATCH).loss
    for handle in handles:
        handle.remove()
    assert_same(backward(model, loss), expected)
    assert seen


#: By the end of a linear's name: what hooks make of its output. The last two leave the block's output as it is.
CHANGES = {
    "scaled": {"": lambda out: out * 1.5},
    "in place": {"up_proj": lambda out: out.mul_(2.0)},
    "turned round": {"down_proj": lambda out: out.flip(-1)},
    "cancelling": {"q_proj": lambda out: out * 2, "k_proj": lambda out: out * 0.5},
    "negative": {"q_proj": torch.neg, "k_proj": torch.neg},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_does_not_run_again_without_a_hook_that_changed_what_it_computes(change):
    model, handles = llama(**BLOCK), []
    for name, module in model.model.layers.named_modules():
        for end, make in CHANGES[change].items() if isinstance(module, nn.Linear) else ():
            if name.endswith(end):
                handles.append(module.register_forward_hook(lambda _, __, out, make=make: make(out)))
    loss = model(**BATCH).loss
    for handle in handles:
        handle.remove()
    with pytest.raises(KeptTensorChangedError, match="other hooks on its modules"):
        loss.backward()


gated = partial(adapted, "llama", "fp32", 0.0, SIZE, r=4, target_modules=["gate_proj", "up_proj"])


def twice_adapted():
    model = gated()
    model.add_adapter("two", LoraConfig(r=2, target_modules=["gate_proj", "up_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "two"])
    return model


@pytest.mark.parametrize(("make", "config", "part"), [
    (llama, {"checkpoint": "gate"}, "gate_proj.weight"), (llama, {"checkpoint": "qkv"}, "q_proj.weight"),
    (llama, {"checkpoint": "o_proj"}, "o_proj.weight"), (llama, {}, "norm.weight"), (gated, {}, "lora_B"),
    (partial(gated, use_dora=True), {}, "lora_B"), (twice_adapted, {}, "lora_B"),
])  # fmt: skip
@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_weight_that_is_given_other_bytes_before_backward_was_read_as_in_stock(make, config, part, is_autocast):
    def run(model):
        with autocasting(torch.device("cpu"), torch.bfloat16 if is_autocast else None):
            loss = model(**BATCH).loss
        swapped = [p for name, p in model.named_parameters() if part in name]
        for parameter in swapped:
            parameter.data = parameter.data * 2
        assert swapped
        return backward(model, loss)

    assert_alike(make, run, config)


class Writes(GradientCheckpointingLayer):
    """Writes to what its linear ``b1`` has read, which ``b2`` then reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b1, self.b2, self.c = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        h = self.a(x)
        y = self.b1(h) + self.b1(h.reshape(-1, 8)).reshape(h.shape)
        h.mul_(1.5)
        return self.c(y * self.b2(h) + h)


@pytest.mark.parametrize("config", [{}, {"offload": True}, BLOCK], ids=str)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_write_to_what_an_adapter_has_read_is_stocks(config, is_checkpointed):
    def make():
        lora = LoraConfig(r=2, lora_dropout=0.3, target_modules=["b1", "b2"], init_lora_weights=False)
        return get_peft_model(nn.Sequential(Writes(), Writes()), lora).train()

    def run(model):
        for block in (m for m in model.modules() if isinstance(m, Writes) and is_checkpointed):
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        return backward(model, model(random(2, 5, 8)).square().sum())

    assert_alike(make, run, config)


@pytest.mark.parametrize("rank", [1, 2, 4, 16])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (1, 3)])
def test_an_adapter_of_a_few_numbers_has_stocks_gradients(shape, rank):
    """Of one seed's numbers, another product's sum has the same bits in half of the cases."""

    def make(seed):
        torch.manual_seed(seed)
        lora = LoraConfig(r=rank, target_modules=["1"], init_lora_weights=False)
        return get_peft_model(nn.Sequential(nn.Identity(), nn.Linear(shape[-1], 5)), lora).train()

    def run(model, seed):
        x = random(*shape, seed=seed).requires_grad_()
        return backward(model, (model(x) * torch.arange(1.0, 6.0).sin()).sum()) | {"x": x.grad}

    for seed in range(8):
        assert_alike(partial(make, seed), partial(run, seed=seed))


class Slices(GradientCheckpointingLayer):
    """A scan over the rows of one tensor, by ``call``."""

    def __init__(self, call):
        super().__init__()
        self.linear, self.call = nn.Linear(8, 8), call

    def forward(self, x):
        h, state = self.linear(x), 0.0
        for row in range(len(h)):
            state = self.call(h[row]) * h[row] + state
        return state


CALLS = {
    "products": lambda row: row, "activations": torch.nn.functional.gelu, "dropouts": torch.nn.functional.dropout,
    "bits": torch.relu, "casts": lambda row: row.double().exp().float(),
    "masks": lambda row: torch.where(row > 0, row, -row),
}  # fmt: skip


@pytest.mark.parametrize("config", [{}, BLOCK, {"offload": True}, {"storage": "int8"}], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_steps_calls_grow_with_the_slices_of_a_storage_and_not_with_their_square(call, config):
    calls = []
    for rows in (16, 32, 64):
        model, x = nn.Sequential(Slices(CALLS[call])).train(), torch.randn(rows, 8)
        patch(model, **config)
        model(x).sum().backward()
        with cProfile.Profile() as profile:
            model(x).sum().backward()
        calls.append(sum(function.callcount + function.reccallcount for function in profile.getstats()))
    assert 0 < calls[2] - calls[1] <= 2.02 * (calls[1] - calls[0])


def kept(model):
    return measure_kept(model, BATCH).total


@pytest.mark.parametrize("rung", ["block", "tiles", "max"])
def test_is_activation_checkpointing_is_the_users_alone(rung):
    model = llama()
    patch(model, rung)
    before = kept(model)
    assert not model.is_activation_checkpointing
    model.activation_checkpointing_disable()
    assert kept(model) == before and not model.is_activation_checkpointing
    enable_checkpointing(model)
    assert model.is_activation_checkpointing
    assert_same(step(model, BATCH), step(llama(), BATCH)) if rung == "block" else step(model, BATCH)
    model.activation_checkpointing_disable()
    assert kept(model) == before and not model.is_activation_checkpointing


def test_a_model_that_was_checkpointed_as_it_was_patched_runs_again_by_us_once_that_is_off():
    before, model = kept(llama(**BLOCK)), llama()
    enable_checkpointing(model)
    patch(model, BLOCK)
    model.activation_checkpointing_disable()
    assert kept(model) == before
    assert_same(step(model, BATCH), step(llama(), BATCH))


@pytest.mark.parametrize("family", ["gpt2", "t5-decoder", "llama"])
def test_no_cache_is_filled_where_blocks_run_again(family):
    model, batch = build(family, dropout=0.0), batch_for(build(family))
    assert model.config.use_cache
    expected = step(model, batch)
    patch(model, BLOCK)
    out = model(**batch)
    assert_same(backward(model, out.loss), expected)
    cache = out.get("past_key_values")
    assert cache is None or cache.get_seq_length() == 0


@pytest.mark.parametrize("how", ["by place", "inner"])
def test_a_filled_cache_that_is_not_named_is_read_as_in_stock(how):
    def run(model):
        with torch.no_grad():
            cache = model(input_ids=torch.arange(6).view(1, 6), use_cache=True).past_key_values
        more = torch.tensor([[3]])
        if how == "by place":
            logits = model(more, None, None, cache).logits
        else:
            logits = model.lm_head(model.model(input_ids=more, past_key_values=cache).last_hidden_state)
        return backward(model, logits.square().sum()) | {"logits": logits.detach()}

    assert_alike(llama, run, BLOCK)
