"""Resolve ``MemSaveConfig(budget=...)`` in a trainer, which knows the batch, by :func:`hf_memsave.plan`."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import nn
from transformers import PreTrainedConfig, TrainingArguments

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.lora import Lora
from hf_memsave.errors import PlanError
from hf_memsave.logs import logger
from hf_memsave.planner.plan import BudgetPlan, plan

#: ``TrainingArguments.optim`` -> the optimizer, as ``plan`` names it, whose states are as large.
_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw_fused", "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit", "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip
#: The most rows that are read for their lengths, and the most objects that are searched for random generators.
_ROWS, _OBJECTS = 256, 10_000
#: Types of objects that hold no random generator of a data set.
_HOLD_NONE = (str, bytes, int, float, type, types.ModuleType, random.SystemRandom, torch.Tensor)


def plan_for(config: MemSaveConfig, model: nn.Module, args: TrainingArguments, batches: Any) -> BudgetPlan:
    """Plan for a trainer's step on the longest row found; PlanError if nothing fits or the step is not known."""
    assert config.budget is not None
    remedy = f"Plan by hand: hf_memsave.plan(model, budget={config.budget!r}, batch_size=..., seq_len=...).config."
    optim, reason = str(getattr(args.optim, "value", args.optim)), ""
    kinds = ("activation_checkpointing", "gradient_checkpointing")  # of some blocks alone, it is planned without it
    options: dict[str, Any] = next(filter(None, (getattr(args, f"{kind}_kwargs", None) for kind in kinds)), {})
    if optim not in _OPTIMIZERS:
        reason = f"expected optim to be one of {', '.join(_OPTIMIZERS)}, got {optim}"
    elif not isinstance(getattr(model, "config", None), PreTrainedConfig):
        reason = f"expected a model of Transformers, got {type(model).__name__}"
    elif options.get("selective"):
        reason = f"expected gradient checkpointing of whole blocks, got {options}"
    if reason:
        raise PlanError(f"budget={config.budget!r}: {reason}. {remedy}")
    weights = [p for p in model.parameters() if p.is_floating_point()]
    deepspeed = getattr(args, "hf_deepspeed_config", None)
    stage = 0 if deepspeed is None else deepspeed.get_value("zero_optimization.stage", 0)
    return plan(
        model, budget=config.budget, memsave=replace(config, budget=None),
        batch_size=args.per_device_train_batch_size, seq_len=_longest(batches, remedy), padded=True,
        # That of most weights: adapters and norms may have another one.
        dtype=max({p.dtype for p in weights}, key=lambda dtype: sum(p.numel() for p in weights if p.dtype == dtype)),
        autocast=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
        optimizer=_OPTIMIZERS[optim], accumulation=args.gradient_accumulation_steps,
        lora=_lora(model, remedy), quantized="nf4" if getattr(model, "is_loaded_in_4bit", False) else None,
        checkpointing=any(getattr(args, kind, False) for kind in kinds) and options.get("every_n_layers", 1) == 1,
        attention="eager" if getattr(model.config, "_attn_implementation", None) == "eager" else "flash",
        devices=args.world_size,
        sharding="fsdp" if args.fsdp else {1: "zero1", 2: "zero2", 3: "fsdp"}.get(stage, "ddp"),
    )  # fmt: skip


def _longest(batches: Any, remedy: str) -> int:
    """Return the padded length of the longest of at most ``_ROWS`` rows, spread evenly over the data set."""
    rows, collate = getattr(batches, "dataset", None), getattr(batches, "collate_fn", None)
    try:
        count = len(rows)  # type: ignore[arg-type]
        read = min(count, _ROWS)
        with _left_as_they_are(rows, collate):
            row = max((rows[i * count // read] for i in range(read)), key=lambda row: len(row["input_ids"]))  # type: ignore[index]
            ids = torch.as_tensor(row["input_ids"]) if collate is None else collate([copy.copy(row)])["input_ids"]
    except (TypeError, KeyError, IndexError, ValueError, AttributeError, NotImplementedError) as error:
        expected = "a data set with a length and rows with 'input_ids', whose longest row tells the sequence length"
        raise PlanError(f"budget: expected {expected}, got {type(rows).__name__}. {remedy}") from error
    found = int(ids.shape[-1])
    logger.info("budget: planned for %d tokens, the longest of %d rows read out of %d.", found, read, count)
    return found


@contextlib.contextmanager
def _left_as_they_are(*readers: Any) -> Iterator[None]:
    """Restore random generators, and attributes of ``readers`` and of what they hold: training begins with them."""
    own = getattr(torch.get_device_module(), "default_generators", ())
    held: list[Any] = [torch.default_generator, *own, *readers]
    seen: set[int] = set()
    with contextlib.ExitStack() as undo:
        undo.callback(numpy.random.set_state, numpy.random.get_state())
        undo.callback(random.setstate, random.getstate())
        for one in held:  # grows by what each holds, the nearest first
            if id(one) in seen or len(seen) == _OBJECTS or isinstance(one, _HOLD_NONE):
                continue
            seen.add(id(one))
            if isinstance(one, (torch.Generator, numpy.random.RandomState)):
                undo.callback(one.set_state, one.get_state())  # type: ignore[arg-type]
            elif isinstance(one, random.Random):
                undo.callback(one.setstate, one.getstate())
            elif isinstance(one, numpy.random.Generator):
                undo.callback(setattr, one.bit_generator, "state", one.bit_generator.state)
            elif isinstance(one, types.FunctionType):
                held += one.__closure__ or ()
            else:
                if hasattr(one, "__dict__"):
                    undo.callback(_put_back, vars(one), dict(vars(one)))
                held += gc.get_referents(one)
        yield


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    attributes.update(before)


def _lora(model: nn.Module, remedy: str) -> Lora | None:
    found: Any = getattr(model, "peft_config", None)
    if not found:
        return None
    config = found[getattr(model, "active_adapter", next(iter(found)))]
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise PlanError(f"budget: expected LoRA adapters or none, got {kind}. {remedy}")
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    trained = next((p.dtype for p in model.parameters() if p.requires_grad), None)
    dtype, targets = "fp32" if trained == torch.float32 else "model", "+".join(sorted(names))
    return Lora(config.r, config.lora_alpha, config.lora_dropout, targets, dtype, config.use_dora)
