"""Whole CNNs, with gradients of a few of their tensors: stock's bits, and what is kept beside stock."""

import contextlib
import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import MobileNetV2Config, MobileNetV2Model, ResNetConfig, ResNetModel

from hf_memsave import measure_kept
from support.helpers import assert_same_bits, only_on_cpu, random
from support.selective import Taped

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
from selective import CASES, choose, set_norms  # noqa: E402 - its cases


class Last(nn.Module):
    """The last hidden state of a model of Transformers."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).last_hidden_state


def resnet():
    return Last(ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2])))


def mobilenet():
    return Last(MobileNetV2Model(MobileNetV2Config(depth_multiplier=0.25, tf_padding=False), add_pooling_layer=False))


def vgg():
    layers, channels = [], 3
    for width in (8, 16):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, 12), nn.ReLU(), nn.Linear(12, 4)
    )


class Checkpointed(nn.Module):
    """A model that runs again in backward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False)


MODELS = {"resnet": resnet, "mobilenet": mobilenet, "vgg": vgg}


def make(name, case, mode, device, dtype=torch.float32):
    """Stock and ours, and images; skips a case the model has no parameters for."""
    stock = MODELS[name]()
    set_norms(stock, mode)
    if not choose(stock, case):
        pytest.skip(f"does not apply: {name} has nothing for {case}")
    stock = stock.to(device, dtype)
    images = random(2, 3, 64, 64, dtype=dtype, device=device).requires_grad_(case == "Input")
    return Taped(stock, False), Taped(copy.deepcopy(stock), True), images


def step(model, images):
    """Loss and gradients of a step: of the images and of every parameter."""
    x = images.detach().requires_grad_(images.requires_grad)
    torch.manual_seed(1)
    loss = model(x * 1)["loss"]
    loss.backward()
    return [loss, x.grad, *(p.grad for p in model.parameters())]


def assert_same_steps(ours, stock, images, hook=contextlib.nullcontext):
    with hook():
        got = step(ours, images)
    for mine, expected in zip(got, step(stock, images), strict=True):
        assert_same_bits(mine, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_bits_of_stock(device, name, case, mode, dtype):
    only_on_cpu(device)
    stock, ours, images = make(name, case, mode, device, dtype)
    assert_same_steps(ours, stock, images)
    for got, expected in zip(ours.buffers(), stock.buffers(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("case", ["All", "Input", "SurgicalFirst"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_bits_of_stock_where_a_hook_outside_keeps_copies(device, name, case):
    only_on_cpu(device)
    stock, ours, images = make(name, case, "eval", device)
    assert_same_steps(ours, stock, images, torch.autograd.graph.save_on_cpu)


@pytest.mark.parametrize("case", ["All", "Input", "SurgicalFirst"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_bits_of_stock_under_gradient_checkpointing(device, name, case):
    only_on_cpu(device)
    stock, ours, images = make(name, case, "eval", device)
    assert_same_steps(Checkpointed(ours), stock, images)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_never_keeps_more_than_stock(device, name, case, mode):
    stock, ours, images = make(name, case, mode, device)
    assert measure_kept(ours, images).total <= measure_kept(stock, images).total


#: At most this share of what stock keeps, in case Input: with norms in train, and in eval.
LIMITS = {"resnet": (0.53, 0.03), "vgg": (0.05, 0.05), "mobilenet": (0.37, 0.02)}


@pytest.mark.parametrize("name", MODELS)
def test_a_frozen_model_keeps_at_most_what_the_paper_does(device, name):
    for mode, limit in zip(("train", "eval"), LIMITS[name], strict=True):
        stock, ours, images = make(name, "Input", mode, device)
        assert measure_kept(ours, images).total <= limit * measure_kept(stock, images).total
