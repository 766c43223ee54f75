"""``from_pretrained(..., memsave=...)`` and ``from_config``: every door into Transformers, and what comes out again."""

import importlib
import json
from functools import partial

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    modeling_utils,
)
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_memsave
from hf_memsave import ConfigError, MemSaveConfig
from hf_memsave.integrations import memsave_argument
from hf_memsave.patching.swap import is_patched, patch_of
from support.steps import assert_same, patched_classes, step
from support.zoo import batch_for, build


def is_memsave(model):
    """Whether it is covered: it lays a tape, and its blocks end parts of it."""
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    return bool(blocks) and all(map(is_patched, (model, *blocks)))


FAMILY_OF = {
    AutoModel: "llama", AutoModelForSequenceClassification: "bert", AutoModelForSeq2SeqLM: "t5-encoder",
    LlamaForCausalLM: "llama", LlamaModel: "llama", GPT2LMHeadModel: "gpt2",
}  # fmt: skip


@pytest.mark.parametrize("cls", FAMILY_OF, ids=lambda c: c.__name__)
def test_every_class_patches_what_it_loads_and_what_it_builds(cls, saved):
    family = FAMILY_OF[cls]
    config = build(family).config
    from_config = cls.from_config if cls.__name__.startswith("Auto") else cls._from_config
    for make in (partial(cls.from_pretrained, saved(family=family)), partial(from_config, config)):
        torch.manual_seed(1)
        model = make(memsave=True)
        torch.manual_seed(1)
        stock = make()
        assert is_memsave(model)
        assert patched_classes(stock) == {}
        assert type(model).__name__ == type(stock).__name__
        assert_same(model.state_dict(), stock.state_dict())
        if cls in (AutoModelForSequenceClassification, LlamaForCausalLM):
            batch = batch_for(model)
            assert_same(step(model.train(), batch), step(stock.train(), batch))
    assert config._attn_implementation == "sdpa"


def test_ways_to_ask_for_the_default_or_for_a_config(saved):
    default = LlamaForCausalLM.from_pretrained(saved(), memsave=True)
    for value in ("exact", {"norm": "recompute"}, MemSaveConfig(), {}):
        model = LlamaForCausalLM.from_pretrained(saved(), memsave=value)
        assert patched_classes(model) == patched_classes(default) != {}
        assert [type(m) for m in model.modules()] == [type(m) for m in default.modules()]
    for value in (False, None):
        assert patched_classes(AutoModelForCausalLM.from_pretrained(saved(), memsave=value)) == {}
    with pytest.raises(TypeError, match="unexpected keyword argument 'memsvae'"):
        LlamaForCausalLM.from_pretrained(saved(), memsvae=True)
    for door, value in ((AutoModelForCausalLM, {"norm": "stock"}), (LlamaForCausalLM, MemSaveConfig(norm="stock"))):
        model = door.from_pretrained(saved(), memsave=value)
        norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
        assert is_memsave(model) and {patch_of(norm).op for norm in norms} == {"quiet"}


def test_a_wrong_value_raises_before_weights_are_looked_for_or_a_model_is_made(tmp_path):
    config = LlamaConfig(hidden_size=2**40)  # could not be built
    config.save_pretrained(tmp_path)  # has no weights
    for load, value in (
        (partial(AutoModelForCausalLM.from_pretrained, tmp_path), "exakt"),
        (partial(LlamaForCausalLM.from_pretrained, tmp_path), {"nrm": "stock"}),
        (partial(AutoModelForCausalLM.from_config, config), {"norm": "stok"}),
        (partial(LlamaForCausalLM.from_pretrained, tmp_path), 1),
    ):
        with pytest.raises(ConfigError, match="expected|must be"):
            load(memsave=value)


def test_loading_info_attention_dtype_and_overrides(saved):
    model, info = AutoModelForCausalLM.from_pretrained(
        saved(), memsave=True, output_loading_info=True, attn_implementation="eager", dtype=torch.bfloat16,
        rms_norm_eps=1e-3, use_cache=False,
    )  # fmt: skip
    assert is_memsave(model) and not model.training
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config._attn_implementation == model.model.config._attn_implementation == "eager"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (model.config.rms_norm_eps, model.config.use_cache) == (1e-3, False)


def test_importing_twice_wraps_once_and_the_methods_keep_name_and_documentation():
    methods = {name: getattr(PreTrainedModel, name).__func__ for name in ("from_pretrained", "_from_config")}
    hf_memsave.install()
    importlib.reload(memsave_argument).teach_models(modeling_utils)
    importlib.reload(hf_memsave)
    assert {name: getattr(PreTrainedModel, name).__func__ for name in methods} == methods
    for name in methods:
        method = getattr(PreTrainedModel, name)
        assert isinstance(PreTrainedModel.__dict__[name], classmethod)
        assert method.__name__ == name
        assert method.__module__ == "transformers.modeling_utils"
    assert "pretrained" in PreTrainedModel.from_pretrained.__doc__


def test_configs_and_saved_files_are_stocks(saved, tmp_path):
    configs = []
    for name, options in (("ours", {"memsave": True}), ("stock", {})):
        given = LlamaConfig.from_pretrained(saved())
        model = LlamaForCausalLM.from_pretrained(saved(), config=given, **options)
        configs.append([(c.to_dict(), c._attn_implementation) for c in (given, model.config)])
        model.save_pretrained(tmp_path / name)
    assert configs[0] == configs[1] and configs[0][1][1] == "sdpa"
    ours, stock = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("ours", "stock"))
    assert "config.json" in ours
    assert ours == stock


def test_a_config_that_hides_the_flag_is_an_error(saved, tmp_path):
    model = LlamaForCausalLM.from_pretrained(saved())
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "memsave": False}))
    with pytest.raises(ConfigError, match=r"LlamaConfig.*attribute 'memsave' = .*config\.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path, memsave=True)
