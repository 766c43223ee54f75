"""What each process of ``engines.py`` does: a few steps of a small LLaMA under one engine, stock or patched."""

from __future__ import annotations

import functools
import hashlib
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaRMSNorm,
)

import hf_memsave
from hf_memsave import MemSaveConfig, patch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.errors import KeptTensorChangedError, MemSaveError
from hf_memsave.tape.offload import Away

RANKS, STEPS, MOMENTS = 2, 4, 3
#: An activation of the block is 64 KiB: the least that offload moves.
BATCH, SEQ, VOCAB, RATE = 2, 128, 96, 0.1
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {}, "gate": {"checkpoint": "gate"}, "block": {"checkpoint": "block"}, "offload": {"offload": True},
}  # fmt: skip
TRAININGS = ("full", "lora")
CHECKPOINTING = ("none", "reentrant", "non-reentrant")
#: The configs of DeepSpeed; every parameter is released after use, a norm's weight too.
ZERO: dict[int, dict[str, Any]] = {
    stage: {
        "train_micro_batch_size_per_gpu": BATCH, "steps_per_print": 10**9, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
    }
    for stage in (2, 3)
}  # fmt: skip
_OPTIMIZER = functools.partial(torch.optim.SGD, lr=RATE)


def llama(folder: Path | None = None) -> nn.Module:
    """Two blocks with the same weights in every process; with a folder, loaded from there by tensor parallelism."""
    torch.manual_seed(0)
    if folder is not None:
        from transformers.distributed import DistributedConfig

        how = DistributedConfig(tp_plan="auto")
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=how).train()
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train()


def _unwrapped(model: nn.Module) -> nn.Module:
    return model


def _fsdp1(model: nn.Module, use_orig_params: bool) -> nn.Module:
    """With PEFT's policy: a flat parameter is frozen or not, so that adapters are units of their own."""
    is_trained = functools.partial(lambda_auto_wrap_policy, lambda_fn=_is_trained_leaf)
    blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    has_frozen = not all(p.requires_grad for p in model.parameters())
    policy = functools.partial(_or_policy, policies=[is_trained, blocks]) if has_frozen else blocks
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


def _is_trained_leaf(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return not list(module.named_children()) and weight is not None and weight.requires_grad


def _fsdp2(model: nn.Module, *units: type[nn.Module], shape: tuple[int, ...] = (RANKS,), one: bool = False) -> Any:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if one:  # each process by itself
        mesh = mesh["shard"]
    for kind in (*units, LlamaDecoderLayer):
        for module in [m for m in model.modules() if isinstance(m, kind)]:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _zero(model: nn.Module, stage: int) -> nn.Module:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=_OPTIMIZER(trained), config=ZERO[stage])
    return engine


#: Engine -> how it wraps a model. "alone" is what the others are compared with; "tp" wraps as it loads.
ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": _unwrapped,
    "ddp": DistributedDataParallel,
    "fsdp1": functools.partial(_fsdp1, use_orig_params=False),
    "fsdp1-orig": functools.partial(_fsdp1, use_orig_params=True),
    "fsdp2": _fsdp2,
    "fsdp2-norms": lambda model: _fsdp2(model, LlamaRMSNorm),
    "fsdp2-attention": lambda model: _fsdp2(model, LlamaAttention),
    "fsdp2-mlp": lambda model: _fsdp2(model, LlamaMLP),
    "fsdp2-one": lambda model: _fsdp2(model, shape=(RANKS, 1), one=True),
    "hsdp-2x1": lambda model: _fsdp2(model, shape=(2, 1)),
    "hsdp-1x2": lambda model: _fsdp2(model, shape=(1, 2)),
    "tp": _unwrapped,
    "zero2": functools.partial(_zero, stage=2),
    "zero3": functools.partial(_zero, stage=3),
}


class Live(TorchDispatchMode):
    """Counts the storages that ops make and that are alive, also where a wrapper holds them."""

    def __enter__(self) -> Live:
        self.made: dict[int, StorageWeakRef] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for storage in _storages(tree_leaves(output)):
            # The weak reference keeps the address from being used again while we watch.
            self.made.setdefault(storage._cdata, StorageWeakRef(storage))
        return output

    def alive(self, model: nn.Module) -> int:
        """Bytes, without those of parameters, be they gathered or not, and of what offload has moved away."""
        flat = [m._handle.flat_param for m in FullyShardedDataParallel.fsdp_modules(model) if m._handle is not None]
        weights = [*model.parameters(), *model.buffers(), *(getattr(p, "_full_param_padded", None) for p in flat)]
        known = {storage._cdata for storage in _storages(weights)}
        there = [ref for key, ref in self.made.items() if key not in known and not ref.expired()]
        return sum(torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in there) - Away.total


def _storages(leaves: list[Any]) -> Iterator[torch.UntypedStorage]:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and is_traceable_wrapper_subclass(leaf):
            yield from _storages([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


def batch(step: int, rank: int) -> dict[str, Tensor]:
    """Token ids that differ between steps and ranks."""
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(100 + RANKS * step + rank))
    return {"input_ids": ids, "labels": ids}


def made(
    engine: str, training: str, checkpointing: str, config: MemSaveConfig | None, order: str, folder: Path
) -> nn.Module:
    """The wrapped model, patched before or after it is wrapped where there is a config."""
    model = llama(folder if engine == "tp" else None)
    if checkpointing != "none":
        enable_checkpointing(model, use_reentrant=checkpointing == "reentrant")
    if training == "lora":
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    if config is not None and order == "before":
        patch(model, config)
    model = ENGINES[engine](model)
    if config is not None and order == "after":
        patch(model, config)
    return model


def trained(
    engine: str, training: str, checkpointing: str, variant: str, order: str, rank: int, folder: Path
) -> dict[str, Any]:
    """Losses, a hash of the parameters that this process has at the end, and the bytes kept in each step; or the error.

    As ``variant`` is one of VARIANTS or "stock", patched "before" or "after" it is wrapped; ``folder`` is for "tp".
    """
    found: dict[str, Any] = {"losses": [], "kept": []}
    try:
        config = None if variant == "stock" else MemSaveConfig(**VARIANTS[variant])
        model = made(engine, training, checkpointing, config, order, folder)
        is_zero = engine.startswith("zero")
        optimizer = model if is_zero else _OPTIMIZER([p for p in model.parameters() if p.requires_grad])
        live = Live()
        inner = next(module for module in model.modules() if isinstance(module, LlamaForCausalLM))
        inner.register_forward_pre_hook(lambda *_: live.made.clear())  # of DDP's buckets, made again in the second step
        for step in range(STEPS):
            if not is_zero:
                optimizer.zero_grad()
            with live:
                loss = model(**batch(step, 0 if engine == "tp" else rank)).loss
            found["kept"].append(min(_settling(live, model)))
            (model.backward if is_zero else torch.autograd.backward)(loss)
            optimizer.step()
            found["losses"].append(loss.item())
        found["parameters"] = _hash(model)
    except Exception as error:
        found |= _said(error)
    return found


def _settling(live: Live, model: nn.Module) -> Iterator[int]:
    """Bytes alive at a few moments: Gloo's threads let go of what a collective has moved later than its caller."""
    for _ in range(MOMENTS):
        time.sleep(0.01)
        yield live.alive(model)


def _hash(model: nn.Module) -> str:
    """Of the bytes that this process has of each parameter."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        own = getattr(parameter, "ds_tensor", parameter)
        own = own.to_local() if hasattr(own, "to_local") else own
        found.update(own.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _said(error: Exception) -> dict[str, Any]:
    """The error's first line, whether it is a refusal with a remedy, and which of our functions it passed last."""
    frames = list(traceback.extract_tb(error.__traceback__))
    cause = error.__cause__ or error.__context__
    while cause is not None:
        frames = [*traceback.extract_tb(cause.__traceback__), *frames]
        cause = cause.__cause__ or cause.__context__
    package = f"{Path(hf_memsave.__file__).parent}/"
    ours = [f"{f.filename[len(package) :]}:{f.lineno} {f.name}" for f in frames if f.filename.startswith(package)]
    last = f"{'/'.join(Path(frames[-1].filename).parts[-3:])}:{frames[-1].lineno} {frames[-1].name}"
    is_refusal = isinstance(error, MemSaveError) and not isinstance(error, KeptTensorChangedError)
    return {
        "error": type(error).__name__, "text": (str(error).strip().splitlines() or [""])[0], "is_refusal": is_refusal,
        "frames": [*ours[-3:], last], "traceback": traceback.format_exc(),
    }  # fmt: skip
