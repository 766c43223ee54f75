"""The description of a training step to be estimated, and a trace of it at a small depth."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.fields import did_you_mean
from hf_memsave.config.lora import Lora, lora_in
from hf_memsave.config.wtacrs import is_int
from hf_memsave.device import HALVES, STAND_IN
from hf_memsave.errors import MeasureError, MemSaveError
from hf_memsave.measure.fake_device import fake_device, to_fake
from hf_memsave.measure.figures import Trace
from hf_memsave.measure.inputs import fitted, forward_of, make_batch, shapes, taken_by
from hf_memsave.measure.kernels import ATTENTION
from hf_memsave.measure.lora import add_adapters, quantize
from hf_memsave.measure.models import at_depth, class_of, from_config, load_config, name_special_tokens, text_head
from hf_memsave.measure.trace import trace_step
from hf_memsave.patching.patch import patch

#: Short name, as in Trainer and ``memsave estimate`` -> dtype.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _AdamW8bit(torch.optim.Optimizer):
    """The states of bitsandbytes' AdamW8bit: two bytes an element, and scales for 256 of them; small ones in fp32."""

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


#: ``Trainer``'s name of an optimizer -> a function that makes one with the same memory.
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw_8bit": _AdamW8bit,
    "adafactor": lambda of: transformers.Adafactor(of, lr=1e-3, scale_parameter=False, relative_step=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, foreach=True),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True),
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training step to be estimated."""

    batch_size: int  # sequences
    seq_len: int  # tokens in each
    dtype: torch.dtype = torch.bfloat16  # of the weights
    autocast: torch.dtype | None = None  # the dtype to compute in; None for that of the weights
    optimizer: str = "adamw"  # a key of OPTIMIZERS
    lora: Lora | None = None  # adapters on a frozen model; None to train the model itself
    quantized: str | None = None  # "nf4" for a frozen model in 4 bits (QLoRA); None for one as it is
    checkpointing: bool = False  # with gradient checkpointing of every block
    accumulation: int = 1  # batches a step
    attention: str = "flash"  # the kernel to prefer ("flash", "efficient", "cudnn"), or "eager" for none
    padded: bool = False  # whether the batch comes with an attention mask
    holds_output: bool = False  # whether the loop holds the output until the next one, as Trainer does not
    inputs: tuple[tuple[str, Any, torch.dtype | None], ...] = ()  # the caller's own batch, as inputs_of gives it

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "accumulation"):
            number = getattr(self, name)
            self._expect(name, is_int(number) and number > 0, "a whole number from 1")
        self._expect("dtype", self.dtype in DTYPES.values(), "torch.float32, torch.bfloat16 or torch.float16")
        self._expect("autocast", self.autocast in (None, *HALVES), "None or a dtype of 16 bits")
        self._expect("optimizer", self.optimizer in OPTIMIZERS, " or ".join(OPTIMIZERS))
        self._expect("quantized", self.quantized in (None, "nf4"), "None or 'nf4'")
        self._expect("lora", self.lora is None or isinstance(self.lora, Lora), "None or fields, such as {'r': 16}")
        self._expect("lora", self.quantized is None or self.lora, "adapters on the quantized model, which is frozen")
        self._expect("attention", self.attention in (*ATTENTION, "eager"), f"{' or '.join(ATTENTION)} or eager")

    def _expect(self, name: str, is_right: Any, expected: str) -> None:
        if not is_right:
            raise MeasureError(f"{name}: expected {expected}, got {getattr(self, name)!r}. Change {name}.")


def training_of(**fields: Any) -> Training:
    """Make a :class:`Training` of these fields; ``lora`` may be a dict of fields, and a dtype its name."""
    for name in ("dtype", "autocast"):
        if isinstance(value := fields.get(name), str):  # short, or PyTorch's
            fields[name] = DTYPES.get(value, getattr(torch, value, value))
    if isinstance(lora := fields.get("lora"), dict):
        fields["lora"] = _made(Lora, "lora", lora)
    return _made(Training, "a step", fields)  # type: ignore[no-any-return]


def _made(cls: Any, what: str, fields: dict[str, Any]) -> Any:
    known = [field.name for field in dataclasses.fields(cls)]
    if unknown := fields.keys() - set(known):
        found = f"expected fields {', '.join(known)}, got {', '.join(sorted(unknown))}"
        raise MeasureError(f"{what}: {found}. {did_you_mean(unknown, known) or 'Leave it out.'}")
    return cls(**fields)


def config_of(model_or_config: Any, training: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration of a name, a configuration or a model, whose dtype is added to ``training``."""
    if isinstance(model_or_config, str):
        training.setdefault("lora", lora_in(model_or_config))
        return load_config(model_or_config)
    if isinstance(model_or_config, PreTrainedConfig):
        return model_or_config
    config = getattr(model_or_config, "config", None)
    if not isinstance(config, PreTrainedConfig):
        expected = "a configuration or a model of Transformers, its folder or its name on the hub"
        reason = f"estimate: expected {expected}, got {type(model_or_config).__name__}."
        raise MeasureError(reason, "Count another model's step with hf_memsave.count.peak.count_peak.")
    if isinstance(dtype := getattr(model_or_config, "dtype", None), torch.dtype):
        training.setdefault("dtype", dtype)
    return config


def build(config: PreTrainedConfig, training: Training) -> PreTrainedModel:
    """Build the model in training mode on the active device; on the meta device it has no weights."""
    config, head = copy.deepcopy(config), class_of(config, bool(training.inputs))
    name_special_tokens(config)
    config.get_text_config().use_cache = False  # as Trainer has it
    for name, value in {"layerdrop": 0.0, "apply_spec_augment": False}.items():  # both read numbers that they draw
        if getattr(config, name, None):
            setattr(config, name, value)
    options = {}
    if hasattr(head, "_model_mapping"):  # an Auto class on token ids; of any other model attention is left as it is
        takes_sdpa = getattr(head._model_mapping[type(config)], "_supports_sdpa", True)
        options["attn_implementation"] = "sdpa" if takes_sdpa and training.attention != "eager" else "eager"
    model: PreTrainedModel = from_config(head, config, dtype=training.dtype, **options)
    if training.quantized:
        quantize(model)
    if training.lora is not None:
        add_adapters(model, training.lora)
    if training.checkpointing:
        enable_checkpointing(model)
    return model.train()


@contextlib.contextmanager
def prepared(
    config: PreTrainedConfig, training: Training, memsave: MemSaveConfig | None, device: str
) -> Iterator[tuple[PreTrainedModel, dict[str, Any], Callable[..., Any], torch.optim.Optimizer]]:
    """Yield a model on a type of device, its batch, forward and optimizer; on the stand-in device without values."""
    is_fake = device == STAND_IN
    with contextlib.ExitStack() as stack:
        if not is_fake:
            stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
            torch.manual_seed(0)
        with torch.device("meta" if is_fake else "cpu" if training.quantized else device):
            model = build(config, training)
        if is_fake:
            kernel = ATTENTION[0] if training.attention == "eager" else training.attention
            to_fake(model, stack.enter_context(fake_device(kernel, training.padded)))
        else:
            model.to(device)  # in 4 bits already: in 16 it may not fit there
        given = {n: x if dtype is None else torch.empty(x, dtype=dtype) for n, x, dtype in training.inputs}
        batch = given or make_batch(class_of(config), config, training.batch_size, training.seq_len)
        batch = fitted(batch, model)
        if text_head(config) is not None and "input_ids" in batch:
            check_positions(model, batch["input_ids"].shape[-1])
        if memsave is not None:
            patch(model, memsave)
        if training.padded and "input_ids" in batch:
            batch["attention_mask"] = mask = torch.ones_like(batch["input_ids"])
            mask[0, 1:] = 0  # Transformers leaves out a mask of ones alone
        optimizer = OPTIMIZERS[training.optimizer](p for p in model.parameters() if p.requires_grad)
        yield model, batch, forward_of(model, training.autocast), optimizer


def trace_at(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None,
    on_cpu: bool = False,
) -> Trace:  # fmt: skip
    """Trace a step at a depth on the stand-in device, or with random weights on the CPU; else MeasureError."""
    device = "cpu" if on_cpu else STAND_IN
    try:
        with prepared(at_depth(config, depth), training, memsave, device) as (model, batch, forward, optimizer):
            trace = trace_step(model, batch, optimizer, forward, training.accumulation, training.holds_output)
    except MemSaveError:
        raise
    except (AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        of = f"{training.batch_size} x {training.seq_len} tokens"
        if given := {name: shape for name, shape, dtype in training.inputs if dtype}:
            of = f"{shapes(given)}: its forward takes {', '.join(taken_by(class_of(config, True)))}"
        raise MeasureError(
            f"{config.model_type!r} cannot be trained on {of}: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}",
            "Lower batch_size or seq_len, or try fp32 weights; a model that reads numbers is measured by "
            "hf_memsave.measure_kept(model, batch).",
            option="Lower --batch-size or --seq-len, try --dtype fp32, or give a batch with --batch.",
        ) from error
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sites = patch(model, memsave).counts if memsave else {}  # again, which changes nothing
    return replace(trace, numbers={"parameters": model.num_parameters(), "trained": trained}, sites=sites)


def check_positions(model: nn.Module, tokens: int) -> None:
    """Raise where a lookup of positions would fail: on the stand-in device, no index is out of range."""
    for name, module in model.named_modules():
        rows = tokens
        if isinstance(module, nn.Embedding):  # RoBERTa numbers positions from behind its padding's
            rows = module.num_embeddings - (-1 if module.padding_idx is None else module.padding_idx) - 1
        if rows < tokens and ("position" in name or "wpe" in name):
            reason = f"expected at most {rows:,} tokens, the rows of {name}, got {tokens:,}."
            raise MeasureError(reason, "Lower seq_len.", "Lower --seq-len.")
