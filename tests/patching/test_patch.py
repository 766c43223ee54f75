"""``patch``: which modules it changes, what it leaves alone, and the way back."""

import copy
import gc
import inspect
import re
import subprocess
import sys
import weakref
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_memsave
from hf_memsave import MemSaveConfig, PatchError, PatchReport, measure_kept, patch, unpatch
from support.steps import assert_same, patched_classes, state_of, step
from support.zoo import FAMILIES, Size, batch_for, build

#: Family -> paths of its repeated blocks. "*" stands for 0 and 1.
BLOCKS = {
    "bert": "bert.encoder.layer.*",
    "roberta": "roberta.encoder.layer.*",
    "gpt2": "transformer.h.*",
    "opt": "model.decoder.layers.*",
    **dict.fromkeys(("t5-encoder", "t5-decoder", "t5-gated-encoder"), "encoder.block.* decoder.block.*"),
    **dict.fromkeys(("llama", "mistral", "phi", "phi3"), "model.layers.*"),
}
#: Op, or what is asked for -> the classes of T5 that it changes.
OTHERS = {
    ("norm", "stock"): {"T5LayerNorm"}, ("norm", "output"): {"T5LayerNorm"},
    ("activation", "stock"): {"NewGELUActivation"}, ("activation", "invert"): {"NewGELUActivation"},
    ("attention", "stock"): {"T5Attention"}, ("dropout", "stock"): set(),
}  # fmt: skip


def sites_of(report):
    found = {}
    for site in report.patched:
        found.setdefault(site.op, []).append(site.name)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_the_model_and_its_blocks_once_and_takes_it_back(family, device):
    model = build(family).to(device)
    before = state_of(model)
    unpatch(model)  # of a stock model, does nothing
    assert state_of(model) == before
    parameters, buffers = ([*named] for named in (model.named_parameters(), model.named_buffers()))
    state = {name: t.clone() for name, t in model.state_dict().items()}
    stock = {name: (type(m), type(m).__name__, type(m).__module__) for name, m in model.named_modules()}
    configs = [(m.config, m.config.to_dict(), m.config._attn_implementation) for m in configured(model)]
    signature, random_state, seen = inspect.signature(model.forward), torch.get_rng_state(), []
    for module in model.modules():
        module.register_forward_hook(lambda m, *_: seen.append(m))
    report = patch(model)
    assert_same(model.state_dict(), state)
    assert torch.equal(torch.get_rng_state(), random_state) and seen == []
    for now, then in ((model.named_parameters(), parameters), (model.named_buffers(), buffers)):
        assert [(name, id(tensor)) for name, tensor in now] == [(name, id(tensor)) for name, tensor in then]
    assert inspect.signature(model.forward) == signature  # Trainer picks its columns by it
    assert [(m.config, m.config.to_dict(), m.config._attn_implementation) for m in configured(model)] == configs
    for name, module in model.named_modules():
        cls, *names = stock[name]
        assert isinstance(module, cls) and [type(module).__name__, type(module).__module__] == names
        added = {"_memsave_buffers", "_memsave_ledger", "_memsave_first_step"} if module is model else set()
        assert set(vars(module)) == before[name][3] | added
    blocks = [path.replace("*", str(i)) for path in BLOCKS[family].split() for i in range(2)]
    assert sites_of(report) == {"model": [""], "block": blocks}
    assert report.skipped == ()
    patched = state_of(model)
    assert sites_of(patch(model)) == sites_of(report)
    assert state_of(model) == patched
    report.undo()
    assert state_of(model) == before
    patch(model, "tempo")
    assert patched_classes(model)
    unpatch(model)
    assert state_of(model) == before


@pytest.mark.parametrize("config", [True, "tempo", {"norm": "stock", "activation": "few_bit"}], ids=str)
@pytest.mark.parametrize("family", ["bert", "t5-gated-encoder", "llama"])
def test_the_report_names_the_modules_that_changed(family, config, device):
    model = build(family).to(device)
    before = {name: type(m) for name, m in model.named_modules()}
    report = patch(model, config)
    changed = {name for name, m in model.named_modules() if type(m) is not before[name]}
    assert changed == {site.name for site in report.patched}


def configured(model):
    return [m for m in model.modules() if hasattr(m, "config")]


def test_a_patched_model_returns_what_stock_returns(llama):
    batch = batch_for(llama)
    stock = llama(**batch)
    assert stock.past_key_values is not None
    patch(llama)
    assert list(llama(**batch)) == list(stock)
    assert llama.config.use_cache


def test_undone_model_keeps_what_stock_keeps_and_one_left_to_stock_no_more(llama):
    batch = batch_for(llama)
    stock, expected = measure_kept(llama, batch), step(llama, batch)
    patch(llama).undo()
    assert measure_kept(llama, batch) == stock
    assert_same(step(llama, batch), expected)
    patch(llama, dict.fromkeys(("norm", "activation", "dropout", "attention", "lora"), "stock") | {"frozen": False})
    assert measure_kept(llama, batch).total <= stock.total
    assert_same(step(llama, batch), expected)


@pytest.mark.parametrize(("before", "asked"), [(True, "tempo"), ({"layers": {"norm": 1}}, True)])
def test_another_config_is_an_error_that_names_both(before, asked, llama):
    patch(llama, before)
    state = state_of(llama)
    both = [MemSaveConfig.resolve(config) for config in (before, asked)]
    with pytest.raises(PatchError, match=r"this LlamaForCausalLM is patched with MemSaveConfig") as refusal:
        patch(llama, asked)
    found, got = re.search(r"with (.*), got (.*): expected", str(refusal.value)).groups()
    assert [eval(text.removesuffix(", the exact default")) for text in (found, got)] == both
    assert "unpatch(model) first" in str(refusal.value) and "replace=True" in str(refusal.value)
    assert state_of(llama) == state
    outer = nn.ModuleDict({"inner": llama})
    with pytest.raises(PatchError, match="this LlamaForCausalLM is patched with"):
        patch(outer, asked)
    patch(outer, before)
    unpatch(llama)
    patch(llama, asked)


@pytest.mark.parametrize(("field", "value"), OTHERS)
def test_another_config_replaces_the_one_before_where_asked_to(field, value, device):
    model = build("t5-gated-encoder", Size(hidden=64)).to(device)
    batch = batch_for(model, Size(hidden=64), padded=True)
    patch(model)
    exact, kept = patched_classes(model), measure_kept(model, batch).total
    patch(model, {field: value}, replace=True)
    added = {name: cls for name, cls in patched_classes(model).items() if name not in exact}
    assert patched_classes(model) == exact | added and set(added.values()) == OTHERS[field, value]
    assert measure_kept(model, batch).total > kept if value == "stock" else True
    patch(model, replace=True)
    assert patched_classes(model) == exact
    assert measure_kept(model, batch).total == kept


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_attention_chosen_by_the_user_stays(when, llama):
    if when == "before":
        llama.set_attn_implementation("eager")
    report = patch(llama)
    if when == "after":
        llama.set_attn_implementation("eager")
    for _ in range(2):
        assert {m.config._attn_implementation for m in configured(llama)} == {"eager"}
        report.undo()


def test_a_model_inside_another_module_is_covered_with_it(device):
    model = nn.ModuleDict({"student": build("llama"), "head": nn.Linear(4, 4)}).to(device)
    report = patch(model)
    assert sites_of(report) == {"model": [""], "block": ["student.model.layers.0", "student.model.layers.1"]}
    report.undo()
    assert patched_classes(model) == {}


def test_a_report_is_read_without_patching_again_and_says_that_it_is_undone():
    model = build("llama").train()
    for got, wrong in (("a stock one. Call hf_memsave.patch", model), ("the text 'llama'", "llama")):
        with pytest.raises(PatchError, match=f"report\\(model\\): expected a .*, got {got}"):
            hf_memsave.report(wrong)
    made = patch(model, "gate")
    classes = patched_classes(model)
    for _ in range(2):
        assert str(hf_memsave.report(model)) == str(hf_memsave.report(nn.DataParallel(model))) == str(made)
        step(model, batch_for(model))
    assert made.step.is_counted and hf_memsave.report(model).step is made.step and patched_classes(model) == classes
    model.model.layers.append(build("llama").model.layers[0])
    assert "2 repeated blocks covered" in str(hf_memsave.report(model)) and "added since" in str(
        hf_memsave.report(model)
    )
    made.undo()
    assert str(made).startswith("hf_memsave: undone, the model is stock\n  the first step keeps")
    assert "undone" in repr(made) and "undone" not in repr(patch(model))
    parts = nn.ModuleDict({"a": build("llama"), "b": build("llama")})
    patch(parts["a"]), patch(parts["b"])
    with pytest.raises(PatchError, match="got 2 parts, each patched by itself. Report each of its parts"):
        hf_memsave.report(parts)


def test_patch_and_the_first_step_cost_calls_by_the_layer_and_no_process_trace_or_page(monkeypatch):
    for owner, name in ((subprocess, "Popen"), (torch.fx.Tracer, "trace"), (PatchReport, "__str__")):
        monkeypatch.setattr(owner, name, None)
    calls = Counter()

    def count(what, run, *args):
        sys.setprofile(lambda _, event, __: calls.update([what] * (event == "call")))
        try:
            run(*args)
        finally:
            sys.setprofile(None)

    for layers in (2, 4, 8):  # the first of them fills caches
        model = build("llama", Size(layers=layers))
        model = get_peft_model(model, LoraConfig(lora_dropout=0.1, target_modules="all-linear")).train()
        batch = batch_for(model)
        for what, run in (("patch", patch), ("first", step), ("second", step), ("unpatch", unpatch)):
            count((what, layers), run, model, *([batch] if run is step else []))
    more = {what: calls[what, 8] - calls[what, 4] for what in ("patch", "first", "second", "unpatch")}  # for 4 layers
    assert all(n < 1.1 * calls[what, 4] for what, n in more.items()), calls
    assert more["first"] < 4 * more["second"], calls


def test_a_class_goes_with_the_models_that_have_it():
    """A search over configurations makes some for each."""
    model = build("llama", Size())
    patch(model, MemSaveConfig(few_bits=3))
    classes = [weakref.ref(type(module)) for module in model.modules() if "_memsave_patch" in vars(type(module))]
    step(model, batch_for(model, Size()))
    assert classes and type(copy.deepcopy(model)) is type(model)
    patch(model, MemSaveConfig(few_bits=5), replace=True)
    gc.collect()
    assert not any(ref() for ref in classes)
