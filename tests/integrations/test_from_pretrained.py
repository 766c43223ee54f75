"""``from_pretrained(..., memsave=...)`` and ``from_config``: every door into Transformers, and what comes out again."""

import importlib
import json
import logging
import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    T5ForConditionalGeneration,
    modeling_utils,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import auto_factory, modeling_auto

import hf_memsave
from hf_memsave import ConfigError, MemSaveConfig
from hf_memsave.integrations import from_pretrained
from hf_memsave.patching.swap import is_patched, patch_of
from support.families import batch_for, build
from support.helpers import only_on_cpu
from support.steps import assert_same, patched_classes, step


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Family -> folder of a stock model."""
    folders = {}
    for family in ("llama", "bert", "gpt2", "t5-encoder"):
        folders[family] = tmp_path_factory.mktemp(family)
        build(family).save_pretrained(folders[family])
    return folders


def is_memsave(model):
    """Whether it is covered: it lays a tape, and its blocks end parts of it."""
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    return bool(blocks) and all(map(is_patched, (model, *blocks)))


def norms(model):
    return [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]


# Doors

FAMILY_OF = {
    AutoModel: "llama",
    AutoModelForCausalLM: "llama",
    AutoModelForSequenceClassification: "bert",
    AutoModelForSeq2SeqLM: "t5-encoder",
    LlamaForCausalLM: "llama",
    LlamaModel: "llama",
    BertForSequenceClassification: "bert",
    GPT2LMHeadModel: "gpt2",
    T5ForConditionalGeneration: "t5-encoder",
}


@pytest.mark.parametrize("cls", FAMILY_OF, ids=lambda c: c.__name__)
def test_every_class_patches_what_it_loads_and_what_it_builds(cls, saved):
    family = FAMILY_OF[cls]
    config = build(family).config
    from_config = cls.from_config if cls.__name__.startswith("Auto") else cls._from_config
    for make in (partial(cls.from_pretrained, saved[family]), partial(from_config, config)):
        torch.manual_seed(1)
        model = make(memsave=True)
        torch.manual_seed(1)
        stock = make()
        assert is_memsave(model)
        assert patched_classes(stock) == {}
        assert type(model).__name__ == type(stock).__name__
        assert_same(model.state_dict(), stock.state_dict())
    assert config._attn_implementation == "sdpa"


def test_a_model_patched_from_a_config_trains_with_stocks_bits(device):
    only_on_cpu(device)
    config = build("bert").config
    results = []
    for load in (
        partial(AutoModelForSequenceClassification.from_config, config),
        partial(AutoModelForSequenceClassification.from_config, config, memsave=True),
        partial(BertForSequenceClassification._from_config, config=config, memsave=True),
    ):
        torch.manual_seed(1)
        model = load().train()
        results.append(step(model, batch_for(model)))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


# Values of the flag


def test_ways_to_ask_for_the_default_or_for_a_config(saved):
    default = LlamaForCausalLM.from_pretrained(saved["llama"], memsave=True)
    for value in ("exact", {"norm": "recompute"}, MemSaveConfig(), {}):
        model = LlamaForCausalLM.from_pretrained(saved["llama"], memsave=value)
        assert patched_classes(model) == patched_classes(default) != {}
        assert [type(m) for m in model.modules()] == [type(m) for m in default.modules()]
    for door, value in ((AutoModelForCausalLM, {"norm": "stock"}), (LlamaForCausalLM, MemSaveConfig(norm="stock"))):
        model = door.from_pretrained(saved["llama"], memsave=value)
        assert is_memsave(model) and {patch_of(norm).op for norm in norms(model)} == {"quiet"}


@pytest.mark.parametrize("value", [False, None], ids=str)
def test_no_is_no(value, saved):
    model = AutoModelForCausalLM.from_pretrained(saved["llama"], memsave=value)
    assert patched_classes(model) == {}
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("door", "value"),
    [("auto", "exakt"), ("direct", {"nrm": "stock"}), ("from_config", {"norm": "stok"}), ("direct", 1)],
    ids=str,
)
def test_a_wrong_value_raises_before_any_weight_is_loaded_or_made(door, value, tmp_path):
    config = LlamaConfig(hidden_size=2**40)  # could not be built
    config.save_pretrained(tmp_path)  # has no weights
    load = {
        "auto": lambda: AutoModelForCausalLM.from_pretrained(tmp_path, memsave=value),
        "direct": lambda: LlamaForCausalLM.from_pretrained(tmp_path, memsave=value),
        "from_config": lambda: AutoModelForCausalLM.from_config(config, memsave=value),
    }[door]
    with pytest.raises(ConfigError, match="expected|must be"):
        load()


@pytest.mark.long
def test_an_auto_class_resolves_nothing_before_a_mistake_is_told(tmp_path, monkeypatch):
    def resolved(*args, **kwargs):
        raise AssertionError("the model was looked up")

    monkeypatch.setattr(auto_factory, "resolve_revision", resolved, raising=False)
    monkeypatch.setattr(AutoConfig, "from_pretrained", resolved)
    found = [cls for cls in from_pretrained.auto_classes(modeling_auto) if hasattr(cls, "_model_mapping")]
    assert {AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification} < set(found) and len(found) > 30
    for method in (method for cls in found for method in (cls.from_pretrained, cls.from_config)):
        with pytest.raises(ConfigError, match="expected.*exact"):
            method("a-name/model", memsave="exactt")
    for method in (AutoModel.from_pretrained, AutoModel.from_config):
        with pytest.raises(Exception) as past:  # noqa: B017  stock's own: there is no such model
            method(tmp_path, memsave=True)
        assert not isinstance(past.value, ConfigError)


class TakesMemSaved(LlamaForCausalLM):
    """A model with an argument of its own whose name is like ours."""

    def __init__(self, config, mem_saved=None):
        super().__init__(config)
        self.mem_saved = mem_saved


@pytest.mark.parametrize("patched", [True, False])
def test_an_argument_that_resembles_memsave_goes_where_it_was_meant_to(patched, saved):
    model = TakesMemSaved.from_pretrained(saved["llama"], mem_saved="theirs", memsave=patched)
    assert model.mem_saved == "theirs" and is_memsave(model) == patched
    with pytest.raises(TypeError, match="unexpected keyword argument 'memsvae'"):
        LlamaForCausalLM.from_pretrained(saved["llama"], memsvae=True)


def test_a_config_that_leaves_everything_to_stock_is_no_error(saved, device):
    only_on_cpu(device)
    off = dict.fromkeys(("norm", "activation", "dropout", "attention", "lora"), "stock")
    model = LlamaForCausalLM.from_pretrained(saved["llama"], memsave=off).train()
    stock = LlamaForCausalLM.from_pretrained(saved["llama"]).train()
    assert_same(step(model, batch_for(model)), step(stock, batch_for(stock)))


# Other arguments go on working


def test_loading_info_attention_dtype_and_overrides(saved):
    model, info = AutoModelForCausalLM.from_pretrained(
        saved["llama"], memsave=True, output_loading_info=True, attn_implementation="eager", dtype=torch.bfloat16,
        rms_norm_eps=1e-3, use_cache=False,
    )  # fmt: skip
    assert is_memsave(model) and not model.training
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config._attn_implementation == model.model.config._attn_implementation == "eager"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (model.config.rms_norm_eps, model.config.use_cache) == (1e-3, False)


def test_the_config_is_stocks(saved):
    configs = []
    for options in ({"memsave": True}, {}):
        given = LlamaConfig.from_pretrained(saved["llama"])
        model = LlamaForCausalLM.from_pretrained(saved["llama"], config=given, **options)
        configs.append([(c.to_dict(), c._attn_implementation) for c in (given, model.config)])
    assert configs[0] == configs[1] and configs[0][1][1] == "sdpa"


def test_importing_twice_wraps_once_and_the_methods_keep_name_and_documentation():
    methods = {name: getattr(PreTrainedModel, name).__func__ for name in from_pretrained._METHODS}
    hf_memsave.install()
    importlib.reload(from_pretrained).teach_models(modeling_utils)
    importlib.reload(hf_memsave)
    assert {name: getattr(PreTrainedModel, name).__func__ for name in methods} == methods
    for name in methods:
        method = getattr(PreTrainedModel, name)
        assert isinstance(PreTrainedModel.__dict__[name], classmethod)
        assert method.__name__ == name
        assert method.__module__ == "transformers.modeling_utils"
    assert "pretrained" in PreTrainedModel.from_pretrained.__doc__


# The way out


def test_a_saved_models_files_are_stocks(saved, tmp_path):
    for name, options in (("ours", {"memsave": True}), ("stock", {})):
        AutoModelForCausalLM.from_pretrained(saved["llama"], **options).save_pretrained(tmp_path / name)
    ours, stock = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("ours", "stock"))
    assert "config.json" in ours
    assert ours == stock


STOCK_PROCESS = """
import json, logging, sys, warnings
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(2)
said = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)
AutoModelForCausalLM.from_pretrained(sys.argv[3])  # what libraries say by themselves, they say here
said.clear()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
said += [str(w.message) for w in caught]
with torch.no_grad():
    logits = model(input_ids=torch.arange(5, 21)[None]).logits
torch.save({"logits": logits, **model.state_dict()}, sys.argv[2])
print(json.dumps({
    "said": said,
    "keys": [str(k) for name in ("missing_keys", "unexpected_keys", "mismatched_keys") for k in info[name]],
    "attention": model.config._attn_implementation,
    "ours": [name for name in sys.modules if name.startswith("hf_memsave")],
}))
"""


@pytest.mark.long
def test_a_trained_model_loads_in_a_process_without_hf_memsave(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved["llama"], memsave=True).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, batch_for(model))
    optimizer.step()
    model.save_pretrained(tmp_path / "model")
    run = subprocess.run(
        [sys.executable, "-c", STOCK_PROCESS, tmp_path / "model", tmp_path / "out.pt", saved["llama"]],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found == {"said": [], "keys": [], "attention": "sdpa", "ours": []}
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.arange(5, 21)[None]).logits
    assert_same(torch.load(tmp_path / "out.pt"), {"logits": logits, **model.state_dict()})


def test_a_config_that_hides_the_flag_is_an_error(saved, tmp_path):
    model = LlamaForCausalLM.from_pretrained(saved["llama"])
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "memsave": False}))
    with pytest.raises(ConfigError, match=r"LlamaConfig.*attribute 'memsave' = .*config\.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path, memsave=True)


def test_loading_says_nothing_that_stock_does_not_say(saved, caplog, monkeypatch):
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    said = []
    for options in ({}, {"memsave": True}):
        caplog.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            AutoModelForCausalLM.from_pretrained(saved["llama"], **options)
        loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
        said.append({*map(logging.LogRecord.getMessage, loud), *(str(w.message) for w in caught)})
    assert said[1] <= said[0]
