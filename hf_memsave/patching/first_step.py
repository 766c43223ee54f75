"""What is said of the first training step: a line, or a warning where next to nothing is freed; once.

Where the caller has turned gradient checkpointing on, a ledger counts each block by itself, so that it is known what
the model would keep without. Under reentrant checkpointing, blocks lay a tape only as backward runs them again: there a
ledger waits for each, and the line comes as that backward ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.config.config import WHOLE, MemSaveConfig
from hf_memsave.config.sizes import MIB, gib
from hf_memsave.device import has_numbers
from hf_memsave.logs import is_measuring, logger
from hf_memsave.tape.ledger import Ledger
from hf_memsave.tape.offload import SMALLEST_NBYTES
from hf_memsave.tape.private import after_backward, backward_id, is_concrete

#: Where a module finds the ledger that waits to count its next forward; and a model, that of its first step.
LEDGER, FIRST = "_memsave_ledger", "_memsave_first_step"
#: Parts of what would be kept: a model, or one setting, that frees less is warned of.
_LEAST, _LEAST_OF_ONE = 0.05, 0.01
#: Kinds that are named, and the part of the largest that each is at least.
_TOP, _SMALL = 5, 0.03


def tell(module: nn.Module, step: Ledger, config: MemSaveConfig) -> None:
    """The first forward of ``module`` was counted."""
    if any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in module.modules()):
        step.is_counted, step.uncounted = False, "parts of the model are compiled, and what those keep is theirs"
        return
    parameter = next(module.parameters(), None)
    is_real = parameter is None or (has_numbers(parameter) and is_concrete(parameter))
    is_vain = is_real and _warn_if_in_vain(module, step, config)
    if not module.training or is_measuring() or not is_real or step.told is not None:
        return
    step.told = shape_of(module)
    if step.is_checkpointed_in_stock and not step.blocks:
        _count_blocks(module, step, config)
    elif not is_vain and step.nbytes_stock:
        _say(step, config)


def shape_of(model: nn.Module) -> tuple[int, int]:
    """Of how many modules and trained parameters it is: adapters that are added change it."""
    return sum(1 for _ in model.modules()), sum(p.requires_grad for p in model.parameters())


def _say(step: Ledger, config: MemSaveConfig) -> None:
    logger.info("hf_memsave: %s More: print(hf_memsave.patch(model))", " ".join(sentences(step, config)))


def sentences(step: Ledger, config: MemSaveConfig) -> list[str]:
    """What a step kept, of what, and what freed it, in people's words."""
    rung, again = config.checkpoint, step.nbytes_again
    how = "blocks run again" + (", in tiles" if rung == "tiles" else "")
    runs = how if rung in WHOLE else f"{gib(again)} of products run again" if again else ""
    said = [f"the first step {kept(step)}{_in_brackets(kinds(step, 'avoided'), runs)}."]
    if not step.is_checkpointed_in_stock:
        return said
    free = step.without_checkpointing
    if free is None:
        return [f"gradient checkpointing is on: {said[0]}"]
    ours, stock = step.largest_block
    on = (
        f"gradient checkpointing is on: the first step keeps {gib(step.nbytes_kept)} for backward, and about "
        f"{gib(step.nbytes_kept + ours)} at its peak as a block runs again, where stock would keep "
        f"{gib(step.nbytes_stock)} and {gib(step.nbytes_stock + stock)}."
    )
    if rung in WHOLE:  # what it keeps by itself was not counted
        return [on, f'Set gradient_checkpointing=False: memsave="{rung}" runs blocks again by itself.']
    other, less = ("block", "") if rung else ("gate", ' less, and "block"')
    return [
        on, f"With gradient_checkpointing=False it {kept(free, 'about ')}{_in_brackets(kinds(free, 'avoided'))}, at "
        "its peak too, and no block runs twice: use that where it fits. Else "
        f'memsave="{other}" in place of checkpointing keeps{less} as little as now.',
    ]  # fmt: skip


def _in_brackets(*parts: str) -> str:
    text = "; ".join(filter(None, parts))
    return f" ({text})" if text else ""


def kept(step: Ledger, about: str = "") -> str:
    """What a step keeps, and the part of stock's that this frees."""
    away, more = step.nbytes_offloaded, step.nbytes_kept + step.nbytes_offloaded - step.nbytes_stock
    here = f"keeps {about}{gib(step.nbytes_kept)} for backward" + (f", and {gib(away)} in main memory," if away else "")
    if more > 0:
        return f"{here}, {gib(more)} more than stock"
    return f"{here} where stock would keep {gib(step.nbytes_stock)}: {step.freed_fraction:.0%} freed"


def kinds(step: Ledger, what: str) -> str:
    """Bytes of ``what`` by kind, the most first, without those that are small beside it."""
    found = list(step.by_kind(what).items())[:_TOP]
    return ", ".join(f"{kind} {gib(n)}" for kind, n in found if n >= _SMALL * found[0][1])


# Blocks that the caller runs again


def _count_blocks(model: nn.Module, step: Ledger, config: MemSaveConfig) -> None:
    """Have each block that is checkpointed counted as it runs again, and say all of it then."""
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    for block in blocks:
        block.__dict__[LEDGER] = step.of_block()
    step.to_tell = partial(_tell_blocks, [weakref.ref(block) for block in blocks], step, config)
    if not blocks:
        step.to_tell()


def counts_again(block: nn.Module, ledger: Ledger, given: Iterable[Tensor]) -> bool:
    """Whether ``block``, for which ``ledger`` waits, runs again now; then its count begins."""
    if backward_id() < 0 or ledger.whole is None:
        return False
    block.__dict__.pop(LEDGER, None)
    ledger.leave_out(given)
    if ledger.whole.to_tell is not None:
        after_backward(ledger.whole.to_tell)
        ledger.whole.to_tell = None
    return True


def _tell_blocks(blocks: Iterable[weakref.ref[nn.Module]], step: Ledger, config: MemSaveConfig) -> None:
    for ref in blocks:  # those that have not run again
        if (block := ref()) is not None:
            block.__dict__.pop(LEDGER, None)
    step.blocks = [block for block in step.blocks if block.is_counted]
    _say(step, config)


# Warnings


def _warn_if_in_vain(module: nn.Module, step: Ledger, config: MemSaveConfig) -> bool:
    """Warn of a first step that frees next to nothing, and of settings that cost something and free nothing.

    Returns:
        Whether next to nothing is freed.
    """
    # Where the caller has turned on that blocks run again, they decide what is kept: nothing is said of exact settings.
    model, kept, total = type(module).__name__, step.nbytes_kept, step.nbytes_stock
    is_rerun = step.is_checkpointed_in_stock
    if is_vain := total - kept < _LEAST * total and not is_rerun:
        logger.warning(
            "hf_memsave %s in the first training step of %s: %s stay, most of it %s.",
            f"freed {(total - kept) / total:.1%} of what stock keeps" if kept <= total else
            f"keeps {gib(kept - total)} more than stock", model, gib(kept), kinds(step, "kept"),
        )  # fmt: skip
    kept += step.nbytes_offloaded
    pairs = []
    if config.inexact and not step.is_checkpointed:
        pairs.append((", ".join(config.inexact), kept, step.nbytes_exact, "an exact setting keeps"))
    if config.checkpoint not in (None, *WHOLE) and not is_rerun:
        pairs.append((f'checkpoint="{config.checkpoint}"', kept, kept + step.nbytes_again, "without it it keeps"))
    if config.offload:
        pairs.append(("offload=True", step.nbytes_kept, kept, "without it the device keeps"))
    for what, here, without, words in pairs:
        if without - here < _LEAST_OF_ONE * without:
            logger.warning(
                "hf_memsave: %s frees nothing here: the first training step of %s kept %.2f MiB, and %s %.2f MiB%s. "
                "Leave it out.", what, model, here / MIB, words, without / MIB,
                f" (tensors below {SMALLEST_NBYTES // 1024} KiB stay)" if what.startswith("offload") else
                " (but for what one block takes as it runs again)" if is_rerun else "",
            )  # fmt: skip
    return is_vain
