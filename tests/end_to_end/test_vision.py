"""Vision models, CLIP's QuickGELU among them, and CNNs with gradients of a few tensors: stock's bits, and less kept."""

import copy
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave import MemSaveConfig, measure_kept, patch
from support.helpers import Calls, halved, only_on_cpu, random
from support.selective import Taped
from support.steps import assert_same, backward, patched

SIZE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32)
PATCHES = dict(SIZE, patch_size=8)
TEXT = dict(SIZE, vocab_size=99, max_position_embeddings=16, bos_token_id=97, eos_token_id=98)
SWIN = dict(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
CONVNEXT = dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32)
CLIP = dict(text_config=TEXT, vision_config=PATCHES, projection_dim=16)

#: Stem of the classes in Transformers, and what follows it; fields of the config; the class of its activations.
MODELS = {
    "clip-vision": ("CLIPVision", CLIP["vision_config"], "QuickGELUActivation"),
    "clip": ("CLIP", CLIP, "QuickGELUActivation"),
    "vit": ("ViT", dict(PATCHES, hidden_dropout_prob=0.1), "GELUActivation"),
    "dinov2": ("Dinov2", PATCHES, "GELUActivation"),
    "siglip": ("SiglipVision", PATCHES, "GELUTanh"),
    "swin": ("Swin", dict(SWIN, hidden_dropout_prob=0.1), "GELUActivation"),
    "convnext": ("ConvNext", CONVNEXT, "GELUActivation"),
}


def of_transformers(stem, fields, **options):
    torch.manual_seed(0)
    model, config = (getattr(transformers, f"{stem}{kind}") for kind in ("Model", "Config"))
    return model(config(**fields), **options).train()


def images_of(model):
    p = next(model.parameters())
    return random(2, 3, 32, 32, dtype=p.dtype, device=p.device)


def summed(model, images):
    """A loss of every output that has a gradient; the weights make each element count."""
    batch = {"pixel_values": images}
    if isinstance(model, transformers.CLIPModel):
        batch["input_ids"] = torch.arange(1, 17, device=images.device).view(2, 8)
    outputs = [t for t in model(**batch).values() if isinstance(t, torch.Tensor) and t.requires_grad]
    return {"loss": sum((t * random(*t.shape, dtype=t.dtype, device=t.device)).sum() for t in outputs)}


def step(model, images, run=None):
    """Loss and gradients, of images too if they want one, and the buffers after it."""
    x = images.detach().requires_grad_(images.requires_grad)
    torch.manual_seed(1)
    found = backward(model, (run or partial(summed, model))(x * 1)["loss"])
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return found if x.grad is None else found | {"images": x.grad}


def kept(model):
    return measure_kept(Calls(partial(summed, model), model), images_of(model)).total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_a_vision_model_is_exact_and_keeps_less_and_its_activations_are_sites(device, kind, dtype):
    only_on_cpu(device)
    model = of_transformers(*MODELS[kind][:2]).to(device, dtype)
    expected, of_stock = step(model, images_of(model)), kept(model)
    report = patch(model)
    assert report.skipped == () and {site.op for site in report.sites} <= {"model", "block"}
    assert_same(step(model, images_of(model)), expected)
    assert kept(model) < of_stock
    activations = {name for name, m in model.named_modules() if type(m).__name__ == MODELS[kind][2]}
    report = patch(model, MemSaveConfig(activation="few_bit"), replace=True)
    assert {site.name for site in report.patched if site.op == "activation"} == activations != set()


def test_a_layer_of_clip_keeps_the_floor(device):
    def of_layers(count):
        fields = dict(PATCHES, hidden_size=128, intermediate_size=512, num_hidden_layers=count)
        model = of_transformers("CLIPVision", fields).to(device)
        stock = kept(model)
        patch(model)
        return stock, kept(model)

    u = 2 * 17 * 128 * 4  # 17 tokens: 16 patches and the class
    stock, ours = (((b - a) / u) for a, b in zip(of_layers(1), of_layers(2), strict=True))
    assert 10 <= ours < 10.3  # 6 + I
    assert stock > 19.9


class Last(nn.Module):
    """The last hidden state of a model of Transformers."""

    def __init__(self, *model, **options):
        super().__init__()
        self.model = of_transformers(*model, **options)

    def forward(self, x):
        return self.model(x).last_hidden_state


def vgg():
    layers = []
    for channels, width in ((3, 8), (8, 16)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    head = [nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, 12), nn.ReLU(), nn.Linear(12, 4)]
    return nn.Sequential(*layers, *head)


NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)
#: Of which layers the parameters want gradients; Input: of none, but the images.
CASES = {
    "All": lambda layers: layers,
    "Input": lambda layers: [],
    "Conv": lambda layers: [m for m in layers if isinstance(m, nn.Conv2d)],
    "Linear": lambda layers: [m for m in layers if isinstance(m, nn.Linear)],
    "Norm": lambda layers: [m for m in layers if isinstance(m, NORMS)],
    "SurgicalFirst": lambda layers: layers[: len(layers) // 4],
    "SurgicalLast": lambda layers: layers[-(len(layers) // 4) :],
}
MOBILENET = dict(depth_multiplier=0.25, tf_padding=False)
CNNS = {
    "resnet": lambda: Last("ResNet", dict(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2])),
    "mobilenet": lambda: Last("MobileNetV2", MOBILENET, add_pooling_layer=False),
    "vgg": vgg,
}
#: What a model has no parameters for.
LACKING = {("resnet", "Linear"), ("mobilenet", "Linear"), ("vgg", "Norm")}
OF_CNNS = [(name, case) for name in CNNS for case in CASES if (name, case) not in LACKING]
#: At most this share of what stock keeps, in case Input: with norms in train, and in eval.
LIMITS = {"resnet": (0.53, 0.03), "vgg": (0.05, 0.05), "mobilenet": (0.37, 0.02)}


def cnn(name, case, mode, device, dtype=torch.float32):
    """Stock and ours, and images."""
    stock = CNNS[name]().to(device, dtype).train().requires_grad_(False)
    layers = [m for m in stock.modules() if isinstance(m, (nn.Linear, nn.Conv2d, *NORMS))]
    for norm in (m for m in layers if isinstance(m, NORMS)):
        norm.train(mode == "train")
    chosen = CASES[case](layers)
    assert chosen or case == "Input"
    for layer in chosen:
        layer.requires_grad_(True)
    images = random(2, 3, 64, 64, dtype=dtype, device=device).requires_grad_(case == "Input")
    return Taped(stock, False), Taped(copy.deepcopy(stock), True), images


@pytest.mark.parametrize("name", CNNS)
def test_the_preset_of_the_paper_keeps_of_a_cnn_what_exact_does(device, name):
    stock, _, images = cnn(name, "Input", "train", device)
    kept = {}
    for preset in ("selective", "exact"):
        model = patched(copy.deepcopy(stock.parts[0]), preset)
        kept[preset] = measure_kept(model, images, forward=lambda x, m=model: {"loss": m(x).sum()}).total
    assert kept["selective"] == kept["exact"] < 0.6 * measure_kept(stock, images).total


@pytest.mark.parametrize(("model", "mode"), halved(OF_CNNS, ["train", "eval"]))
def test_a_cnn_has_the_bits_of_stock_and_keeps_no_more(device, model, mode):
    """In eval also under a hook outside, and in a checkpoint."""
    name, case = model
    stock, ours, images = cnn(name, case, mode, device)
    kept_by_stock, kept_by_ours = (measure_kept(model, images).total for model in (stock, ours))
    assert kept_by_ours <= kept_by_stock
    if case == "Input":
        assert kept_by_ours <= LIMITS[name][mode == "eval"] * kept_by_stock
    only_on_cpu(device)
    for dtype in (torch.float32, torch.bfloat16):
        stock, ours, images = cnn(name, case, mode, device, dtype)
        expected = step(stock, images, stock)
        assert_same(step(ours, images, ours), expected)
        if mode == "eval" and dtype == torch.float32:
            with torch.autograd.graph.save_on_cpu():
                assert_same(step(ours, images, ours), expected)
            assert_same(step(ours, images, partial(checkpoint, ours, use_reentrant=False)), expected)
