"""Models that nothing here was written for, and modules of one's own: same bits, fewer bytes."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertModel
from transformers.activations import SiLUActivation

from hf_memsave import measure_kept, patch
from support.families import batch_for
from support.helpers import only_on_cpu
from support.steps import assert_same, patched_classes, step

COMMON = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=512, pad_token_id=0)
GATED = dict(COMMON, intermediate_size=88, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
DEEPSEEK = dict(
    GATED, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, index_topk=2, index_head_dim=8, index_n_heads=2,
)  # fmt: skip

#: Model -> its sizes, and the most that it keeps of what stock keeps.
MODELS = {
    "qwen2": (GATED, 0.66),
    "qwen3": (dict(GATED, head_dim=8), 0.6),
    "gemma": (dict(GATED, head_dim=8), 0.66),
    "olmo2": (GATED, 0.6),
    "seed_oss": (dict(GATED, head_dim=8, residual_dropout=0.1), 0.74),
    "deepseek_v32": (DEEPSEEK, 0.67),
    "gpt_neox": (dict(COMMON, intermediate_size=64), 0.76),
}


def bare(kind):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind][0]))


def make(kind, dtype=torch.float32):
    """As after some training: no norm weight is one, no bias zero."""
    torch.manual_seed(0)
    model = bare(kind).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_same_loss_and_gradients_of_fewer_bytes(kind, dtype, device):
    only_on_cpu(device)
    stock = make(kind, dtype)
    ours = copy.deepcopy(stock)
    patch(ours)
    batch = batch_for(stock, padded=True)
    assert_same(step(ours, batch), step(stock, batch))
    if dtype == torch.float32:
        batch = batch_for(stock)
        assert measure_kept(ours, batch).total < MODELS[kind][1] * measure_kept(stock, batch).total


@pytest.mark.parametrize("kind", ["gemma", "olmo2"])
def test_a_norm_whose_arithmetic_is_not_known_is_never_approximated(kind, device):
    """Gemma's multiplies with one plus the weight, OLMo2's rounds after multiplying."""
    only_on_cpu(device)
    stock = make(kind)
    ours = copy.deepcopy(stock)
    report = patch(ours, {"norm": "output"})
    assert {site.op for site in report.sites} == {"model", "block"}
    batch = batch_for(stock)
    assert_same(step(ours, batch), step(stock, batch))


def test_patching_runs_nothing_and_changes_no_number(device):
    model = make("qwen2").to(device)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random_state, seen = torch.get_rng_state(), []
    for module in model.modules():
        module.register_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    patch(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert seen == []
    assert_same(model.state_dict(), before)


def test_a_model_without_weights_is_patched_as_one_with_them():
    with torch.device("meta"):
        model = bare("gemma")
    assert [site.name for site in patch(model).patched] == [site.name for site in patch(make("gemma")).patched]


# Layers of one's own: each looks like a known one, and differs from it somewhere


class GatedMLP(nn.Module):
    """LLaMA's."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn = SiLUActivation()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ClampedMLP(GatedMLP):
    """DeepSeek-V4's."""

    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=0.2), self.up_proj(x).clamp(-0.2, 0.2)
        return self.down_proj(self.act_fn(gate) * up)


class ScaledMLP(GatedMLP):
    """Inkling's: the factor is trained."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.1]))

    def forward(self, x):
        return super().forward(x) * self.scale


def doubled(forward):
    @functools.wraps(forward)
    def wrapper(self, x):
        return 2 * forward(self, x)

    return wrapper


class DoubledMLP(GatedMLP):
    """Its forward is LLaMA's, by name and source, and wrapped."""

    forward = doubled(GatedMLP.forward)


class InPlace(nn.Module):
    """Writes to what came before, or would be kept."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.SiLU(inplace=True), nn.Dropout(0.1, inplace=True))

    def forward(self, x):
        y = self.layers(x)
        return (x + y).add_(1).mul_(y)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.inner:
            x = x + block(x)
        return x


class Loss(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), inner

    def forward(self, x):
        return {"loss": self.inner(self.norm(x)).square().mean()}


class Wrapper(nn.Module):
    """BERT and a head."""

    def __init__(self):
        super().__init__()
        config = BertConfig(**COMMON, intermediate_size=128, attention_probs_dropout_prob=0.0)
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 2))

    def forward(self, **inputs):
        return {"loss": self.head(self.encoder(**inputs).last_hidden_state).square().mean()}


#: Class -> the most that it keeps of what stock keeps.
OWN = {
    GatedMLP: 0.52, ClampedMLP: 0.37, ScaledMLP: 0.47, DoubledMLP: 0.52, InPlace: 0.69, Mixer: 0.37, Wrapper: 0.62
}  # fmt: skip


def own(cls, device):
    torch.manual_seed(0)
    if cls is Wrapper:
        ids = torch.randint(5, 512, (2, 16), device=device)
        return Wrapper().to(device).train(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Loss(cls()).to(device).train(), {"x": torch.randn(64, 64, 8, device=device)}


def gradients_of(model, batch):
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**batch)["loss"]
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cls", OWN)
def test_a_module_of_ones_own_trains_with_the_same_bits_and_keeps_less(cls, device):
    only_on_cpu(device)
    stock, batch = own(cls, device)
    ours = copy.deepcopy(stock)
    patch(ours)
    assert_same(gradients_of(ours, batch), gradients_of(stock, batch))
    assert measure_kept(ours, batch).total <= OWN[cls] * measure_kept(stock, batch).total


def test_what_lays_a_tape_in_a_wrapper(device):
    model, batch = own(Mixer, device)
    parallel = nn.DataParallel(model)  # one of torch
    stock = measure_kept(parallel, batch).total
    assert [(site.op, site.name) for site in patch(parallel).patched] == [("model", "module")]
    assert measure_kept(parallel, batch).total < OWN[Mixer] * stock
    model, batch = own(Wrapper, device)
    assert [(site.op, site.name) for site in patch(model).patched] == [
        ("model", ""), ("block", "encoder.encoder.layer.0"), ("block", "encoder.encoder.layer.1"),
    ]  # fmt: skip
    assert set(patched_classes(model)) == {"", "encoder.encoder.layer.0", "encoder.encoder.layer.1"}

    kept = measure_kept(model, batch).by_module
    # The norm's input, mean and 1/std; GELU's input; and what the loss takes in: no output of norm, GELU or dropout.
    assert {name for name in kept if name.startswith("head.")} == {"head.0", "head.1", "head.4"}


def test_an_activation_between_two_linears_is_kept_by_its_input(device):
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).to(device)
    x = torch.randn(16, 8, device=device)
    stock = measure_kept(model, x).total
    patch(model)
    assert stock - measure_kept(model, x).total == 16 * 32 * 4
