"""Vision models, CLIP's QuickGELU among them: stock's bits, and at CLIP the floor of a pre-norm block."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    ConvNextConfig,
    ConvNextModel,
    Dinov2Config,
    Dinov2Model,
    SiglipVisionConfig,
    SiglipVisionModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTModel,
)

from hf_memsave import MemSaveConfig, measure_kept, patch
from support.helpers import assert_same_bits, only_on_cpu, random

SIZE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32)
PATCHES = dict(SIZE, patch_size=8)
TEXT = dict(SIZE, vocab_size=99, max_position_embeddings=16, bos_token_id=97, eos_token_id=98)
SWIN = dict(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
CONVNEXT = dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32)

#: How to make the model, and the class of its activations.
MODELS = {
    "clip-vision": (lambda: CLIPVisionModel(CLIPVisionConfig(**PATCHES)), "QuickGELUActivation"),
    "clip": (
        lambda: CLIPModel(CLIPConfig(text_config=TEXT, vision_config=PATCHES, projection_dim=16)),
        "QuickGELUActivation",
    ),
    "vit": (lambda: ViTModel(ViTConfig(**PATCHES, hidden_dropout_prob=0.1)), "GELUActivation"),
    "dinov2": (lambda: Dinov2Model(Dinov2Config(**PATCHES)), "GELUActivation"),
    "siglip": (lambda: SiglipVisionModel(SiglipVisionConfig(**PATCHES)), "GELUTanh"),
    "swin": (lambda: SwinModel(SwinConfig(**SWIN, hidden_dropout_prob=0.1)), "GELUActivation"),
    "convnext": (lambda: ConvNextModel(ConvNextConfig(**CONVNEXT)), "GELUActivation"),
}


def build(kind, dtype, device):
    torch.manual_seed(0)
    return MODELS[kind][0]().to(device, dtype).train()


def batch_for(model):
    dtype, device = next(model.parameters()).dtype, next(model.parameters()).device
    batch = {"pixel_values": random(2, 3, 32, 32, dtype=dtype, device=device)}
    if isinstance(model, CLIPModel):
        batch["input_ids"] = torch.arange(1, 17, device=device).view(2, 8)
    return batch


class Summed(nn.Module):
    """A model and a loss of every output that has a gradient; the weights make each element count."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        outputs = [t for t in self.model(**batch).values() if isinstance(t, torch.Tensor) and t.requires_grad]
        return {"loss": sum((t * random(*t.shape, dtype=t.dtype, device=t.device)).sum() for t in outputs)}


def step(model):
    """Loss and gradients by name."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = Summed(model)(**batch_for(model))["loss"]
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def kept(model):
    return measure_kept(Summed(model), batch_for(model)).total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_a_vision_model_is_exact_and_keeps_less(device, kind, dtype):
    only_on_cpu(device)
    stock = build(kind, dtype, device)
    ours = copy.deepcopy(stock)
    report = patch(ours)
    assert report.skipped == ()
    expected, got = step(stock), step(ours)
    assert got.keys() == expected.keys()
    for name in expected:
        assert_same_bits(got[name], expected[name], name)
    assert kept(ours) < kept(stock)


@pytest.mark.parametrize("kind", MODELS)
def test_every_activation_of_a_vision_model_is_a_site_where_it_is_approximated(kind):
    model = build(kind, torch.float32, "cpu")
    assert {site.op for site in patch(model).sites} <= {"model", "block"}
    report = patch(model, MemSaveConfig(activation="few_bit"), replace=True)
    found = {name for name, module in model.named_modules() if type(module).__name__ == MODELS[kind][1]}
    assert {site.name for site in report.patched if site.op == "activation"} == found != set()


def test_a_layer_of_clip_keeps_the_floor(device):
    def of_layers(count):
        options = dict(PATCHES, hidden_size=128, intermediate_size=512, num_hidden_layers=count)
        model = CLIPVisionModel(CLIPVisionConfig(**options)).to(device).train()
        stock = kept(model)
        patch(model)
        return stock, kept(model)

    u = 2 * 17 * 128 * 4  # 17 tokens: 16 patches and the class
    stock, ours = (((b - a) / u) for a, b in zip(of_layers(1), of_layers(2), strict=True))
    assert 10 <= ours < 10.3  # 6 + I
    assert stock > 19.9


@pytest.mark.parametrize("value", ["invert", "precision_bit", "few_bit"])
def test_clips_activation_takes_the_approximate_slopes(device, value):
    stock = build("clip-vision", torch.float32, device)
    ours = copy.deepcopy(stock)
    patch(ours, MemSaveConfig(activation=value, few_bits=8))
    for model in (stock, ours):
        for name, p in model.named_parameters():
            p.requires_grad_("fc1" in name)
    expected, got = step(stock), step(ours)
    torch.testing.assert_close(got["loss"], expected["loss"], rtol=1e-5, atol=1e-4)
    assert any(not torch.equal(got[name], expected[name]) for name in expected)
    for name in expected.keys() - {"loss"}:
        assert (got[name] - expected[name]).norm() < 0.02 * expected[name].norm()
    assert kept(ours) < kept(stock)
