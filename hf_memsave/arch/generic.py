"""For models no table knows: sites guessed from a module's class name and children.

A guess is only a candidate: it counts if the source of the module's forward says what the op computes (see
:mod:`hf_memsave.ops.expression`), and is reported as skipped otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from hf_memsave.arch.llama import GATED_MLP_NAMES
from hf_memsave.arch.spec import Site
from hf_memsave.ops.eager_attention import NAME, implementation, is_attention


@dataclass(frozen=True)
class Pattern:
    """A guess: modules whose class name ends in ``suffix`` and that have all attributes in ``names``."""

    suffix: str
    op: str
    names: Mapping[str, str] = field(default_factory=dict)


PATTERNS = (
    Pattern("RMSNorm", op="rms_norm", names={"eps": "variance_epsilon"}),
    Pattern("RMSNorm", op="rms_norm", names={"eps": "eps"}),
    Pattern("LayerNorm", op="t5_layer_norm", names={"eps": "variance_epsilon"}),
    Pattern("MLP", op="gated_mlp", names=GATED_MLP_NAMES),
)


def adapter(cls: type[nn.Module]) -> Site | None:
    """The site of a PEFT layer, of any method that converts its input to the adapter's dtype."""
    is_adapter = any(base.__module__ == "peft.tuners.tuners_utils" for base in cls.__mro__)
    if not is_adapter or not hasattr(cls, "_cast_input_dtype"):
        return None
    return Site(cls=f"{cls.__module__}.{cls.__qualname__}", op="lora")


def guess(cls: type[nn.Module], module: nn.Module) -> Site | None:
    """Eager attention, or the first pattern that fits ``module``, whose stock class is ``cls``."""
    if is_attention(cls) and implementation(module) == NAME:
        return Site(cls=f"{cls.__module__}.{cls.__qualname__}", op="eager_attention")
    for pattern in PATTERNS:
        if cls.__name__.endswith(pattern.suffix) and all(hasattr(module, a) for a in pattern.names.values()):
            return Site(cls=f"{cls.__module__}.{cls.__qualname__}", op=pattern.op, names=pattern.names)
    return None
