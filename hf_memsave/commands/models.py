"""A model from its configuration alone: what to build, how deep, and a batch to train it on."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_memsave.commands import CommandError

#: The heads that can be measured, and whether they take one label per sequence.
HEADS = {
    AutoModelForSequenceClassification: True,
    AutoModelForTokenClassification: False,
    AutoModelForCausalLM: False,
    AutoModelForMaskedLM: False,
    AutoModelForSeq2SeqLM: False,
}
_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout", "attn_dropout")
_DECODER_DEPTH = ("num_decoder_layers", "decoder_layers")

aten = torch.ops.aten
_RANDOM_FILLS = (aten.normal_, aten.uniform_)
_DRAWN = 2**16
# Matrix products, and which argument is the first factor.
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten._grouped_mm: 0, aten.addmm: 1, aten.baddbmm: 1}


class SkipValues(TorchDispatchMode):
    """Runs a model for its allocations alone: weights repeat a few random numbers, and matrix products are zeros.

    No byte that is kept depends on a value, so what is counted is what a real step keeps, and a layer of any width is
    measured in a moment.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _RANDOM_FILLS and args[0].numel() > _DRAWN and args[0].is_contiguous():
            few = func(args[0].new_empty(_DRAWN), *args[1:], **(kwargs or {}))
            for part in args[0].view(-1).split(_DRAWN):
                part.copy_(few[: len(part)])
            return args[0]
        if func.overloadpacket in _PRODUCTS:
            left, right = args[_PRODUCTS[func.overloadpacket] :][:2]
            return left.new_zeros(*left.shape[:-1], right.shape[-1])
        return func(*args, **(kwargs or {}))


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of a folder, a file, a model type (its defaults) or a name on the hub.

    Args:
        name: Any of these.

    Returns:
        The configuration.

    Raises:
        CommandError: There is none.
    """
    path = Path(name)
    if name in CONFIG_MAPPING and not path.exists():
        return CONFIG_MAPPING[name]()
    if not path.exists() and (name.endswith(".json") or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)):
        raise CommandError(f"{name}: no such file or folder. Expected a config.json, or a folder with one.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise CommandError(f"{name}: expected a config.json in this folder, found none. Name the model's folder.")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise CommandError(
            f"{name}: {reason} Expected a model's folder, its config.json, a model type such as 'bert' or 'llama', or "
            "a name on the hub (which needs a network, or the model in the cache)."
        ) from error


def choose_head(config: PreTrainedConfig) -> Any:
    """The Auto class to build with.

    Args:
        config: Names an architecture, perhaps.

    Returns:
        The class for that architecture, else for a usual one of its family.

    Raises:
        CommandError: The family has no head that trains on token ids and labels alone.
    """
    named = (config.architectures or [""])[0]
    known = {auto: auto._model_mapping[type(config)] for auto in HEADS if type(config) in auto._model_mapping}
    for auto, cls in known.items():
        if cls.__name__ == named:
            return auto
    if config.is_encoder_decoder:
        usual = [AutoModelForSeq2SeqLM]
    elif AutoModelForMaskedLM in known:
        usual = [AutoModelForSequenceClassification, AutoModelForMaskedLM]
    else:
        usual = [AutoModelForCausalLM]
    for auto in usual:
        if auto in known:
            return auto
    raise CommandError(
        f"{config.model_type!r} has no language modelling or classification head on token ids. Expected a text model; "
        "measure another one with hf_memsave.measure_kept(model, batch)."
    )


def depth_fields(config: PreTrainedConfig) -> tuple[str, ...]:
    """The fields that say how many layers there are.

    Args:
        config: Any text model's.

    Returns:
        One name, or one for the encoder and one for the decoder.

    Raises:
        CommandError: There is none.
    """
    first = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    fields = tuple(f for f in (first, *_DECODER_DEPTH) if isinstance(getattr(config, f, None), int))
    if first not in fields:
        raise CommandError(
            f"the configuration of {config.model_type!r} has no field {first!r} with its number of layers. Expected a "
            "text model; measure another one with hf_memsave.measure_kept(model, batch)."
        )
    return fields


def period(config: PreTrainedConfig) -> int:
    """After how many layers the list of layer types, if there is one, repeats itself."""
    rows = list(zip(*_lists_by_layer(config).values(), strict=True)) or [()]
    return next(p for p in range(1, len(rows) + 1) if all(rows[i] == rows[i - p] for i in range(p, len(rows))))


def at_depth(config: PreTrainedConfig, depth: dict[str, int]) -> PreTrainedConfig:
    """A copy with other numbers of layers.

    Args:
        config: Left as it is.
        depth: A number for each of its :func:`depth_fields`.

    Returns:
        The copy; its lists with one entry a layer have as many entries.

    Raises:
        CommandError: The configuration does not say its depth in that field alone.
    """
    changed = copy.deepcopy(config)
    layers, every = next(iter(depth.values())), period(config)
    for name, values in _lists_by_layer(config).items():
        setattr(changed, name, [values[i % every] for i in range(layers)])
    for field, number in depth.items():
        try:
            setattr(changed, field, number)
        except NotImplementedError as error:
            raise CommandError(
                f"cannot change the depth of {config.model_type!r}: {error} Expected a model of like layers; measure "
                "another one with hf_memsave.measure_kept(model, batch)."
            ) from error
    return changed


def _lists_by_layer(config: PreTrainedConfig) -> dict[str, list[Any]]:
    layers = getattr(config, depth_fields(config)[0])
    return {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == layers and "layer" in k}


def build(head: Any, config: PreTrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model in training mode, on the device that is active, without reading any weights.

    Attention has no dropout and T5's position bias is frozen: for each of them the CPU's attention keeps tensors
    ``[batch, heads, seq, seq]``, as a fused GPU kernel does not.

    Args:
        head: The Auto class to build with.
        config: Left as it is.
        dtype: Of the weights.

    Returns:
        The model, and what of this had to be changed in it.
    """
    config = copy.deepcopy(config)
    changes = set()
    for name in _ATTENTION_DROPOUT:
        if getattr(config, name, None):
            setattr(config, name, 0.0)
            changes.add("attention has no dropout")
    name_special_tokens(config)
    with SkipValues():
        model = head.from_config(config, dtype=dtype).train()
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float) and "Attention" in type(module).__name__:
            module.dropout = 0.0
            changes.add("attention has no dropout")
        if (bias := getattr(module, "relative_attention_bias", None)) is not None:
            bias.requires_grad_(False)
            changes.add("the position bias is frozen")
    return model, tuple(sorted(changes))


def name_special_tokens(config: PreTrainedConfig) -> None:
    """Set the special tokens without which some models refuse a batch."""
    config.pad_token_id = config.pad_token_id or 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id


def make_batch(head: Any, config: PreTrainedConfig, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Random token ids ``[batch, seq]``, none of them padding, and the labels that the head takes; always the same."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch_size, seq_len), generator=generator)
    ids[ids == config.pad_token_id] = 0 if config.pad_token_id else 1
    if head not in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        return {"input_ids": ids, "labels": ids.clone()}
    label_dtype = torch.float if config.num_labels == 1 else torch.long  # one label means regression
    shape = (batch_size,) if HEADS[head] else (batch_size, seq_len)
    labels = torch.randint(max(2, config.num_labels), shape, generator=generator)
    return {"input_ids": ids, "labels": labels.to(label_dtype)}
