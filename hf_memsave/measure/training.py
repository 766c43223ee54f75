"""A training step to be estimated: what is trained, on what, and how; and a step of it, traced at a small depth."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.optimization import Adafactor

from hf_memsave.arch.versions import cache_name
from hf_memsave.config.config import MemSaveConfig
from hf_memsave.errors import MeasureError
from hf_memsave.measure.fake_device import fake_device, to_fake
from hf_memsave.measure.inputs import empty_batch, forward_of, make_batch
from hf_memsave.measure.kernels import ATTENTION
from hf_memsave.measure.layers import at_depth
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.models import choose_head, load_config, name_special_tokens
from hf_memsave.measure.peak import rounded
from hf_memsave.measure.quantized import quantize
from hf_memsave.measure.trace import UNIT, Trace, trace_step
from hf_memsave.patching.patch import patch
from hf_memsave.tape import measure_kept

#: Short names, as Trainer and ``memsave estimate`` have them (which imports nothing of this before it runs).
_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES = tuple(_NAMES.values())
_UNRUNNABLE = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


class _AdamW8bit(torch.optim.Optimizer):
    """The states of bitsandbytes' AdamW8bit: two bytes an element, and a scale for 256 of them; small ones in fp32."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it is given no closure
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if not self.state[p]:
                dtype, scales = (torch.float32, 0) if p.numel() < 4096 else (torch.uint8, -(-p.numel() // 256))
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p][name] = torch.empty_like(p, dtype=dtype)
                    self.state[p][f"{name}_scales"] = p.new_empty(scales, dtype=torch.float32)


#: Optimizers by ``Trainer``'s names, as far as their memory goes.
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw_8bit": _AdamW8bit,
    "adafactor": lambda parameters: Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, foreach=True),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True),
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """One step of training.

    Attributes:
        batch_size: Sequences.
        seq_len: Tokens in each.
        dtype: Of the weights.
        autocast: The dtype to compute in; None for that of the weights.
        optimizer: A key of :data:`OPTIMIZERS`.
        lora: Adapters on a frozen model; None to train the model itself.
        quantized: "nf4" for a frozen model in 4 bits (QLoRA); None for one as it is.
        checkpointing: With gradient checkpointing of every block.
        accumulation: Batches a step.
        attention: The kernel to prefer ("flash", "efficient", "cudnn"), or "eager" for none.
        padded: Whether the batch comes with an attention mask.
        holds_output: Whether the loop holds the model's output, with its logits, until it has the next one, as
            ``output = model(**batch)`` does; Trainer does not.
    """

    batch_size: int
    seq_len: int
    dtype: torch.dtype = torch.bfloat16
    autocast: torch.dtype | None = None
    optimizer: str = "adamw"
    lora: Lora | None = None
    quantized: str | None = None
    checkpointing: bool = False
    accumulation: int = 1
    attention: str = "flash"
    padded: bool = False
    holds_output: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "accumulation"):
            number = getattr(self, name)
            is_number = isinstance(number, int) and not isinstance(number, bool) and number > 0
            self._expect(name, is_number, "a whole number from 1")
        self._expect("dtype", self.dtype in _DTYPES, "torch.float32, torch.bfloat16 or torch.float16")
        self._expect("autocast", self.autocast in (None, *_DTYPES[1:]), "None or a dtype of 16 bits")
        self._expect("optimizer", self.optimizer in OPTIMIZERS, " or ".join(OPTIMIZERS))
        self._expect("quantized", self.quantized in (None, "nf4"), "None or 'nf4'")
        self._expect("lora", self.quantized is None or self.lora, "adapters on the quantized model, which is frozen")
        self._expect("attention", self.attention in (*ATTENTION, "eager"), f"{' or '.join(ATTENTION)} or eager")

    def _expect(self, name: str, is_right: Any, expected: str) -> None:
        if not is_right:
            raise MeasureError(f"{name}: expected {expected}, got {getattr(self, name)!r}. Change {name}.")

    @property
    def u_itemsize(self) -> int:
        """Bytes of an element of an activation."""
        return (self.autocast or self.dtype).itemsize


def training_of(**fields: Any) -> Training:
    """The training that these fields describe; ``lora`` may be a dict, and a dtype its name."""
    _check_names("a step", fields, Training)
    if isinstance(lora := fields.get("lora"), dict):
        _check_names("lora", lora, Lora)
        fields["lora"] = Lora(**lora)
    for name in ("dtype", "autocast"):
        if isinstance(value := fields.get(name), str):  # short, or PyTorch's
            fields[name] = _NAMES.get(value, getattr(torch, value, value))
    return Training(**fields)


def _check_names(what: str, fields: dict[str, Any], cls: Any) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    if unknown := fields.keys() - set(known):
        raise MeasureError(f"{what}: expected fields {', '.join(known)}, got {', '.join(sorted(unknown))}.")


def config_of(model_or_config: Any, training: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a name, a configuration or a model, whose dtype is added to ``training``."""
    if isinstance(model_or_config, str):
        return load_config(model_or_config)
    if isinstance(model_or_config, PreTrainedConfig):
        return model_or_config
    config = getattr(model_or_config, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise MeasureError(
            "estimate: expected a configuration or a model of Transformers, its folder or its name on the hub, got "
            f"{type(model_or_config).__name__}. Count another model's step with hf_memsave.measure.peak.count_peak."
        )
    if isinstance(dtype := getattr(model_or_config, "dtype", None), torch.dtype):
        training.setdefault("dtype", dtype)
    return config


def build(config: PreTrainedConfig, training: Training) -> PreTrainedModel:
    """The model in training mode on the device that is active, or on the meta device: it has no weights."""
    config, head = copy.deepcopy(config), choose_head(config)
    name_special_tokens(config)
    takes_sdpa = getattr(head._model_mapping[type(config)], "_supports_sdpa", True)  # else Transformers' own choice
    implementation = "sdpa" if takes_sdpa and training.attention != "eager" else "eager"
    model = head.from_config(config, dtype=training.dtype, attn_implementation=implementation)
    if training.quantized:
        quantize(model)
    if training.lora is not None:
        training.lora.add_to(model)
    if training.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return model.train()


def trace_at(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None,
    keeps: bool = True, on_cpu: bool = False,
) -> Trace:  # fmt: skip
    """Trace a step at another depth, on the stand-in device, or on the CPU with random weights.

    Args:
        config: Of the model.
        depth: Field of the configuration -> number of layers.
        training: What to do.
        memsave: How the model is patched; None for stock.
        keeps: Whether to count what is kept too.
        on_cpu: Whether to run it on the CPU.

    Returns:
        What was counted.

    Raises:
        MeasureError: The model cannot be built or trained so.
    """
    changed = at_depth(config, depth)
    size = training.batch_size, training.seq_len
    batch: dict[str, Any] = make_batch(choose_head(config), changed, *(size if on_cpu else (1, 1)))
    preferred = ATTENTION[0] if training.attention == "eager" else training.attention
    try:
        with torch.device("cpu" if on_cpu else "meta"):
            model = build(changed, training)
        _check_positions(model, training.seq_len)
        with contextlib.nullcontext(torch.device("cpu")) if on_cpu else fake_device(preferred) as device:
            if not on_cpu:
                to_fake(model, device)
                batch = empty_batch(batch, *size, device)
            if memsave is not None:
                patch(model, memsave)
            if training.padded:
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            if training.checkpointing and choose_head(config) is AutoModelForCausalLM:
                # It stays empty. Without one, Transformers takes fake positions for packed sequences.
                batch[cache_name(model)] = DynamicCache()
            forward = forward_of(model, training.autocast)
            trace = trace_step(
                model, batch, OPTIMIZERS[training.optimizer], forward, training.accumulation, training.holds_output
            )
            storages = measure_kept(model, batch, forward).storages if keeps else ()
    except MeasureError:
        raise
    except _UNRUNNABLE as error:
        raise MeasureError(
            f"{config.model_type!r} cannot be trained on {training.batch_size} x {training.seq_len} token ids here: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} Lower seq_len if it is beyond "
            "the model's positions; other inputs need hf_memsave.measure_kept(model, batch)."
        ) from error
    by_kind: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    for storage in storages:
        nbytes = rounded(storage.nbytes, UNIT)
        by_kind[storage.kind] += nbytes
        by_module[".".join("*" if part.isdecimal() else part for part in storage.module.split("."))] += nbytes
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    numbers = {"parameters": model.num_parameters(), "trained": trained}
    return replace(trace, numbers=numbers, by_kind=dict(by_kind), by_module=dict(by_module))


def _check_positions(model: PreTrainedModel, seq_len: int) -> None:
    """Refuse what a lookup of positions would: on the stand-in device, no index is out of range."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and ("position" in name or "wpe" in name):
            if module.num_embeddings < seq_len:
                raise MeasureError(
                    f"seq_len: expected at most {module.num_embeddings} tokens, the rows of {name}, got {seq_len}. "
                    "Lower seq_len."
                )
