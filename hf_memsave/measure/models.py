"""Build a model from its configuration alone, at any depth, or load it with saved weights."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from hf_memsave.config.lora import adapter_in
from hf_memsave.config.names import SHAPES, hub_answers, refuse_missing, refuse_unreachable, shape_of
from hf_memsave.errors import MeasureError
from hf_memsave.tape.applied import is_of_kernels
from hf_memsave.tape.private import tree_leaves

#: PEFT's name of a task -> the Auto class with the head for it.
HEADS = {
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
    "TOKEN_CLS": transformers.AutoModelForTokenClassification,
    "CAUSAL_LM": transformers.AutoModelForCausalLM,
    "MASKED_LM": transformers.AutoModelForMaskedLM,  # not PEFT's
    "SEQ_2_SEQ_LM": transformers.AutoModelForSeq2SeqLM,
}
#: Suffixes of further Auto classes, for other inputs, in the order in which they are tried; "" has no head.
_OTHER_HEADS = (
    "ForSpeechSeq2Seq", "ForZeroShotImageClassification", "ForImageClassification", "ForAudioClassification",
    "ForVideoClassification", "ForImageTextToText", "ForPreTraining", "",
)  # fmt: skip
#: The exceptions that a broken file, or one of another kind, raises when it is read.
UNREADABLE = (
    AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError, SafetensorError,
    UnpicklingError,
)  # fmt: skip


class DepthError(MeasureError):
    """A model whose depth cannot be changed, or whose layers are unlike, so that a few do not represent it."""


def load_config(name: str) -> PreTrainedConfig:
    """Load the configuration of a folder (for an adapter its base's), file, model type or name; else MeasureError."""
    is_there = Path(name).exists()
    if name in CONFIG_MAPPING and not is_there:
        return CONFIG_MAPPING[name]()
    if adapter := adapter_in(name):
        config, head = load_config(adapter["base_model_name_or_path"]), HEADS.get(adapter.get("task_type") or "")
        if head and (cls := _class_in(head, config)):
            config.architectures = [cls.__name__]
        return config
    refuse_missing(name, "config.json")
    if not is_there:
        refuse_unreachable(name)
    is_offline = not is_there and not hub_answers()
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=is_offline)
    except StrictDataclassError as error:  # fields that contradict each other
        raise MeasureError(f"{name}: {' '.join(str(error).split())} Correct the configuration.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not is_there and (known := shape_of(name)):  # gated, or out of reach
            return transformers.AutoConfig.for_model(**known, name_or_path=SHAPES)
        raise MeasureError(
            f"{name}: {str(error).splitlines()[0]} Expected a model's folder, its config.json, a model type such as "
            "'bert' or 'llama', or a name on the hub."
        ) from error


def text_head(config: PreTrainedConfig) -> Any:
    """Return the Auto class for a text model's named architecture, else its usual one; None without token ids."""
    known = {task: cls.__name__ for task, auto in HEADS.items() if (cls := _class_in(auto, config)) is not None}
    asked = [task for task, name in known.items() if name == (config.architectures or [""])[0]]
    usual = ["SEQ_CLS", "MASKED_LM"] if "MASKED_LM" in known else ["CAUSAL_LM"]
    usual = ["SEQ_2_SEQ_LM"] if config.is_encoder_decoder else usual
    return next((HEADS[task] for task in (*asked, *usual) if task in known), None)


def class_of(config: PreTrainedConfig, has_batch: bool = False) -> Any:
    """Return the class to train: for a text model :func:`text_head`'s Auto class, else a class of models."""
    # First the class that is named, if it has a head. A text model's may take more than can be made, but not more than
    # the caller's own batch. A class without a head, which gives no loss, comes last.
    named = getattr(transformers, (config.architectures or [""])[0], None)
    is_class, head = isinstance(named, type) and issubclass(named, PreTrainedModel), text_head(config)
    if is_class and named is not _class_in(transformers.AutoModel, config) and (has_batch or head is None):
        return named
    if head is not None:
        return head
    for other in _OTHER_HEADS:
        if (found := _class_in(getattr(transformers, f"AutoModel{other}"), config)) is not None:
            return found
    raise MeasureError(f"{config.model_type!r} has no Auto class. Name its class in the configuration's architectures.")


def _class_in(auto: Any, config: PreTrainedConfig) -> Any:
    found = auto._model_mapping[type(config)] if type(config) in auto._model_mapping else None
    return found[0] if isinstance(found, tuple) else found


#: Functions that determine the dtype of their result without a dtype argument.
_NAMING = (torch.Tensor.float, torch.Tensor.type, torch.from_numpy)


class _Floats(TorchFunctionMode):
    """A mode that makes floats in ``dtype`` by default, on this thread; torch's default dtype is process-wide."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, given = func(*args, **(kwargs or {})), tree_leaves((args, kwargs))
        is_meant = isinstance(made, torch.Tensor) and made.dtype == torch.get_default_dtype() and func not in _NAMING
        has_floats = any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in given)
        if not is_meant or has_floats or any(isinstance(x, (torch.dtype, numpy.ndarray)) for x in given):
            return made
        return made.to(self.dtype)


def from_config(head: Any, config: PreTrainedConfig, **options: Any) -> Any:
    """Build a model with random weights, of an Auto class or a class of models, on the active device."""
    make, dtype = getattr(head, "from_config", None) or head._from_config, options.get("dtype")
    if dtype is None or not torch.empty(0).is_meta:
        return make(config, **options)
    with _Floats(dtype):  # Transformers would set the process's default dtype
        model = make(config, **options | {"dtype": None})
    if theirs := next((type(m).__name__ for m in model.modules() if is_of_kernels(type(m).__module__)), ""):
        raise MeasureError(
            f"{config.model_type!r} cannot be measured: expected Transformers' classes, got Liger-Kernel's ({theirs}), "
            "which has replaced them in this process.",
            'Plan in another process (memsave plan MODEL --out plan.yaml), and pass memsave="plan.yaml".',
        )
    for parameter in model.parameters():
        if not parameter.is_meta:  # made by torch.Tensor(...), of which no mode is told
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def build_empty(config: PreTrainedConfig) -> nn.Module:
    """Build a configuration's model on the meta device, with its head if there is one; MeasureError if that fails."""
    head = class_of(config)
    try:
        with torch.device("meta"):
            return from_config(head, config).train()  # type: ignore[no-any-return]
    except (AssertionError, AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise MeasureError(
            f"cannot build a {config.model_type!r} model: {type(error).__name__}: {error}. Expected a configuration "
            "that Transformers builds a model from. Correct it, or name the model's own folder."
        ) from error


def count_parameters(config: PreTrainedConfig) -> int:
    """Return the number of parameters of a configuration's model."""
    return int(sum(p.numel() for p in build_empty(config).parameters()))


def has_weights(name: str, config: PreTrainedConfig) -> bool:
    """Return whether a model's name stands for saved weights or an adapter, or is a name that the hub knows."""
    path = Path(name)
    is_name = not path.exists() and name not in CONFIG_MAPPING and config.name_or_path != SHAPES
    saved = ("model*.safetensors", "pytorch_model*.bin", "adapter_config.json")
    return is_name or any(file for kind in saved for file in path.glob(kind))


def load_model(
    name: str, dtype: torch.dtype | None = None, head: Any = None, config: PreTrainedConfig | None = None,
    has_batch: bool = False,
) -> tuple[Any, Any, str]:  # fmt: skip
    """Load a model or a PEFT adapter, or draw random weights; return it, its class, and which weights these are."""
    path = Path(name)
    try:
        if adapter := adapter_in(name):
            from peft import PeftModel

            of, task = adapter["base_model_name_or_path"], HEADS.get(adapter.get("task_type") or "")
            base, head, _ = load_model(of, dtype, task, has_batch=has_batch)
            return PeftModel.from_pretrained(base, name, is_trainable=True), head, f"adapter {path.resolve().name}"
        config = config or load_config(name)
        head = head or class_of(config, has_batch)
        options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if has_weights(name, config):
            options["local_files_only"] = not path.exists() and not hub_answers()
            return head.from_pretrained(name, **options), head, f"weights of {path.name}"
        name_special_tokens(config)
        torch.manual_seed(0)
        return from_config(head, config, **options), head, "random weights"
    except MeasureError:
        raise
    except UNREADABLE as error:
        expected = "Expected a model that from_pretrained loads; for its architecture alone, name its config.json."
        reason = f"{name}: {type(error).__name__}: {str(error) or 'it cannot be loaded'}"
        raise MeasureError(reason, expected) from error


def name_special_tokens(config: PreTrainedConfig) -> None:
    """Set the special tokens in ``config`` without which some models refuse a batch."""
    config.pad_token_id = getattr(config, "pad_token_id", None) or 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id


def most_tokens(config: PreTrainedConfig) -> int:
    """Return how many tokens a model has positions for; some rows of RoBERTa's table, up to padding's, are for none."""
    text = config.get_text_config()
    rows = getattr(text, "max_position_embeddings", None) or sys.maxsize
    unused = (getattr(text, "pad_token_id", None) or 0) + 1
    return sys.maxsize if rows < 1 else rows - unused if rows % 8 == unused else rows


def depth_of(config: PreTrainedConfig, layers: int | None = None) -> dict[str, int]:
    """Return the number of layers of each stack by field, or ``layers`` for each; DepthError if there is no field."""
    first = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    names = (first, "num_decoder_layers", "decoder_layers")
    found = {name: layers or getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)}
    if first not in found:
        reason = f"the configuration of {config.model_type!r} has no field {first!r} with its number of layers."
        raise DepthError(reason, "Expected a model whose layers are alike. Leave the number of layers out.")
    return found


def period(config: PreTrainedConfig) -> int:
    """Return after how many layers the list of layer types repeats; 1 without such a list."""
    rows = list(zip(*_lists_by_layer(config).values(), strict=True)) or [()]
    return next(p for p in range(1, len(rows) + 1) if all(rows[i] == rows[i - p] for i in range(p, len(rows))))


def at_depth(config: PreTrainedConfig, depth: dict[str, int]) -> PreTrainedConfig:
    """Return a copy with ``depth`` layers by field, and per-layer lists of that length; DepthError if it cannot be."""
    changed = copy.deepcopy(config)
    if not depth:  # as deep as it is
        return changed
    layers, every = next(iter(depth.values())), period(config)
    lists = {name: [values[i % every] for i in range(layers)] for name, values in _lists_by_layer(config).items()}
    for field, value in (lists | depth).items():
        try:
            setattr(changed, field, value)
        except NotImplementedError as error:
            reason = f"cannot change the depth of {config.model_type!r}: {error}"
            raise DepthError(reason, "Leave the number of layers out.") from error
    return changed


def _lists_by_layer(config: PreTrainedConfig) -> dict[str, list[Any]]:
    layers = next(iter(depth_of(config).values()))
    return {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == layers and "layer" in k}
