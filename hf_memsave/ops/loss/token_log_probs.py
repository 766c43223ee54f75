"""Log-probabilities of labels, for losses that are written by hand: DPO, ORPO, GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.errors import MeasureError


def token_log_probs(
    model: nn.Module, batch: Mapping[str, Any], labels: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the log-probability of each label, given the tokens before it.

    For a patched model no logits are kept, and a chunk of them is computed at a time, also under ``torch.no_grad()``.

    Args:
        model: A language model of Transformers or PEFT, patched or not.
        batch: The arguments of the model; its ``labels`` are left out.
        labels: ``[batch, tokens]``, as a model takes them: not shifted, and -100 where no number is asked for.
        temperature: The number that logits are divided by.
        entropy: Compute the entropy of each of these distributions too, in nats.

    Returns:
        ``[batch, tokens]`` in fp32, zero for labels of -100 and for a decoder's first token; or this and the entropies.

    Raises:
        MeasureError: The labels are not one for each of the model's logits, or the temperature is not above zero.

    Example:
        >>> logp = hf_memsave.token_log_probs(model, batch, batch["input_ids"])  # doctest: +SKIP
    """
    if temperature <= 0:
        raise MeasureError(f"token_log_probs: expected a temperature above 0, got {temperature}. Leave it out for 1.")
    given, inner = {k: v for k, v in batch.items() if k != "labels"}, cast("Any", getattr(model, "module", model))
    ahead = 0 if getattr(getattr(inner, "config", None), "is_encoder_decoder", False) else 1  # DDP wraps a model
    if not ahead and "decoder_input_ids" not in given:
        given["decoder_input_ids"] = inner.prepare_decoder_input_ids_from_labels(labels)
    logits = model(**given).logits
    if labels.shape != logits.shape[:-1]:
        raise MeasureError(
            f"token_log_probs: expected labels of shape {tuple(logits.shape[:-1])}, one for each of the model's "
            f"logits, got {tuple(labels.shape)}. Pad them with -100, and do not shift them."
        )
    target = F.pad(labels[:, ahead:], (0, ahead), value=-100).unsqueeze(-1)
    logp, is_asked = (logits.float() / temperature).log_softmax(-1), target != -100
    found = [logp.gather(-1, target.where(is_asked, 0))]
    found += [-(logp.exp() * logp).sum(-1, keepdim=True)] if entropy else []
    out = [F.pad(one.where(is_asked, 0).squeeze(-1)[:, : labels.shape[1] - ahead], (ahead, 0)) for one in found]
    return (out[0], out[1]) if entropy else out[0]
