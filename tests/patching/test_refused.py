"""What ``patch`` refuses, and leaves as it was; and what other tools do to a model that it takes as it is."""

import copy
import functools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama import modeling_llama

from hf_memsave import ConfigError, MemSaveConfig, PatchError, measure_kept, patch, unpatch
from support.families import batch_for, build
from support.helpers import only_on_cpu
from support.steps import assert_same, patched_classes, state_of, step


@pytest.fixture
def llama(device):
    return build("llama").to(device)


def _liger_class(model, monkeypatch):
    class LigerRMSNorm(modeling_llama.LlamaRMSNorm):
        __module__ = "liger_kernel.transformers.rms_norm"

    model.model.norm.__class__ = LigerRMSNorm


def _liger_function(model, monkeypatch):
    def lce_forward(self, *args, **kwargs): ...

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lce_forward)


def _traced(model, monkeypatch):
    model.model.norm = torch.jit.script(nn.LayerNorm(32))


REFUSED = {
    "a class of Liger": (_liger_class, ("model.norm", "Liger", "use_liger_kernel=False")),
    "a forward of Liger": (_liger_function, ("model.layers.0.mlp", "Liger", "use_liger_kernel=False")),
    "a scripted module": (_traced, ("model.norm", "traced, scripted", "Patch the model that it was made of")),
}


@pytest.mark.parametrize("before", [None, {"dropout": "mask"}, "tempo"], ids=str)
@pytest.mark.parametrize("spoil", REFUSED)
def test_a_refused_model_is_left_as_it_was(spoil, before, llama, monkeypatch):
    if before is not None:
        patch(llama, before)
    make, words = REFUSED[spoil]
    make(llama, monkeypatch)
    state = state_of(llama)
    with pytest.raises(PatchError) as refusal:
        patch(llama)
    assert [word for word in words if word not in str(refusal.value)] == []
    assert state_of(llama) == state


@pytest.mark.parametrize(
    "make", [torch.jit.script, torch.fx.symbolic_trace, "trace"], ids=["script", "symbolic_trace", "trace"]
)
def test_a_traced_part_is_refused(make):
    part = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()
    traced = nn.ModuleDict({"inner": torch.jit.trace(part, torch.randn(2, 4)) if make == "trace" else make(part)})
    with pytest.raises(PatchError, match="inner is a .*traced, scripted or exported.*Patch the model that"):
        patch(traced)


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


def test_a_module_that_keeps_nothing_is_an_error():
    model = Empty()
    with pytest.raises(PatchError, match=r"nothing to patch in Empty.*Pass the model that you train"):
        patch(model)
    assert type(model) is Empty and not patched_classes(model)


class Replaced(nn.Module):
    """A module of one's own, whose forward another tool has replaced."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forward = lambda x: self.linear(x)


def test_a_module_of_ones_own_with_a_foreign_forward_is_refused():
    model = Replaced()
    with pytest.raises(PatchError, match=r"the model \(Replaced\) has a forward of its own.*patch before that tool"):
        patch(model)
    assert type(model) is Replaced


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


# What other tools change, and patching takes as it is


def _wrapped(model, monkeypatch):
    stock = modeling_llama.LlamaMLP.forward

    @functools.wraps(stock)
    def forward(self, x):
        return 2 * stock(self, x)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)


def _function(model, monkeypatch):
    mlp = model.model.layers[1].mlp
    del mlp.act_fn
    mlp.act_fn = F.silu


def _replaced(path):
    def replace(model, monkeypatch):
        module = model.get_submodule(path)
        stock = type(module).forward
        module.forward = types.MethodType(lambda self, *args, **kwargs: stock(self, *args, **kwargs), module)

    return replace


#: What a tool does -> how, and the path of what is skipped for it.
TAKEN = {
    "a forward around the class's": (_wrapped, None),
    "a forward on a norm": (_kernelized, None),
    "a function for a module": (_function, None),
    "a forward on a block": (_replaced("model.layers.1"), "model.layers.1"),
    "a forward on the model inside": (_replaced("model"), None),
    "a forward on the model": (_replaced(""), None),
}


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


# Other tools that swap classes, after us


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


@pytest.mark.parametrize("path", ["model.norm", "lm_head", "model.layers.0.mlp"])
def test_undo_leaves_the_wrapped_class_of_a_module_that_is_not_ours(path, llama):
    report = patch(llama)
    wrap_class(llama.get_submodule(path))
    wrapped = type(llama.get_submodule(path))
    report.undo()
    assert type(llama.get_submodule(path)) is wrapped and not patched_classes(llama)


@pytest.mark.parametrize("path", ["", "model.layers.1", "model.layers.0.mlp", "lm_head"])
def test_the_same_patch_over_another_tools_wrapper_changes_nothing(path, llama):
    patch(llama)
    wrap_class(llama.get_submodule(path))
    before = state_of(llama)
    patch(llama)
    assert state_of(llama) == before


def test_another_config_is_refused_where_another_tool_wrapped_our_class(llama):
    patch(llama)
    wrap_class(llama.model.layers[0])
    before = state_of(llama)
    with pytest.raises(PatchError, match=r"model\.layers\.0.*FSDP"):
        patch(llama, MemSaveConfig(norm="stock"), replace=True)
    assert state_of(llama) == before
