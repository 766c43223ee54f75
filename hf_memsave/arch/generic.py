"""For models no table knows: sites guessed from a module's class name and children, and proven by running it.

A guess counts only after the op's expression gave the module's own output, to the bit, on a small random input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_memsave.arch.llama import GATED_MLP_NAMES
from hf_memsave.arch.spec import Site


@dataclass(frozen=True)
class Pattern:
    """A guess: modules whose class name ends in ``suffix`` and that have all ``attributes``."""

    suffix: str
    op: str
    names: Mapping[str, str] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()


PATTERNS = (
    Pattern("RMSNorm", op="rms_norm", names={"eps": "variance_epsilon"}, attributes=("variance_epsilon",)),
    Pattern("RMSNorm", op="rms_norm", names={"eps": "eps"}, attributes=("eps",)),
    Pattern("LayerNorm", op="t5_layer_norm", names={"eps": "variance_epsilon"}, attributes=("variance_epsilon",)),
    Pattern("MLP", op="gated_mlp", names=GATED_MLP_NAMES, attributes=tuple(GATED_MLP_NAMES.values())),
)


def guess(module: nn.Module) -> Site | None:
    """The first pattern that fits ``module``."""
    cls = type(module)
    for pattern in PATTERNS:
        if cls.__name__.endswith(pattern.suffix) and all(hasattr(module, a) for a in pattern.attributes):
            return Site(cls=f"{cls.__module__}.{cls.__qualname__}", op=pattern.op, names=pattern.names)
    return None


def disproof(module: nn.Module, site: Site) -> str | None:
    """Why a guessed gated MLP is not one; None if its expression gives the module's bits (norms prove themselves)."""
    if site.op != "gated_mlp":
        return None
    gate, up, down, act = (getattr(module, site.names[role]) for role in ("gate", "up", "down", "act"))
    weight = getattr(gate, "weight", None)
    if not isinstance(gate, nn.Linear) or not isinstance(weight, torch.Tensor) or weight.device.type == "meta":
        return f"its {site.names['gate']} is {type(gate).__name__}, which cannot be tried here"
    x = torch.randn(1, 3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    try:
        with torch.no_grad():
            same = torch.equal(module(x), down(act(gate(x)) * up(x)))
    except Exception as error:  # whatever an unknown forward raises, the guess was wrong
        return f"its forward cannot be tried: {error}"
    return None if same else "its forward is not down(act(gate(x)) * up(x))"
