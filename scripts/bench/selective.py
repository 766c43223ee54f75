"""Kept memory and step time of three CNNs, stock and patched, for gradients of a few of their tensors.

    python scripts/bench/selective.py [--models resnet-101 vgg-16] [--cases All Input] [--batch 4] [--out [DIR]]

Cases, as in Bhatia & Dangel (2024): All parameters; Input alone; the parameters of all convolutions (Conv), of all
linears (Linear) or of all norms (Norm); those of the first or of the last quarter of the layers (SurgicalFirst,
SurgicalLast). Norms run in train and in eval.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from transformers import (
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

from hf_memsave import MemSaveConfig, measure_kept, patch
from publish import MIB, arguments, publish, ratio_of_medians, versions

NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
CASES = ("All", "Input", "Conv", "Linear", "Norm", "SurgicalFirst", "SurgicalLast")


def vgg_16() -> nn.Module:
    """Simonyan & Zisserman's VGG-16: thirteen convolutions and three linears, without norms."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers += [nn.MaxPool2d(2)]
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head, nn.Linear(4096, 1000))


#: Transformers' ResNet has the depths of ResNet-101; its MobileNetV2 is padded as PyTorch pads.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet-101": lambda: ResNetForImageClassification(ResNetConfig(depths=[3, 4, 23, 3], num_labels=1000)),
    "vgg-16": vgg_16,
    "mobilenet-v2": lambda: MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000, tf_padding=False)),
}


def choose(model: nn.Module, case: str) -> bool:
    """Let the parameters of ``case`` want gradients, and no other; False where the model has none of them."""
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, _ConvNd, *NORMS))]
    kinds = {"All": layers, "Input": [], "SurgicalFirst": layers[: len(layers) // 4]}
    kinds["SurgicalLast"] = layers[-(len(layers) // 4) :]
    for name, classes in (("Conv", _ConvNd), ("Linear", nn.Linear), ("Norm", NORMS)):
        kinds[name] = [m for m in layers if isinstance(m, classes)]
    model.requires_grad_(False)
    for layer in kinds[case]:
        layer.requires_grad_(True)
    return case == "Input" or bool(kinds[case])


def set_norms(model: nn.Module, mode: str) -> bool:
    """Put the model in training, its norms in ``mode``; False where it has none."""
    norms = [m for m in model.train().modules() if isinstance(m, NORMS)]
    for norm in norms:
        norm.train(mode == "train")
    return bool(norms)


def step(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of one forward, whose images may come from a layer that wants gradients, as features do."""
    output = model(images * 1)
    return getattr(output, "logits", output).float().logsumexp(-1).sum()


def main() -> None:
    """Run the benchmark and print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, default=224, help="of the square images")
    parser.add_argument("--steps", type=int, default=0, help="alternating steps to time; 0 for memory alone")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs = [(name, mode, case) for name in options.models for mode in ("train", "eval") for case in options.cases]
    found = [bench(*run, options, device) for run in track(runs, "benchmarking", console=Console(stderr=True))]
    rows = [row for row in found if row]
    setting = f"batch {options.batch}, {options.size} x {options.size}, fp32, {device.type}, {versions()}"
    header = ["model", "norms", "case", "stock MiB", "patched MiB", "ratio", "step time"]
    title = f"Kept between forward and backward: {setting}"
    publish("selective", title, header, map(cells, rows), {"setting": setting, "rows": rows}, options.out)


def cells(row: dict[str, Any]) -> list[str]:
    """Of the table's row."""
    figures = [f"{row[key] / MIB:.1f}" for key in ("stock", "patched")] + [f"{row['patched'] / row['stock']:.2f}"]
    return [row["model"], row["norms"], row["case"], *figures, f"{row['time']:.2f}" if "time" in row else ""]


def bench(name: str, mode: str, case: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any] | None:
    """One row; None where the model has no norms to put in eval, or no parameters that the case asks for."""
    torch.manual_seed(0)
    stock = MODELS[name]().to(device)
    has_norms = set_norms(stock, mode)
    if not choose(stock, case) or not (has_norms or mode == "train"):
        return None
    patched = copy.deepcopy(stock)
    patch(patched, MemSaveConfig())
    images = torch.randn(options.batch, 3, options.size, options.size, device=device, requires_grad=case == "Input")
    kept = [measure_kept(m, images, forward=lambda x, m=m: {"loss": step(m, x)}).total for m in (stock, patched)]
    row = {"model": name, "norms": mode if has_norms else "none", "case": case, "stock": kept[0], "patched": kept[1]}
    if options.steps:
        steps = [lambda model=model: step(model, images).backward() for model in (stock, patched)]
        row["time"] = ratio_of_medians(*steps, options.steps)
    return row


if __name__ == "__main__":
    main()
