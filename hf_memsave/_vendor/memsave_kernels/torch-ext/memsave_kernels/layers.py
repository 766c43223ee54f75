"""Modules with a forward only, for ``kernels.kernelize``: weights and settings are those of the module they replace.

Transformers 5.24 maps ``RMSNorm``, ``SwiGLUMLP``, ``GeGLUMLP`` and ``ForCausalLMLoss``. Of its 145 norms of the first
name 131 compute what is computed here; 14 round after the weight only, which in half precision is one rounding less. It
also has ``RMSNormZeroCentered``, where :class:`GemmaRMSNorm` belongs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .activation import activate
from .cross_entropy import cross_entropy_, linear_cross_entropy
from .dropout_norm import dropout_norm
from .gated import gated
from .rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Replaces ``LlamaRMSNorm`` and its copies."""

    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute RMSNorm of ``[*, N]``."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, "llama")


class LlamaRMSNorm(RMSNorm):
    """Names :class:`RMSNorm` after the class that it replaces."""


class GemmaRMSNorm(nn.Module):
    """Replaces ``GemmaRMSNorm`` and its copies."""

    can_torch_compile = True
    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Compute RMSNorm of ``[*, N]`` by ``1 + weight``."""
        return rms_norm(x, self.weight, self.eps, "gemma")


class T5RMSNorm(nn.Module):
    """Replaces ``T5LayerNorm``."""

    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute RMSNorm of ``[*, N]``."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, "t5")


class LayerNorm(nn.Module):
    """Replaces ``torch.nn.LayerNorm`` over one dimension."""

    can_torch_compile = True
    weight: Tensor
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        """Compute LayerNorm of ``[*, N]``, in float32 under autocast as PyTorch's."""
        out = torch.float32 if torch.is_autocast_enabled(input.device.type) else None
        return dropout_norm(input, None, self.weight, self.bias, self.eps, out=out)[1]


class SiluAndMul(nn.Module):
    """Multiplies ``silu`` of the first half of ``[*, 2F]`` by the second."""

    can_torch_compile = True

    def forward(self, gate_up: Tensor) -> Tensor:
        """Return ``[*, F]``."""
        return gated(gate_up, None, "silu")


class SwiGLUMLP(nn.Module):
    """Replaces ``LlamaMLP`` and its copies whose activation is SiLU."""

    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``down_proj(silu(gate_proj(x)) * up_proj(x))``."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), "silu"))


class GeGLUMLP(nn.Module):
    """Replaces ``GemmaMLP`` and its copies whose activation is GELU in its tanh form."""

    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``down_proj(gelu_tanh(gate_proj(x)) * up_proj(x))``."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), "gelu_tanh"))


class Gelu(nn.Module):
    """Replaces ``torch.nn.GELU``."""

    can_torch_compile = True
    approximate: str

    def forward(self, input: Tensor) -> Tensor:
        """Compute GELU of a tensor of any shape."""
        return activate(input, "gelu_tanh" if self.approximate == "tanh" else "gelu")


class ForCausalLMLoss(nn.Module):
    """Replaces Transformers' function of this name, but for labels that are no class: they count as ignored."""

    can_torch_compile = True

    def forward(
        self, logits: Tensor | None, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the mean cross-entropy of the next tokens, from the logits or, if None, in chunks of rows.

        Args:
            logits: ``[batch, length, vocab_size]``, which are copied, or None.
            labels: ``[batch, length]``, not shifted.
            vocab_size: The size of the last dimension of the logits.
            num_items_in_batch: What the sum is divided by; the number of labels that are not ignored, if None.
            ignore_index: The label of tokens that count for nothing.
            shift_labels: The labels, shifted already, or None.
            **kwargs: Without logits, ``hidden_states``, ``lm_head_weight`` and maybe ``lm_head_bias``.

        Returns:
            The loss, a float32 number.

        Raises:
            ValueError: Without logits, ``final_logit_softcapping`` is asked for.
        """
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.reshape(-1)
        if logits is not None:
            flat, shift_labels = logits.reshape(-1, vocab_size).clone(), shift_labels.to(logits.device)
            return cross_entropy_(flat, shift_labels, num_items_in_batch, ignore_index)
        if kwargs.get("final_logit_softcapping") is not None:
            raise ValueError("expected logits or no final_logit_softcapping, which chunks of rows do not have")
        x: Tensor = kwargs["hidden_states"].reshape(-1, kwargs["hidden_states"].shape[-1])
        head = kwargs["lm_head_weight"], shift_labels.to(x.device), kwargs.get("lm_head_bias")
        return linear_cross_entropy(x, *head, num_items_in_batch, ignore_index)
