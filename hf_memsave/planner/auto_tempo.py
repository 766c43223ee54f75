"""Auto-Tempo: list settings of what to convert in a model, try them on one batch, and take the best that fits.

:func:`smart` tries nothing, everything and each kind alone; then, from everything, fewer blocks of one kind after
another, beginning with the kind that frees the fewest bytes for a second that it adds.

Source: Andoorveedu et al. (2022), arXiv:2210.10246, section 5.2.
"""

from __future__ import annotations

import functools
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from hf_memsave.arch.sites import kind_of
from hf_memsave.config.config import KINDS, MemSaveConfig, MemSaveLike
from hf_memsave.config.sizes import gib
from hf_memsave.config.wtacrs import is_int
from hf_memsave.errors import PlanError
from hf_memsave.measure.step import left_as_it_was
from hf_memsave.patching.blocks import block_at, block_numbers
from hf_memsave.patching.patch import patch, unpatch
from hf_memsave.planner.trial import Bench, Plan, Timer, Trial, median_seconds

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: The share of a step by which two equal times may differ.
_NOISE = 1e-3


def fast(
    model: nn.Module, batch: Mapping[str, Any], config: MemSaveLike = True, memory: int | str | None = None, *,
    forward: Callable[..., Any] | None = None, optimizer_bytes: int = 8, max_batch: int | None = None,
    timer: Timer = median_seconds,
) -> Plan:  # fmt: skip
    """Convert everything, if the larger batch that then fits trains more sequences a second than stock's largest.

    Args:
        model: A stock model, tried in training mode, and stock after an error; returns a loss or ``{"loss": ...}``.
        batch: Its keyword arguments: tensors ``[batch, ...]`` on its device, which other sizes repeat or cut.
        config: As for :func:`hf_memsave.patch`.
        memory: The limit for :class:`Trial`'s ``needed``, in bytes or as "16GiB"; transients of backward do not count.
            None, on CUDA, for nine tenths of what the device has left.
        forward: Called instead of ``model``, for a loss of your own or autocast.
        optimizer_bytes: Bytes of the optimizer's states for each trained number (AdamW: two of four bytes).
        max_batch: The largest batch to try; None for no limit but memory.
        timer: Called with a step to run, once or more; returns the seconds of one.

    Returns:
        The plan; the model is patched with its config, or stock.

    Raises:
        PlanError: The model is patched already, or not one sequence fits, or the batch has no loss.
        PatchError: The model cannot be patched.
        ConfigError: ``config`` names a preset, field or value that does not exist.
    """
    if max_batch is not None and not (is_int(max_batch) and max_batch > 0):
        raise PlanError(f"max_batch: expected a whole number from 1, or None, got {max_batch!r}. Leave it out.")
    bench = Bench(model, batch, config, memory, forward, optimizer_bytes, timer)
    with left_as_it_was(model):
        stock = bench.largest("nothing", max_batch or sys.maxsize)
        patch(model, bench.config)
        converted = bench.largest("everything", max_batch or sys.maxsize)
        few, many = stock.batch_size, converted.batch_size
        if not many:
            raise PlanError(
                f"not one sequence fits with everything converted: expected at most {gib(bench.memory)}, of which "
                f"{gib(bench.fixed)} are for parameters, gradients and the optimizer. Use shorter sequences, a preset "
                "that keeps less, gradient checkpointing, or more memory."
            )
        pays = many > few
        if not few:
            reason = f"Stock, not one sequence fits; converted, {many} do"
        elif not pays:
            reason = f"Converted, no more sequences fit than stock's {few}"
        else:
            rate = many / bench.seconds(converted)
            unpatch(model)
            stock_rate = few / bench.seconds(stock)
            pays = rate > stock_rate
            reason = f"Converted, {rate:.4g} sequences a second at a batch of {many}; stock, {stock_rate:.4g} at {few}"
    if pays:
        return bench.plan(bench.config, many, f"{reason}: everything is converted.")
    return bench.plan(None, few, f"{reason}: the model stays stock.")


def smart(
    model: nn.Module, batch: Mapping[str, Any], config: MemSaveLike = True, memory: int | str | None = None, *,
    forward: Callable[..., Any] | None = None, optimizer_bytes: int = 8, timer: Timer = median_seconds,
) -> Plan:  # fmt: skip
    """Convert as few blocks of each kind (activation, norm, dropout, attention, lora) as it takes for ``batch`` to fit.

    Arguments and errors are those of :func:`fast`; ``layers`` of ``config`` are the most that is converted.

    Returns:
        The plan; the model is patched with its config, which says how many blocks in ``layers``, or stock.

    Raises:
        PlanError: The batch does not fit with everything converted.
    """
    bench = Bench(model, batch, config, memory, forward, optimizer_bytes, timer)
    with left_as_it_was(model):
        stock = bench.count("nothing", bench.batch_size)
        reason, limit = f"Stock needs {gib(stock.needed)}", gib(bench.memory)
        if stock.fits:
            return bench.plan(None, stock.batch_size, f"{reason} and fits in {limit}: the model stays stock.")
        steps = _steps(bench.config, model)
        most = {kind: numbers[-1] for kind, numbers in steps.items()}

        @functools.cache  # none is counted twice
        def tried(**blocks: int) -> Trial:
            patch(model, _limited(bench.config, blocks), replace=True)
            return bench.count("everything" if blocks == most else _words(blocks), stock.batch_size)

        if not (everything := tried(**most)).fits:
            raise PlanError(
                f"a batch of {stock.batch_size} does not fit: expected at most {limit}, got {gib(everything.needed)} "
                f"with everything converted (stock {gib(stock.needed)}). Use a smaller batch, a preset that keeps "
                "less, gradient checkpointing, or more memory."
            )
        worth = dict.fromkeys(steps, 0.0)  # the bytes that each kind frees alone for a second that it adds
        if len(steps) > 1:
            unpatch(model)
            seconds = bench.seconds(stock)
            for kind in steps:
                alone = tried(**{**dict.fromkeys(steps, 0), kind: most[kind]})
                worth[kind] = (stock.kept - alone.kept) / max(bench.seconds(alone) - seconds, _NOISE * seconds)
        counts = dict(most)
        for kind in sorted(steps, key=worth.__getitem__):

            def fits(number: int, kind: str = kind) -> bool:  # the last number does
                return tried(**{**counts, kind: number}).fits

            counts[kind] = steps[kind][bisect_left(steps[kind][:-1], True, key=fits)]
    reason += f"; with {_words(counts)} converted it fits in {limit}."
    return bench.plan(_limited(bench.config, counts), stock.batch_size, reason)


def _limited(config: MemSaveConfig, blocks: Mapping[str, int]) -> MemSaveConfig:
    return replace(config, layers={**dict(config.layers or ()), **blocks})


def _words(blocks: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in blocks.items() if number) or "other sites alone"


def _steps(config: MemSaveConfig, model: nn.Module) -> dict[str, list[int]]:
    """List for each kind of module in ``model`` the numbers of blocks, from 0, at which ``config`` converts more."""
    numbers, found = block_numbers(model), {kind: {0} for kind in KINDS}
    for name, module in model.named_modules():
        # Of torch.nn.functional.dropout there is only a number.
        rates = [rate for field, rate in vars(module).items() if "dropout" in field and isinstance(rate, float)]
        rates += [module.p] if isinstance(module, _DROPOUTS) else []
        kinds = {kind_of(type(module)), "dropout" if max(rates, default=0) > 0 else None}
        for kind in KINDS:
            if kind in kinds and config.converts(kind, block := block_at(name, numbers) or 0):
                found[kind].add(block + 1)
    if config.linear is not None and config.linear.attention:
        found["attention"].clear()  # its products are sampled in every block
    return {kind: sorted(blocks) for kind, blocks in found.items() if len(blocks) > 1}
