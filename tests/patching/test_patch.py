"""``patch``: which modules it changes, what it leaves alone, what it refuses, and the way back."""

import copy
import functools
import inspect
import re
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from hf_memsave import ConfigError, MemSaveConfig, PatchError, measure_kept, patch, unpatch
from support.families import FAMILIES, Size, batch_for, build
from support.steps import assert_same, patched_classes, state_of, step

# Per family, op -> paths. "*" stands for the layers 0 and 1, "{a,b}" for a and b, "@" for the model itself.
BERT = {
    "attention": "@ bert",
    "block": "@ bert bert.encoder.layer.*",
    "layer_norm": "bert.embeddings.LayerNorm bert.encoder.layer.*.{attention.output,output}.LayerNorm",
    "activation": "bert.encoder.layer.*.intermediate.intermediate_act_fn",
    "dropout": "bert.embeddings.dropout bert.encoder.layer.*.{attention.self,attention.output,output}.dropout dropout",
    "linear": "bert.encoder.layer.*.{attention.self.{query,key,value},{attention.output,intermediate,output}.dense}"
    " bert.pooler.dense classifier",
}
ROBERTA = {op: paths.replace("bert", "roberta") for op, paths in BERT.items()}
ROBERTA["dropout"] = ROBERTA["dropout"].removesuffix(" dropout") + " classifier.dropout"
ROBERTA["linear"] = ROBERTA["linear"].removesuffix(" roberta.pooler.dense classifier") + " classifier.{dense,out_proj}"
LLAMA = {
    "attention": "@ model",
    "block": "@ model model.layers.*",
    "rms_norm": "model.layers.*.{input,post_attention}_layernorm model.norm",
    "gated_mlp": "model.layers.*.mlp",
    "activation": "model.layers.*.mlp.act_fn",
    "linear": "model.layers.*.{self_attn.{q,k,v,o},mlp.{gate,up,down}}_proj lm_head",
}
T5 = {
    "attention": "@ encoder decoder",
    "block": "@ encoder decoder {encoder,decoder}.block.*",
    "t5_layer_norm": "encoder.block.*.layer.{0,1}.layer_norm decoder.block.*.layer.{0,1,2}.layer_norm"
    " {encoder,decoder}.final_layer_norm",
    "t5_mlp": "{encoder.block.*.layer.1,decoder.block.*.layer.2}.DenseReluDense",
    "rectifier": "{encoder.block.*.layer.1,decoder.block.*.layer.2}.DenseReluDense.act",
    "dropout": "encoder.block.*.layer.{0.,1.,1.DenseReluDense.}dropout"
    " decoder.block.*.layer.{0.,1.,2.,2.DenseReluDense.}dropout {encoder,decoder}.dropout",
    "linear": "{{encoder,decoder}.block.*.layer.0.Self,decoder.block.*.layer.1.EncDec}Attention.{q,k,v,o}"
    " {encoder.block.*.layer.1,decoder.block.*.layer.2}.DenseReluDense.{wi,wo} lm_head",
}
GATED_T5 = T5 | {
    "t5_gated_mlp": T5["t5_mlp"],
    "new_gelu": T5["t5_mlp"] + ".act",
    "linear": T5["linear"].replace("{wi,wo}", "{wi_0,wi_1,wo}"),
}
del GATED_T5["t5_mlp"], GATED_T5["rectifier"]
SITES = {
    "bert": BERT,
    "roberta": ROBERTA,
    "gpt2": {
        "attention": "@ transformer",
        "block": "@ transformer transformer.h.*",
        "layer_norm": "transformer.h.*.ln_{1,2} transformer.ln_f",
        "new_gelu": "transformer.h.*.mlp.act",
        "dropout": "transformer.drop transformer.h.*.{attn.attn_dropout,attn.resid_dropout,mlp.dropout}",
        "conv1d": "transformer.h.*.{attn.c_attn,attn.c_proj,mlp.c_fc,mlp.c_proj}",
        "linear": "lm_head",
    },
    "t5-encoder": T5,
    "t5-decoder": T5,
    "t5-gated-encoder": GATED_T5,
    "llama": LLAMA,
    "mistral": LLAMA,
    "opt": {
        "attention": "@ model model.decoder",
        "block": "@ model model.decoder model.decoder.layers.*",
        "layer_norm": "model.decoder.layers.*.{self_attn,final}_layer_norm model.decoder.final_layer_norm",
        "rectifier": "model.decoder.layers.*.activation_fn",
        "linear": "model.decoder.layers.*.{self_attn.{q_proj,k_proj,v_proj,out_proj},fc1,fc2} lm_head",
    },
    "phi": {
        "attention": "@ model",
        "block": "@ model model.layers.*",
        "layer_norm": "model.layers.*.input_layernorm model.final_layernorm",
        "new_gelu": "model.layers.*.mlp.activation_fn",
        "dropout": "model.embed_dropout model.layers.*.resid_dropout",
        "linear": "model.layers.*.{self_attn.{q_proj,k_proj,v_proj,dense},mlp.fc1,mlp.fc2} lm_head",
    },
    "phi3": {
        "attention": "@ model",
        "block": "@ model model.layers.*",
        "rms_norm": LLAMA["rms_norm"],
        "chunked_gated_mlp": "model.layers.*.mlp",
        "activation": "model.layers.*.mlp.activation_fn",
        "dropout": "model.layers.*.resid_{attn,mlp}_dropout",
        "linear": "model.layers.*.{self_attn.o_proj,self_attn.qkv_proj,mlp.gate_up_proj,mlp.down_proj} lm_head",
    },
}


def expanded(paths):
    """Every path that a row of ``SITES`` stands for."""
    words, done = paths.replace("*", "{0,1}").split(), set()
    while words:
        word = words.pop()
        choice = re.search(r"\{([^{}]*)\}", word)
        if choice is None:
            done.add(word)
        else:
            words += [word[: choice.start()] + one + word[choice.end() :] for one in choice[1].split(",")]
    return sorted(done)


def sites_of(report):
    found = {}
    for site in report.patched:
        found.setdefault(site.op, []).append(site.name or "@")
    return {op: sorted(names) for op, names in found.items()}


@pytest.fixture
def llama(device):
    return build("llama").to(device)


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_exactly_these(family, device):
    report = patch(build(family).to(device))
    assert sites_of(report) == {op: expanded(paths) for op, paths in SITES[family].items()}
    assert report.skipped == ()
    assert report.unknown == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_names_the_modules_that_changed(family, device):
    model = build(family).to(device)
    before = {name: type(m) for name, m in model.named_modules()}
    report = patch(model)
    changed = {name for name, m in model.named_modules() if type(m) is not before[name]}
    assert changed == {site.name for site in report.patched if site.op != "attention"}


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_parameters_state_dict_and_classes_as_others_see_them(family, device):
    model = build(family).to(device)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = {name: t.clone() for name, t in model.state_dict().items()}
    classes = {name: (type(m), type(m).__name__, type(m).__module__) for name, m in model.named_modules()}
    attributes = {name: set(m.__dict__) for name, m in model.named_modules()}
    signature = inspect.signature(model.forward)
    patch(model)
    assert list(model.state_dict()) == list(state)
    assert_same(model.state_dict(), state)
    assert [(n, id(p)) for n, p in model.named_parameters()] == [(n, id(p)) for n, p in parameters.items()]
    assert [(n, id(b)) for n, b in model.named_buffers()] == [(n, id(b)) for n, b in buffers.items()]
    assert inspect.signature(model.forward) == signature  # Trainer picks its columns by it
    for name, module in model.named_modules():
        cls, *names = classes[name]
        assert isinstance(module, cls)
        assert [type(module).__name__, type(module).__module__] == names
        assert set(module.__dict__) == attributes[name]


@pytest.mark.parametrize("how", ["report.undo", "unpatch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_undo_restores_every_class_and_the_attention(family, how, device):
    model = build(family).to(device)
    before = {name: (cls, attention, own) for name, (cls, _, attention, own) in state_of(model).items()}
    report = patch(model)
    assert any(type(m) is not before[name][0] for name, m in model.named_modules())
    assert model.config._attn_implementation != "sdpa"
    report.undo() if how == "report.undo" else unpatch(model)
    assert {name: (cls, attention, own) for name, (cls, _, attention, own) in state_of(model).items()} == before
    assert model.config._attn_implementation == "sdpa"


def test_undone_model_keeps_what_stock_keeps(llama):
    batch = batch_for(llama)
    stock, expected = measure_kept(llama, batch), step(llama, batch)
    patch(llama).undo()
    assert measure_kept(llama, batch) == stock
    assert_same(step(llama, batch), expected)


def test_unpatch_of_a_stock_model_does_nothing(llama):
    before = state_of(llama)
    unpatch(llama)
    assert state_of(llama) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_patch_changes_nothing(family, device):
    model = build(family).to(device)
    first = patch(model)
    before = state_of(model)
    assert sites_of(patch(model)) == sites_of(first)
    assert state_of(model) == before


# Another config replaces the one before


@pytest.mark.parametrize(
    ("field", "stock_again"),
    [
        ("norm", {"T5LayerNorm"}),
        ("activation", {"T5DenseGatedActDense", "NewGELUActivation"}),
        ("dropout", {"Dropout"}),
    ],
)
def test_another_config_makes_a_kind_of_site_stock_again(field, stock_again, device):
    model = build("t5-gated-encoder").to(device)
    patch(model)
    before = patched_classes(model)
    report = patch(model, MemSaveConfig(**{field: "stock"}))
    assert patched_classes(model) == {name: cls for name, cls in before.items() if cls not in stock_again}
    assert {site.cls for site in report.skipped} == stock_again
    assert all(f"{field}='stock' was asked for" == site.reason for site in report.skipped)
    patch(model)
    assert patched_classes(model) == before


def test_attention_stock_gives_the_attention_name_back(llama):
    patch(llama)
    report = patch(llama, MemSaveConfig(attention="stock"))
    assert {m.config._attn_implementation for m in llama.modules() if hasattr(m, "config")} == {"sdpa"}
    assert "attention" not in sites_of(report)


def test_another_way_to_keep_masks_replaces_the_one_before(device):
    model = build("bert", Size(hidden=64)).to(device)
    batch = batch_for(model, Size(hidden=64))
    patch(model)
    seeds = measure_kept(model, batch).total
    patch(model, {"dropout": "mask"})
    masks = measure_kept(model, batch).total
    fresh = build("bert", Size(hidden=64)).to(device)
    patch(fresh, {"dropout": "mask"})
    assert masks != seeds
    assert masks == measure_kept(fresh, batch).total


def test_attention_alone_can_be_asked_for(llama):
    batch = batch_for(llama, padded=True)  # a mask makes SDPA repeat k and v
    stock = measure_kept(llama, batch).total
    report = patch(llama, MemSaveConfig(norm="stock", activation="stock", dropout="stock"))
    assert sites_of(report)["attention"] == ["@", "model"]
    assert measure_kept(llama, batch).total < stock


# The model's config


def test_the_users_config_object_stays_as_it_was(device):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99
    )
    model = LlamaForCausalLM(config).to(device)
    before = config.to_dict()
    assert config._attn_implementation == "sdpa"  # the model has chosen it
    patch(model)
    assert (config._attn_implementation, config.to_dict()) == ("sdpa", before)
    other = LlamaForCausalLM(config)
    assert other.config._attn_implementation == "sdpa"


def test_modules_go_on_sharing_one_config(llama):
    def configs():
        return {id(m.config) for m in llama.modules() if hasattr(m, "config")}

    assert len(configs()) == 1
    report = patch(llama)
    assert len(configs()) == 1
    report.undo()
    assert len(configs()) == 1


def test_what_the_user_sets_on_the_config_survives_undo(llama):
    report = patch(llama)
    llama.config.use_cache = False
    llama.config.problem_type = "regression"
    report.undo()
    assert (llama.config.use_cache, llama.config.problem_type) == (False, "regression")
    assert llama.config._attn_implementation == "sdpa"


def test_an_attention_chosen_by_the_user_stays(device):
    model = build("llama").to(device)
    model.set_attn_implementation("eager")
    report = patch(model)
    assert "attention" not in sites_of(report)
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"eager"}


def test_an_attention_chosen_after_patching_survives_undo(llama):
    report = patch(llama)
    llama.set_attn_implementation("eager")
    report.undo()
    assert {m.config._attn_implementation for m in llama.modules() if hasattr(m, "config")} == {"eager"}


# What is refused, and that a refused model is left as it was


def _liger_class(model, monkeypatch):
    class LigerRMSNorm(modeling_llama.LlamaRMSNorm):
        __module__ = "liger_kernel.transformers.rms_norm"

    model.model.norm.__class__ = LigerRMSNorm


def _liger_function(model, monkeypatch):
    def lce_forward(self, *args, **kwargs): ...

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lce_forward)


def _wrapped_function(model, monkeypatch):
    stock = modeling_llama.LlamaMLP.forward

    @functools.wraps(stock)
    def forward(self, x):
        return 2 * stock(self, x)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)


def _kernelized(model, monkeypatch):
    norm = model.model.norm
    norm.forward = types.MethodType(lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight), norm)


def _plain_function(model, monkeypatch):
    mlp = model.model.layers[1].mlp
    del mlp.act_fn
    mlp.act_fn = F.silu


def _missing_child(model, monkeypatch):
    model.model.layers[0].mlp.down_proj = None


def _another_norm(model, monkeypatch):
    model.model.layers[0].input_layernorm.variance_epsilon = None


REFUSED = {
    "a class of Liger": (_liger_class, ("model.norm", "Liger", "use_liger_kernel=False")),
    "a forward of Liger": (_liger_function, ("model.layers.0.mlp", "Liger", "use_liger_kernel=False")),
    "a forward around the class's": (_wrapped_function, ("model.layers.0.mlp", "forward", "activation='stock'")),
    "a forward on the instance": (_kernelized, ("model.norm", "forward", "use_kernels=False")),
    "a function for a module": (
        _plain_function,
        ("model.layers.1.mlp", "act_fn", "function", "'gated_mlp'", "activation='stock'"),
    ),
    "a missing module": (_missing_child, ("model.layers.0.mlp", "down_proj", "NoneType", "activation='stock'")),
    "another norm": (_another_norm, ("model.layers.0.input_layernorm", "variance_epsilon", "norm='stock'")),
}


@pytest.mark.parametrize("spoil", REFUSED)
def test_a_refused_model_is_left_untouched(spoil, llama, monkeypatch):
    make, words = REFUSED[spoil]
    make(llama, monkeypatch)
    before = state_of(llama)
    with pytest.raises(PatchError) as refusal:
        patch(llama)
    assert [word for word in words if word not in str(refusal.value)] == []
    assert state_of(llama) == before


@pytest.mark.parametrize("spoil", REFUSED)
def test_a_refused_second_patch_leaves_the_first(spoil, llama, monkeypatch):
    patch(llama, {"dropout": "mask"})
    make, _ = REFUSED[spoil]
    make(llama, monkeypatch)
    before = state_of(llama)
    with pytest.raises(PatchError):
        patch(llama, {"attention": "stock"})
    assert state_of(llama) == before


@pytest.mark.parametrize(("family", "child"), [("t5-encoder", "wo"), ("t5-gated-encoder", "wi_1")])
def test_t5_without_a_linear_is_refused_by_name(family, child, device):
    model = build(family).to(device)
    setattr(model.decoder.block[1].layer[2].DenseReluDense, child, None)
    before = state_of(model)
    with pytest.raises(PatchError, match=rf"decoder\.block\.1\.layer\.2\.DenseReluDense .*{child} is NoneType"):
        patch(model)
    assert state_of(model) == before


def test_the_remedy_of_a_refusal_works(llama):
    _plain_function(llama, None)
    report = patch(llama, MemSaveConfig(activation="stock"))
    assert "gated_mlp" not in sites_of(report)
    assert {site.name for site in report.skipped} == {
        "model.layers.0.mlp",
        "model.layers.0.mlp.act_fn",
        "model.layers.1.mlp",
    }


@pytest.mark.parametrize("config", ["exakt", {"norms": "stock"}, {"norm": "stok"}, 3], ids=str)
def test_a_config_that_does_not_exist_leaves_the_model_untouched(config, llama):
    before = state_of(llama)
    with pytest.raises(ConfigError, match="(?i)expected|must be"):
        patch(llama, config)
    assert state_of(llama) == before


@pytest.mark.parametrize("nothing", [False, None], ids=str)
def test_asking_for_nothing_is_an_error(nothing, llama):
    before = state_of(llama)
    with pytest.raises(PatchError, match=r"asks for nothing.*unpatch"):
        patch(llama, nothing)
    assert state_of(llama) == before


def test_nothing_to_patch_is_an_error(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    before = state_of(model)
    with pytest.raises(PatchError, match=r"nothing to patch in Sequential.*hf_memsave/arch"):
        patch(model)
    assert state_of(model) == before


def test_a_config_that_leaves_everything_stock_is_an_error(llama):
    before = state_of(llama)
    with pytest.raises(PatchError, match=r"nothing to patch in LlamaForCausalLM.*norm='stock' was asked for"):
        patch(llama, MemSaveConfig(norm="stock", activation="stock", dropout="stock", attention="stock"))
    assert state_of(llama) == before


def test_storage_alone_is_something_to_patch(device):
    model = build("bert").to(device)
    stock = measure_kept(model, batch_for(model)).total
    off = dict.fromkeys(("activation", "norm", "dropout", "attention", "lora"), "stock")
    patch(model, MemSaveConfig(**off, frozen=False, storage="int8"))
    assert measure_kept(model, batch_for(model)).total < 0.5 * stock


# Other tools that swap classes, after us


def wrap_class(module):
    """What FSDP2's ``fully_shard`` does to a module."""
    cls = type(module)
    module.__class__ = type(f"FSDP{cls.__name__}", (cls,), {"__module__": "torch.distributed.fsdp"})


@pytest.mark.parametrize("path", ["", "model.layers.1", "model.layers.0.mlp", "lm_head"])
def test_undo_refuses_where_another_tool_wrapped_our_class(path, llama):
    report = patch(llama)
    wrap_class(llama.get_submodule(path))
    before = state_of(llama)
    with pytest.raises(PatchError, match=rf"cannot undo {path or 'the model'}.*FSDP.*Undo before you wrap"):
        report.undo()
    assert state_of(llama) == before


@pytest.mark.parametrize("path", ["", "model.layers.1", "model.layers.0.mlp", "lm_head"])
def test_the_same_patch_over_another_tools_wrapper_changes_nothing(path, llama):
    patch(llama)
    wrap_class(llama.get_submodule(path))
    before = state_of(llama)
    patch(llama)
    assert state_of(llama) == before


def test_another_config_is_refused_where_another_tool_wrapped_our_class(llama):
    patch(llama)
    wrap_class(llama.model.norm)
    before = state_of(llama)
    with pytest.raises(PatchError, match=r"model\.norm.*FSDP"):
        patch(llama, MemSaveConfig(norm="stock"))
    assert state_of(llama) == before


# The report


def test_the_report_reads_as_a_table(llama):
    lines = str(patch(llama, MemSaveConfig(norm="stock"))).splitlines()
    assert lines[0] == "hf_memsave: 25 sites patched, 5 skipped"
    assert "  patched     2 x gated_mlp          LlamaMLP" in lines
    assert "  skipped     5 x rms_norm           LlamaRMSNorm: norm='stock' was asked for" in lines
    assert len(lines) == 1 + len(SITES["llama"]) + 3  # attention has sites of two classes, block of three


def test_compare_measures_stock_and_patched(llama):
    batch = batch_for(llama)
    stock = copy.deepcopy(llama)
    report = patch(llama)
    before = {name: (cls, attention) for name, (cls, _, attention, _) in state_of(llama).items()}
    comparison = report.compare(batch)
    assert comparison.stock.total == measure_kept(stock, batch).total
    assert comparison.patched.total == measure_kept(llama, batch).total
    assert comparison.freed == comparison.stock.total - comparison.patched.total > comparison.patched.total / 2
    assert {name: (cls, attention) for name, (cls, _, attention, _) in state_of(llama).items()} == before


def test_compare_leaves_the_model_patched_when_the_batch_fails(llama):
    report = patch(llama)
    before = patched_classes(llama)
    with pytest.raises(ValueError, match="input_ids"):
        report.compare({})
    assert patched_classes(llama) == before


def test_a_report_does_not_keep_its_model_alive(device):
    report = patch(build("phi").to(device))
    with pytest.raises(ReferenceError, match="no longer exists"):
        report.compare({})
    report.undo()  # nothing to undo


@pytest.mark.parametrize("how", ["trace", "script", "fx"])
def test_a_traced_model_is_refused(how):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()
    make = {
        "trace": lambda m: torch.jit.trace(m, torch.randn(2, 4)),
        "script": torch.jit.script,
        "fx": torch.fx.symbolic_trace,
    }
    traced = nn.ModuleDict({"inner": make[how](model)})
    with pytest.raises(
        PatchError, match="inner is a .*traced, scripted or exported.*Patch the model that it was made of"
    ):
        patch(traced)
