"""Checks, before anything is changed, that a model can be patched: an error names the module and the remedy."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.arch.sites import LINEARS, RUN_AGAIN, kind_of, path_of
from hf_memsave.config.config import WHOLE, MemSaveConfig
from hf_memsave.config.sizes import counted
from hf_memsave.config.wtacrs import WTACRS
from hf_memsave.errors import PatchError
from hf_memsave.logs import is_measuring
from hf_memsave.ops.sampled.eager_attention import NAME, implementation, is_attention
from hf_memsave.patching.blocks import block_numbers
from hf_memsave.patching.collect import Found, SiteReport
from hf_memsave.patching.sharded import refuse_zero3
from hf_memsave.patching.swap import stock_class

#: How errors name the class of repeated blocks, and linears that run again.
_BLOCK, _LINEARS = path_of(GradientCheckpointingLayer), "o_proj, q_proj, up_proj, gate_proj, ..."


def check(model: nn.Module, config: MemSaveConfig, found: Found, replace: bool = False) -> None:
    """Raise a PatchError if ``model`` cannot be patched with ``config``, or, unless ``replace``, has another config."""
    if found.errors:
        raise PatchError(found.errors[0])
    if config.checkpoint is not None:
        refuse_zero3(model, config.checkpoint)
        _refuse_no_rung(found.sites, config, model)
    if config.layers and not is_measuring():  # which may be of fewer layers than a plan is for
        _refuse_more_blocks(model, dict(config.layers))
    if config.linear is not None:
        _refuse_unsampled(found.sites, config.linear, model)
    _refuse_nothing(model)
    _refuse_unseen_batches(model, config)
    _refuse_uncompilable(model, found.sites, config)
    for module, other in [] if replace else found.before:
        if other != config:
            raise PatchError(
                f"this {type(module).__name__} is patched with {_short(other)}, got {_short(config)}: expected the "
                "same again. Call hf_memsave.unpatch(model) first, or hf_memsave.patch(model, ..., replace=True)."
            )


def _refuse_more_blocks(model: nn.Module, layers: dict[str, float]) -> None:
    """Raise if a limit is above the number of blocks, unless ``model`` is a part, of a model that may have as many."""
    is_whole = any(isinstance(module, PreTrainedModel) for module in model.modules())
    count = len(block_numbers(model)) if is_whole else 0
    for kind, number in layers.items():
        if number > count > 0:
            expected = f"at most {counted(count, 'block')}, as {type(model).__name__} has"
            raise PatchError(f"layers[{kind!r}]: expected {expected}, got {number}. Leave it out for all blocks.")


def _names_in(model: nn.Module, paths: tuple[str, ...]) -> list[str]:
    """Return the last path components of modules whose stock class is among ``paths``, sorted."""
    return sorted({name.rpartition(".")[2] for name, m in model.named_modules() if path_of(stock_class(m)) in paths})


def _refuse_no_rung(sites: list[SiteReport], config: MemSaveConfig, model: nn.Module) -> None:
    """Raise if ``checkpoint`` was asked for and no module of ``model`` runs again."""
    asked, blocks = ([site for site in sites if site.op == op] for op in ("run_again", "block"))
    if config.first_blocks("checkpoint") == 0 or any(site.status == "patched" for site in asked):
        return
    cls, option = type(model).__name__, "Leave --checkpoint out."
    if not blocks:
        got, expected = "none", f"repeated blocks in {cls}, whose classes derive from {_BLOCK}"
        expected += "" if config.checkpoint in WHOLE else f", with linears of known names ({_LINEARS})"
        remedy = "Derive the class of your blocks from it, in place of nn.Module, or leave checkpoint out."
        if getattr(model, "supports_gradient_checkpointing", False):
            remedy = "Leave checkpoint out, or turn on the model's own gradient checkpointing in its place."
    elif config.checkpoint in WHOLE:
        expected = f"repeated blocks in {cls} that run their own forward"
        got = f"{blocks[0].name} ({blocks[0].cls}): {blocks[0].reason.partition(';')[0]}"
        remedy = "Build the model without that tool, or with its checkpointing off, or leave checkpoint out."
    else:
        expected = f"linears of a known name in repeated blocks of {cls} ({_LINEARS})"
        got = ", ".join(_names_in(model, RUN_AGAIN)) or "none"
        if asked:
            expected, got = "linears that can run again", f"{asked[0].name} ({asked[0].cls}): {asked[0].reason}"
        remedy = "Use checkpoint='block', which runs whole blocks again, or leave checkpoint out."
        option = "Use --checkpoint block, which runs whole blocks again, or leave it out."
    raise PatchError(f"checkpoint={config.checkpoint!r}: expected {expected}, got {got}.", remedy, option)


def _refuse_unsampled(sites: list[SiteReport], config: WTACRS, model: nn.Module) -> None:
    """Raise if a target of WTACRS is no linear (adapters may come later), or attention to sample is not eager."""
    sampled = [f".{site.name}." for site in sites if site.op == "wta_crs"]
    for target in config.targets or ():
        if target not in ("lora_A", "lora_B") and not any(f".{target}." in path for path in sampled):
            raise PatchError(
                f"WTACRS.targets: expected names of linears of {type(model).__name__}, got {target!r}. "
                f"Choose from {', '.join(_names_in(model, LINEARS))}, or leave targets out for all in repeated blocks."
            )
    if not config.attention:
        return
    found = {name: module for name, module in model.named_modules() if is_attention(stock_class(module))}
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
                f"{name}. Load the model with attn_implementation={NAME!r}, or leave attention=True out."
            )
        if reports[name].status == "skipped":
            raise PatchError(
                f"WTACRS(attention=True): expected to patch {name}, but {reports[name].reason}. Leave attention out."
            )


def _refuse_nothing(model: nn.Module) -> None:
    """Raise for a module that autograd keeps no tensor for: no parameters, no children, and no known activation."""
    is_known = type(model).__module__.startswith("torch.nn.modules") or kind_of(type(model)) is not None
    if not is_known and next(model.parameters(), None) is None and next(model.children(), None) is None:
        raise PatchError(
            f"nothing to patch in {type(model).__name__}: expected a module with parameters or other modules, whose "
            "forward autograd keeps tensors for. Pass the model that you train."
        )


def _refuse_unseen_batches(model: nn.Module, config: MemSaveConfig) -> None:
    """Raise if norms are to be cached by sample, and no Transformers model in ``model`` sees the batch."""
    if config.linear is None or config.linear.cache not in ("sample_idx", "content"):
        return
    if not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        raise PatchError(
            f"WTACRS(cache={config.linear.cache!r}): expected a model of Transformers, which sees the batch, got "
            f"{type(model).__name__}. Use cache='position' or None, or patch the whole model."
        )


def _refuse_uncompilable(model: nn.Module, sites: list[SiteReport], config: MemSaveConfig) -> None:
    """Raise if ``compile`` finds no block, or settings of the compiler change what is kept or drawn again."""
    if not config.compile:
        return
    if not any(site.op == "block" and site.status == "patched" for site in sites):
        expected = f"repeated blocks that run their own forward, whose classes derive from {_BLOCK}"
        reason = f"compile=True: expected {expected}, got {type(model).__name__} without."
        raise PatchError(reason, "Leave compile out, and compile the patched model: torch.compile(model).")
    from hf_memsave.patching.compiled import refuse_other_settings  # which loads the compiler

    refuse_other_settings()


def _short(config: MemSaveConfig) -> str:
    """Describe ``config`` in an error."""
    return f"{config}" if config != MemSaveConfig() else f"{config}, the exact default"
