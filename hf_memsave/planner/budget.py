"""``MemSaveConfig(budget=...)`` in a trainer, which knows the batch: the config that :func:`hf_memsave.plan` finds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pickle import PickleError
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate
from transformers import TrainingArguments

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.lora import Lora
from hf_memsave.errors import PlanError
from hf_memsave.logs import logger
from hf_memsave.planner.plan import BudgetPlan, plan

#: ``TrainingArguments.optim`` -> the name of what has as large states.
_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw_fused", "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit", "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip
#: The most rows that are read for their lengths.
_ROWS = 256


def plan_for(config: MemSaveConfig, model: nn.Module, args: TrainingArguments, batches: Any) -> BudgetPlan:
    """Plan for a trainer's step on the longest row that is found; PlanError if nothing fits, or it cannot be told."""
    assert config.budget is not None
    remedy = f"Plan by hand: hf_memsave.plan(model, budget={config.budget!r}, batch_size=..., seq_len=...).config."
    optim, reason = str(getattr(args.optim, "value", args.optim)), ""
    if optim not in _OPTIMIZERS:
        reason = f"expected optim to be one of {', '.join(_OPTIMIZERS)}, got {optim}"
    elif not isinstance(getattr(model, "dtype", None), torch.dtype):
        reason = f"expected a model of Transformers, got {type(model).__name__}"
    if reason:
        raise PlanError(f"budget={config.budget!r}: {reason}. {remedy}")
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    weights = [p for p in model.parameters() if p.is_floating_point()]
    deepspeed = getattr(args, "hf_deepspeed_config", None)
    stage = 0 if deepspeed is None else deepspeed.get_value("zero_optimization.stage", 0)
    return plan(
        model,
        budget=config.budget,
        memsave=replace(config, budget=None),
        batch_size=args.per_device_train_batch_size,
        seq_len=_longest(batches, remedy),
        # That of most weights: adapters and norms may have another one.
        dtype=max({p.dtype for p in weights}, key=lambda dtype: sum(p.numel() for p in weights if p.dtype == dtype)),
        autocast=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
        optimizer=_OPTIMIZERS[optim],
        lora=_lora(model, remedy),
        quantized="nf4" if getattr(model, "is_loaded_in_4bit", False) else None,
        checkpointing=args.gradient_checkpointing,
        accumulation=args.gradient_accumulation_steps,
        attention="eager" if attention == "eager" else "flash",
        padded=True,
        devices=args.world_size,
        sharding="fsdp" if args.fsdp else {1: "zero1", 2: "zero2", 3: "fsdp"}.get(stage, "ddp"),
    )


def _longest(batches: Any, remedy: str) -> int:
    """Tokens in the longest of at most ``_ROWS`` rows, spread evenly over the data set, as the collator pads it."""
    rows, collate = getattr(batches, "dataset", None), getattr(batches, "collate_fn", None)
    try:
        count = len(rows)  # type: ignore[arg-type]
        read = min(count, _ROWS)
        # In a process of its own: a data set or collator that draws, or counts, then begins training as it is now.
        options: Any = dict(num_workers=1, collate_fn=partial(_length, collate), generator=torch.Generator())
        found: int = max(DataLoader(rows, batch_sampler=[[i * count // read] for i in range(read)], **options))  # type: ignore[arg-type]
    except (TypeError, KeyError, IndexError, ValueError, AttributeError, RuntimeError, PickleError) as error:
        raise PlanError(
            "budget: expected a data set with a length and rows with 'input_ids', of which the longest tells the "
            f"sequence length, and that a worker process can read, got {type(rows).__name__}. {remedy}"
        ) from error
    logger.info("budget: planned for %d tokens, the longest of %d rows that were read of %d.", found, read, count)
    return found


def _length(collate: Any, rows: list[Any]) -> int:
    return int((collate or default_collate)(rows)["input_ids"].shape[-1])


def _lora(model: nn.Module, remedy: str) -> Lora | None:
    found: Any = getattr(model, "peft_config", None)
    if not found:
        return None
    config = found[getattr(model, "active_adapter", next(iter(found)))]
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise PlanError(f"budget: expected LoRA adapters or none, got {kind}. {remedy}")
    targets = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    trained = next((p for p in model.parameters() if p.requires_grad), None)
    return Lora(
        r=config.r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        targets="+".join(sorted(targets)),
        dtype="fp32" if trained is not None and trained.dtype == torch.float32 else "model",
        dora=config.use_dora,
    )
