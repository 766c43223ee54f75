"""Activations and their slopes, in float32, for the kernels that share them."""

import triton
import triton.language as tl

#: ``"gelu"`` is the exact one, ``"gelu_tanh"`` its approximation with tanh, ``"quick_gelu"`` x σ(1.702 x).
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu")


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _gate(x, ACT: tl.constexpr):
    """What an activation multiplies x by."""
    if ACT == "silu":
        return _sigmoid(x)
    elif ACT == "quick_gelu":
        return _sigmoid(1.702 * x)
    elif ACT == "gelu_tanh":
        return _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACT == "gelu")
        return 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))


@triton.jit
def activation(x, ACT: tl.constexpr):
    """The activation of x: the same in forward, again and backward."""
    return x * _gate(x, ACT)


@triton.jit
def slope(x, ACT: tl.constexpr):
    """Its derivative."""
    gate = _gate(x, ACT)
    if ACT == "silu":
        return gate * (1.0 + x * (1.0 - gate))
    elif ACT == "quick_gelu":
        return gate * (1.0 + 1.702 * x * (1.0 - gate))
    elif ACT == "gelu_tanh":
        rest = _sigmoid(-1.5957691216057308 * (x + 0.044715 * x * x * x))  # 1 - gate, where that would cancel
        return gate * (1.0 + rest * x * 1.5957691216057308 * (1.0 + 0.134145 * x * x))
    else:
        return gate + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


def check(name: str) -> str:
    """The name, if it is one of :data:`ACTIVATIONS`.

    Returns:
        It.

    Raises:
        ValueError: It is not.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"expected an activation in {ACTIVATIONS}, got {name!r}")
    return name
