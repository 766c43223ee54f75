"""Finding the sites of a model, and checking every one, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.arch import ARCHS, COMMON, Site, disproof, guess
from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import PatchError
from hf_memsave.ops import OPS
from hf_memsave.swap import binding_of, stock_class

_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")


@dataclass(frozen=True)
class SiteReport:
    """One site: the module's path, its stock class, the op, and whether it was patched or why not."""

    name: str
    cls: str
    op: str
    status: Literal["patched", "skipped"]
    reason: str = ""


class Planned(NamedTuple):
    """A module to swap: the site it matches, and the value of the config field that chose the op."""

    module: nn.Module
    site: Site
    value: str


def collect(model: nn.Module, config: MemSaveConfig) -> tuple[list[SiteReport], list[Planned]]:
    """Every site of ``model`` that ``config`` asks for, checked; the model is not touched.

    Args:
        model: Stock, or patched before.
        config: What was asked for.

    Returns:
        A line for each site found, and the modules to swap.

    Raises:
        PatchError: A module of a known architecture is not what its table says.
    """
    tables = [COMMON, *(ARCHS[t] for t in sorted(model_types(model)) if t in ARCHS)]
    known = {path: site for table in tables for path, site in table.by_class().items()}
    sites: list[SiteReport] = []
    plan: list[Planned] = []
    taped: set[str] = set()
    uncovered = False
    for name, module in model.named_modules():
        cls = stock_class(module)
        path = f"{cls.__module__}.{cls.__qualname__}"
        if isinstance(module, (PreTrainedModel, GradientCheckpointingLayer)):
            plan.append(Planned(module, Site(cls=path, op="block"), "on"))
            sites.append(SiteReport(name, cls.__name__, "block", "patched"))
            taped.add(name)
            continue
        site = known.get(path) or guess(module)
        if site is None:
            continue
        value, reason = _check(name, module, site, config, is_guess=path not in known)
        sites.append(SiteReport(name, cls.__name__, site.op, "skipped" if reason else "patched", reason or ""))
        if reason is None:
            plan.append(Planned(module, site, value))
            uncovered |= not _ancestors(name) & taped
    if uncovered and "" not in taped:
        _add_root(model, sites, plan)
    return sites, plan


def _check(name: str, module: nn.Module, site: Site, config: MemSaveConfig, is_guess: bool) -> tuple[str, str | None]:
    """The value that chooses the op, and why the module cannot take it (None if it can)."""
    op = OPS[site.op]
    value = "on" if op.setting is None else getattr(config, op.setting)
    if value == "stock":
        return value, f"{op.setting}='stock' was asked for"
    reason = op.check(module, site.names) or (disproof(module, site) if is_guess else None)
    if reason is not None and not is_guess and site not in COMMON.sites:
        raise PatchError(
            f"{name} is a {stock_class(module).__name__}, but {reason}. Expected what op {op.name!r} is exact for; use "
            f"{op.setting}='stock' to leave these modules alone."
        )
    return value, reason


def _ancestors(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(len(parts))}


def _add_root(model: nn.Module, sites: list[SiteReport], plan: list[Planned]) -> None:
    """A tape for sites outside any model of Transformers; the root itself may be such a site."""
    cls = stock_class(model)
    if not cls.__module__.startswith(_WRAPPERS) and not any(p.module is model for p in plan):
        plan.append(Planned(model, Site(cls=f"{cls.__module__}.{cls.__qualname__}", op="block"), "on"))
        sites.append(SiteReport("", cls.__name__, "block", "patched"))


def refuse_foreign_patches(model: nn.Module) -> None:
    """Raise where another tool has replaced a forward already.

    Raises:
        PatchError: Liger-Kernel, kernelize or a monkey patch got there first; the message names module and remedy.
    """
    for name, module in model.named_modules():
        forward = type(module).forward
        if type(module).__module__.startswith("liger_kernel") or forward.__module__.startswith("liger_kernel"):
            raise PatchError(
                f"{name or 'the model'} is patched by Liger-Kernel, process-wide, and the two cannot be combined. Load "
                "the model in a process that has not applied Liger (for Trainer: use_liger_kernel=False)."
            )
        is_ours = binding_of(module) is not None  # Accelerate wraps the forward of a model it prepares
        if "forward" in module.__dict__ and "_hf_hook" not in module.__dict__ and not is_ours:
            raise PatchError(
                f"{name or 'the model'} ({type(module).__name__}) has a forward of its own, set on the instance by "
                "another tool (kernelize, Liger, a monkey patch), which would hide ours. Build the model without it "
                "(use_kernels=False), or patch before that tool."
            )


def model_types(model: nn.Module) -> set[str]:
    """The ``model_type`` of every Transformers model inside ``model``."""
    return {m.config.model_type for m in model.modules() if isinstance(m, PreTrainedModel)}
