"""Models that no table knows: sites guessed by module class, each proven before it is believed."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)
from transformers.activations import SiLUActivation

from hf_memsave import measure_kept, patch
from support.families import batch_for, build
from support.helpers import only_on_cpu
from support.steps import assert_same, patched_classes, step

COMMON = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=512, pad_token_id=0)
GATED = dict(COMMON, intermediate_size=88, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
DEEPSEEK = dict(
    GATED, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, index_topk=2, index_head_dim=8, index_n_heads=2,
)  # fmt: skip

MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GATED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GATED, head_dim=8)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**GATED, head_dim=8)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**GATED)),
    "seed_oss": lambda: SeedOssForCausalLM(SeedOssConfig(**GATED, head_dim=8, residual_dropout=0.1)),
    "deepseek_v32": lambda: DeepseekV32ForCausalLM(DeepseekV32Config(**DEEPSEEK)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON, intermediate_size=64)),
}
#: Op -> how many sites, beyond linears, blocks and attention.
GUESSED = {
    "qwen2": {"rms_norm": 5, "gated_mlp": 2, "activation": 2},
    "qwen3": {"rms_norm": 9, "gated_mlp": 2, "activation": 2},
    "gemma": {"gated_mlp": 2, "activation": 2},
    "gpt_neox": {"layer_norm": 5, "activation": 2, "dropout": 5},
}
ALWAYS = {"linear", "block", "attention"}


def make(kind, dtype=torch.float32):
    """As after some training: no norm weight is one, no bias zero."""
    torch.manual_seed(0)
    model = MODELS[kind]().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.train()


def counts(report):
    found = {}
    for site in report.patched:
        if site.op not in ALWAYS:
            found[site.op] = found.get(site.op, 0) + 1
    return found


@pytest.mark.parametrize("kind", GUESSED)
def test_guesses_these_sites(kind, device):
    report = patch(make(kind).to(device))
    assert counts(report) == GUESSED[kind]
    assert "attention" in {site.op for site in report.patched}


@pytest.mark.parametrize("kind", GUESSED)
def test_the_report_says_that_no_table_knows_the_model(kind, device):
    report = patch(make(kind).to(device))
    assert report.unknown == (kind,)
    assert f"no table for model type {kind!r}: sites were found by module class" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_same_loss_and_gradients(kind, dtype, device):
    only_on_cpu(device)
    stock = make(kind, dtype)
    ours = copy.deepcopy(stock)
    patch(ours)
    batch = batch_for(stock, padded=True)
    assert_same(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("kind", MODELS)
def test_keeps_less(kind, device):
    model = make(kind).to(device)
    batch = batch_for(model)
    stock = measure_kept(model, batch).total
    patch(model)
    assert measure_kept(model, batch).total < 0.9 * stock


def test_a_model_that_asks_for_sdpa_by_name_keeps_the_name():
    """DeepSeek-V3.2 masks by its indexer only where its config says "sdpa" or "eager"."""
    model = make("deepseek_v32")
    report = patch(model)
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"sdpa"}
    assert "attention" not in {site.op for site in report.patched}


# What looks like a site and is not. Each differs from the op somewhere that a fresh model in eval mode does not show.


def seed_oss_in_eval_mode():
    """Its MLP ends in a dropout, which does nothing until training starts; from_pretrained returns eval mode."""
    return make("seed_oss").eval(), "gated_mlp", "SeedOssMLP"


def olmo2_with_fresh_norms():
    """Its norm rounds after multiplying with the weight: the same while the weight is one, or all is fp32."""
    torch.manual_seed(0)
    return MODELS["olmo2"]().to(torch.bfloat16), "rms_norm", "Olmo2RMSNorm"


def gemma():
    """Its norm multiplies with one plus the weight."""
    return make("gemma"), "rms_norm", "GemmaRMSNorm"


def gemma_without_weights():
    """Nothing can be proven on the meta device (nor while accelerate has the weights on disk)."""
    with torch.device("meta"):
        return MODELS["gemma"](), "rms_norm", "GemmaRMSNorm"


class ClampedMLP(nn.Module):
    """DeepSeek-V4's: no small input reaches the limit."""

    def __init__(self, limit=7.0):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn = SiLUActivation()
        self.limit = limit

    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=self.limit), self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(gate) * up)


class ScaledMLP(ClampedMLP):
    """Inkling's: the factor is trained, and starts at one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.scale


def doubled(forward):
    @functools.wraps(forward)
    def wrapper(self, x):
        return 2 * forward(self, x)

    return wrapper


class DoubledMLP(ClampedMLP):
    """Its forward is LLaMA's, by name, module and source; somebody has wrapped it."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    forward = doubled(forward)


def doubled_mlp():
    return nn.Sequential(nn.LayerNorm(8), DoubledMLP()), "gated_mlp", "DoubledMLP"


def clamped_mlp():
    return nn.Sequential(nn.LayerNorm(8), ClampedMLP()), "gated_mlp", "ClampedMLP"


def scaled_mlp():
    return nn.Sequential(nn.LayerNorm(8), ScaledMLP()), "gated_mlp", "ScaledMLP"


@pytest.mark.parametrize(
    "case",
    [
        seed_oss_in_eval_mode,
        olmo2_with_fresh_norms,
        gemma,
        gemma_without_weights,
        clamped_mlp,
        scaled_mlp,
        doubled_mlp,
    ],
    ids=lambda f: f.__name__,
)
def test_a_wrong_guess_is_refused_with_a_reason(case):
    model, op, cls = case()
    report = patch(model)
    assert {site.cls for site in report.patched if site.op == op} == set()
    skipped = [site for site in report.skipped if site.op == op]
    assert {site.cls for site in skipped} == {cls}
    assert all(site.reason for site in skipped)


def test_trying_a_guess_leaves_model_and_random_state_as_they_were(device):
    model = make("qwen2").to(device)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random_state = torch.get_rng_state()
    patch(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same(model.state_dict(), before)


def test_trying_a_guess_calls_no_hook_of_the_user(device):
    model = make("qwen2").to(device)
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    patch(model)
    assert seen == []


# Modules that are no model of Transformers


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.inner:
            x = x + block(x)
        return {"loss": x.square().mean()}


class Wrapper(nn.Module):
    """A user's own: BERT and a head."""

    def __init__(self):
        super().__init__()
        config = BertConfig(**COMMON, intermediate_size=128, attention_probs_dropout_prob=0.0)
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 2))

    def forward(self, **inputs):
        return {"loss": self.head(self.encoder(**inputs).last_hidden_state).square().mean()}


def plain(device):
    torch.manual_seed(0)
    return Mixer().to(device).train(), {"x": torch.randn(4, 16, 32, device=device)}


def wrapped(device):
    torch.manual_seed(0)
    ids = torch.randint(5, 512, (2, 16), device=device)
    return Wrapper().to(device).train(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def gradients_of(model, batch):
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**batch)["loss"]
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_a_plain_modules_sites_and_its_tape(device):
    model, _ = plain(device)
    report = patch(model)
    assert counts(report) == {"layer_norm": 3, "activation": 3, "dropout": 3}
    assert [site.name for site in report.patched if site.op == "block"] == [""]
    assert report.unknown == ()


def test_a_wrappers_head_is_patched_with_the_model_inside(device):
    model, _ = wrapped(device)
    report = patch(model)
    assert {"head.0", "head.2", "head.3"} < set(patched_classes(model))
    assert [site.name for site in report.patched if site.op == "block"] == [
        "encoder", "encoder.encoder.layer.0", "encoder.encoder.layer.1", "",
    ]  # fmt: skip
    assert [site.name for site in report.patched if site.op == "attention"] == ["encoder"]


@pytest.mark.parametrize("build_it", [plain, wrapped])
def test_a_module_of_ones_own_trains_with_the_same_bits(build_it, device):
    only_on_cpu(device)
    stock, batch = build_it(device)
    ours = copy.deepcopy(stock)
    patch(ours)
    assert_same(gradients_of(ours, batch), gradients_of(stock, batch))


@pytest.mark.parametrize("build_it", [plain, wrapped])
def test_a_module_of_ones_own_keeps_less(build_it, device):
    model, batch = build_it(device)
    stock = measure_kept(model, batch).total
    patch(model)
    assert measure_kept(model, batch).total < 0.75 * stock


def test_the_head_of_a_wrapper_keeps_only_what_its_sites_take_in(device):
    model, batch = wrapped(device)
    patch(model)
    kept = measure_kept(model, batch).by_module
    # The norm's input, mean and 1/std; GELU's input; and what the loss takes in: no output of norm, GELU or dropout.
    assert {name for name in kept if name.startswith("head.")} == {"head.0", "head.1", "head.4"}


def test_a_module_inside_a_wrapper_of_torch_keeps_less(device):
    model, batch = plain(device)
    parallel = nn.DataParallel(model)
    stock = measure_kept(parallel, batch).total
    report = patch(parallel)
    assert measure_kept(parallel, batch).total < 0.75 * stock
    assert [site.name for site in report.patched if site.op == "block"] == ["module"]


def test_a_single_module_can_be_patched(device):
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).to(device)
    x = torch.randn(16, 8, device=device)
    stock = measure_kept(model, x).total
    report = patch(model)
    assert counts(report) == {"activation": 1}
    assert stock - measure_kept(model, x).total == 16 * 32 * 4  # GELU's output


def test_an_inplace_module_is_left_out_with_a_reason(device):
    model = nn.Sequential(nn.LayerNorm(8), nn.SiLU(inplace=True), nn.Dropout(0.1, inplace=True)).to(device)
    report = patch(model)
    assert counts(report) == {"layer_norm": 1}
    assert {(site.name, site.reason) for site in report.skipped} == {
        ("1", "it works in place (inplace=True), so its input is gone"),
        ("2", "it works in place (inplace=True), so its input is gone"),
    }


def test_a_model_in_a_wrapper_is_known_by_its_table(device):
    model = nn.ModuleDict({"student": build("llama"), "head": nn.Linear(4, 4)}).to(device)
    report = patch(model)
    assert report.unknown == ()
    assert counts(report) == {"rms_norm": 5, "gated_mlp": 2, "activation": 2}
    report.undo()
    assert patched_classes(model) == {}
