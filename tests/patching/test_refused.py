"""What ``patch`` refuses, and leaves as it was; and what other tools do to a model that it takes as it is."""

import contextlib
import copy
import gc
import re
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2Model

from hf_memsave import WTACRS, ConfigError, MemSaveConfig, PatchError, measure_kept, patch, unpatch
from support.helpers import only_on_cpu
from support.steps import assert_same, patched_classes, state_of, step
from support.zoo import batch_for


@pytest.mark.parametrize("rung", ["gate", "block"])
def test_linears_do_not_run_again_where_zero3_takes_their_weights_away(rung, llama):
    for parameter in llama.parameters():
        parameter.ds_id = 0
    if rung == "block":
        assert patch(llama, rung).patched
        return
    state = state_of(llama)
    with pytest.raises(PatchError, match="checkpoint='gate': expected parameters that stay, got DeepSpeed ZeRO-3's"):
        patch(llama, rung)
    assert state_of(llama) == state


def test_a_traced_part_is_refused():
    part = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()
    for traced in (torch.jit.trace(part, torch.randn(2, 4)), torch.fx.symbolic_trace(part), torch.jit.script(part)):
        for name, model in {"inner": nn.ModuleDict({"inner": traced}), "the model": traced}.items():
            said = f"^{name} is a .*traced, scripted or exported.*Patch the model that"
            for config in ({}, {"linear": WTACRS(attention=True)}):
                with pytest.raises(PatchError, match=said):
                    patch(model, **config)


def test_a_refused_model_is_freed_at_once(llama):
    model, known = copy.deepcopy(llama), []
    known.append(weakref.ref(model))
    gc.disable()
    try:
        model.model.norm.forward = lambda x: x
        with contextlib.suppress(PatchError):
            patch(model, norm="output")
        assert not patched_classes(model)
        del model
        assert known[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("config", ["exakt", {"norms": "stock"}, {"norm": "stok"}, 3, False, None], ids=str)
def test_a_config_that_does_not_exist_or_asks_for_nothing_leaves_the_model_untouched(config, llama):
    before = state_of(llama)
    error, words = (ConfigError, "(?i)expected|must be") if config else (PatchError, r"asks for nothing.*unpatch")
    with pytest.raises(error, match=words):
        patch(llama, config)
    assert state_of(llama) == before


class Empty(nn.Module):
    def forward(self, x):
        return x


def test_a_module_that_keeps_nothing_is_an_error_but_not_an_activation_by_itself():
    model = Empty()
    with pytest.raises(PatchError, match=r"nothing to patch in Empty.*Pass the model that you train"):
        patch(model)
    assert type(model) is Empty and not patched_classes(model)
    assert [site.op for site in patch(nn.GELU()).sites] == ["model"]


def _kernelized(model, monkeypatch):
    norm = model.model.norm
    norm.forward = types.MethodType(lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight), norm)


def test_an_approximation_of_a_module_with_a_foreign_forward_is_refused(llama):
    _kernelized(llama, None)
    before = state_of(llama)
    with pytest.raises(PatchError, match=r"model\.norm \(LlamaRMSNorm\) has a forward of its own.*use_kernels=False"):
        patch(llama, {"norm": "output"})
    assert state_of(llama) == before
    patch(llama, {"norm": "stock"})
    model = nn.Linear(4, 4)
    model.forward = lambda x: x
    with pytest.raises(PatchError, match=r"the model \(Linear\) has a forward of its own.*patch before that tool"):
        patch(model)
    assert type(model) is nn.Linear


@pytest.mark.parametrize("rung", ["gate", "block"])
def test_no_remedy_is_a_method_that_the_model_lacks(rung):
    own = r"derive from transformers\.modeling_layers\.GradientCheckpointingLayer.*, got none\. Derive the class of"
    for model, words in (
        (nn.Sequential(nn.Linear(4, 4)), own),
        (GPT2Model(GPT2Config(n_embd=8, n_layer=0, n_head=2, vocab_size=8)), "turn on the model's own gradient check"),
    ):
        with pytest.raises(PatchError, match=words) as refusal:
            patch(model, rung)
        assert all(hasattr(model, name) for name in re.findall(r"\w+(?=\()", str(refusal.value)))


def test_blocks_that_run_another_tools_forward_are_said_to(llama):
    for name, block in llama.model.layers.named_children():
        _replaced(f"model.layers.{name}")(llama, None)
        assert "forward" in block.__dict__
    before = state_of(llama)
    words = r"got model\.layers\.0 \(LlamaDecoderLayer\): its forward was set by test_refused\. .*leave checkpoint out"
    for rung in ("block", "tiles"):
        with pytest.raises(PatchError, match=words):
            patch(llama, rung)
    assert state_of(llama) == before


# What other tools change, and patching takes as it is


def _replaced(path):
    def replace(model, monkeypatch):
        module = model.get_submodule(path)
        stock = type(module).forward
        module.forward = types.MethodType(lambda self, *args, **kwargs: stock(self, *args, **kwargs), module)

    return replace


#: What a tool does -> how, and the path of what is skipped for it.
TAKEN = {
    "a forward on a norm": (_kernelized, None), "a forward on a block": (_replaced("model.layers.1"), "model.layers.1"),
    "a forward on the model inside": (_replaced("model"), None), "a forward on the model": (_replaced(""), None),
}  # fmt: skip


@pytest.mark.parametrize("change", TAKEN)
def test_what_another_tool_changed_trains_with_its_bits_and_keeps_less(change, llama, monkeypatch, device):
    only_on_cpu(device)
    make, skipped = TAKEN[change]
    ours = copy.deepcopy(llama)
    for model in (llama, ours):
        make(model, monkeypatch)
    batch = batch_for(llama, padded=True)
    report = patch(ours)
    assert [site.name for site in report.skipped] == ([] if skipped is None else [skipped])
    assert all("forward was set by" in site.reason for site in report.skipped)
    assert_same(step(ours, batch), step(llama, batch))
    assert measure_kept(ours, batch).total < 0.7 * measure_kept(llama, batch).total


def wrap_class(module):
    """What FSDP2's ``fully_shard`` does to a module."""
    cls = type(module)
    module.__class__ = type(f"FSDP{cls.__name__}", (cls,), {"__module__": "torch.distributed.fsdp"})


@pytest.mark.parametrize(("config", "path"), [(True, ""), (True, "model.layers.1"), ("tempo", "model.norm")])
def test_undo_refuses_where_another_tool_wrapped_our_class(config, path, llama):
    report = patch(llama, config)
    wrap_class(llama.get_submodule(path))
    before = state_of(llama)
    for undo in (report.undo, lambda: unpatch(llama)):
        with pytest.raises(PatchError, match=rf"cannot undo {path or 'the model'}.*FSDP.*Undo before you wrap"):
            undo()
    assert state_of(llama) == before


@pytest.mark.parametrize("path", ["", "model.layers.1", "model.layers.0.mlp"])
def test_over_another_tools_wrapper_the_same_patch_changes_nothing_and_another_is_refused(path, llama):
    report = patch(llama)
    module = llama.get_submodule(path)
    wrap_class(module)
    before, wrapped = state_of(llama), type(module)
    patch(llama)
    assert state_of(llama) == before
    if path.endswith("mlp"):  # of which the class is not ours
        report.undo()
        assert type(module) is wrapped and not patched_classes(llama)
        return
    with pytest.raises(PatchError, match=rf"{path or 'the model'}.*FSDP"):
        patch(llama, MemSaveConfig(norm="stock"), replace=True)
    assert state_of(llama) == before
