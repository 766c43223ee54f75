"""How many layers a configuration asks for, and copies of it that ask for other numbers."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig

from hf_memsave.errors import MeasureError


def depth_fields(config: PreTrainedConfig) -> tuple[str, ...]:
    """The field with the number of layers, or that of the encoder and that of the decoder; else MeasureError."""
    first = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    names = (first, "num_decoder_layers", "decoder_layers")
    fields = tuple(name for name in names if isinstance(getattr(config, name, None), int))
    if first not in fields:
        raise MeasureError(
            f"the configuration of {config.model_type!r} has no field {first!r} with its number of layers. Expected a "
            "text model; measure another one with hf_memsave.measure_kept(model, batch)."
        )
    return fields


def period(config: PreTrainedConfig) -> int:
    """After how many layers the list of layer types, if there is one, repeats itself."""
    rows = list(zip(*_lists_by_layer(config).values(), strict=True)) or [()]
    return next(p for p in range(1, len(rows) + 1) if all(rows[i] == rows[i - p] for i in range(p, len(rows))))


def at_depth(config: PreTrainedConfig, depth: dict[str, int]) -> PreTrainedConfig:
    """A copy with other numbers of layers by field, and as many entries in lists with one a layer."""
    changed = copy.deepcopy(config)
    layers, every = next(iter(depth.values())), period(config)
    for name, values in _lists_by_layer(config).items():
        setattr(changed, name, [values[i % every] for i in range(layers)])
    for field, number in depth.items():
        try:
            setattr(changed, field, number)
        except NotImplementedError as error:
            raise MeasureError(
                f"cannot change the depth of {config.model_type!r}: {error} Expected a model of like layers; measure "
                "another one with hf_memsave.measure_kept(model, batch)."
            ) from error
    return changed


def _lists_by_layer(config: PreTrainedConfig) -> dict[str, list[Any]]:
    layers = getattr(config, depth_fields(config)[0])
    return {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == layers and "layer" in k}
