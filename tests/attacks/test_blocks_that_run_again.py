"""Blocks that run again in backward, when what their forward had (hooks, a mode, adapters' inputs) is gone by then."""

import contextlib
import gc
import weakref
from functools import partial

import pytest
import torch
from peft import LoraConfig, PolyConfig, XLoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import CheckpointError
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import KeptTensorChangedError, MemSaveConfig, patch, unpatch
from hf_memsave.patching import checkpointed
from support.families import Size, batch_for, build

SIZE = Size()
#: Transformers runs a block's own hooks again only where it checkpoints ``__call__``, as it did before ``forward``.
RUNS_OWN_HOOKS = "__call__" in vars(GradientCheckpointingLayer)


def llama():
    return build("llama", SIZE, dropout=0.0)


def activated(**options):
    config = LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM", alora_invocation_tokens=[7],
        **options,
    )  # fmt: skip
    return get_peft_model(llama(), config).train()


def batch_of(model):
    batch = batch_for(model, SIZE)
    batch["input_ids"][:, 5] = 7  # what an activated LoRA is invoked by
    return batch


def steps(model, checkpoint=None, *, is_patched=True, **inputs):
    """The gradients of two steps."""
    if is_patched:
        patch(model, MemSaveConfig(checkpoint=checkpoint))
    found = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)  # Poly draws
        model(**batch_of(model), **inputs).loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def assert_equal(ours, stock):
    assert len(ours) == len(stock) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
    assert any(g.any() for g in stock)


@pytest.mark.parametrize("checkpoint", ["gate", "block"])
@pytest.mark.parametrize("layers", [None, [0], [1]], ids=str)
def test_activated_lora_has_stocks_gradients(checkpoint, layers):
    stock = steps(activated(layers_to_transform=layers), is_patched=False)
    assert_equal(steps(activated(layers_to_transform=layers), checkpoint), stock)


def test_activated_lora_leaves_no_hook_and_no_other_call():
    model = activated()
    keys, calls = list(model.state_dict()), [type(m).__call__ for m in model.modules()]
    steps(model, "block")
    assert list(model.state_dict()) == keys
    assert not any(m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    unpatch(model)
    assert [type(m).__call__ for m in model.modules()] == calls


def test_the_input_of_a_block_without_backward_hooks_stays_as_it_is():
    model, seen = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"])).train(), []
    patch(model, MemSaveConfig(checkpoint="block"))
    first = model.base_model.model.model.layers[0]
    handle = first.register_forward_pre_hook(lambda module, args: seen.append(args[0].requires_grad))
    model(**batch_of(model)).loss.backward()
    handle.remove()
    assert seen == [False] * (1 + RUNS_OWN_HOOKS)


@pytest.mark.parametrize("wants", [False, True], ids=["frozen embeddings", "an input that wants a gradient"])
def test_backward_hooks_of_a_block_run_after_it_ran_again(wants):
    """One that takes away what the block needs, as PEFT's does."""
    found = []
    for is_patched in (False, True):
        model = llama()
        model.get_input_embeddings().weight.requires_grad_(wants)
        if is_patched:
            patch(model, MemSaveConfig(checkpoint="block"))
        for block in model.model.layers:
            block.mlp.shift = block.mlp.register_forward_hook(lambda module, args, y: y.sin() * 2)
            block.register_full_backward_hook(lambda block, *_: block.mlp.shift.remove())
        model(**batch_of(model)).loss.backward()
        assert not any(block.mlp._forward_hooks for block in model.model.layers)
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_equal(*found)


def poly(tmp_path):
    config = PolyConfig(r=2, n_tasks=3, n_skills=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    return get_peft_model(llama(), config).train(), {"task_ids": torch.tensor([1, 0])}


def xlora(tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    for name in "01":
        if not (tmp_path / name).exists():
            get_peft_model(llama(), config).save_pretrained(tmp_path / name)
    adapters = {name: str(tmp_path / name) for name in "01"}
    mix = XLoraConfig(task_type="CAUSAL_LM", hidden_size=SIZE.hidden, adapters=adapters, use_trainable_adapters=True)
    torch.manual_seed(0)
    model = llama()
    model.config.use_cache = False
    return get_peft_model(model, mix).train(), {}


@pytest.mark.parametrize("make", [poly, xlora])
def test_adapters_whose_inputs_come_by_hooks_are_refused_by_a_block_and_exact_by_products(make, tmp_path):
    (stock, inputs), (ours, _), (block, _) = (make(tmp_path) for _ in range(3))
    assert_equal(steps(ours, "gate", **inputs), steps(stock, is_patched=False, **inputs))
    with pytest.raises(KeptTensorChangedError, match=r"got other hooks on its modules .* use checkpoint='gate'"):
        steps(block, "block", **inputs)


def shift_output(module):
    return module.register_forward_hook(lambda module, args, y: (y[0] + 1, *y[1:]) if isinstance(y, tuple) else y + 1)


def shift_input(module):
    def hook(module, args, kwargs):
        if args:
            return (args[0] + 1, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + 1}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("when", ["in the forward", "in backward", "in both"])
@pytest.mark.parametrize("shift", [shift_output, shift_input])
@pytest.mark.parametrize("part", ["self_attn", "self_attn.q_proj", "mlp", "mlp.act_fn", ""])
def test_interventions_by_hooks(part, shift, when):
    """A hook that is gone when the block runs again would leave all shapes as they are, and gradients wrong."""
    is_refused = when != "in both" and (part or RUNS_OWN_HOOKS)
    found = []
    for is_patched in (False, True):
        model = llama()
        if is_patched:
            patch(model, MemSaveConfig(checkpoint="block"))
        module = model.model.layers[1].get_submodule(part)
        handle = None if when == "in backward" else shift(module)
        loss = model(**batch_of(model)).loss
        if when == "in the forward":
            handle.remove()
        elif when == "in backward":
            shift(module)
        if is_patched and is_refused:
            with pytest.raises(KeptTensorChangedError, match="got other hooks on its modules"):
                loss.backward()
            return
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert_equal(*found)


@pytest.mark.parametrize("is_call", [False, True], ids=["forward", "__call__"])
def test_own_hooks_of_a_block_count_where_they_run_again(is_call):
    """As they do where Transformers checkpoints a block's ``__call__``."""
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4, requires_grad=True)
    handle = shift_output(block)
    function = partial(block.__call__) if is_call else partial(type(block).forward, block)
    y = checkpointed._checkpoint(function, x)
    handle.remove()
    with pytest.raises(KeptTensorChangedError) if is_call else contextlib.nullcontext():
        y.sum().backward()
    assert (x.grad is None) == is_call


def test_a_block_does_not_run_again_without_its_dropout():
    model = build("bert", SIZE)
    patch(model, MemSaveConfig(checkpoint="block"))
    loss = model(**batch_for(model, SIZE)).loss
    model.eval()
    with pytest.raises(KeptTensorChangedError, match=r"switched by train\(\) or eval\(\)"):
        loss.backward()


def test_a_block_does_not_run_again_with_adapters_merged_since():
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).train()
    patch(model, MemSaveConfig(checkpoint="block"))
    loss = model(**batch_of(model)).loss
    model.merge_adapter()
    with pytest.raises(KeptTensorChangedError, match="adapters that were switched, scaled, merged or disabled"):
        loss.backward()


def other_forward(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x).sin().square()
    return mlp


@pytest.mark.parametrize("is_ours", [False, True], ids=["stock's gradient checkpointing", "ours"])
def test_what_else_was_changed_is_said_in_our_words_where_the_block_runs_again_by_us(is_ours):
    model = llama()
    if not is_ours:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    patch(model, MemSaveConfig(checkpoint="block" if is_ours else None))
    mlp = other_forward(model)
    loss = model(**batch_of(model)).loss
    del mlp.forward
    with pytest.raises(KeptTensorChangedError if is_ours else CheckpointError) as caught:
        loss.backward()
    if is_ours:
        assert type(caught.value.__cause__) is CheckpointError
        assert "got something else (torch.utils.checkpoint: " in str(caught.value)
        assert str(caught.value).endswith("use checkpoint='gate' or None.")


def test_a_forward_without_a_backward_leaves_nothing():
    model, alive = activated(), []
    patch(model, MemSaveConfig(checkpoint="block"))
    handle = model.base_model.model.model.norm.register_forward_hook(lambda m, a, y: alive.append(weakref.ref(a[0])))
    gc.disable()
    try:
        loss = model(**batch_of(model)).loss
        del loss
    finally:
        gc.enable()
    handle.remove()
    assert [ref for ref in alive if ref() is not None] == []
    assert alive


def test_a_hook_is_not_kept_from_dying():
    class Hook(nn.Module):
        def forward(self, module, args, y):
            return None

    model = llama()
    patch(model, MemSaveConfig(checkpoint="block"))
    hook = Hook()
    handle, alive = model.model.layers[0].mlp.register_forward_hook(hook), weakref.ref(hook)
    loss = model(**batch_of(model)).loss
    handle.remove()
    del hook
    gc.collect()
    assert alive() is None
    assert loss.requires_grad
