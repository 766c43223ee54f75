"""Modules with a forward only, for ``kernels.kernelize``: weights and settings are those of the module they replace."""

import torch
from torch import Tensor, nn

from .activation import activate
from .dropout_norm import dropout_norm
from .gated import gated
from .rms_norm import rms_norm


class LlamaRMSNorm(nn.Module):
    """In the place of ``LlamaRMSNorm`` and its copies."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """RMSNorm of ``[*, N]``."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, "llama")


class GemmaRMSNorm(nn.Module):
    """In the place of ``GemmaRMSNorm`` and its copies."""

    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """RMSNorm of ``[*, N]`` by ``1 + weight``."""
        return rms_norm(x, self.weight, self.eps, "gemma")


class T5RMSNorm(nn.Module):
    """In the place of ``T5LayerNorm``."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """RMSNorm of ``[*, N]``."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, "t5")


class LayerNorm(nn.Module):
    """In the place of ``torch.nn.LayerNorm`` over one dimension."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        """LayerNorm of ``[*, N]``, in float32 under autocast as PyTorch's."""
        out = torch.float32 if torch.is_autocast_enabled(input.device.type) else None
        return dropout_norm(input, None, self.weight, self.bias, self.eps, out=out)[1]


class SiluAndMul(nn.Module):
    """Of ``[*, 2F]``: ``silu`` of its first half times its second."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """``[*, F]``."""
        return gated(gate_up, None, "silu")


class Gelu(nn.Module):
    """In the place of ``torch.nn.GELU``."""

    approximate: str

    def forward(self, input: Tensor) -> Tensor:
        """Of any shape."""
        return activate(input, "gelu_tanh" if self.approximate == "tanh" else "gelu")
