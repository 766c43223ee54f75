"""Finding the sites of a model, and checking every one, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.arch import ARCHS, COMMON, Site, adapter, guess
from hf_memsave.blocks import ancestors, block_numbers, left_out, number_of
from hf_memsave.config import WTACRS, MemSaveConfig
from hf_memsave.errors import PatchError
from hf_memsave.ops import OPS, Binding
from hf_memsave.ops.eager_attention import NAME, implementation, is_attention
from hf_memsave.ops.expression import match
from hf_memsave.ops.few_bit import FewBit
from hf_memsave.swap import hides_forward, stock_class

#: What a tape is put around.
BLOCKS = (PreTrainedModel, GradientCheckpointingLayer)
_TRACED = (torch.jit.ScriptModule, torch.fx.GraphModule)
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")


@dataclass(frozen=True)
class SiteReport:
    """One site: the module's path, its stock class, the op, and "patched" or "skipped".

    ``reason`` says why it was skipped, or what a patched site still keeps beyond the floor.
    """

    name: str
    cls: str
    op: str
    status: str
    reason: str = ""


class Planned(NamedTuple):
    """A module to swap: the site it matches, what its binding shall hold as value, and if it lays its own tape."""

    module: nn.Module
    site: Site
    value: Any
    lays_tape: bool = False


def collect(
    model: nn.Module, config: MemSaveConfig, prefix: str = "", block: int | None = None
) -> tuple[list[SiteReport], list[Planned]]:
    """Every site of ``model`` that ``config`` asks for, checked; the model is not touched.

    Args:
        model: Stock, or patched before.
        config: What was asked for.
        prefix: The path of ``model`` in the model that it is a part of, for what is chosen by path.
        block: The number of the repeated block that ``model`` is a part of, if it is.

    Returns:
        A line for each site found, and the modules to swap.

    Raises:
        PatchError: A module of a known architecture is not what its table says, or has a forward that hides ours.
    """
    tables = [COMMON, *(ARCHS[t] for t in sorted(model_types(model)) if t in ARCHS)]
    known = {path: site for table in tables for path, site in table.by_class().items()}
    sites: list[SiteReport] = []
    plan: list[Planned] = []
    taped: set[str] = set()
    uncovered = root_is_layer = False
    numbers = block_numbers(model)
    for name, module in model.named_modules():
        cls = stock_class(module)
        path = f"{cls.__module__}.{cls.__qualname__}"
        if isinstance(module, BLOCKS):
            if hides_forward(module):
                sites.append(SiteReport(name, cls.__name__, "block", "skipped", _hidden(module)))
                taped.add(name)
                continue
            plan.append(Planned(module, Site(cls=path, op="block"), config))
            sites.append(SiteReport(name, cls.__name__, "block", "patched"))
            taped.add(name)
            root_is_layer |= not (name or prefix or isinstance(module, PreTrainedModel))
            continue
        site = known.get(path) or adapter(cls) or guess(cls, module)
        if site is None:
            continue
        root_is_layer |= not (name or prefix)
        if config.linear is not None and is_sampled(f"{prefix}.{name}", site.op, config.linear, root_is_layer):
            site = Site(cls=site.cls, op="wta_crs")
        if OPS[site.op].method == "forward" and hides_forward(module):
            if site.op == "eager_attention":  # a stranger's attention is welcome to run instead of stock's
                sites.append(SiteReport(name, cls.__name__, site.op, "skipped", _hidden(module)))
                continue
            refuse_hidden(name, module)
        number = number_of(name, numbers) if block is None else block
        is_own = site not in COMMON.sites and path in known
        value, reason = _check(name, module, site, config, number, is_own)
        if reason is not None:
            sites.append(SiteReport(name, cls.__name__, site.op, "skipped", reason))
        else:
            note = _note(name, module, site, value)
            sites.append(SiteReport(name, cls.__name__, site.op, "patched", note))
            plan.append(Planned(module, site, value))
            uncovered |= not ancestors(name) & taped
    if config.linear is not None and config.linear.targets and not prefix:
        _refuse_no_target(sites, config.linear.targets, model)
    if config.linear is not None and config.linear.attention and not prefix:
        _refuse_other_attention(sites, model)
    if uncovered and "" not in taped and not prefix:
        _add_root(model, config, sites, plan)
    return sites, plan


def is_sampled(path: str, op: str, config: WTACRS, has_no_blocks: bool = False) -> bool:
    """Whether the linear at ``path``, perhaps of a layer patched by itself, is one of those that ``config`` samples."""
    if op not in ("linear", "conv1d"):
        return False
    if config.targets is None:
        return "lora_B" not in path and (has_no_blocks or any(part.isdigit() for part in path.split(".")))
    dotted = f".{path}."
    named = [target for target in config.targets if f".{target}." in dotted]
    return bool(named) and ("lora_B" not in path or "lora_B" in ".".join(named))


def _refuse_no_target(sites: list[SiteReport], targets: tuple[str, ...], model: nn.Module) -> None:
    sampled = [f".{site.name}." for site in sites if site.op == "wta_crs"]
    if missing := [t for t in targets if not any(f".{t}." in path for path in sampled)]:
        linears = {site.name.rpartition(".")[2] for site in sites if site.op in ("linear", "conv1d", "wta_crs")}
        if missing == ["lora_A"] or missing == ["lora_B"]:
            return  # adapters are added later, as often as not
        raise PatchError(
            f"WTACRS.targets: expected names of linears of {type(model).__name__}, got {missing[0]!r}, which is none. "
            f"Choose from {', '.join(sorted(linears))}, or leave targets out for all linears in repeated blocks."
        )


def _refuse_other_attention(sites: list[SiteReport], model: nn.Module) -> None:
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


def _check(
    name: str, module: nn.Module, site: Site, config: MemSaveConfig, block: int, is_own: bool
) -> tuple[Any, str | None]:
    """The value that chooses the op, and why the module cannot take it (None if it can)."""
    op = OPS[site.op]
    value = "on" if op.setting is None else getattr(config, op.setting)
    if value == "stock" or value is False:
        return value, f"{op.setting}={value!r} was asked for"
    if (reason := left_out(config, op.setting, block)) is not None:
        return value, reason
    if value == "few_bit":
        value = FewBit(config.few_bits)
    if op.takes_config:
        value = config
    reason = op.check(module, site.names) or _contradiction(module, site)
    if reason is not None and is_own:
        raise PatchError(
            f"{name} is a {stock_class(module).__name__}, but {reason}. Expected what op {op.name!r} is exact for; use "
            f"{op.setting}='stock' to leave these modules alone."
        )
    return value, reason


def _note(name: str, module: nn.Module, site: Site, value: Any) -> str:
    op = OPS[site.op]
    binding = Binding(stock_class(module), op, site.names, value)
    if (error := op.refuse(module, binding)) is not None:
        raise PatchError(f"{name or 'the model'} ({stock_class(module).__name__}) {error}")
    return op.note(module, binding)


def _contradiction(module: nn.Module, site: Site) -> str | None:
    """Why the module's own source does not say what the op computes; None if it does."""
    op = OPS[site.op]
    if not op.expressions:
        return None
    names = match(getattr(stock_class(module), op.method), op.expressions)
    if names is None:
        return f"its {op.method} does not say what op {op.name!r} computes"
    found = {role: attribute for role, attribute in names.items() if site.names.get(role, role) != attribute}
    return f"its forward uses {found}, where {dict(site.names)} was expected" if found else None


def _tool(forward: Any) -> str:
    """The module whose code a forward is; ``functools.wraps`` cannot hide it."""
    return getattr(getattr(forward, "__func__", forward), "__globals__", {}).get("__name__", "")


def _hidden(module: nn.Module) -> str:
    """Why a block with a forward of its own stays stock: what it calls below has tapes of its own."""
    own = module.__dict__
    tool = "accelerate" if "_original_forward" in own else _tool(own["forward"]).partition(".")[0]
    return f"its forward was set by {tool}; what lies below is patched"


def _add_root(model: nn.Module, config: MemSaveConfig, sites: list[SiteReport], plan: list[Planned]) -> None:
    """A tape for sites outside any model of Transformers: at the root, or below the wrappers of torch around it."""
    name = ""
    while stock_class(model).__module__.startswith(_WRAPPERS):
        if not isinstance(inner := getattr(model, "module", None), nn.Module):
            return
        name, model = f"{name}.module".lstrip("."), inner
    cls = stock_class(model)
    if isinstance(model, BLOCKS):
        return  # its forward is hidden, and it is reported as skipped
    if hides_forward(model):
        refuse_hidden(name, model)
    for index, planned in enumerate(plan):
        if planned.module is model:
            plan[index] = planned._replace(lays_tape=True)
            return
    plan.append(Planned(model, Site(cls=f"{cls.__module__}.{cls.__qualname__}", op="block"), config))
    sites.append(SiteReport(name, cls.__name__, "block", "patched"))


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
            refuse_hidden(name, module)


def refuse_hidden(name: str, module: nn.Module) -> None:
    """Raise for a forward that hides ours.

    Raises:
        PatchError: Always.
    """
    raise PatchError(
        f"{name or 'the model'} ({type(module).__name__}) has a forward of its own, set on the instance by another "
        "tool (kernelize, Liger, a monkey patch), which would hide ours. Build the model without it "
        "(use_kernels=False), or patch before that tool."
    )


def model_types(model: nn.Module) -> set[str]:
    """The ``model_type`` of every Transformers model inside ``model``."""
    return {m.config.model_type for m in model.modules() if isinstance(m, PreTrainedModel)}
