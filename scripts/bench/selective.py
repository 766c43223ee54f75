"""Kept memory and step time of three CNNs, stock and patched, for gradients of a few of their tensors.

    python scripts/bench/selective.py [--models resnet-101 vgg-16] [--cases All Input] [--batch 8] [--size 224]

Cases, as in Bhatia & Dangel (2024): All parameters; Input alone; the parameters of all convolutions (Conv), of all
linears (Linear) or of all norms (Norm); those of the first or of the last quarter of the layers (SurgicalFirst,
SurgicalLast). Norms run in train and in eval. Writes selective.json, selective.md and selective.png to --output.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
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

MIB = 2**20
NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
CASES = ("All", "Input", "Conv", "Linear", "Norm", "SurgicalFirst", "SurgicalLast")


def resnet_101() -> nn.Module:
    """Transformers' ResNet with the depths of ResNet-101."""
    return ResNetForImageClassification(ResNetConfig(depths=[3, 4, 23, 3], num_labels=1000))


def mobilenet_v2() -> nn.Module:
    """Transformers' MobileNetV2, padded as PyTorch pads."""
    return MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000, tf_padding=False))


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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet-101": resnet_101, "vgg-16": vgg_16, "mobilenet-v2": mobilenet_v2,
}  # fmt: skip


def choose(model: nn.Module, case: str) -> bool:
    """Let the parameters of ``case`` want gradients, and no other.

    Returns:
        False where the model has no such parameters.
    """
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
    """Run the benchmark and write its three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, default=224, help="of the square images")
    parser.add_argument("--steps", type=int, default=0, help="alternating steps to time; 0 for memory alone")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs = [(name, mode, case) for name in options.models for mode in ("train", "eval") for case in options.cases]
    rows = [bench(*run, options, device) for run in track(runs, "benchmarking", console=Console(stderr=True))]
    found = [row for row in rows if row]
    options.output.mkdir(parents=True, exist_ok=True)
    setting = f"batch {options.batch}, {options.size} x {options.size}, fp32, {device.type}, torch {torch.__version__}"
    (options.output / "selective.json").write_text(json.dumps({"setting": setting, "rows": found}, indent=2) + "\n")
    (options.output / "selective.md").write_text(markdown(setting, found), encoding="utf-8")
    picture(options.output / "selective.png", setting, found)
    print(markdown(setting, found))


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
        row["time"] = time_ratio(stock, patched, images, options.steps)
    return row


def time_ratio(stock: nn.Module, patched: nn.Module, images: Tensor, steps: int) -> float:
    """Median step time of ``patched`` over that of ``stock``; the steps alternate, and the first two do not count."""
    times: tuple[list[float], list[float]] = [], []
    for _ in range(steps + 2):
        for model, record in zip((stock, patched), times, strict=True):
            start = time.perf_counter()
            step(model, images).backward()
            if images.is_cuda:
                torch.cuda.synchronize()
            record.append(time.perf_counter() - start)
    return statistics.median(times[1][2:]) / statistics.median(times[0][2:])


def markdown(setting: str, rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = ["model | norms | case | stock MiB | patched MiB | ratio | step time", " | ".join(["---"] * 7)]
    for row in rows:
        figures = [f"{row[key] / MIB:.1f}" for key in ("stock", "patched")] + [f"{row['patched'] / row['stock']:.2f}"]
        timed = f"{row['time']:.2f}" if "time" in row else ""
        lines.append(" | ".join([row["model"], row["norms"], row["case"], *figures, timed]))
    return f"Kept between forward and backward: {setting}\n\n" + "".join(f"| {line} |\n" for line in lines)


def picture(path: Path, setting: str, rows: list[dict[str, Any]]) -> None:
    """Bars of kept memory, stock beside patched, one panel for each model and mode of its norms."""
    panels = list(dict.fromkeys((row["model"], row["norms"]) for row in rows))
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained", dpi=150)
    figure.suptitle(f"kept between forward and backward: {setting}", fontsize=11)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        mine = [row for row in rows if (row["model"], row["norms"]) == panel]
        for offset, key, color in ((-0.2, "stock", "#88CCEE"), (0.2, "patched", "#332288")):
            axes.bar(
                [i + offset for i in range(len(mine))], [row[key] / MIB for row in mine], 0.4, color=color, label=key
            )
        axes.set_xticks(range(len(mine)), [row["case"] for row in mine], rotation=45, ha="right")
        axes.set(title=f"{panel[0]}, norms: {panel[1]}", ylabel="MiB")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
