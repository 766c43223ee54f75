"""Models and batches as saved in files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hf_memsave.commands import CommandError
from hf_memsave.commands.models import choose_head, load_config, name_special_tokens

_ADAPTER_HEADS = {
    "SEQ_CLS": AutoModelForSequenceClassification,
    "TOKEN_CLS": AutoModelForTokenClassification,
    "CAUSAL_LM": AutoModelForCausalLM,
    "SEQ_2_SEQ_LM": AutoModelForSeq2SeqLM,
}
_UNREADABLE = (AttributeError, LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError)


def read_batch(path: Path) -> dict[str, Tensor]:
    """A batch from a file: ``torch.save`` of a dict of tensors, safetensors, JSON (lists by name), or JSON lines.

    Args:
        path: Ends in .safetensors, .json or .jsonl (one example a line); any other name means ``torch.save``.

    Returns:
        Its tensors by name.

    Raises:
        CommandError: The file is missing, or holds something else.
    """
    expected = 'Expected tensors by name, such as {"input_ids": ..., "labels": ...}'
    if not path.is_file():
        raise CommandError(f"{path}: no such file. {expected}, saved with torch.save, or as .safetensors or .json.")
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
    except (*_UNREADABLE, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or ["it ends too early"])[0]
        raise CommandError(
            f"{path}: {type(error).__name__}: {reason}. {expected}, padded to one length. Save it with "
            "torch.save(dict(batch), ...)."
        ) from error
    if not isinstance(batch, dict) or not batch or not all(isinstance(value, Tensor) for value in batch.values()):
        got = {k: type(v).__name__ for k, v in batch.items()} if isinstance(batch, dict) else type(batch).__name__
        raise CommandError(f"{path}: {expected}, got {got}. Save it with torch.save(dict(batch), ...).")
    return batch


def load_model(name: str, dtype: torch.dtype | None = None, head: Any = None) -> tuple[Any, Any, str]:
    """A model with its weights: saved ones where there are any, else random ones.

    Args:
        name: A folder with a model or a PEFT adapter, a config.json, a model type, or a name on the hub.
        dtype: Of the weights; as saved, or the configuration's own, if None.
        head: The Auto class to load with; the one for the architecture it names if None.

    Returns:
        The model, its Auto class, and what its weights are.

    Raises:
        CommandError: There is no such model, or it cannot be loaded.
    """
    path = Path(name)
    try:
        if (path / "adapter_config.json").is_file():
            from peft import PeftConfig, PeftModel

            adapter = PeftConfig.from_pretrained(name)
            base, head, _ = load_model(adapter.base_model_name_or_path, dtype, _ADAPTER_HEADS.get(adapter.task_type))
            return PeftModel.from_pretrained(base, name, is_trainable=True), head, f"adapter {path.resolve().name}"
        config = load_config(name)
        head = head or choose_head(config)
        options = {} if dtype is None else {"dtype": dtype}
        is_name = not path.exists() and name not in CONFIG_MAPPING
        if is_name or any(f for kind in ("model*.safetensors", "pytorch_model*.bin") for f in path.glob(kind)):
            return head.from_pretrained(name, **options), head, f"weights of {path.name}"
        name_special_tokens(config)
        torch.manual_seed(0)
        return head.from_config(config, **options), head, "random weights"
    except CommandError:
        raise
    except _UNREADABLE as error:
        raise CommandError(
            f"{name}: {type(error).__name__}: {str(error) or 'it cannot be loaded'} Expected a model that "
            "from_pretrained loads; for its architecture alone, name its config.json."
        ) from error
