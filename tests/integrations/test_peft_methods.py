"""Every method that PEFT lists trains on a patched model as on a stock one, and keeps less."""

from __future__ import annotations

import gc
import re
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_memsave import measure_kept, patch
from support.helpers import chosen, only_on_cpu
from support.steps import assert_same, with_uneven_vectors
from support.zoo import Size, batch_for, build

LISTED = {kind.value: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
SIZE = Size()
STEPS = 2
#: Tokens that every batch holds: some methods train only what these tokens meet.
TOKENS = [5, 6, 7, 8]

#: Adapters of linears; of norms for LN_TUNING.
LINEARS = {"llama": ["q_proj", "v_proj", "down_proj"], "bert": ["query", "value", "output.dense"],
           "gpt2": ["c_attn", "c_proj"]}  # fmt: skip
NORMS = {"llama": ["input_layernorm", "norm"], "bert": ["LayerNorm"], "gpt2": ["ln_1", "ln_2"]}
TASK = {"llama": "CAUSAL_LM", "bert": "SEQ_CLS", "gpt2": "CAUSAL_LM"}

#: Method -> options. "on" says what is adapted ("linears" unless said otherwise), or "task" for methods that ask for
#: a task type instead.
METHODS: dict[str, dict[str, Any]] = {
    "ADALORA": dict(init_r=4, target_r=2, total_step=10, tinit=0, tfinal=1, lora_dropout=0.1),
    "ADAMSS": dict(r=8, num_subspaces=2), "ADAPTION_PROMPT": dict(on="task", adapter_len=4, adapter_layers=2),
    "BEFT": dict(), "BOFT": dict(boft_block_size=4, boft_dropout=0.1), "C3A": dict(block_size=8),
    "CARTRIDGE": dict(on="task", num_virtual_tokens=4),
    "CPT": dict(on="task", cpt_token_ids=[1, 2, 3, 4], cpt_mask=[1] * 4, cpt_tokens_type_mask=[1, 2, 3, 4]),
    "DELORA": dict(r=4, module_dropout=0.1), "FOURIERFT": dict(n_frequency=20),
    "FROD": dict(frod_dropout=0.1, progressbar=False), "IA3": dict(feedforward_modules=[]),
    "LN_TUNING": dict(on="norms"), "LOHA": dict(r=4, rank_dropout=0.1), "LOKR": dict(r=4, rank_dropout=0.1),
    "MULTITASK_PROMPT_TUNING": dict(on="task", num_virtual_tokens=4, num_tasks=2),
    "OFT": dict(oft_block_size=8, module_dropout=0.1), "OSF": dict(effective_rank=8), "PEANUT": dict(r=4, depth=2),
    "POLY": dict(r=4, n_tasks=2, n_skills=2, task_type="CAUSAL_LM"),
    "PREFIX_TUNING": dict(on="task", num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=16),
    "PROMPT_TUNING": dict(on="task", num_virtual_tokens=4), "PVERA": dict(r=8, pvera_dropout=0.1),
    "P_TUNING": dict(on="task", num_virtual_tokens=4, encoder_hidden_size=16, encoder_dropout=0.1),
    "ROAD": dict(group_size=8), "SHADOW": dict(on="task", r=4), "SHIRA": dict(r=4, random_seed=0),
    "SUPERTUNING": dict(sparsity=0.9), "TINYLORA": dict(r=2, u=8, tinylora_dropout=0.1),
    "TRAINABLE_TOKENS": dict(on="nothing", token_indices=TOKENS),
    "UNILORA": dict(r=4, theta_d_length=32, unilora_dropout=0.1),
    "VBLORA": dict(r=4, num_vectors=16, vector_length=8, vblora_dropout=0.1),
    "VERA": dict(r=8, vera_dropout=0.1), "WAVEFT": dict(n_frequency=16),
    **{name: {"r": 4} for name in ("GLORA", "HRA", "LILY")},
    **{
        name: {"r": 4, f"{name.lower()}_dropout": 0.1}
        for name in ("LORA", "DEFT", "GRALORA", "HIRA", "MISS", "PSOFT", "RANDLORA")
    },
    "XLORA": dict(on="task", hidden_size=SIZE.hidden, xlora_depth=2, xlora_size=16, use_trainable_adapters=True),
}  # fmt: skip

#: Family -> methods that PEFT itself refuses there (no linears, another task), or that the table cannot say for it.
REFUSED = {
    "llama": set(),
    "bert": {"ADAPTION_PROMPT", "CPT", "POLY", "SHADOW", "XLORA"},
    "gpt2": {
        "ADAMSS", "BEFT", "BOFT", "C3A", "DELORA", "GLORA", "HRA", "LILY", "LOHA", "LOKR", "MISS", "OFT", "OSF",
        "PEANUT", "POLY", "PSOFT", "ROAD", "SHIRA", "SUPERTUNING", "XLORA",
    },
}  # fmt: skip
#: Methods with parameters that no loss depends on, and how their names are spelled.
UNUSED = {"SHADOW": rf"\.{SIZE.layers - 1}\.shadow_update|shadow_backbone.*\.wte"}

#: Method -> other options of it that compute something else.
VARIANTS = [
    ("LORA", dict(use_dora=True)),
    ("LORA", dict(lora_bias=True, use_rslora=True, bias="all", modules_to_save=["lm_head"])),
    ("LORA", dict(use_qalora=True, qalora_group_size=8)),
    ("LORA", dict(alora_invocation_tokens=TOKENS[:1], task_type="CAUSAL_LM", lora_dropout=0.0)),
    ("LORA", dict(trainable_token_indices=TOKENS)),
    ("LORA", dict(target_modules=[], target_parameters=["down_proj.weight", "q_proj.weight"], lora_dropout=0.0)),
    ("LORA", dict(layer_replication=[(0, 2), (1, 2)])),
    ("LORA", dict(init_lora_weights="pissa")),
    ("LORA", dict(target_modules=["embed_tokens", "lm_head", "up_proj"])),
    ("LORA", dict(velora_config="VeloraConfig")),
    ("LORA", dict(kasa_config="KasaConfig")),
    ("LORA", dict(monteclora_config="MontecloraConfig")),
    ("OFT", dict(coft=True, block_share=True, use_cayley_neumann=False)),
    ("HRA", dict(apply_GS=True, init_weights=False)),  # whose own start has pairs of equal vectors
    ("IA3", dict(feedforward_modules=["down_proj"])),
    ("MISS", dict(init_weights="bat")),
    ("LOKR", dict(decompose_both=True)),
    ("ROAD", dict(variant="road_4")),
    ("GLORA", dict(config_A_B="vector", config_C="vector", config_D_E="vector")),
    ("PREFIX_TUNING", dict(prefix_projection=False)),
    ("P_TUNING", dict(encoder_reparameterization_type="LSTM")),
    ("DEFT", dict(para=True)),
    ("PEANUT", dict(act_fn="silu")),
    ("PSOFT", dict(use_cayley_neumann=True)),
    ("SUPERTUNING", dict(r=4, lora_alpha=8, lora_dropout=0.1)),
]

#: Run by `make test`: what adds to a linear, multiplies or rotates it, adapts norms, embeddings or prompts.
SOME = {
    ("LORA", "gpt2"), ("ADALORA", "llama"), ("IA3", "bert"), ("OFT", "llama"), ("VERA", "bert"), ("GLORA", "llama"),
    ("LN_TUNING", "bert"), ("PREFIX_TUNING", "llama"), ("TRAINABLE_TOKENS", "llama"), ("XLORA", "llama"),
}  # fmt: skip
#: Of the variants those that add a magnitude, biases, tensors in place of modules, and blocks that share weights.
SOME_VARIANTS = [VARIANTS[0], VARIANTS[1], VARIANTS[5], VARIANTS[6]]
CASES = [(method, family) for family in LINEARS for method in METHODS if method in LISTED.keys() - REFUSED[family]]


def config_of(method: str, family: str, experts: str, options: dict[str, Any]) -> Any:
    asked = METHODS[method] | options
    on = asked.pop("on", "linears")
    if on == "task":
        asked["task_type"] = TASK[family]
    elif on in ("linears", "norms"):
        asked.setdefault("target_modules", (LINEARS if on == "linears" else NORMS)[family])
    if method == "BEFT":
        asked["target_modules"] = LINEARS[family][1:2]  # a bias of the values, and nothing else
    if method == "XLORA":
        asked["adapters"] = {name: f"{experts}/{name}" for name in ("0", "1")}
    if family == "gpt2" and "fan_in_fan_out" in LISTED[method].__dataclass_fields__:
        asked["fan_in_fan_out"] = True
    for name, value in asked.items():
        if name in ("velora_config", "kasa_config", "monteclora_config"):
            asked[name] = getattr(peft, value)()
    return LISTED[method](**asked)


def adapted(method: str, family: str, when: str, experts: str, options: dict[str, Any]) -> nn.Module:
    """A model with adapters; patched ``when``: "never", or "before" or "after" PEFT had it."""
    base = with_uneven_vectors(build(family, SIZE))
    base.config.use_cache = False  # XLORA asks for that
    if when == "before":
        patch(base)
    torch.manual_seed(0)
    model = get_peft_model(base, config_of(method, family, experts, options))
    if when == "after":
        patch(model)
    return model.train()


def batch_of(model: nn.Module, method: str, seed: int) -> dict[str, torch.Tensor]:
    batch = batch_for(model, SIZE, padded=True, seed=seed)
    batch["input_ids"][:, : len(TOKENS)] = torch.tensor(TOKENS)
    if method in ("MULTITASK_PROMPT_TUNING", "POLY"):
        batch["task_ids"] = torch.tensor([0, 1])
    if method == "CPT":
        batch["input_type_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def train(model: nn.Module, method: str) -> dict[str, torch.Tensor]:
    """Loss and gradients of every step, and the trained parameters after the last."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), 1e-2)
    torch.manual_seed(3)
    found = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(model, method, seed=step)).loss
        loss.backward()
        found[f"{step} loss"] = loss.detach().clone()
        found |= {f"{step} {name}": p.grad.clone() for name, p in trained.items() if p.grad is not None}
        optimizer.step()
        if hasattr(model.base_model, "update_and_allocate"):
            model.base_model.update_and_allocate(step + 1)
    return found | {name: p.detach().clone() for name, p in trained.items()}


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> str:
    """Two saved LoRA adapters, for XLORA to mix."""
    folder = tmp_path_factory.mktemp("experts")
    for name in ("0", "1"):
        config = LoraConfig(r=4, target_modules=LINEARS["llama"], init_lora_weights=False, task_type="CAUSAL_LM")
        torch.manual_seed(int(name))
        get_peft_model(build("llama", SIZE), config).save_pretrained(folder / name)
    return str(folder)


def kept(model: nn.Module, method: str) -> int:
    gc.collect()
    gc.freeze()  # as in conftest.py: spare the meter what PEFT has loaded since
    return measure_kept(model, batch_of(model, method, seed=0)).total


def places(model: nn.Module) -> dict[str, str]:
    """Path -> kind of every layer that PEFT put in."""
    return {name: type(m).__qualname__ for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}


def test_every_method_of_peft_is_in_the_table():
    assert LISTED.keys() <= METHODS.keys()
    assert LISTED.keys() <= {method for method, _ in CASES}, "refused in every family"


@pytest.mark.parametrize(("method", "family"), chosen(CASES, SOME))
def test_a_method_trains_like_stock_and_keeps_less(method, family, experts, device):
    """And stock trains all that it adds; and a patched model gets it where a stock one does."""
    only_on_cpu(device)
    stock = adapted(method, family, "never", experts, {})
    most = 0.98 * kept(stock, method) if family == "llama" else float("inf")
    expected = train(adapted(method, family, "never", experts, {}), method)
    assert len({float(expected[f"{step} loss"]) for step in range(STEPS)}) == STEPS
    trained = {name for name in expected if not name[0].isdigit()}
    steps = range(STEPS)
    moved = {name for name in trained if any(expected.get(f"{s} {name}", torch.zeros(1)).any() for s in steps)}
    assert moved and [name for name in trained - moved if not re.search(UNUSED.get(method, "^$"), name)] == []
    for when in ("before", "after"):
        ours = adapted(method, family, when, experts, {})
        assert places(ours) == places(stock)
        assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in stock.parameters()]
        assert kept(ours, method) < most
        assert_same(train(adapted(method, family, when, experts, {}), method), expected)


@pytest.mark.parametrize(("method", "options"), chosen(VARIANTS, SOME_VARIANTS), ids=str)
def test_a_variant_trains_like_stock(method, options, experts, device):
    only_on_cpu(device)
    if method not in LISTED:
        pytest.skip(f"this PEFT has no {method}")
    stock = train(adapted(method, "llama", "never", experts, options), method)
    for when in ("before", "after"):
        assert_same(train(adapted(method, "llama", when, experts, options), method), stock)


# What PEFT asks of the layers it adapts, by their exact type for one, is true on a patched model.

LINEAR_METHODS = [(method,) for method in ("GLORA", "LORA", "IA3", "LOHA", "LOKR", "MISS", "OFT")]


@pytest.mark.parametrize("method", chosen(LINEAR_METHODS, {"GLORA", "IA3", "OFT"}))
def test_an_adapter_wraps_a_plain_linear_and_a_merged_model_is_stocks(method, device):
    merged = []
    for when in ("never", "before"):
        model = adapted(method, "llama", when, "", {})
        found = [m.get_base_layer() for m in model.modules() if isinstance(m, BaseTunerLayer)]
        assert len(found) == 3 * SIZE.layers and {type(m) for m in found} == {nn.Linear}
        train(model, method)
        merged.append(model.merge_and_unload())
    assert_same(merged[1].state_dict(), merged[0].state_dict())
    sizes = [kept(model.train().requires_grad_(), method) for model in merged]
    assert sizes[1] < sizes[0]
    assert {type(m) for m in merged[1].modules() if isinstance(m, nn.Linear)} == {nn.Linear}
