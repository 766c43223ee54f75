"""The layers of selective differentiation: how to make each one, its kind, and the shape of its input."""

import copy
from typing import Any, NamedTuple

from torch import nn

from support.helpers import Calls, laid


class Layer(NamedTuple):
    make: Any
    kind: str
    shape: tuple[int, ...]

    @property
    def modes(self):
        return (True, False) if self.kind in ("batch_norm", "channel_dropout") else (True,)

    def pair(self, device, dtype, training=True):
        layer = self.make().to(device, dtype).train(training)
        return layer, copy.deepcopy(layer)


def shape(dimensions):
    return (2, 4, *(6, 5, 4)[:dimensions])


def convolutions():
    for d in (1, 2, 3):
        conv, transposed = getattr(nn, f"Conv{d}d"), getattr(nn, f"ConvTranspose{d}d")
        for mode in ("zeros", "reflect", "replicate", "circular"):
            yield f"Conv{d}d-{mode}", conv, (4, 6, 3), {"padding": 1, "padding_mode": mode}, shape(d)
        yield f"Conv{d}d-same", conv, (4, 4, 2), {"padding": "same"}, shape(d)
        yield f"Conv{d}d-strided", conv, (4, 6, 2), {"stride": 2, "dilation": 2, "groups": 2, "bias": False}, shape(d)
        yield f"Conv{d}d-unbatched", conv, (4, 3, 1), {}, shape(d)[1:]
        yield f"ConvTranspose{d}d", transposed, (4, 6, 3), {"stride": 2, "output_padding": 1}, shape(d)
        yield f"ConvTranspose{d}d-nobias", transposed, (4, 6, 3), {"groups": 2, "bias": False}, shape(d)


def norms():
    for d in (1, 2, 3):
        norm = getattr(nn, f"BatchNorm{d}d")
        yield f"BatchNorm{d}d", norm, (4,), {}, shape(d)
        yield f"BatchNorm{d}d-cumulative", norm, (4,), {"momentum": None}, shape(d)
        yield f"BatchNorm{d}d-plain", norm, (4,), {"affine": False}, shape(d)
        yield f"BatchNorm{d}d-untracked", norm, (4,), {"track_running_stats": False}, shape(d)
    yield "BatchNorm1d-flat", nn.BatchNorm1d, (4,), {}, (9, 4)


def average_pools():
    for d in (1, 2, 3):
        yield f"AvgPool{d}d", getattr(nn, f"AvgPool{d}d"), (2,), {"padding": 1}, shape(d)
        yield f"AdaptiveAvgPool{d}d", getattr(nn, f"AdaptiveAvgPool{d}d"), (2,), {}, shape(d)


def max_pools():
    for d in (1, 2, 3):
        pool = getattr(nn, f"MaxPool{d}d")
        yield f"MaxPool{d}d", pool, (2,), {}, shape(d)
        yield f"MaxPool{d}d-overlapping", pool, (3,), {"stride": 1, "padding": 1, "ceil_mode": True}, shape(d)
        yield f"MaxPool{d}d-dilated", pool, (2,), {"stride": 2, "dilation": 2}, shape(d)
        yield f"MaxPool{d}d-unbatched", pool, (2,), {}, shape(d)[1:]
    yield "MaxPool2d-oblong", nn.MaxPool2d, ((3, 2),), {"stride": (1, 2), "padding": (1, 0)}, (2, 4, 7, 6)
    yield "MaxPool1d-wide", nn.MaxPool1d, (300,), {"stride": 7}, (2, 3, 600)  # places above a byte


def dropouts():
    for d in (1, 2, 3):
        yield f"Dropout{d}d", getattr(nn, f"Dropout{d}d"), (0.3,), {}, shape(d)
        yield f"Dropout{d}d-all", getattr(nn, f"Dropout{d}d"), (1.0,), {}, shape(d)
    yield "Dropout1d-unbatched", nn.Dropout1d, (0.3,), {}, (4, 6)
    yield "Dropout3d-unbatched", nn.Dropout3d, (0.3,), {}, (4, 6, 5, 3)


RECTIFIERS = {"ReLU": (), "ReLU6": (), "LeakyReLU": (0.1,), "Hardtanh": (-0.3, 0.7), "Threshold": (0.1, 0.5)}


def rectifiers():
    for inplace in (False, True):
        for name, args in RECTIFIERS.items():
            yield f"{name}{'-inplace' * inplace}", getattr(nn, name), args, {"inplace": inplace}, shape(2)


GROUP_NORMS = (
    ("GroupNorm", nn.GroupNorm, (2, 4), {}, shape(2)),
    ("GroupNorm-plain", nn.GroupNorm, (2, 4), {"affine": False}, shape(2)),
)
LINEARS = (("Linear", nn.Linear, (5, 3), {}, (2, 4, 5)), ("Linear-nobias", nn.Linear, (5, 3), {"bias": False}, (2, 5)))

_FAMILIES = {
    "average_pool": average_pools(), "batch_norm": norms(), "channel_dropout": dropouts(),
    "convolution": convolutions(), "group_norm": GROUP_NORMS, "linear": LINEARS, "max_pool": max_pools(),
    "rectifier": rectifiers(),
}  # fmt: skip

#: Name -> layer.
LAYERS = {
    name: Layer(lambda cls=cls, args=args, options=options: cls(*args, **options), kind, shape)
    for kind, family in _FAMILIES.items()
    for name, cls, args, options, shape in family
}


class Taped(Calls):
    """``model`` under a tape, or not; its sum is the loss."""

    def __init__(self, model, tape):
        def forward(x):
            with laid(tape):
                return {"loss": model(x).sum()}

        super().__init__(forward, model)
