"""The configuration, tokenizer and model that the arguments ask for: stock or patched, whole or with LoRA adapters."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

import hf_memsave  # from now on from_pretrained and from_config take memsave=
from arguments import ModelArguments, UsageError

#: Heads of sequence classification that PEFT saves by itself.
PEFT_HEADS = ("classifier", "score")


def load_config(args: ModelArguments, known: Mapping[type, type], head: str) -> PreTrainedConfig:
    """The model's configuration; ``known`` are those of the models with the wanted head."""
    name = base_of_adapter(args.model_name_or_path) or args.model_name_or_path or args.config_name or args.model_type
    try:
        config = AutoConfig.for_model(name) if args.model_type else AutoConfig.from_pretrained(name)
        if args.config_overrides:
            config.update_from_string(args.config_overrides)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"configuration {name}: {error}") from error
    if type(config) not in known:
        raise UsageError(f"{name}: expected a model with {head}, got {config.model_type!r}. Name another.")
    return config


def load_tokenizer(
    args: ModelArguments, config: PreTrainedConfig, train: Callable[[Iterable[str], int], Any], texts: Iterable | None
) -> PreTrainedTokenizerBase:
    """The tokenizer asked for, else the pretrained model's, else what ``train`` makes of texts and vocabulary size."""
    name = args.tokenizer_name or args.model_name_or_path
    if name:
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise UsageError(f"tokenizer {name}: {error} Give --tokenizer_name.") from error
    if texts is None:
        raise UsageError("expected a tokenizer, got none to train one on. Add --do_train or --tokenizer_name.")
    return train(texts, config.vocab_size)


def fit(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, random_weights: bool) -> None:
    """Set a model with random weights to the tokenizer's vocabulary and special tokens; check a pretrained one's."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if random_weights:
        config.vocab_size = len(tokenizer)
        config.bos_token_id = tokenizer.bos_token_id if tokenizer.bos_token else tokenizer.cls_token_id
        config.eos_token_id = tokenizer.eos_token_id if tokenizer.eos_token else tokenizer.sep_token_id
        config.pad_token_id = tokenizer.pad_token_id
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id  # T5's own choice
        return
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"tokenizer: expected at most the model's {config.vocab_size} tokens, got {len(tokenizer)}. "
            "Give the model's own as --tokenizer_name."
        )


def load_model(auto: type, args: ModelArguments, config: PreTrainedConfig, quantization: Any = None) -> torch.nn.Module:
    """The model, stock or patched, with the adapters saved beside its name; new ones come with :func:`add_lora`."""
    model = _load(auto, args, config, quantization)
    if args.train_only:
        named = model.named_parameters(remove_duplicate=False)  # a tied weight has two names
        trained = {parameter for name, parameter in named if any(part in name for part in args.train_only)}
        if not trained:
            parts = " ".join(args.train_only)
            raise UsageError(f"--train_only {parts}: expected parts of parameters' names, as in classifier LayerNorm.")
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in trained)
    return model


def _load(auto: type, args: ModelArguments, config: PreTrainedConfig, quantization: Any) -> torch.nn.Module:
    options = {"memsave": None if args.lora_r else args.memsave_config()}
    options |= {"dtype": args.dtype} if args.dtype else {}
    if args.random_weights:
        return auto.from_config(config, **options)
    options |= {"quantization_config": quantization} if quantization else {}
    base = base_of_adapter(args.model_name_or_path)
    if base and args.lora_r:
        raise UsageError(
            f"--lora_r: expected a model without adapters, got {args.model_name_or_path}, which has some. "
            f"Leave --lora_r out to train those on, or start from {base}."
        )
    try:
        model = auto.from_pretrained(base or args.model_name_or_path, config=config, **options)
    except OSError as error:
        raise UsageError(f"--model_name_or_path {args.model_name_or_path}: {error}") from error
    if base:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, args.model_name_or_path, is_trainable=True)
    return model


def base_of_adapter(name: str | None) -> str | None:
    """The model that a folder of saved adapters belongs to; None for anything else."""
    file = Path(name or "") / "adapter_config.json"
    return json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"] if file.is_file() else None


def add_lora(
    model: PreTrainedModel, args: ModelArguments, task_type: str, training: TrainingArguments
) -> torch.nn.Module:
    """The model with adapters to train, and the heads of its task: stock PEFT, or hf_memsave's config.

    Random weights are written to ``base_model`` in the output folder: without them the saved adapter means nothing.
    """
    from peft import LoraConfig, get_peft_model

    heads = _heads(model) if task_type == "SEQ_CLS" else []
    deep = [name for name in heads if list(getattr(model, name).children())]  # all-linear would reach into these
    options: dict[str, Any] = {
        "task_type": task_type,
        "r": args.lora_r,
        "lora_alpha": args.lora_alpha or 16,
        "lora_dropout": args.lora_dropout or 0.0,
        "use_dora": args.lora_dora,
        "target_modules": _targets(model, args.lora_target_modules or ["all-linear"]),
        "modules_to_save": [name for name in heads if name not in PEFT_HEADS] or None,
        "exclude_modules": rf"({'|'.join(deep)})\..*" if deep else None,
    }
    base = dict(model.state_dict()) if args.random_weights else {}
    memsave = args.memsave_config()
    config = hf_memsave.MemSaveLoraConfig(memsave=memsave, **options) if memsave else LoraConfig(**options)
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise UsageError(f"--lora_target_modules: {error} Name other modules, or all-linear.") from error
    if args.random_weights and training.do_train:
        folder = (Path(training.output_dir) / "base_model").resolve()
        config.base_model_name_or_path = str(folder)
        if training.should_save:
            model.save_pretrained(folder, state_dict=base)
    return adapted


def _targets(model: PreTrainedModel, wanted: list[str]) -> str | list[str]:
    if wanted == ["all-linear"]:
        return "all-linear"
    names = [name for name, _ in model.named_modules()]
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            linears = {name.rpartition(".")[2] for name, module in model.named_modules() if _is_linear(module)}
            raise UsageError(
                f"--lora_target_modules: expected all-linear or modules of {type(model).__name__}, got {target!r}. "
                f"Choose from {', '.join(sorted(linears))}."
            )
    return wanted


def _heads(model: PreTrainedModel) -> list[str]:
    children = model.named_children()
    return [name for name, child in children if name != model.base_model_prefix and list(child.parameters())]


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
