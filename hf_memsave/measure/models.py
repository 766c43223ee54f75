"""A model from its configuration alone, of any depth, or with its weights where they are saved."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from hf_memsave.errors import MeasureError

#: The heads that can be measured, by the task that PEFT has for them.
HEADS = {
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
    "TOKEN_CLS": transformers.AutoModelForTokenClassification,
    "CAUSAL_LM": transformers.AutoModelForCausalLM,
    "MASKED_LM": transformers.AutoModelForMaskedLM,  # not PEFT's
    "SEQ_2_SEQ_LM": transformers.AutoModelForSeq2SeqLM,
}
_UNREADABLE = (AttributeError, LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError)
_ANOTHER = "measure another one with hf_memsave.measure_kept(model, batch)."


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of a folder, a file, a model type (its defaults) or a name on the hub; else MeasureError."""
    path = Path(name)
    if name in CONFIG_MAPPING and not path.exists():
        return CONFIG_MAPPING[name]()
    if not path.exists() and (name.endswith(".json") or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)):
        raise MeasureError(f"{name}: no such file or folder. Expected a config.json, or a folder with one.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise MeasureError(f"{name}: expected a config.json in this folder, found none. Name the model's folder.")
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except StrictDataclassError as error:  # fields that contradict each other
        raise MeasureError(f"{name}: {' '.join(str(error).split())} Correct the configuration.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise MeasureError(
            f"{name}: {reason} Expected a model's folder, its config.json, a model type such as 'bert' or 'llama', or "
            "a name on the hub (which needs a network, or the model in the cache)."
        ) from error


def choose_head(config: PreTrainedConfig) -> Any:
    """The Auto class for the architecture that a configuration names, else a usual one; else MeasureError."""
    known = {
        task: auto._model_mapping[type(config)].__name__
        for task, auto in HEADS.items() if type(config) in auto._model_mapping
    }  # fmt: skip
    named = (config.architectures or [""])[0]
    asked = [task for task, name in known.items() if name == named]
    if config.is_encoder_decoder:
        usual = ["SEQ_2_SEQ_LM"]
    else:
        usual = ["SEQ_CLS", "MASKED_LM"] if "MASKED_LM" in known else ["CAUSAL_LM"]
    for task in (*asked, *usual):
        if task in known:
            return HEADS[task]
    raise MeasureError(
        f"{config.model_type!r} has no language modelling or classification head on token ids. Expected a text model; "
        f"{_ANOTHER}"
    )


def build_empty(config: PreTrainedConfig) -> nn.Module:
    """The model of a configuration on the meta device, with its head if there is one; MeasureError if it fails."""
    try:
        head = choose_head(config)
    except MeasureError:
        head = transformers.AutoModel
    try:
        with torch.device("meta"):
            model: nn.Module = head.from_config(config)
            return model.train()
    except (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise MeasureError(
            f"cannot build a {config.model_type!r} model: {type(error).__name__}: {error}. Expected a configuration "
            "that Transformers builds a model from. Correct it, or name the model's own folder."
        ) from error


def has_weights(name: str) -> bool:
    """Whether a model's name stands for saved weights, or at least for a name on the hub."""
    path = Path(name)
    is_name = not path.exists() and name not in CONFIG_MAPPING
    saved = ("model*.safetensors", "pytorch_model*.bin", "adapter_config.json")
    return is_name or any(file for kind in saved for file in path.glob(kind))


def load_model(
    name: str, dtype: torch.dtype | None = None, head: Any = None, config: PreTrainedConfig | None = None
) -> tuple[Any, Any, str]:
    """A model, or an adapter's, with saved weights or random ones (of ``config``); its Auto class; what these are."""
    path = Path(name)
    try:
        if (path / "adapter_config.json").is_file():
            from peft import PeftConfig, PeftModel

            adapter = PeftConfig.from_pretrained(name)
            base, head, _ = load_model(adapter.base_model_name_or_path, dtype, HEADS.get(adapter.task_type))
            return PeftModel.from_pretrained(base, name, is_trainable=True), head, f"adapter {path.resolve().name}"
        config = config or load_config(name)
        head = head or choose_head(config)
        options = {} if dtype is None else {"dtype": dtype}
        if has_weights(name):
            return head.from_pretrained(name, **options), head, f"weights of {path.name}"
        name_special_tokens(config)
        torch.manual_seed(0)
        return head.from_config(config, **options), head, "random weights"
    except MeasureError:
        raise
    except _UNREADABLE as error:
        raise MeasureError(
            f"{name}: {type(error).__name__}: {str(error) or 'it cannot be loaded'} Expected a model that "
            "from_pretrained loads; for its architecture alone, name its config.json."
        ) from error


def name_special_tokens(config: PreTrainedConfig) -> None:
    """Set the special tokens without which some models refuse a batch."""
    config.pad_token_id = config.pad_token_id or 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id


def depth_of(config: PreTrainedConfig, layers: int | None = None) -> dict[str, int]:
    """Field of the configuration -> its number of layers, or ``layers``, for each stack; else MeasureError."""
    first = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    names = (first, "num_decoder_layers", "decoder_layers")
    found = {name: layers or getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)}
    if first not in found:
        raise MeasureError(
            f"the configuration of {config.model_type!r} has no field {first!r} with its number of layers. Expected a "
            f"text model; {_ANOTHER}"
        )
    return found


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
                f"cannot change the depth of {config.model_type!r}: {error} Expected a model of like layers; {_ANOTHER}"
            ) from error
    return changed


def _lists_by_layer(config: PreTrainedConfig) -> dict[str, list[Any]]:
    layers = next(iter(depth_of(config).values()))
    return {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == layers and "layer" in k}
