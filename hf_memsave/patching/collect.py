"""Finding what of a model is to change, and checking all of it, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.arch import HIDDEN, KINDS, LINEARS, kind_of, path_of
from hf_memsave.config import WTACRS, MemSaveConfig
from hf_memsave.errors import PatchError
from hf_memsave.ops import OPS
from hf_memsave.ops.eager_attention import NAME, implementation, is_attention
from hf_memsave.ops.few_bit import FewBit
from hf_memsave.patching.blocks import block_numbers, number_of
from hf_memsave.patching.swap import Patch, hides_forward, stock_class

_TRACED = (torch.jit.ScriptModule, torch.fx.GraphModule)
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")
#: Kinds whose modules are text in Python: left to stock, what runs inside is not recorded.
_QUIET = ("activation", "norm", "attention", "lora")


@dataclass(frozen=True)
class SiteReport:
    """One module: its path, its stock class, what is done there, and "patched" or "skipped".

    ``op`` is "model" or "block" for what lays a tape or ends a block of one, else the name of the op that replaces its
    forward. ``reason`` says why it was skipped, or what a patched one still keeps.
    """

    name: str
    cls: str
    op: str
    status: str
    reason: str = ""


Plan = dict[nn.Module, Patch]


def collect(
    model: nn.Module, config: MemSaveConfig, prefix: str = "", block: int | None = None
) -> tuple[list[SiteReport], Plan]:
    """Every module of ``model`` that ``config`` changes, checked; the model is not touched.

    Args:
        model: Stock, or patched before.
        config: What was asked for.
        prefix: The path of ``model`` in the model that it is a part of; then only its ops are collected.
        block: The number of the repeated block that ``model`` is a part of, if it is.

    Returns:
        A line for each, and what each shall become.

    Raises:
        PatchError: A module has a forward that hides ours, or cannot have what was asked for.
    """
    sites: list[SiteReport] = []
    plan: Plan = {}
    numbers = block_numbers(model)
    if not prefix:
        _collect_taped(model, config, sites, plan, numbers)
    root_is_layer = not prefix and not isinstance(model, PreTrainedModel) and not numbers.keys() - {""}
    for name, module in model.named_modules():
        number = number_of(name, numbers) if block is None else block
        op, value = _choice(f"{prefix}.{name}", module, config, number, root_is_layer)
        if op is None:
            continue
        cls = stock_class(module)
        if hides_forward(module):
            if op in ("quiet", "eager_attention"):  # another tool's forward runs instead: nothing of ours is asked for
                sites.append(SiteReport(name, cls.__name__, op, "skipped", _hidden(module)))
                continue
            _refuse_hidden(name, module)
        if reason := OPS[op].refuse(module, value):
            raise PatchError(f"{name or 'the model'} ({cls.__name__}) {reason}")
        if reason := OPS[op].check(module, value):
            sites.append(SiteReport(name, cls.__name__, op, "skipped", reason))
            continue
        sites.append(SiteReport(name, cls.__name__, op, "patched", OPS[op].note(module, value)))
        before = plan.get(module, Patch(cls))
        plan[module] = before._replace(op=op, value=value, block=number)
    if config.linear is not None and not prefix:
        _refuse_no_target(sites, config.linear, model)
        _refuse_other_attention(sites, config.linear, model)
    return sites, plan


def _collect_taped(
    model: nn.Module, config: MemSaveConfig, sites: list[SiteReport], plan: Plan, numbers: dict[str, int]
) -> None:
    """The outermost models whose own forward runs, and the repeated blocks: what lays a tape."""
    roots: list[str] = []
    outer = _unwrapped(model)
    for name, module in model.named_modules():
        is_block = isinstance(module, GradientCheckpointingLayer)
        is_root = module is outer or isinstance(module, PreTrainedModel)
        if not is_block and (not is_root or f"{name}.".startswith(tuple(roots)) and roots):
            continue
        cls = stock_class(module)
        op = "block" if is_block else "model"
        is_hidden = hides_forward(module)
        if is_hidden and (is_block or not isinstance(module, PreTrainedModel)):
            if not is_block:
                _refuse_hidden(name, module)
            sites.append(SiteReport(name, cls.__name__, op, "skipped", _hidden(module)))
            continue
        if not is_block:
            roots.append(f"{name}." if name else "")
        number = number_of(name, numbers) if config.layers else 0
        plan[module] = Patch(cls, config, number, is_hidden=is_hidden)
        sites.append(SiteReport(name, cls.__name__, op, "patched"))


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model below the wrappers of torch around it."""
    while stock_class(model).__module__.startswith(_WRAPPERS):
        if not isinstance(inner := getattr(model, "module", None), nn.Module):
            break
        model = inner
    return model


def _choice(
    path: str, module: nn.Module, config: MemSaveConfig, block: int, root_is_layer: bool
) -> tuple[str | None, Any]:
    """The op that a module takes, and the value that chose it; None if its forward stays."""
    cls = stock_class(module)
    name = path_of(cls)
    if name in LINEARS:
        is_wanted = config.linear is not None and is_sampled(path, config.linear, root_is_layer)
        return ("wta_crs", config.linear) if is_wanted else (None, None)
    if name in HIDDEN:
        return HIDDEN[name], True
    if config.linear is not None and config.linear.attention and is_attention(cls) and implementation(module) == NAME:
        return "eager_attention", config.linear
    kind = kind_of(cls)
    if kind == "attention" and any(kind_of(stock_class(m)) == kind for m in module.modules() if m is not module):
        return None, None  # it holds an attention, and a norm and a dropout beside
    if kind in _QUIET and not config.converts(kind, block):
        return "quiet", "stock"
    if kind is None or name not in KINDS or getattr(config, kind) == "recompute":
        return None, None
    if kind == "norm":
        return "output_norm", config.norm
    return "activation", FewBit(config.few_bits) if config.activation == "few_bit" else config.activation


def is_sampled(path: str, config: WTACRS, has_no_blocks: bool = False) -> bool:
    """Whether the linear at ``path``, perhaps of a layer patched by itself, is one of those that ``config`` samples."""
    if config.targets is None:
        return "lora_B" not in path and (has_no_blocks or any(part.isdigit() for part in path.split(".")))
    dotted = f".{path}."
    named = [target for target in config.targets if f".{target}." in dotted]
    return bool(named) and ("lora_B" not in path or "lora_B" in ".".join(named))


def _refuse_no_target(sites: list[SiteReport], config: WTACRS, model: nn.Module) -> None:
    sampled = [f".{site.name}." for site in sites if site.op == "wta_crs"]
    missing = [t for t in config.targets or () if not any(f".{t}." in path for path in sampled)]
    if missing and missing not in (["lora_A"], ["lora_B"]):  # adapters are added later, as often as not
        linears = {name.rpartition(".")[2] for name, m in model.named_modules() if path_of(stock_class(m)) in LINEARS}
        raise PatchError(
            f"WTACRS.targets: expected names of linears of {type(model).__name__}, got {missing[0]!r}, which is none. "
            f"Choose from {', '.join(sorted(linears))}, or leave targets out for all linears in repeated blocks."
        )


def _refuse_other_attention(sites: list[SiteReport], config: WTACRS, model: nn.Module) -> None:
    if not config.attention:
        return
    found = {name: module for name, module in model.named_modules() if is_attention(stock_class(module))}
    remedy = f"Load the model with attn_implementation={NAME!r}, or leave attention=True out."
    if not found:
        raise PatchError(
            f"WTACRS(attention=True): expected a model with Transformers' own eager attention, got "
            f"{type(model).__name__}, which has none. Leave attention=True out."
        )
    reports = {site.name: site for site in sites if site.op == "eager_attention"}
    for name, module in found.items():
        if name not in reports:
            raise PatchError(
                f"WTACRS(attention=True): expected attn_implementation={NAME!r}, got {implementation(module)!r} in "
                f"{name}. {remedy}"
            )
        if reports[name].status == "skipped":
            raise PatchError(
                f"WTACRS(attention=True): expected to patch {name}, but {reports[name].reason}. Leave that out, or "
                "attention=True."
            )


def _tool(forward: Any) -> str:
    """The module whose code a forward is; ``functools.wraps`` cannot hide it."""
    return getattr(getattr(forward, "__func__", forward), "__globals__", {}).get("__name__", "")


def _hidden(module: nn.Module) -> str:
    """Why a module with a forward of its own stays stock: what it calls below has tapes of its own."""
    own = module.__dict__
    tool = "accelerate" if "_original_forward" in own else _tool(own["forward"]).partition(".")[0]
    return f"its forward was set by {tool}; what lies below is patched"


def refuse_foreign_patches(model: nn.Module) -> None:
    """Raise where another tool has replaced a forward already.

    Raises:
        PatchError: Liger-Kernel, kernelize or a monkey patch got there first, or the model has been traced; the message
            names module and remedy.
    """
    for name, module in model.named_modules():
        if isinstance(module, _TRACED):
            raise PatchError(
                f"{name or 'the model'} is a {type(module).__name__}: it has been traced, scripted or exported, and "
                "runs no module's forward any more. Patch the model that it was made of."
            )
        cls = stock_class(module)
        if cls.__module__.startswith("liger_kernel") or cls.forward.__module__.startswith("liger_kernel"):
            raise PatchError(
                f"{name or 'the model'} is patched by Liger-Kernel, process-wide, and the two cannot be combined. Load "
                "the model in a process that has not applied Liger (for Trainer: use_liger_kernel=False)."
            )
        if _tool(module.__dict__.get("forward")).startswith("liger_kernel"):
            _refuse_hidden(name, module)


def _refuse_hidden(name: str, module: nn.Module) -> None:
    raise PatchError(
        f"{name or 'the model'} ({type(module).__name__}) has a forward of its own, set on the instance by another "
        "tool (kernelize, Liger, a monkey patch), which would hide ours. Build the model without it "
        "(use_kernels=False), or patch before that tool."
    )
