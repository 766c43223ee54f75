"""What a training step is run on: a batch, the forward that takes it, and the loss that it returns."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_memsave.errors import MeasureError
from hf_memsave.measure.models import HEADS

_UNREADABLE = (
    AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError,
    pickle.UnpicklingError, SafetensorError,
)  # fmt: skip


def make_batch(head: Any, config: PreTrainedConfig, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Random token ids ``[batch, seq]``, none of them padding, and the labels that the head takes; always the same."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch_size, seq_len), generator=generator)
    ids[ids == config.pad_token_id] = 0 if config.pad_token_id else 1
    if head not in (HEADS["SEQ_CLS"], HEADS["TOKEN_CLS"]):
        return {"input_ids": ids, "labels": ids.clone()}
    label_dtype = torch.float if config.num_labels == 1 else torch.long  # one label means regression
    shape = (batch_size,) if head is HEADS["SEQ_CLS"] else (batch_size, seq_len)
    labels = torch.randint(max(2, config.num_labels), shape, generator=generator)
    return {"input_ids": ids, "labels": labels.to(label_dtype)}


def read_batch(path: Path) -> dict[str, Tensor]:
    """Tensors by name from .safetensors, .json (lists), .jsonl (one example a line) or ``torch.save``; MeasureError."""
    expected = 'Expected tensors by name, such as {"input_ids": ..., "labels": ...}'
    if not path.is_file():
        raise MeasureError(f"{path}: no such file. {expected}, saved with torch.save, or as .safetensors or .json.")
    try:
        if path.suffix == ".safetensors":
            batch = load_file(path)
        elif path.suffix in (".json", ".jsonl"):
            text = path.read_text(encoding="utf-8")
            lists = json.loads(text) if path.suffix == ".json" else [json.loads(x) for x in text.splitlines() if x]
            if isinstance(lists, list):
                lists = {name: [example[name] for example in lists] for name in lists[0]}
            batch = {name: torch.tensor(values) for name, values in lists.items()}
        else:
            batch = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = (str(error).splitlines() or ["it ends too early"])[0]
        raise MeasureError(
            f"{path}: {type(error).__name__}: {reason}. {expected}, padded to one length. Save it with "
            "torch.save(dict(batch), ...)."
        ) from error
    if not isinstance(batch, dict) or not batch or not all(isinstance(value, Tensor) for value in batch.values()):
        got = {k: type(v).__name__ for k, v in batch.items()} if isinstance(batch, dict) else type(batch).__name__
        raise MeasureError(f"{path}: {expected}, got {got}. Save it with torch.save(dict(batch), ...).")
    return batch


def described(batch: Mapping[str, Any]) -> str:
    """Names and shapes."""
    return ", ".join(
        f"{name} {list(value.shape)}" if isinstance(value, Tensor) else name for name, value in batch.items()
    )


def forward_of(model: nn.Module, autocast: torch.dtype | None) -> Callable[..., Any]:
    """The model's forward, under autocast to a dtype; None for no autocast."""
    device = device_of(model)

    def forward(**inputs: Any) -> Any:
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            return model(**inputs)

    return forward


def device_of(model: nn.Module) -> str:
    """The type of device that the model is on."""
    return next((p.device.type for p in model.parameters()), "cpu")


def loss_of(output: Any, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The one number that backward begins at: ``output["loss"]``, or ``output``; MeasureError if there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = ", ".join(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
        if isinstance(loss, Tensor):
            got = f"a tensor {list(loss.shape)}"
        remedy = "Use a model with a head that takes them" if "labels" in batch else "Add 'labels' to the batch"
        raise MeasureError(
            f"expected a loss in the output of {type(model).__name__}, got {got} for a batch of {', '.join(batch)}. "
            f"{remedy}, or have its forward return a loss of one number."
        )
    if not loss.requires_grad:
        raise MeasureError(
            f"expected a loss that depends on parameters of {type(model).__name__} that require a gradient, got one "
            "that needs none. Unfreeze some."
        )
    return loss
