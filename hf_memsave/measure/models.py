"""A model from its configuration alone, or with its weights where they are saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)

from hf_memsave.errors import MeasureError

#: The heads that can be measured, and whether they take one label per sequence.
HEADS = {
    AutoModelForSequenceClassification: True,
    AutoModelForTokenClassification: False,
    AutoModelForCausalLM: False,
    AutoModelForMaskedLM: False,
    AutoModelForSeq2SeqLM: False,
}
_ADAPTER_HEADS = {
    "SEQ_CLS": AutoModelForSequenceClassification,
    "TOKEN_CLS": AutoModelForTokenClassification,
    "CAUSAL_LM": AutoModelForCausalLM,
    "SEQ_2_SEQ_LM": AutoModelForSeq2SeqLM,
}
_UNREADABLE = (AttributeError, LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError)


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
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
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
    named = (config.architectures or [""])[0]
    known = {auto: auto._model_mapping[type(config)] for auto in HEADS if type(config) in auto._model_mapping}
    asked = [auto for auto, cls in known.items() if cls.__name__ == named]
    if config.is_encoder_decoder:
        usual = [AutoModelForSeq2SeqLM]
    elif AutoModelForMaskedLM in known:
        usual = [AutoModelForSequenceClassification, AutoModelForMaskedLM]
    else:
        usual = [AutoModelForCausalLM]
    for auto in (*asked, *usual):
        if auto in known:
            return auto
    raise MeasureError(
        f"{config.model_type!r} has no language modelling or classification head on token ids. Expected a text model; "
        "measure another one with hf_memsave.measure_kept(model, batch)."
    )


def build_empty(config: PreTrainedConfig) -> nn.Module:
    """The model of a configuration on the meta device, with its head if there is one; MeasureError if it fails."""
    try:
        head = choose_head(config)
    except MeasureError:
        head = AutoModel
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
    """A model with its weights: saved ones where there are any, else random ones.

    Args:
        name: A folder with a model or a PEFT adapter, a config.json, a model type, or a name on the hub.
        dtype: Of the weights; as saved, or the configuration's own, if None.
        head: The Auto class to load with; that of :func:`choose_head` if None.
        config: Instead of its own, where the weights are random.

    Returns:
        The model, its Auto class, and what its weights are.

    Raises:
        MeasureError: There is no such model, or it cannot be loaded.
    """
    path = Path(name)
    try:
        if (path / "adapter_config.json").is_file():
            from peft import PeftConfig, PeftModel

            adapter = PeftConfig.from_pretrained(name)
            base, head, _ = load_model(adapter.base_model_name_or_path, dtype, _ADAPTER_HEADS.get(adapter.task_type))
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
