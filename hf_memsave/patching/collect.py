"""Collection of what a config changes in a model, and of what forbids it; nothing is changed here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.arch import sites
from hf_memsave.arch.fused import fused_of
from hf_memsave.arch.sites import HIDDEN, LINEARS, LORA, RUN_AGAIN, first_of_experts, is_run_again, kind_of, path_of
from hf_memsave.config.config import WHOLE, MemSaveConfig
from hf_memsave.config.wtacrs import WTACRS
from hf_memsave.ops import OPS
from hf_memsave.ops.approximate.few_bit import FewBit
from hf_memsave.ops.fused.kernels import why_not
from hf_memsave.ops.run_again import is_known_by_weight
from hf_memsave.ops.sampled.eager_attention import NAME, implementation, is_attention
from hf_memsave.patching.blocks import block_at, block_numbers, head_of
from hf_memsave.patching.rows import may_run_in_rows
from hf_memsave.patching.swap import Patch, hides_forward, patched_models, stock_class
from hf_memsave.tape.applied import is_of_kernels

#: Kinds of modules written in Python: left to stock, a tape records nothing inside but dropouts.
_QUIET = ("activation", "norm", "attention", "lora")
#: Activations with two slopes: under ``frozen`` a tape handles them, also where activations are left to stock.
_RECTIFIERS = (nn.ReLU, nn.Hardtanh, nn.LeakyReLU, nn.Threshold)


@dataclass(frozen=True)
class SiteReport:
    """One module of a report: its path, stock class, op, status ("patched" or "skipped") and the reason for it.

    ``op`` is "model" for a module with a tape, "block" for a repeated block, else what replaces the forward.
    """

    name: str
    cls: str
    op: str
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Found:
    """The changes that a config makes to a model: ``refusals.check`` checks them, ``patch`` makes them."""

    sites: list[SiteReport] = field(default_factory=list)  # a line for each module that is changed, or skipped
    patches: dict[nn.Module, Patch] = field(default_factory=dict)  # by which modules get other classes
    recomputed: set[nn.Module] = field(default_factory=set)  # linears and experts that run again, and keep theirs
    before: list[tuple[nn.Module, MemSaveConfig]] = field(default_factory=list)  # models that are patched already
    errors: list[str] = field(default_factory=list)  # for modules that cannot have what was asked for

    def add(self, name: str, module: nn.Module, op: str, reason: str = "") -> None:
        """Add ``module`` to the sites: patched by ``op``, or skipped for ``reason``."""
        status = "skipped" if reason else "patched"
        self.sites.append(SiteReport(name, stock_class(module).__name__, op, status, reason))

    def change(self, module: nn.Module, **fields: Any) -> None:
        """Set fields of the patch that ``module`` gets."""
        self.patches[module] = self.patches.get(module, Patch(stock_class(module)))._replace(**fields)


def collect(model: nn.Module, config: MemSaveConfig, prefix: str = "", block: int | None = None) -> Found:
    """Return every module of ``model``, stock or patched, that ``config`` changes; the model is not touched.

    ``prefix`` is the path of ``model`` in the model that it is a part of: then only its ops are collected. ``block`` is
    the number of the repeated block that it is a part of, if it is.
    """
    found = Found(before=patched_models(model))
    for name, module in model.named_modules():
        if isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule)):
            found.errors.append(
                f"{name or 'the model'} is a {type(module).__name__}: it has been traced, scripted or exported, and "
                "runs no module's forward any more. Patch the model that was traced."
            )
            return found
    numbers = block_numbers(model)
    if not prefix:
        _collect_taped(model, config, found, numbers)
    if config.backend != "torch" and (reason := why_not(model)):
        if config.backend == "triton":
            found.errors.append(f"backend='triton' cannot run: {reason}. Use backend='auto' or 'torch'.")
        config = replace(config, backend="torch")
        found.add(prefix, model, "fused", reason)
    heads = {head_of(m) for m in model.modules()} if config.loss == "chunked" else set()
    has_norm = config.checkpoint in WHOLE and bool(heads - {None})  # the last norm may be the peak of a step
    root_is_layer = not prefix and not isinstance(model, PreTrainedModel) and not numbers.keys() - {""}
    for name, module in model.named_modules():
        around = block_at(name, numbers) if block is None else block
        number = around or 0
        rung = config.checkpoint if config.converts("checkpoint", number, len(numbers)) else None
        op, value = _choice(f"{prefix}.{name}", module, config, number, root_is_layer)
        if around is not None and _is_chosen(name, module, rung):
            if op is None:
                op, value = "run_again", rung
            else:
                found.add(name, module, "run_again", f"{op} replaces its forward")
        # A tape knows a plain linear head by its weight, as ``F.linear`` is called, so that its class can stay.
        is_known = isinstance(module, nn.Linear) and not type(module).__module__.startswith("bitsandbytes")
        if op in (None, "lora") and module in heads and not is_known:
            op, value = "lazy_head", config.loss
        rows = _rows(module, config, around, rung) if around is not None or has_norm and op is None else None
        if rows is not None and not hides_forward(module):
            found.change(module, rows=rows)
        if op is None:
            continue
        is_by_weight = op == "run_again" and is_known_by_weight(module)
        if hides_forward(module) and not is_by_weight:
            reason = _why_hidden(module)  # another tool's forward runs instead
            if not OPS[op].is_implied:
                found.errors.append(_hidden(name, module))
        elif op == "activation" and is_of_kernels(_tool_of(model.get_submodule(name.rpartition(".")[0]).forward)):
            reason = "a kernel around it computes it"
        elif refusal := OPS[op].refuse(module, value):
            found.errors.append(f"{name or 'the model'} ({stock_class(module).__name__}) {refusal}")
            continue
        else:
            reason = OPS[op].check(module, value)
        found.add(name, module, op, reason)
        if not reason and is_by_weight:
            found.recomputed.add(module)
        elif not reason:
            found.change(module, op=op, value=value)
    return found


def _rows(module: nn.Module, config: MemSaveConfig, block: int | None, rung: str | None) -> int | str | None:
    """Return how many tokens of each sequence ``module`` runs at a time, in block number ``block``; None for all."""
    cls = stock_class(module)
    if block is None:
        return "norm" if kind_of(cls) == "norm" and may_run_in_rows(module, cls) else None
    is_within = rung == "tiles" and not issubclass(cls, GradientCheckpointingLayer)
    return config.tiles if is_within and may_run_in_rows(module, cls) else None


def _collect_taped(model: nn.Module, config: MemSaveConfig, found: Found, numbers: dict[str, int]) -> None:
    """Collect the outermost models, each of which runs under a tape, and the repeated blocks."""
    roots: tuple[str, ...] = ()
    outer = model
    while stock_class(outer).__module__.startswith(("torch.nn.parallel", "torch.distributed", "torch._dynamo")):
        if not isinstance(inner := getattr(outer, "module", None), nn.Module):
            break
        outer = inner
    for name, module in model.named_modules():
        is_block = isinstance(module, GradientCheckpointingLayer)
        is_model = isinstance(module, PreTrainedModel)
        if not is_block and (not (module is outer or is_model) or f"{name}.".startswith(roots)):
            continue
        op = "block" if is_block else "model"
        is_hidden = hides_forward(module)
        if is_hidden and (is_block or not is_model):
            found.add(name, module, op, _why_hidden(module))
            if not is_block:
                found.errors.append(_hidden(name, module))
            continue
        if not is_block:
            roots += (f"{name}." if name else "",)
        number = block_at(name, numbers) or 0
        rung = config.checkpoint if config.converts("checkpoint", number, len(numbers)) or not is_block else None
        number = number if config.layers and not config.compile else 0  # blocks of one class share a graph
        found.change(module, config=config, block=number, is_hidden=is_hidden, rung=rung)
        found.add(name, module, op)
        if is_block and rung in WHOLE:
            found.add(name, module, "run_again")


def _tool_of(forward: Any) -> str:
    """Return the name of the Python module that defines ``forward``, which ``functools.wraps`` cannot change."""
    return str(getattr(getattr(forward, "__func__", forward), "__globals__", {}).get("__name__", ""))


def _hidden(name: str, module: nn.Module) -> str:
    """Return the error for a module with a forward on its instance, set by another tool, that would hide ours."""
    tool = _tool_of(module.__dict__["forward"])
    option = "use_liger_kernel=False" if tool.startswith("liger_kernel") else "for kernelize: use_kernels=False"
    return (
        f"{name or 'the model'} ({type(module).__name__}) has a forward of its own, set on the instance by another "
        f"tool ({tool or 'one written in C'}), which would hide hf_memsave's. Build the model without it "
        f"({option}), patch before that tool, or leave out what was asked for this module."
    )


def _why_hidden(module: nn.Module) -> str:
    """Return why a module whose forward hides ours stays stock."""
    is_dispatched = "_original_forward" in module.__dict__
    tool = "accelerate" if is_dispatched else _tool_of(module.__dict__["forward"]) or "code in C"
    return f"its forward was set by {tool}; what lies below is patched"  # under tapes of its own


def _choice(path: str, module: nn.Module, config: MemSaveConfig, block: int, is_layer: bool) -> tuple[str | None, Any]:
    """Return the op that replaces the forward of ``module``, and its value; None and None if the forward stays."""
    cls = stock_class(module)
    name = path_of(cls)
    if name in LINEARS:
        is_wanted = config.linear is not None and is_sampled(path, config.linear, is_layer)
        return ("wta_crs", config.linear) if is_wanted else (None, None)
    if name in HIDDEN:
        return HIDDEN[name], True
    if config.linear is not None and config.linear.attention and is_attention(cls) and implementation(module) == NAME:
        return "eager_attention", config.linear
    fused = fused_of(cls) if config.backend != "torch" else None
    if fused is not None and getattr(config, fused.kind) == "recompute" and config.converts(fused.kind, block):
        return fused.op, config.converts("dropout", block) if fused.draws else fused.value
    kind = kind_of(cls)
    if name in LORA and config.converts("lora", block):
        return "lora", LORA[name]
    if kind == "attention" and any(kind_of(stock_class(m)) == kind for m in module.modules() if m is not module):
        return None, None  # such as BertAttention: an attention, a norm and a dropout
    if kind in _QUIET and not config.converts(kind, block):
        is_of_frozen = config.frozen and config.activation == "stock" and issubclass(cls, _RECTIFIERS)
        return (None, None) if is_of_frozen else ("quiet", "stock")
    if kind is None or name not in sites.KIND_OF_CLASS or getattr(config, kind) == "recompute":
        return None, None
    if kind == "norm":
        return "output_norm", config.norm
    return "activation", FewBit(config.few_bits) if config.activation == "few_bit" else config.activation


def _is_chosen(path: str, module: nn.Module, rung: str | None) -> bool:
    """Return whether a rung below whole blocks runs ``module`` again: experts, or a linear without adapters."""
    if rung is None or rung in WHOLE:
        return False
    if names := first_of_experts(module):
        paths = [f"{path}.{name}".removesuffix(".weight") for name in names]
        return all(is_run_again(p, rung) and not is_run_again(p, "qkv") for p in paths)
    is_linear = path_of(stock_class(module)) in RUN_AGAIN or isinstance(getattr(module, "out_features", None), int)
    return is_linear and "base_layer" not in module._modules and is_run_again(path, rung)


def is_sampled(path: str, config: WTACRS, has_no_blocks: bool = False) -> bool:
    """Return whether ``config`` samples the linear at ``path``; ``has_no_blocks`` in a layer that is patched alone."""
    if config.targets is None:
        return "lora_B" not in path and (has_no_blocks or any(part.isdigit() for part in path.split(".")))
    dotted = f".{path}."
    named = [target for target in config.targets if f".{target}." in dotted]
    return bool(named) and ("lora_B" not in path or "lora_B" in ".".join(named))
