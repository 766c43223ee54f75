"""A model from its configuration alone, of any depth, or with its weights where they are saved."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from hf_memsave.config.names import hub_answers, refuse_missing, refuse_unreachable
from hf_memsave.errors import MeasureError

#: The heads that can be measured, by the task that PEFT has for them.
HEADS = {
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
    "TOKEN_CLS": transformers.AutoModelForTokenClassification,
    "CAUSAL_LM": transformers.AutoModelForCausalLM,
    "MASKED_LM": transformers.AutoModelForMaskedLM,  # not PEFT's
    "SEQ_2_SEQ_LM": transformers.AutoModelForSeq2SeqLM,
}
#: How the names of further Auto classes end: heads on other inputs, in the order in which they are looked for; or none.
_OTHER_HEADS = (
    "ForSpeechSeq2Seq", "ForZeroShotImageClassification", "ForImageClassification", "ForAudioClassification",
    "ForVideoClassification", "ForImageTextToText", "ForPreTraining", "",
)  # fmt: skip
#: What a file that is broken, or of another kind, raises.
UNREADABLE = (
    AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError, SafetensorError,
    UnpicklingError,
)  # fmt: skip


class DepthError(MeasureError):
    """A model whose depth cannot be changed, or whose layers are not alike: one that few layers do not tell of."""


#: What to do about a DepthError, in Python and on the command line.
AS_IT_IS = (
    "Measure it as it is with hf_memsave.measure_kept(model, batch).",
    "`memsave report` measures a model as it is, without --layers.",
)


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of a folder, a file, a model type (its defaults) or a name on the hub; else MeasureError."""
    if name in CONFIG_MAPPING and not Path(name).exists():
        return CONFIG_MAPPING[name]()
    refuse_missing(name, "config.json")
    is_offline = False
    if not Path(name).exists():
        refuse_unreachable(name)
        is_offline = not hub_answers()
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=is_offline)
    except StrictDataclassError as error:  # fields that contradict each other
        raise MeasureError(f"{name}: {' '.join(str(error).split())} Correct the configuration.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise MeasureError(
            f"{name}: {reason} Expected a model's folder, its config.json, a model type such as 'bert' or 'llama', or "
            "a name on the hub."
        ) from error


def choose_head(config: PreTrainedConfig) -> Any:
    """The Auto class for the architecture that a configuration names, else a usual one; else MeasureError."""
    if (head := text_head(config)) is not None:
        return head
    raise MeasureError(
        f"{config.model_type!r} has no language modelling or classification head on token ids. Expected a text model.",
        "Measure another one with hf_memsave.measure_kept(model, batch).",
        "`memsave report` measures any other one, on a batch of yours with --batch.",
    )


def text_head(config: PreTrainedConfig) -> Any:
    """What :func:`choose_head` finds; None for a model of other inputs."""
    known = {task: cls.__name__ for task, auto in HEADS.items() if (cls := _class_in(auto, config)) is not None}
    named = (config.architectures or [""])[0]
    asked = [task for task, name in known.items() if name == named]
    usual = ["SEQ_CLS", "MASKED_LM"] if "MASKED_LM" in known else ["CAUSAL_LM"]
    usual = ["SEQ_2_SEQ_LM"] if config.is_encoder_decoder else usual
    return next((HEADS[task] for task in (*asked, *usual) if task in known), None)


def class_of(config: PreTrainedConfig, has_batch: bool = False) -> Any:
    """What to train of a configuration: of a text model :func:`choose_head`'s Auto class, else a class of models."""
    # First the class that is named, if it has a head. A text model's may take more than can be made, but not more than
    # the caller's own batch. A class without a head, which gives no loss, comes last.
    named = getattr(transformers, (config.architectures or [""])[0], None)
    is_class, head = isinstance(named, type) and issubclass(named, PreTrainedModel), text_head(config)
    if is_class and named is not _class_in(transformers.AutoModel, config) and (has_batch or head is None):
        return named
    if head is not None:
        return head
    autos = (getattr(transformers, f"AutoModel{head}") for head in _OTHER_HEADS)
    found = next(filter(None, (_class_in(auto, config) for auto in autos)), None)
    if found is None:
        raise MeasureError(
            f"{config.model_type!r} has no Auto class. Name its class in the configuration's architectures."
        )
    return found


def _class_in(auto: Any, config: PreTrainedConfig) -> Any:
    found = auto._model_mapping[type(config)] if type(config) in auto._model_mapping else None
    return found[0] if isinstance(found, tuple) else found


def from_config(head: Any, config: PreTrainedConfig, **options: Any) -> Any:
    """A model with random weights, of an Auto class or of a class of models."""
    return getattr(head, "from_config" if hasattr(head, "from_config") else "_from_config")(config, **options)


def build_empty(config: PreTrainedConfig) -> nn.Module:
    """The model of a configuration on the meta device, with its head if there is one; MeasureError if it fails."""
    head = class_of(config)
    try:
        with torch.device("meta"):
            model: nn.Module = from_config(head, config)
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
    name: str, dtype: torch.dtype | None = None, head: Any = None, config: PreTrainedConfig | None = None,
    has_batch: bool = False,
) -> tuple[Any, Any, str]:  # fmt: skip
    """A model, or an adapter's, with saved weights or random ones (of ``config``); its class; what these are."""
    path = Path(name)
    try:
        if (path / "adapter_config.json").is_file():
            from peft import PeftConfig, PeftModel

            adapter = PeftConfig.from_pretrained(name)
            of, task = adapter.base_model_name_or_path, HEADS.get(adapter.task_type)
            base, head, _ = load_model(of, dtype, task, has_batch=has_batch)
            return PeftModel.from_pretrained(base, name, is_trainable=True), head, f"adapter {path.resolve().name}"
        config = config or load_config(name)
        head = head or class_of(config, has_batch)
        options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if has_weights(name):
            options["local_files_only"] = not path.exists() and not hub_answers()
            return head.from_pretrained(name, **options), head, f"weights of {path.name}"
        name_special_tokens(config)
        torch.manual_seed(0)
        return from_config(head, config, **options), head, "random weights"
    except MeasureError:
        raise
    except UNREADABLE as error:
        raise MeasureError(
            f"{name}: {type(error).__name__}: {str(error) or 'it cannot be loaded'} Expected a model that "
            "from_pretrained loads; for its architecture alone, name its config.json."
        ) from error


def name_special_tokens(config: PreTrainedConfig) -> None:
    """Set the special tokens without which some models refuse a batch."""
    config.pad_token_id = getattr(config, "pad_token_id", None) or 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id


def most_tokens(config: PreTrainedConfig) -> int:
    """How many a model has positions for; RoBERTa and its like have further rows, up to padding's, for no token."""
    text = config.get_text_config()
    rows = getattr(text, "max_position_embeddings", None) or sys.maxsize
    unused = (getattr(text, "pad_token_id", None) or 0) + 1
    return sys.maxsize if rows < 1 else rows - unused if rows % 8 == unused else rows


def depth_of(config: PreTrainedConfig, layers: int | None = None) -> dict[str, int]:
    """Field of the configuration -> its number of layers, or ``layers``, for each stack; else MeasureError."""
    first = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    names = (first, "num_decoder_layers", "decoder_layers")
    found = {name: layers or getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)}
    if first not in found:
        raise DepthError(
            f"the configuration of {config.model_type!r} has no field {first!r} with its number of layers. Expected a "
            "model of like layers.",
            *AS_IT_IS,
        )
    return found


def period(config: PreTrainedConfig) -> int:
    """After how many layers the list of layer types, if there is one, repeats itself."""
    rows = list(zip(*_lists_by_layer(config).values(), strict=True)) or [()]
    return next(p for p in range(1, len(rows) + 1) if all(rows[i] == rows[i - p] for i in range(p, len(rows))))


def at_depth(config: PreTrainedConfig, depth: dict[str, int]) -> PreTrainedConfig:
    """A copy with other numbers of layers by field, and as many entries in lists with one a layer."""
    changed = copy.deepcopy(config)
    if not depth:  # as deep as it is
        return changed
    layers, every = next(iter(depth.values())), period(config)
    for name, values in _lists_by_layer(config).items():
        setattr(changed, name, [values[i % every] for i in range(layers)])
    for field, number in depth.items():
        try:
            setattr(changed, field, number)
        except NotImplementedError as error:
            raise DepthError(
                f"cannot change the depth of {config.model_type!r}: {error} Expected a model of like layers.", *AS_IT_IS
            ) from error
    return changed


def _lists_by_layer(config: PreTrainedConfig) -> dict[str, list[Any]]:
    layers = next(iter(depth_of(config).values()))
    return {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == layers and "layer" in k}
