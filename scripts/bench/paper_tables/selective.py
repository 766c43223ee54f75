"""Bhatia & Dangel (2024), selective differentiation: the forward pass's peak, weights and graph, in GiB.

A row is a net and which of its tensors want gradients. CNNs are torchvision's, on 64 images. What the tables leave
open is as in the authors' public scripts: the loss is a cross-entropy, of 20 classes a pixel in segmentation; layers
are the modules with parameters and no children; "Surgical" trains a quarter of them and one more; text models are in
eval, without embeddings and head. Their CUDA kernel of log-softmax copies logits that are not contiguous.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    T5Config,
)
from transformers.integrations import sdpa_attention
from transformers.utils import is_torchvision_available

from hf_memsave import MemSaveConfig
from hf_memsave.arch.versions import enable_checkpointing
from paper_tables.rows import GIB, Row, Setting, forward_peak, made
from publish import unpacked

CASES = ("All", "Input", "Norm", "Surgical")
METHOD = Setting(MemSaveConfig.preset("selective"))
#: In Table 4 the authors' converter has swapped RMSNorms and dropouts as well.
TEXT_METHOD = Setting(replace(MemSaveConfig.preset("selective"), norm="recompute", dropout="seed"))
Figures = tuple[float | None, ...]
SEGMENTATION = {"weights_backbone": None, "num_classes": 20}
#: Net -> its function in torchvision.models, and arguments.
CNNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-101": ("resnet101", {}),
    "DeepLabv3 (RN101)": ("segmentation.deeplabv3_resnet101", SEGMENTATION),
    "EfficientNetv2-L": ("efficientnet_v2_l", {}),
    "FCN (RN101)": ("segmentation.fcn_resnet101", SEGMENTATION),
    "MobileNetv3-L": ("mobilenet_v3_large", {}),
    "ResNeXt101-64x4d": ("resnext101_64x4d", {}),
    "VGG-16": ("vgg16", {}),
    "Faster-RCNN (RN50)": ("detection.fasterrcnn_resnet50_fpn_v2", {}),
    "SSDLite (MobileNetv3-L)": ("detection.ssdlite320_mobilenet_v3_large", {"weights_backbone": "DEFAULT"}),
}
#: Boxes that Faster-RCNN's head reads of 4 images: as many as torchvision samples in training.
BOXES = 4 * 512


class Text(NamedTuple):
    """A text model of Table 4: its batch of 256 tokens, its attention in Transformers of that time, and its dtype."""

    config: PreTrainedConfig
    batch: int
    attention: str
    dtype: torch.dtype


def _decoder(cls: Any, hidden: int, mlp: int, kv: int, vocab: int) -> PreTrainedConfig:
    sizes: dict[str, Any] = dict(hidden_size=hidden, intermediate_size=mlp, num_key_value_heads=kv, vocab_size=vocab)
    return cls(num_hidden_layers=32, num_attention_heads=32, use_cache=False, pad_token_id=0, **sizes)


T5_BASE: dict[str, Any] = dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12, dropout_rate=0.0, use_cache=False)
TEXTS = {
    "LLaMa3-8B": Text(_decoder(LlamaConfig, 4096, 14336, 8, 128256), 8, "sdpa", torch.bfloat16),
    "Mistral-7B": Text(_decoder(MistralConfig, 4096, 14336, 8, 32000), 16, "sdpa", torch.bfloat16),
    "Phi3-4B": Text(_decoder(Phi3Config, 3072, 8192, 32, 32064), 16, "eager", torch.bfloat16),
    "T5": Text(T5Config(**T5_BASE), 64, "eager", torch.float32),
}
MEMSAVE = "MemSave"
#: Table, method -> net -> GiB by case, of PyTorch and with the method; None where the paper has "N/A".
FIGURES: dict[tuple[str, str], dict[str, tuple[Figures, Figures]]] = {
    ("Table 1", f"{MEMSAVE}, convolutions alone"): {"ResNet-101": ((7.83,) * 4, (7.83, 7.78, 7.78, 7.83))},
    ("Table 1", MEMSAVE): {"ResNet-101": ((7.83,) * 4, (8.56, 5.24, 5.24, 6.86))},
    ("Table 3", MEMSAVE): {
        "DeepLabv3 (RN101)": ((22.82,) * 4, (24.90, 15.17, 15.17, 16.83)),
        "EfficientNetv2-L": ((26.81,) * 4, (26.81, 18.64, 18.64, 22.05)),
        "FCN (RN101)": ((22.23,) * 4, (24.39, 15.15, 15.15, 16.80)),
        "Faster-RCNN (RN50)": ((6.84,) * 4, (7.31, 4.79, 4.79, 5.73)),
        "MobileNetv3-L": ((2.82,) * 4, (2.96, 1.91, 1.91, 2.52)),
        "ResNeXt101-64x4d": ((15.15,) * 4, (16.75, 9.87, 9.87, 13.32)),
        "SSDLite (MobileNetv3-L)": ((0.54, 0.53, 0.53, 0.53), (0.57, 0.41, 0.41, 0.50)),
        "VGG-16": ((4.93, 4.93, None, 5.05), (4.30, 3.08, None, 3.15)),
    },
    ("Table 4", MEMSAVE): {
        "LLaMa3-8B": ((31.01, 27.27, 28.26, 28.18), (29.01, 26.26, 26.26, 26.94)),
        "Mistral-7B": ((41.67, 34.20, 36.17, 36.01), (37.67, 32.17, 32.17, 33.54)),
        "Phi3-4B": ((31.74, 26.01, 27.49, 27.40), (28.74, 24.49, 24.49, 25.55)),
        "Transformer": ((26.91, 21.54, 21.54, 23.04), (25.60, 20.23, 20.23, 21.73)),
        "T5": ((33.40, 25.94, 28.85, 27.77), (31.84, 22.80, 22.80, 25.28)),
    },
    ("Table 5", MEMSAVE): {
        "DeepLabv3 (RN101)": ((22.82,) * 4, (24.90, 4.28, 15.17, 8.40)),
        "EfficientNetv2-L": ((26.81,) * 4, (26.81, 10.45, 18.64, 17.31)),
        "FCN (RN101)": ((22.23,) * 4, (24.39, 4.26, 15.15, 7.99)),
        "Faster-RCNN (RN50)": ((6.84,) * 4, (7.31, 1.98, 4.79, 4.19)),
        "MobileNetv3-L": ((2.82,) * 4, (2.96, 0.87, 1.91, 2.10)),
        "ResNeXt101-64x4d": ((15.15,) * 4, (16.75, 2.46, 9.87, 9.77)),
        "SSDLite (MobileNetv3-L)": ((0.54, 0.53, 0.53, 0.53), (0.57, 0.26, 0.41, 0.44)),
    },
}
#: Figures 1 and 3: a layer that keeps its input's size -> its arguments, and an input of 512 MiB (2.1, Appendix B).
PROBES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(("Conv2d", "ConvTranspose2d"), ((8, 8, 3, 1, 1), (256, 8, 256, 256))),
    **dict.fromkeys(("Conv1d", "ConvTranspose1d"), ((8, 8, 3, 1, 1), (4096, 8, 4096))),
    **dict.fromkeys(("Conv3d", "ConvTranspose3d"), ((8, 8, 3, 1, 1), (64, 8, 64, 64, 64))),
    "BatchNorm2d": ((8,), (256, 8, 256, 256)),
}
GQA = "k and v are repeated to all heads, and logits are in fp32, as in PyTorch 2.2 and Transformers of that time"
NOTES = {
    "LLaMa3-8B": GQA,
    "Mistral-7B": GQA,
    "Phi3-4B": "eager attention, as in Transformers of that time",
    "T5": "eager attention, as in Transformers of that time",
    "Transformer": "attention's input projections want gradients in every case, as in the authors' script",
    "Faster-RCNN (RN50)": "RN101 in the table, RN50 in 3.2; the loss and the choice of boxes are left out, and "
    "backward, which the authors' script runs for detectors",
    "SSDLite (MobileNetv3-L)": "0.13 GiB short, and MobileNetv3-L 0.16 with 8 times the pixels: no activation, so "
    "likely cuDNN's workspace, which the stand-in has not, of backward too, as the authors' script runs it for "
    "detectors; the loss is left out",
}


class Measured(nn.Module):
    """A net and its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net: Any = net

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Of images."""
        out = self.net(x)
        return {"loss": F.cross_entropy(out["out"] if isinstance(out, dict) else out, y)}


class MeasuredDetector(Measured):
    """A detector up to what its loss reads, on images of the size that it makes them."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Of images."""
        has_boxes = hasattr(self.net, "rpn")
        x = F.interpolate(x, size=(800, 800) if has_boxes else (320, 320), mode="bilinear")
        features = [*self.net.backbone(x).values()]
        if not has_boxes:
            return {"loss": sum(out.sum() for out in self.net.head(features).values())}
        proposed = [out for outs in self.net.rpn.head(features) for out in outs]
        pooled = sum(f.mean() for f in features).expand(BOXES, 256, 7, 7).contiguous()
        heads = self.net.roi_heads
        return {"loss": sum(out.sum() for out in (*proposed, *heads.box_predictor(heads.box_head(pooled))))}


class MeasuredText(Measured):
    """A text model on embeddings, and its loss in fp32."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Of embeddings, which an encoder and a decoder both read."""
        x = x.to(self.net.dtype)
        given = {"decoder_inputs_embeds": x} if self.net.config.is_encoder_decoder else {}
        with mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", return_value=False):  # as before PyTorch 2.5
            logits = self.net(inputs_embeds=x, **given).logits.float().transpose(1, 2)
        return {"loss": F.cross_entropy(logits.contiguous(), y)}

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        """Of all blocks."""
        enable_checkpointing(self.net, **options)


class Transformer(nn.Module):
    """PyTorch's Transformer as Table 4 has it: 6 layers of each kind, and a head of 5,000."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(2048, batch_first=True)
        self.head = nn.Linear(2048, 5000)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, ``[batch, vocabulary, tokens]``."""
        logits: Tensor = self.head(self.transformer.decoder(x, self.transformer.encoder(x)))
        return logits.transpose(1, 2).contiguous()


def choose(net: nn.Module, case: str) -> None:
    """Let the parameters of ``case`` want gradients, of all layers."""
    layers = [m for m in net.modules() if not [*m.children()] and [*m.parameters()]]
    chosen = {
        "All": [m for m in layers if not isinstance(m, nn.Embedding)],
        "Input": [],
        "Norm": [m for m in layers if "Norm" in type(m).__name__],
        "Surgical": layers[: len(layers) // 4 + 1],
    }[case]
    for layer in layers:
        layer.requires_grad_(False)
    for layer in chosen:
        layer.requires_grad_(True)


@cache
def torchvision_models() -> Any:
    """``torchvision.models``, if it is not installed from a pinned wheel.

    A build for CUDA, installed beside PyTorch for CPU, would break every import of Transformers: it names operators
    that are not there. No net here runs them.
    """
    if not is_torchvision_available():
        sys.path.append(str(unpacked("torchvision==0.28.0")))
    try:
        return import_module("torchvision.models")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return import_module("torchvision.models")


def cnn(name: str, case: str, norms: str) -> nn.Module:
    """A net of torchvision in training, its batch norms in train or eval."""
    path, options = CNNS[name]
    module, _, function = f"torchvision.models.{path}".rpartition(".")
    make, home = torchvision_models().mobilenet_v3_large, "torchvision.models.detection.ssdlite"
    with mock.patch(f"{home}.mobilenet_v3_large", lambda weights, **given: make(**given)):  # which would download them
        net: nn.Module = getattr(import_module(module), function)(weights=None, **options).train()
    for norm in (m for m in net.modules() if isinstance(m, _BatchNorm)):
        norm.train(norms == "train")
    choose(net, case)
    return MeasuredDetector(net) if path.startswith("detection") else Measured(net)


def images(name: str, case: str, device: torch.device) -> dict[str, Tensor]:
    """64 of them, 4 for a detector, and a class an image or a pixel."""
    path, options = CNNS[name]
    batch = 4 if path.startswith("detection") else 64
    shape = (batch, 224, 224) if options is SEGMENTATION else (batch,)
    x = torch.empty(batch, 3, 224, 224, device=device, requires_grad=case == "Input")
    return {"x": x, "y": torch.empty(shape, dtype=torch.int64, device=device)}


def text(name: str, case: str) -> nn.Module:
    """A text model; without dropout, training is eval."""
    if name == "Transformer":
        net: nn.Module = Transformer()
        choose(net, case)
        return Measured(net)
    found = TEXTS[name]
    auto: Any = AutoModelForSeq2SeqLM if found.config.is_encoder_decoder else AutoModelForCausalLM
    net = auto.from_config(found.config, attn_implementation=found.attention, dtype=found.dtype).train()
    choose(net, case)
    return MeasuredText(net)


def embeddings(name: str, case: str, device: torch.device) -> dict[str, Tensor]:
    """A batch of them, in fp32, and a token for each."""
    batch, width = (TEXTS[name].batch, TEXTS[name].config.hidden_size) if name in TEXTS else (64, 2048)
    x = torch.empty(batch, 256, width, device=device, requires_grad=case == "Input")
    return {"x": x, "y": torch.empty(batch, 256, dtype=torch.int64, device=device)}


def probe(name: str, trained: str, layers: int) -> nn.Module:
    """Equal layers in eval, of which all want gradients or the fourth alone."""
    net = nn.Sequential(*(getattr(nn, name)(*PROBES[name][0]) for _ in range(layers))).eval()
    net.requires_grad_(trained == "all")
    net[3].requires_grad_(True)
    return net


def probed(name: str, device: torch.device) -> dict[str, Tensor]:
    """Of 512 MiB."""
    return {"input": torch.empty(PROBES[name][1], device=device)}


def slope(build: Callable[[int], nn.Module], inputs: Any, setting: Setting) -> float:
    """MiB that a tenth layer adds."""
    peaks = [forward_peak(partial(build, layers), inputs, setting) for layers in (9, 10)]
    return (peaks[1] - peaks[0]) / 2**20


def gib(build: Callable[[], nn.Module], inputs: Any, setting: Setting) -> float:
    """The peak of the forward pass."""
    return forward_peak(build, inputs, setting) / GIB


def row(table: str, method: str, name: str, case: str, stock: float, figure: float | None) -> Row:
    """A net and a case."""
    norms = "eval" if table == "Table 5" else "train"
    if name in CNNS:
        build, inputs, here = made(cnn, name, case, norms), made(images, name, case), METHOD
    else:
        build, inputs, here = made(text, name, case), made(embeddings, name, case), TEXT_METHOD
    return Row(
        table=table, work=f"{name}, {case}", unit="GiB", stock=stock, method=method, figure=figure,
        measure=partial(gib, build, inputs), here=here if method == MEMSAVE else None,
        columns=("exact", "gate", "block", "checkpointing") if name in TEXTS else ("exact",),
        note=NOTES.get(name, ""),
    )  # fmt: skip


def rows() -> Iterator[Row]:
    """All figures of memory of the paper."""
    for (table, method), nets in FIGURES.items():
        for name, by_case in nets.items():
            for case, stock, figure in zip(CASES, *by_case, strict=True):
                if stock is not None:
                    yield row(table, method, name, case, stock, figure)
    for name in PROBES:
        for trained, figure in (("all", None), ("layer 4 alone", 0.0)):
            yield Row(
                table="Figure 1" if name == "Conv2d" else "Figure 3", work=f"{name}, a tenth layer, {trained} trained",
                unit="MiB", method=MEMSAVE, share=figure, here=METHOD, columns=("exact",),
                note="stock: 512 MiB by the input's size",
                measure=partial(slope, partial(probe, name, trained), partial(probed, name)),
            )  # fmt: skip
