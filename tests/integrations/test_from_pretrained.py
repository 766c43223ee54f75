"""``from_pretrained(..., memsave=...)`` and ``from_config``: every door into Transformers, and what comes out again."""

import importlib
import json
import logging
import subprocess
import sys
import types
import warnings

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

import hf_memsave
from hf_memsave import ConfigError, MemSaveConfig, PatchError
from hf_memsave.integrations import from_pretrained
from hf_memsave.patching.swap import is_patched
from hf_memsave.tape import current
from support.families import batch_for, build
from support.helpers import only_on_cpu
from support.steps import assert_same, patched_classes, step

NORMS = {"LlamaRMSNorm", "LayerNorm", "T5LayerNorm"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Family -> folder of a stock model."""
    folders = {}
    for family in ("llama", "bert", "gpt2", "t5-encoder"):
        folders[family] = tmp_path_factory.mktemp(family)
        build(family).save_pretrained(folders[family])
    return folders


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, saved):
    """A LoRA adapter of the LLaMA model, as PEFT saves it; its B matrices are not zero."""
    torch.manual_seed(0)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(saved["llama"]), LoraConfig(r=4, lora_dropout=0.1))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


def is_memsave(model):
    return NORMS & set(patched_classes(model).values()) != set() and is_patched(model)


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
    names = set(patched_classes(door.from_pretrained(saved["llama"], memsave=value)).values())
    assert "LlamaMLP" in names
    assert "LlamaRMSNorm" not in names


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


def test_a_model_with_nothing_to_patch_is_an_error(saved):
    with pytest.raises(PatchError, match="asked for"):
        LlamaForCausalLM.from_pretrained(
            saved["llama"], memsave=dict(norm="stock", activation="stock", dropout="stock", attention="stock")
        )


# Other arguments go on working


def test_output_loading_info(saved):
    model, info = AutoModelForCausalLM.from_pretrained(saved["llama"], memsave=True, output_loading_info=True)
    assert is_memsave(model)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_eager_attention_stays_eager(saved):
    model = AutoModelForCausalLM.from_pretrained(saved["llama"], memsave=True, attn_implementation="eager")
    assert is_memsave(model)
    assert model.config._attn_implementation == model.model.config._attn_implementation == "eager"


def test_sdpa_is_renamed_in_the_models_own_config_only(saved):
    config = LlamaConfig.from_pretrained(saved["llama"])
    model = LlamaForCausalLM.from_pretrained(saved["llama"], config=config, memsave=True)
    assert model.config._attn_implementation == "memsave"
    assert config._attn_implementation != "memsave"


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


# Accelerate's hooks

OFFLOADED = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "disk",
    "lm_head": "cpu",
}


@pytest.fixture
def dispatched(saved, tmp_path, device):
    only_on_cpu(device, "a map of CPU and disk")

    def load(**options):
        return AutoModelForCausalLM.from_pretrained(
            saved["llama"], device_map=OFFLOADED, offload_folder=tmp_path, **options
        )

    return load


def test_an_offloaded_models_hooks_call_our_forward(dispatched):
    model = dispatched(memsave=True)
    hooked = [m for m in model.modules() if "_old_forward" in m.__dict__ and is_patched(m)]
    assert {type(m).__name__ for m in hooked} >= {"LlamaForCausalLM", "LlamaRMSNorm", "LlamaMLP"}
    for module in hooked:
        assert isinstance(module._old_forward, types.MethodType)
        assert module._old_forward.__func__ is type(module).forward


def test_an_offloaded_model_runs_under_our_tape(dispatched):
    model = dispatched(memsave=True)
    taped = []
    for module in (model.model.norm, model.model.layers[1].mlp):
        module.register_forward_pre_hook(lambda *_: taped.append(current() is not None))
    model(input_ids=torch.arange(5, 15)[None])
    assert taped == [True, True]


def test_an_offloaded_model_gives_stocks_bits(dispatched):
    results = []
    for options in ({"memsave": True}, {}):
        model = dispatched(**options).train()
        embedded = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = model(inputs_embeds=embedded, use_cache=False)
        out.logits.square().sum().backward()
        results.append({"logits": out.logits.detach(), "grad": embedded.grad})
    assert_same(*results)


def test_undo_of_an_offloaded_model_rebinds_the_hooks(dispatched):
    model = dispatched(memsave=True)
    hf_memsave.unpatch(model)
    for module in model.modules():
        if "_old_forward" in module.__dict__:
            assert module._old_forward.__func__ is type(module).forward
    assert patched_classes(model) == {}


def taped_norm_calls(model):
    """Whether our tape is on while each norm runs, in one forward."""
    seen = []
    handles = [
        module.register_forward_pre_hook(lambda *_: seen.append(current() is not None))
        for module in model.modules()
        if type(module).__name__ == "LlamaRMSNorm"
    ]
    model(**batch_for(model))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("first", ["patched", "hooked"])
def test_hooks_and_patches_come_in_any_order(first, device):
    model = build("llama").to(device)
    if first == "patched":
        hf_memsave.patch(model)
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    if first == "hooked":
        hf_memsave.patch(model)
    assert taped_norm_calls(model) == [True] * 5
    hf_memsave.unpatch(model)
    assert taped_norm_calls(model) == [False] * 5


def test_undo_reaches_a_forward_that_accelerate_left_on_the_instance(device):
    model = build("llama").to(device)
    hf_memsave.patch(model)
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    remove_hook_from_module(model, recurse=True)
    assert taped_norm_calls(model) == [True] * 5
    hf_memsave.unpatch(model)
    assert taped_norm_calls(model) == [False] * 5


# Quantized models


def quantized(saved, bits, **options):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    # device_map: the quantizer would move the model to a GPU by itself
    device_map = {"": 0} if torch.cuda.is_available() else {"": "cpu"}
    return AutoModelForCausalLM.from_pretrained(
        saved["llama"], quantization_config=config, device_map=device_map, **options
    )


@pytest.mark.parametrize(("bits", "linear"), [(4, "Linear4bit"), (8, "Linear8bitLt")])
def test_quantized_linears_keep_their_class_and_norms_are_patched(bits, linear, saved):
    model = quantized(saved, bits, memsave=True)
    linears = [m for m in model.modules() if type(m).__name__ == linear]
    assert len(linears) == 14
    assert all(is_patched(m) == (bits == 8) for m in linears)  # only its node hides an input
    assert sorted(name for name, cls in patched_classes(model).items() if cls == "LlamaRMSNorm") == [
        "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm",
        "model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm", "model.norm",
    ]  # fmt: skip


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_gives_stocks_bits(bits, saved, device):
    only_on_cpu(device)
    results = []
    for options in ({"memsave": True}, {}):
        model = quantized(saved, bits, **options).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name or "embed" in name)
        results.append(step(model, batch_for(model)))
    assert_same(*results)


# Adapters

ADAPTER_DOORS = {"native": AutoModelForCausalLM, "peft": AutoPeftModelForCausalLM}


@pytest.mark.parametrize("door", ADAPTER_DOORS)
def test_an_adapter_folder_loads_patched(door, adapter):
    model = ADAPTER_DOORS[door].from_pretrained(adapter, memsave=True)
    base = model if door == "native" else model.get_base_model()
    assert is_memsave(base)
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 4  # q and v of two layers


@pytest.mark.parametrize("door", ADAPTER_DOORS)
def test_an_adapter_trains_with_stocks_bits(door, adapter, device):
    only_on_cpu(device)
    results = []
    for options in ({"memsave": True}, {}):
        model = ADAPTER_DOORS[door].from_pretrained(adapter, **options).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        results.append(step(model, batch_for(model)))
    assert_same(*results)
    assert len(results[0]) == 1 + 8


# The way out


def test_a_saved_models_files_are_stocks(saved, tmp_path):
    for name, options in (("ours", {"memsave": True}), ("stock", {})):
        AutoModelForCausalLM.from_pretrained(saved["llama"], **options).save_pretrained(tmp_path / name)
    ours, stock = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("ours", "stock"))
    assert "config.json" in ours
    assert ours == stock
    assert not any(b"memsave" in content for content in ours.values())


STOCK_PROCESS = """
import json, logging, sys, warnings
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(2)
said = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)
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
        [sys.executable, "-c", STOCK_PROCESS, tmp_path / "model", tmp_path / "out.pt"],
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


def test_loading_says_nothing_that_stock_does_not_say(saved):
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            AutoModelForCausalLM.from_pretrained(saved["llama"], memsave=True)
    finally:
        logger.removeHandler(handler)
    assert said == []
    assert [str(w.message) for w in caught] == []
