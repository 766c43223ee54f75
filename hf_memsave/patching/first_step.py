"""The log of the first training step: one line, or a warning where next to nothing is freed.

Not counted is what blocks keep while the caller's gradient checkpointing runs them again.
"""

from __future__ import annotations

from torch import nn

from hf_memsave.config.config import WHOLE, MemSaveConfig
from hf_memsave.config.sizes import gib
from hf_memsave.device import has_numbers
from hf_memsave.logs import is_measuring, logger
from hf_memsave.tape.ledger import SELECTED, Ledger
from hf_memsave.tape.offload import SMALLEST_NBYTES
from hf_memsave.tape.private import is_concrete

#: Attributes of a model: the ledger that waits to count its next forward, and the ledger of its first step.
LEDGER, FIRST = "_memsave_ledger", "_memsave_first_step"
#: Fractions of what would be kept: a warning tells of a model, or of one setting, that frees less.
_LEAST, _LEAST_OF_ONE = 0.05, 0.01
#: The fraction of what stock would keep that counts as nothing.
_ROUNDS = 0.005
#: Most steps of a model that are counted, one for each set of parameters that it trains.
_MOST = 8
#: Most kinds that are listed, and the least fraction of the largest for each.
_TOP, _SMALL = 5, 0.03


def tell(module: nn.Module, step: Ledger, config: MemSaveConfig) -> None:
    """Log what ``step``, the counted first forward of ``module``, kept; if parts are compiled, mark it uncounted."""
    if any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in module.modules()):
        step.is_counted, step.uncounted = False, "parts of the model are compiled, and what those keep is theirs"
        return
    parameter = next(module.parameters(), None)
    step.is_on_cpu = parameter is not None and parameter.device.type == "cpu"
    is_real = parameter is None or (has_numbers(parameter) and is_concrete(parameter))
    is_vain = is_real and _warn_if_in_vain(module, step, config)
    if is_measuring() or not is_real:
        return
    if not module.training:
        logger.info(
            "the model is in eval mode: dropout is off, and no block runs again. Before you train: model.train()."
        )
        return
    step.told.append(trained_in(module))
    if step.told[-1] not in step.told[:-1] and not is_vain and step.nbytes_stock:
        logger.info("hf_memsave: %s More: print(hf_memsave.report(model))", sentence(step, config))


def trained_in(model: nn.Module) -> int:
    """Return a hash that changes when parameters of ``model`` are frozen, unfrozen, or added with adapters."""
    modules, parameters = list[nn.Module | None]([model]), list[nn.Parameter | None]()
    for module in modules:  # which grows: ``model.parameters()`` takes ten times as long
        if module is not None:
            modules += module._modules.values()
            parameters += module._parameters.values()
    return hash(tuple([p is not None and p.requires_grad for p in parameters]))


def waiting(module: nn.Module, trained: int) -> Ledger | None:
    """Return the ledger that waits for the next forward of ``module``: the first step's again, if others train now."""
    own = module.__dict__
    ledger, step = own.get(LEDGER), own.get(FIRST)
    if ledger is None and step is not None and 0 < len(step.told) < _MOST and module.training and not is_measuring():
        if trained not in step.told:
            vars(step).update(vars(Ledger()), told=step.told)
            ledger = own[LEDGER] = step
    return ledger


def sentence(step: Ledger, config: MemSaveConfig) -> str:
    """Describe in a sentence what a step kept for backward, of how much in stock, and what freed the rest."""
    rung, again = config.checkpoint, step.nbytes_recomputed
    whole = ("blocks run again" + ", MLPs in rows" * (rung == "tiles")) * _runs_blocks_again(step)
    runs = whole if rung in WHOLE else f"{gib(again)} of products run again" if again else ""
    first = "the first step" if len(step.told) < 2 else "the first step that trains other parameters"
    unless = "" if rung == "tiles" or config.compile else ", but not with loss='stock'"
    chunks = f"the loss ran in chunks, so last bits may differ{unless}" if step.is_loss_chunked else ""
    how = "; ".join(filter(None, ("" if step.uncounted else kinds(step, "avoided"), runs, chunks)))
    unknown = f"; what stock would keep is not counted: {step.uncounted}" if step.uncounted else ""
    said = f"{first} {kept(step)}{f' ({how})' if how else ''}{unknown}"
    if not step.is_checkpointed_in_stock:
        return f"{said}."
    moved = f" and moves {gib(step.nbytes_moved)} to main memory" if step.nbytes_moved else ""
    return f"gradient checkpointing is on{moved}: {said}."


def _runs_blocks_again(step: Ledger) -> bool:
    return step.is_checkpointed or step.is_checkpointed_in_stock


def advice(step: Ledger, config: MemSaveConfig) -> list[str]:
    """Advise on gradient checkpointing where the caller has turned it on."""
    also = ", with offload=True," if step.nbytes_moved and not config.offload else ""
    more = "" if SELECTED in step.kept else "more is kept and "  # chosen products may be more than all that we keep
    said = f'checkpoint="block"{also} in its place keeps no more; with neither, {more}no block runs twice'
    if config.checkpoint in WHOLE:
        said = f'leave it out{also or ","} as memsave="{config.checkpoint}" runs blocks again already'
    return [f"gradient checkpointing: {said}"] * step.is_checkpointed_in_stock


def kept(step: Ledger) -> str:
    """Describe the bytes that a step keeps, and the fraction of stock's that is freed."""
    away, stock = step.nbytes_offloaded, step.nbytes_stock
    where = "in main memory" + " (which on a CPU is the device's own)" * step.is_on_cpu
    more, here = step.nbytes_kept + away - stock, gib(step.nbytes_kept) if step.nbytes_kept else "nothing"
    here = f"keeps {here} for backward" + (f", and {gib(away)} {where}," if away else "")
    if step.uncounted:
        return here.removesuffix(",")
    if not away and abs(more) <= _ROUNDS * stock:
        return f"{here} as stock does"
    if more > 0:
        return f"{here}, {gib(more)} more than stock"
    return f"{here} where stock would keep {gib(stock)}: {step.freed_fraction:.0%} freed"


def kinds(step: Ledger, what: str) -> str:
    """List the bytes of ``what`` (``"kept"``, ``"avoided"``, ...) by kind, the largest first, without small kinds."""
    found = list(step.by_kind(what).items())[:_TOP]
    return ", ".join(f"{kind} {gib(n)}" for kind, n in found if n >= _SMALL * found[0][1])


# Warnings


def _warn_if_in_vain(module: nn.Module, step: Ledger, config: MemSaveConfig) -> bool:
    """Warn of settings that cost something and free nothing; return whether the first step frees next to nothing."""
    # The caller's gradient checkpointing, where it is on, decides what is kept: no exact setting is warned of.
    model, kept, total = type(module).__name__, step.nbytes_kept, step.nbytes_stock
    is_rerun, rung = step.is_checkpointed_in_stock, config.checkpoint
    if step.uncounted:
        return False
    freed = step.freed_fraction
    if module.training and rung in WHOLE and config.first_blocks("checkpoint") != 0 and not _runs_blocks_again(step):
        logger.warning(
            'hf_memsave: checkpoint="%s" ran no block of %s again in the first training step, as none does in a call '
            "that asks for a KV cache (use_cache=False asks for none) or brings one, or in eval mode.", rung, model,
        )  # fmt: skip
    if is_vain := total - kept < _LEAST * total and not is_rerun:
        logger.warning(
            "hf_memsave %s in the first training step of %s: %s stay, most of it %s.",
            f"keeps {gib(kept - total)} more than stock" if kept - total > _ROUNDS * total else
            f"freed {f'{freed:.1%}' if freed >= _ROUNDS else 'nothing'} of what stock keeps", model, gib(kept),
            kinds(step, "kept"),
        )  # fmt: skip
    rung = None if rung in WHOLE or is_rerun else rung
    small = f" (tensors below {SMALLEST_NBYTES // 1024} KiB stay)"
    costs = [(f'checkpoint="{rung}"', step.nbytes_recomputed, "")] if rung else []
    costs += [("offload=True", step.nbytes_offloaded, small)] if config.offload else []
    for what, less, reason in costs:
        if less < _LEAST_OF_ONE * (kept + less):
            logger.warning(
                "hf_memsave: %s frees nothing here: the first training step of %s keeps %s, and %s without it%s. "
                "Leave it out.", what, model, gib(kept), gib(kept + less), reason,
            )  # fmt: skip
    return is_vain
