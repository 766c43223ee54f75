"""The inputs of a training step: a batch, the forward that takes it, and the loss that this returns."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_memsave.errors import MeasureError
from hf_memsave.measure.models import HEADS, UNREADABLE

#: Parameters of a forward that are no inputs.
_SWITCHES = {"self", "return_dict", "output_attentions", "output_hidden_states", "use_cache", "logits_to_keep"}


def make_batch(head: Any, config: PreTrainedConfig, batch_size: int, seq_len: int) -> dict[str, Any]:
    """Make random inputs, always the same, with labels for a head: token ids ``[batch, seq]``, images or sound."""
    generator = torch.Generator().manual_seed(0)
    try:
        if head not in HEADS.values():
            return _make_others(head, config, batch_size, seq_len, generator)
        ids = torch.randint(config.vocab_size, (batch_size, seq_len), generator=generator)
        ids[ids == config.pad_token_id] = 0 if config.pad_token_id else 1  # none of them is padding
        if head not in (HEADS["SEQ_CLS"], HEADS["TOKEN_CLS"]):
            return {"input_ids": ids, "labels": ids.clone()}
        shape = (batch_size,) if head is HEADS["SEQ_CLS"] else (batch_size, seq_len)
        labels = torch.randint(max(2, config.num_labels), shape, generator=generator)
        return {"input_ids": ids, "labels": labels.float() if config.num_labels == 1 else labels}  # one: regression
    except MeasureError:
        raise
    except RuntimeError as error:
        reason = f"a batch of {batch_size}: {str(error).splitlines()[0]}"
        raise MeasureError(reason, "Lower batch_size.", "Lower --batch-size.") from error


def _image(config: Any) -> tuple[int, ...]:
    size = getattr(config, "image_size", 224)
    sides = (size["height"], size["width"]) if isinstance(size, Mapping) else size
    frames = [config.num_frames] if hasattr(config, "num_frames") else []
    channels = next((n for name in ("num_channels", "in_channels", "in_chans") if (n := getattr(config, name, 0))), 3)
    return (*frames, channels, *([sides] * 2 if isinstance(sides, int) else sides))


#: Input -> a function from the configuration of the submodel that takes it to its shape, and the field of that one.
_SHAPES: dict[str, tuple[Callable[[Any], tuple[int, ...]], str]] = {
    "pixel_values": (_image, "vision_config"),
    "input_values": (lambda c: (c.max_length, c.num_mel_bins) if hasattr(c, "num_mel_bins") else (16_000,), ""),
    "input_features": (lambda c: (c.num_mel_bins, 2 * c.max_source_positions), "audio_config"),
}


def _make_others(cls: Any, config: Any, batch_size: int, seq_len: int, generator: torch.Generator) -> dict[str, Any]:
    takes, text = taken_by(cls), config.get_text_config()
    limits = (getattr(text, name, None) for name in ("max_target_positions", "max_position_embeddings"))
    length = min(seq_len, next(filter(None, limits), 16))  # else the tokens of a second of speech
    vocabulary = getattr(text, "vocab_size", None) or 2
    pairs = "return_loss" in takes  # texts and images, whose distances are the loss: of one pair it is zero
    batch_size = max(batch_size, 2) if pairs else batch_size
    batch: dict[str, Any] = {}
    for name in [n for n in ("input_ids", *_SHAPES) if n in takes] if pairs else [cls.main_input_name]:
        try:
            if name == "input_ids":
                batch[name] = torch.randint(1, vocabulary, (batch_size, length), generator=generator)
            else:
                shape_of, part = _SHAPES[name]
                batch[name] = torch.randn(batch_size, *shape_of(getattr(config, part, config)), generator=generator)
        except (AttributeError, KeyError, TypeError) as error:
            raise MeasureError(
                f"cannot make {name!r} for {cls.__name__}: expected its sizes in the configuration, as images or sound "
                f"have them, got {type(error).__name__}: {error}. Its forward takes {', '.join(takes)}.",
                "Give a batch of your own.", "Give one with --batch.",
            ) from error  # fmt: skip
    if pairs:
        return batch | {"return_loss": True}
    labels: dict[str, tuple[tuple[int, ...], int, int]] = {  # how a class's name ends -> shape, the least, the end
        "Classification": ((), 0, config.num_labels),
        "SemanticSegmentation": (tuple(batch[cls.main_input_name].shape[2:]), 0, config.num_labels),
        "ConditionalGeneration": ((length,), 1, vocabulary),
        "CTC": ((length,), 1, vocabulary),
    }
    for kind, (shape, least, end) in labels.items():
        if cls.__name__.endswith(kind) and "labels" in takes:
            made = torch.randint(least, end, (batch_size, *shape), generator=generator)
            batch["labels"] = made.float() if end == 1 else made  # one label means regression
    return batch


def taken_by(model: Any) -> list[str]:
    """Return the names of the inputs that the forward of a model, or of a class of models, takes."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = inspect.signature(model.forward).parameters.values()
    return [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in _SWITCHES]


def fitted(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the batch on the model's device, with floating-point tensors but labels in its weights' dtype."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))

    def moved(name: str, x: Tensor) -> Tensor:
        return x.to(weight.device, weight.dtype if x.is_floating_point() and name != "labels" else None)

    return {name: moved(name, x) if isinstance(x, Tensor) else x for name, x in batch.items()}


def inputs_of(batch: Mapping[str, Any]) -> tuple[tuple[str, Any, torch.dtype | None], ...]:
    """Return what a trace needs of a batch: the name, shape and dtype of each tensor, or another value itself."""
    return tuple((n, x.shape, x.dtype) if isinstance(x, Tensor) else (n, x, None) for n, x in batch.items())


def read_batch(path: Path) -> dict[str, Tensor]:
    """Read tensors by name from .safetensors, .json, .jsonl (a line an example) or torch.save; else MeasureError."""
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
    except UNREADABLE as error:
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
    """Describe a batch by names and shapes."""
    return shapes({n: list(value.shape) if isinstance(value, Tensor) else [] for n, value in batch.items()})


def shapes(inputs: Mapping[str, Sequence[int]]) -> str:
    """Join the names of inputs, each with its shape if it has one."""
    return ", ".join(f"{name} {list(shape)}" if shape else name for name, shape in inputs.items())


def forward_of(model: nn.Module, autocast: torch.dtype | None) -> Callable[..., Any]:
    """Return a function that runs the model's forward under autocast to a dtype, or without it for None."""
    device = device_of(model)

    def forward(**inputs: Any) -> Any:
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            return model(**inputs)

    return forward


def device_of(model: nn.Module) -> str:
    """Return the device type of the model's parameters; "cpu" if it has none."""
    return next((p.device.type for p in model.parameters()), "cpu")


def cannot_run(model: nn.Module, batch: Mapping[str, Any], error: Exception) -> str:
    """Return the message for a model whose stock step fails on a batch."""
    return (
        f"{type(model).__name__} cannot run a stock step on {described(batch)}: {type(error).__name__}: "
        f"{str(error).rstrip('. ')}. Expected a batch that the model trains on: its forward takes "
        f"{', '.join(taken_by(model))}."
    )


def loss_of(output: Any, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the scalar loss in a forward's output, ``output["loss"]`` or ``output``; MeasureError if there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = ", ".join(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
        got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else got
        can_add = "labels" in taken_by(model) and "labels" not in batch
        remedy = "Add 'labels' to the batch" if can_add else "Use a model with a head"
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
