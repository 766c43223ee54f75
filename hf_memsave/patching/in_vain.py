"""Warnings after the first step, where what was asked for costs exactness or time and frees nothing."""

from __future__ import annotations

from torch import nn
from transformers.utils import logging

from hf_memsave.config import MemSaveConfig
from hf_memsave.sizes import MIB
from hf_memsave.tape.ledger import Ledger
from hf_memsave.tape.offload import SMALLEST_NBYTES

logger = logging.get_logger(__name__)

#: A part of what would be kept; a model that frees less is warned of.
LEAST = 0.05
#: A part of what would be kept without one setting; one that costs something and frees less is warned of.
LEAST_OF_ONE = 0.01


def warn_if_in_vain(module: nn.Module, ledger: Ledger, config: MemSaveConfig) -> None:
    """Say where the bytes are that stay, if most do; and which settings free nothing, with and without them.

    Where blocks run again as a whole, they decide what is kept, and settings what one block takes meanwhile: of those
    that are to be exact nothing is said where the caller has turned that on.

    Args:
        module: The model.
        ledger: Of its first step.
        config: What the model was patched with.
    """
    model, kept, total = type(module).__name__, ledger.nbytes_kept, ledger.nbytes_stock
    is_rerun = ledger.is_checkpointed_in_stock
    if total - kept < LEAST * total and not is_rerun:
        most = ", ".join(f"{name} {n / MIB:.1f} MiB" for name, n in list(ledger.by_function("kept").items())[:3])
        logger.warning(
            "hf_memsave %s in the first training step of %s: %.1f MiB stay, most made by %s.",
            f"freed {(total - kept) / total:.1%} of what stock keeps" if kept <= total else
            f"keeps {(kept - total) / MIB:.2f} MiB more than stock", model, kept / MIB, most,
        )  # fmt: skip
    kept += ledger.nbytes_offloaded
    pairs = []
    if config.inexact and not ledger.is_checkpointed:
        pairs.append((", ".join(config.inexact), kept, ledger.nbytes_exact, "an exact setting keeps"))
    if config.checkpoint not in (None, "block") and not is_rerun:
        pairs.append((f'checkpoint="{config.checkpoint}"', kept, kept + ledger.nbytes_again, "without it it keeps"))
    if config.offload:
        pairs.append(("offload=True", ledger.nbytes_kept, kept, "without it the device keeps"))
    for what, here, without, words in pairs:
        if without - here < LEAST_OF_ONE * without:
            logger.warning(
                "hf_memsave: %s frees nothing here: the first training step of %s kept %.2f MiB, and %s %.2f MiB%s. "
                "Leave it out.", what, model, here / MIB, words, without / MIB,
                f" (tensors below {SMALLEST_NBYTES // 1024} KiB stay)" if what.startswith("offload") else
                " (but for what one block takes as it runs again)" if is_rerun else "",
            )  # fmt: skip
