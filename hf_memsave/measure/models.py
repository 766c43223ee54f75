"""A model from its configuration alone, or with its weights where they are saved."""

from __future__ import annotations

import copy
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
    PreTrainedModel,
)

from hf_memsave.errors import MeasureError
from hf_memsave.measure.skip_values import SkipValues

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
_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout", "attn_dropout")


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of a folder, a file, a model type (its defaults) or a name on the hub.

    Returns:
        The configuration.

    Raises:
        MeasureError: There is none.
    """
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
    """The Auto class to build with.

    Returns:
        The class for that architecture, else for a usual one of its family.

    Raises:
        MeasureError: The family has no head that trains on token ids and labels alone.
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
    raise MeasureError(
        f"{config.model_type!r} has no language modelling or classification head on token ids. Expected a text model; "
        "measure another one with hf_memsave.measure_kept(model, batch)."
    )


def build(head: Any, config: PreTrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model in training mode, on the device that is active, without reading any weights; large ones share memory.

    Attention has no dropout and T5's position bias is frozen: for each of them the CPU's attention keeps tensors
    ``[batch, heads, seq, seq]``, as a fused GPU kernel does not.

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
    with SkipValues(shares=True):
        model = head.from_config(config, dtype=dtype).train()
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float) and "Attention" in type(module).__name__:
            module.dropout = 0.0
            changes.add("attention has no dropout")
        if (bias := getattr(module, "relative_attention_bias", None)) is not None:
            bias.requires_grad_(False)
            changes.add("the position bias is frozen")
    return model, tuple(sorted(changes))


def build_empty(config: PreTrainedConfig) -> nn.Module:
    """The model of a configuration at full depth, on the meta device: it has no bytes.

    Returns:
        The model, with the head that ``config`` names, or a usual one, or none.

    Raises:
        MeasureError: It cannot be built.
    """
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
        head: The Auto class to load with; the one for the architecture it names if None.
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
