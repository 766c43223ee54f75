"""``from_pretrained(..., memsave=...)`` and ``from_config``: every door into Transformers, and what comes out again."""

import importlib
import json
import logging
import subprocess
import sys
import warnings

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
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import auto_factory

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
def test_from_pretrained_patches_what_it_loads(cls, saved):
    folder = saved[FAMILY_OF[cls]]
    model, stock = cls.from_pretrained(folder, memsave=True), cls.from_pretrained(folder)
    assert is_memsave(model)
    assert patched_classes(stock) == {}
    assert type(model).__name__ == type(stock).__name__
    assert_same(model.state_dict(), stock.state_dict())


@pytest.mark.parametrize("cls", [c for c in FAMILY_OF if c.__name__.startswith("Auto")], ids=lambda c: c.__name__)
def test_from_config_patches_what_it_builds(cls, saved):
    config = build(FAMILY_OF[cls]).config
    torch.manual_seed(1)
    model = cls.from_config(config, memsave=True)
    torch.manual_seed(1)
    stock = cls.from_config(config)
    assert is_memsave(model)
    assert patched_classes(stock) == {}
    assert_same(model.state_dict(), stock.state_dict())


@pytest.mark.parametrize("cls", [LlamaForCausalLM, LlamaModel], ids=lambda c: c.__name__)
def test_a_direct_class_builds_from_a_config(cls):
    config = build("llama").config
    assert is_memsave(cls._from_config(config, memsave=True))
    assert patched_classes(cls._from_config(config)) == {}
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize("config_as", ["positional", "keyword"])
def test_a_model_patched_from_a_config_trains_with_stocks_bits(config_as, device):
    only_on_cpu(device)
    config = build("bert").config
    load = {
        "positional": lambda **kw: AutoModelForSequenceClassification.from_config(config, **kw),
        "keyword": lambda **kw: BertForSequenceClassification._from_config(config=config, **kw),
    }[config_as]
    results = []
    for options in ({"memsave": True}, {}):
        torch.manual_seed(1)
        model = load(**options).train()
        results.append(step(model, batch_for(model)))
    assert_same(*results)


# Values of the flag


@pytest.mark.parametrize(
    "value",
    [True, "exact", {"norm": "recompute"}, MemSaveConfig(), {}],
    ids=["True", "preset", "dict", "config", "empty dict"],
)
def test_ways_to_ask_for_the_default(value, saved):
    model = LlamaForCausalLM.from_pretrained(saved["llama"], memsave=value)
    default = LlamaForCausalLM.from_pretrained(saved["llama"], memsave=True)
    assert patched_classes(model) == patched_classes(default) != {}
    assert [type(m) for m in model.modules()] == [type(m) for m in default.modules()]


@pytest.mark.parametrize("value", [{"norm": "stock"}, MemSaveConfig(norm="stock")], ids=["dict", "config"])
@pytest.mark.parametrize("door", [AutoModelForCausalLM, LlamaForCausalLM], ids=lambda c: c.__name__)
def test_the_flag_carries_a_config(door, value, saved):
    model = door.from_pretrained(saved["llama"], memsave=value)
    assert is_memsave(model) and {patch_of(norm).op for norm in norms(model)} == {"quiet"}


@pytest.mark.parametrize("value", [False, None], ids=str)
def test_no_is_no(value, saved):
    model = AutoModelForCausalLM.from_pretrained(saved["llama"], memsave=value)
    assert patched_classes(model) == {}
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("value", ["exakt", {"nrm": "stock"}, {"norm": "stok"}, 1], ids=str)
@pytest.mark.parametrize("door", ["auto", "direct", "from_config"])
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
@pytest.mark.parametrize("method", ["from_pretrained", "from_config"])
def test_an_auto_class_resolves_nothing_before_a_mistake_is_told(method, tmp_path, monkeypatch):
    def resolved(*args, **kwargs):
        raise AssertionError("the model was looked up")

    monkeypatch.setattr(auto_factory, "resolve_revision", resolved, raising=False)
    monkeypatch.setattr(AutoConfig, "from_pretrained", resolved)
    found = [cls for cls in from_pretrained.auto_classes() if hasattr(cls, "_model_mapping")]
    assert {AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification} < set(found) and len(found) > 30
    for cls in found:
        with pytest.raises(ConfigError, match="expected.*exact"):
            getattr(cls, method)("somebody/model", memsave="exactt")
    with pytest.raises(Exception) as past:  # noqa: B017  stock's own: there is no such model
        getattr(AutoModel, method)(tmp_path, memsave=True)
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


def test_output_loading_info(saved):
    model, info = AutoModelForCausalLM.from_pretrained(saved["llama"], memsave=True, output_loading_info=True)
    assert is_memsave(model)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_eager_attention_stays_eager(saved):
    model = AutoModelForCausalLM.from_pretrained(saved["llama"], memsave=True, attn_implementation="eager")
    assert is_memsave(model)
    assert model.config._attn_implementation == model.model.config._attn_implementation == "eager"


def test_the_config_is_stocks(saved):
    configs = []
    for options in ({"memsave": True}, {}):
        given = LlamaConfig.from_pretrained(saved["llama"])
        model = LlamaForCausalLM.from_pretrained(saved["llama"], config=given, **options)
        configs.append([(c.to_dict(), c._attn_implementation) for c in (given, model.config)])
    assert configs[0] == configs[1] and configs[0][1][1] == "sdpa"


def test_dtype_and_config_overrides(saved):
    model = AutoModelForCausalLM.from_pretrained(
        saved["llama"], memsave=True, dtype=torch.bfloat16, rms_norm_eps=1e-3, use_cache=False
    )
    assert is_memsave(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (model.config.rms_norm_eps, model.config.use_cache) == (1e-3, False)


def test_the_loaded_model_is_in_eval_mode_as_stock(saved):
    assert not LlamaForCausalLM.from_pretrained(saved["llama"], memsave=True).training


def test_importing_twice_wraps_once():
    methods = {name: getattr(PreTrainedModel, name).__func__ for name in from_pretrained._METHODS}
    from_pretrained.install()
    importlib.reload(from_pretrained).install()
    importlib.reload(hf_memsave)
    assert {name: getattr(PreTrainedModel, name).__func__ for name in methods} == methods


def test_the_wrapped_methods_keep_name_and_documentation():
    for name in from_pretrained._METHODS:
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
