"""Blocks that run again in backward, when what their forward had (hooks, a mode, adapters) is gone by then."""

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
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.patching import checkpointed
from support.attacks import assert_alike
from support.steps import backward, patched, step
from support.zoo import Size, batch_for, build

SIZE = Size()
#: Transformers runs a block's own hooks again only where it checkpoints ``__call__``, as it did before ``forward``.
RUNS_OWN_HOOKS = "__call__" in vars(GradientCheckpointingLayer)
BLOCK = MemSaveConfig(checkpoint="block")


llama = partial(build, "llama")


def lora(*names, **options):
    """With random adapters of these names."""
    options |= dict(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    config = LoraConfig(**options)
    model = get_peft_model(llama(), config)
    for name in names:
        model.add_adapter(name, config)
    return model.train()


def activated(**options):
    return lora(alora_invocation_tokens=[7], **options)


def batch_of(model):
    batch = batch_for(model, SIZE)
    batch["input_ids"][:, 5] = 7  # what an activated LoRA is invoked by
    return batch


def steps(model, **inputs):
    return [step(model, batch_of(model), **inputs) for _ in range(2)]


@pytest.mark.parametrize(("checkpoint", "layers"), [("gate", [0]), ("block", None), ("block", [0]), ("block", [1])])
def test_activated_lora_has_stocks_gradients_and_leaves_no_hook_and_no_other_call(checkpoint, layers):
    assert_alike(lambda: activated(layers_to_transform=layers), steps, MemSaveConfig(checkpoint=checkpoint))
    model = activated()
    keys, calls = list(model.state_dict()), [type(m).__call__ for m in model.modules()]
    patch(model, BLOCK)
    steps(model)
    assert list(model.state_dict()) == keys
    assert not any(m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    unpatch(model)
    assert [type(m).__call__ for m in model.modules()] == calls


def test_the_input_of_a_block_without_backward_hooks_stays_as_it_is():
    model, seen = lora(), []
    patch(model, BLOCK)
    first = model.base_model.model.model.layers[0]
    handle = first.register_forward_pre_hook(lambda module, args: seen.append(args[0].requires_grad))
    model(**batch_of(model)).loss.backward()
    handle.remove()
    assert seen == [False] * (1 + RUNS_OWN_HOOKS)


@pytest.mark.parametrize("wants", [False, True], ids=["frozen embeddings", "an input that wants a gradient"])
def test_backward_hooks_of_a_block_run_after_it_ran_again(wants):
    """One that takes away what the block needs, as PEFT's does."""

    def run(model):
        model.get_input_embeddings().weight.requires_grad_(wants)
        for block in model.model.layers:
            block.mlp.shift = block.mlp.register_forward_hook(lambda module, args, y: y.sin() * 2)
            block.register_full_backward_hook(lambda block, *_: block.mlp.shift.remove())
        found = step(model, batch_of(model))
        assert not any(block.mlp._forward_hooks for block in model.model.layers)
        return found

    assert_alike(llama, run, BLOCK)


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
    model, inputs = make(tmp_path)
    assert_alike(lambda: make(tmp_path)[0], lambda model: steps(model, **inputs), MemSaveConfig(checkpoint="gate"))
    patch(model, BLOCK)
    with pytest.raises(KeptTensorChangedError, match=r"got other hooks on its modules .* use checkpoint='gate'"):
        steps(model, **inputs)


def shift_output(module):
    return module.register_forward_hook(lambda module, args, y: (y[0] + 1, *y[1:]) if isinstance(y, tuple) else y + 1)


def shift_input(module):
    def hook(module, args, kwargs):
        if args:
            return (args[0] + 1, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + 1}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


SHIFTS = {
    "self_attn": shift_output, "self_attn.q_proj": shift_input, "mlp": shift_output, "mlp.act_fn": shift_input,
    "": shift_output,
}  # fmt: skip


@pytest.mark.parametrize("when", ["in the forward", "in backward", "in both"])
@pytest.mark.parametrize(("part", "shift"), SHIFTS.items())
def test_interventions_by_hooks(part, shift, when):
    """A hook that is gone when the block runs again would leave all shapes as they are, and gradients wrong."""
    is_refused = when != "in both" and (part or RUNS_OWN_HOOKS)

    def loss_of(model):
        module = model.model.layers[1].get_submodule(part)
        handle = None if when == "in backward" else shift(module)
        loss = model(**batch_of(model)).loss
        if when == "in the forward":
            handle.remove()
        elif when == "in backward":
            shift(module)
        return loss

    if not is_refused:
        assert_alike(llama, lambda model: backward(model, loss_of(model)), BLOCK)
        return
    model = patched(llama(), BLOCK)
    loss = loss_of(model)
    with pytest.raises(KeptTensorChangedError, match="got other hooks on its modules"):
        loss.backward()


@pytest.mark.parametrize("is_call", [False, True], ids=["forward", "__call__"])
def test_own_hooks_of_a_block_count_where_they_run_again(is_call):
    """As they do where Transformers checkpoints a block's ``__call__``."""
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4, requires_grad=True)
    handle = shift_output(block)
    function = partial(block.__call__) if is_call else partial(type(block).forward, block)
    y = checkpointed.checkpoint_block(function, x)
    handle.remove()
    with pytest.raises(KeptTensorChangedError) if is_call else contextlib.nullcontext():
        y.sum().backward()
    assert (x.grad is None) == is_call


#: What is done to a model between forward and backward, and the words of the error.
ADAPTERS = "adapters that were switched, scaled, merged or disabled"
CHANGES = {
    "switched": (lambda model: model.set_adapter("other"), ADAPTERS),
    "scaled": (lambda m: next(x for n, x in m.named_modules() if n.endswith("q_proj")).scale_layer(3.0), ADAPTERS),
    "disabled": (lambda model: model.base_model.disable_adapter_layers(), ADAPTERS),
    "merged": (lambda model: model.merge_adapter(), ADAPTERS),
    "in eval": (lambda model: model.eval(), r"switched by train\(\) or eval\(\)"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_block_does_not_run_again_as_another_one(change, words):
    model = patched(lora("other", lora_dropout=0.1), BLOCK)
    loss = model(**batch_of(model)).loss
    change(model)
    with pytest.raises(KeptTensorChangedError, match=words):
        loss.backward()


@pytest.mark.parametrize("checkpoint", [None, "gate", "block"])
def test_a_forward_with_each_adapter_before_both_backwards(checkpoint):
    def run(model):
        losses = {}
        for name in ("default", "other"):
            model.set_adapter(name)
            losses[name] = model(**batch_of(model)).loss
        for name, loss in losses.items():  # back to what the forward had
            model.set_adapter(name)
            loss.backward()
        return [p.grad for n, p in model.named_parameters() if "lora_" in n]

    assert_alike(lambda: lora("other"), run, MemSaveConfig(checkpoint=checkpoint))


@pytest.mark.parametrize("is_ours", [False, True], ids=["stock's gradient checkpointing", "ours"])
def test_what_else_was_changed_is_said_in_our_words_where_the_block_runs_again_by_us(is_ours):
    model = llama()
    if not is_ours:
        enable_checkpointing(model)
    patch(model, MemSaveConfig(checkpoint="block" if is_ours else None))
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x).sin().square()
    loss = model(**batch_of(model)).loss
    del mlp.forward
    with pytest.raises(KeptTensorChangedError if is_ours else CheckpointError) as caught:
        loss.backward()
    if is_ours:
        assert type(caught.value.__cause__) is CheckpointError
        assert "got something else (torch.utils.checkpoint: " in str(caught.value)
        assert str(caught.value).endswith("use checkpoint='gate' or None.")


def test_a_forward_without_a_backward_leaves_nothing_and_keeps_no_hook_from_dying():
    class Hook(nn.Module):
        def forward(self, module, args, y):
            return None

    model, alive, hook = activated(), [], Hook()
    patch(model, BLOCK)
    layers = model.base_model.model.model
    handles = [layers.norm.register_forward_hook(lambda m, a, y: alive.append(weakref.ref(a[0])))]
    handles.append(layers.layers[0].mlp.register_forward_hook(hook))
    loss, died = model(**batch_of(model)).loss, weakref.ref(hook)
    for handle in handles:
        handle.remove()
    del hook, handle, handles
    gc.collect()
    assert died() is None and loss.requires_grad
    gc.disable()
    try:
        del loss
        assert alive and all(ref() is None for ref in alive)
    finally:
        gc.enable()
