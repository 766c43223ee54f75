"""Eager attention in patched models: stock's bits, and one tensor of weights per head is kept."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.ops.sampled.eager_attention import NAME
from support.attacks import assert_alike
from support.eager import eager
from support.helpers import generator_state, only_on_cpu, random
from support.pairs import pairwise
from support.steps import backward, step
from support.zoo import Size, batch_for, build

#: Each its own eager function, or another way to use it: plain, downcast, biased, repeated k and v, a fused projection.
FAMILIES = ("bert", "gpt2", "t5-decoder", "llama", "phi3")
FP32, BF16 = torch.float32, torch.bfloat16
#: Dtype and autocast.
PRECISIONS = ((FP32, None), (BF16, None), (FP32, BF16))
RUNG = MemSaveConfig(checkpoint="qkv")
CONFIGS = (True, "checkpointed", MemSaveConfig(dropout="mask"), MemSaveConfig(dropout="stock"), RUNG)
WIDE = Size(seq=48)


def assert_is_exact(make, config=True, autocast=None):
    assert_alike(make, lambda model: step(model, batch_for(model, padded=True), low=autocast), config)


@pytest.mark.parametrize(("family", "precision", "config"), pairwise(FAMILIES, PRECISIONS, CONFIGS), ids=str)
def test_eager_attention_is_exact(device, family, precision, config):
    dtype, autocast = precision

    def make(p):
        model = eager(family, p, dtype, device=device)
        if config == "checkpointed":
            enable_checkpointing(model)
        return model

    for p in (0.0, 0.1):
        assert_is_exact(partial(make, p), True if config == "checkpointed" else config, autocast)


def test_eager_attention_is_exact_where_little_is_trained_and_where_it_is_asked_for_by_name(device):
    """GPT-2 upcasts and reorders its scores only where its config says "eager"."""

    def of_bert(trained):
        model = eager("bert", device=device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        return model

    def reordered():
        model = build("gpt2", reorder_and_upcast_attn=True, attn_pdrop=0.1).to(device)
        model.set_attn_implementation(NAME)
        return model

    for make in (*(partial(of_bert, name) for name in ("query", "key", "value")), reordered):
        assert_is_exact(make)


class Mixed(GradientCheckpointingLayer):
    """Heads times one weight, twice, in a checkpoint of the block's own."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.mix = nn.Linear(32, 32), nn.Parameter(torch.randn(1, 4, 8, 8))

    def heads(self, x):
        q = self.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return (q @ self.mix @ self.mix).transpose(1, 2).flatten(2)

    def forward(self, x):
        return x + checkpoint(self.heads, x, use_reentrant=False)


def test_a_weight_with_heads_is_cast_as_in_stock_within_a_checkpoint(device):
    x = random(1, 7, 32, device=device)
    assert_alike(lambda: nn.Sequential(Mixed(), Mixed()).to(device), lambda m: step(m, x, low=BF16), RUNG)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_eager_attention_returns_the_same_weights(device, family):
    only_on_cpu(device)

    def run(model):
        outputs = model(**batch_for(model, padded=True), output_attentions=True)
        found = backward(model, sum(weights.square().sum() for weights in outputs.attentions))
        keys = [name for name in found if name.endswith(("key.weight.grad", "k_proj.weight.grad"))]
        assert len(outputs.attentions) == len(keys) == 2
        return [*outputs.attentions, found]

    assert_alike(lambda: eager(family, device=device), run)


def kept_by_models(device, family, p, dtype=torch.float32, **config):
    """What a patched model keeps with eager attention, and with SDPA without dropout."""
    model, other = eager(family, p, dtype, WIDE, device), eager(family, 0.0, dtype, WIDE, device)
    batch = batch_for(model, WIDE, padded=True)
    other.set_attn_implementation("sdpa")
    for patched in (model, other):
        patch(patched, MemSaveConfig(**config))
    return measure_kept(model, batch), measure_kept(other, batch).total


N = WIDE.batch * WIDE.heads * WIDE.seq**2
#: The log of each row's sum, which SDPA keeps.
LSE = WIDE.batch * WIDE.heads * WIDE.seq * 4
#: The number that scores are scaled by, and the one that masks are filled with.
SCALE, FILLING = 8, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "dropout"), [("bert", 0.1), ("gpt2", 0.0), ("gpt2", 0.1), ("phi", 0.1), ("llama", 0.0), ("phi3", 0.1)]
)
@pytest.mark.parametrize("rung", [None, "qkv"])
def test_eager_attention_keeps_one_tensor_of_weights_beyond_what_sdpa_keeps(device, family, dropout, dtype, rung):
    """Of llama's k and v as they were before they were repeated, and of phi3's fused projection, no more than SDPA."""
    only_on_cpu(device, "what SDPA keeps")
    here, sdpa = kept_by_models(device, family, dropout, dtype, checkpoint=rung)
    of_weights = [s.nbytes for s in here.storages if s.nbytes in (N, 2 * N, 4 * N)]
    assert of_weights == WIDE.layers * [dtype.itemsize * N], "one tensor a layer, in the dtype of the scores"
    of_state = generator_state(device).nbytes if dropout else 0
    assert here.total - sdpa <= WIDE.layers * (dtype.itemsize * N - LSE + of_state + SCALE) + FILLING
