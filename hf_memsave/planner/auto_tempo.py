"""Auto-Tempo: find out by trial what to convert in a model, for one batch and one memory limit.

:func:`fast` asks whether converting everything pays: does the larger batch that then fits train more sequences a
second? :func:`smart` keeps the batch, and converts only as many blocks of each kind as it takes to fit.

Memory is counted, not sampled: the bytes kept between forward and backward, parameters and buffers, and for each number
that is trained its gradient and the optimizer's state. What backward computes and drops again is not counted.

Source: Andoorveedu et al. (2022), arXiv:2210.10246, section 5.2.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_memsave.arch import kind_of
from hf_memsave.config.config import KINDS, MemSaveConfig, MemSaveLike
from hf_memsave.config.sizes import gib, html_table
from hf_memsave.config.wtacrs import is_int
from hf_memsave.errors import PlanError
from hf_memsave.measure.step import left_as_it_was
from hf_memsave.patching.blocks import block_numbers, number_of
from hf_memsave.patching.patch import PatchReport, patch, unpatch
from hf_memsave.patching.swap import is_patched, stock_class
from hf_memsave.planner.trial import Bench, Timer, Trial, limit_of, median_seconds

#: The share of a step below which two times are the same.
_NOISE = 1e-3
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True, repr=False)
class Plan:
    """What :func:`fast` or :func:`smart` found, and what was done: prints as a table."""

    config: MemSaveConfig | None  # what the model is patched with now; None if it was left stock
    batch_size: int  # sequences in the batch that it is for
    memory: int  # the limit in bytes
    reason: str  # why, in one sentence
    trials: tuple[Trial, ...]  # all that were tried, in order
    report: PatchReport | None = None  # of the patched model; None if it was left stock

    @property
    def converted(self) -> bool:
        """Whether anything in the model was converted."""
        return self.config is not None

    def _rows(self) -> list[list[str]]:
        rows = [["converted", "batch", "kept", "needed", "seconds", ""]]
        for t in self.trials:
            seconds, fits = "" if t.seconds is None else f"{t.seconds:.4f}", "fits" if t.fits else "too much"
            rows.append([t.name, str(t.batch_size), gib(t.kept), gib(t.needed), seconds, fits])
        return rows

    def __repr__(self) -> str:
        return f"<Plan for a batch of {self.batch_size} in {gib(self.memory)}: {self.reason}>"

    def __str__(self) -> str:
        lines = [f"{name:<48} {n:>6} {kept:>12} {needed:>12} {seconds:>8} {fits}".rstrip()
                 for name, n, kept, needed, seconds, fits in self._rows()]  # fmt: skip
        return "\n".join([*lines, self.reason])

    def _repr_html_(self) -> str:
        return html_table(f"Auto-Tempo in {gib(self.memory)}", self._rows(), [self.reason])


def fast(
    model: nn.Module, batch: Mapping[str, Any], config: MemSaveLike = True, memory: int | str | None = None, *,
    forward: Callable[..., Any] | None = None, optimizer_bytes: int = 8, max_batch: int | None = None,
    timer: Timer = median_seconds,
) -> Plan:  # fmt: skip
    """Convert everything, if the larger batch that then fits trains more sequences a second than stock's largest.

    Batches of other sizes repeat or cut the sequences of ``batch``. All but what is converted stays as it is, and on an
    error the model stays stock.

    Args:
        model: Stock; it is tried in training mode. Returns a mapping with a ``"loss"``, or the loss.
        batch: Its keyword arguments; tensors are ``[batch, ...]``, on its device.
        config: As for :func:`hf_memsave.patch`.
        memory: The limit, in bytes or as "16GiB". None, on CUDA, for nine tenths of what the device has left.
        forward: Called instead of ``model``, for a loss of your own or autocast.
        optimizer_bytes: Of the optimizer's state, for each number that is trained (AdamW: two of four bytes).
        max_batch: The largest batch to try; None for no limit but memory.
        timer: Called with a step to run, once or more; returns the seconds of one.

    Returns:
        The plan; the model is patched with its config, or stock.

    Raises:
        PlanError: The model is patched already, or not one sequence fits, or the batch has no loss.
        PatchError: The model cannot be patched.
        ConfigError: ``config`` names a preset, field or value that does not exist.
    """
    resolved, limit = _asked(model, config), limit_of(memory, model)
    if max_batch is not None and not (is_int(max_batch) and max_batch > 0):
        raise PlanError(f"max_batch: expected a whole number from 1, or None, got {max_batch!r}. Leave it out.")
    with left_as_it_was(model) as start_over:
        start_over()
        bench = Bench(model, batch, limit, forward, optimizer_bytes, timer)
        stock = bench.largest("nothing", max_batch or sys.maxsize)
        patch(model, resolved)
        converted = bench.largest("everything", max_batch or sys.maxsize)
        if converted is None:
            raise PlanError(
                f"not one sequence fits with everything converted: expected at most {gib(limit)}, of which "
                f"{gib(bench.fixed)} are for parameters, gradients and the optimizer. Use shorter sequences, a preset "
                "that keeps less, gradient checkpointing, or more memory."
            )
        size, most = converted.batch_size, 0 if stock is None else stock.batch_size
        pays = size > most
        if stock is None:
            reason = f"Stock, not one sequence fits; converted, {size} do"
        elif not pays:
            reason = f"Converted, no more sequences fit than stock's {most}"
        else:
            rate = size / bench.seconds(converted)
            unpatch(model)
            stock_rate = most / bench.seconds(stock)
            pays = rate > stock_rate
            reason = f"Converted, {rate:.4g} sequences a second at a batch of {size}; stock, {stock_rate:.4g} at {most}"
    trials = tuple(bench.trials)
    if not pays:
        return Plan(None, most, limit, f"{reason}: the model stays stock.", trials)
    return Plan(resolved, size, limit, f"{reason}: everything is converted.", trials, patch(model, resolved))


def smart(
    model: nn.Module, batch: Mapping[str, Any], config: MemSaveLike = True, memory: int | str | None = None, *,
    forward: Callable[..., Any] | None = None, optimizer_bytes: int = 8, timer: Timer = median_seconds,
) -> Plan:  # fmt: skip
    """Convert as few blocks of each kind (activation, norm, dropout, attention, lora) as it takes for ``batch`` to fit.

    Each kind is first tried alone, for the bytes it frees and the seconds it adds. Then, from everything converted and
    beginning with the kind that frees the fewest bytes a second, bisection finds the fewest blocks of that kind that
    still fit. Arguments and errors are those of :func:`fast`; ``layers`` of ``config`` are the most that is converted.

    Returns:
        The plan; the model is patched with its config, which says how many blocks in ``layers``, or stock.
    """
    resolved, limit = _asked(model, config), limit_of(memory, model)
    with left_as_it_was(model) as start_over:
        start_over()
        bench = Bench(model, batch, limit, forward, optimizer_bytes, timer)
        counts = _fewest(bench, resolved)
    trials, reason = tuple(bench.trials), f"Stock needs {gib(bench.trials[0].needed)}"
    if counts is None:
        return Plan(None, bench.batch_size, limit, f"{reason} and fits in {gib(limit)}: the model stays stock.", trials)
    found = _with_layers(resolved, counts)
    reason += f"; with {_words(counts)} converted it fits in {gib(limit)}."
    return Plan(found, bench.batch_size, limit, reason, trials, patch(model, found))


def _fewest(bench: Bench, config: MemSaveConfig) -> dict[str, int] | None:
    """Blocks to convert of each kind; None if stock fits."""
    model, stock = bench.model, bench.count("nothing")
    if stock.fits:
        return None
    steps = _steps(config, model)
    patch(model, config)
    everything = bench.count("everything")
    if not everything.fits:
        raise PlanError(
            f"a batch of {bench.batch_size} does not fit: expected at most {gib(bench.memory)}, got "
            f"{gib(everything.needed)} with everything converted (stock {gib(stock.needed)}). Use a smaller batch, "
            "a preset that keeps less, gradient checkpointing, or more memory."
        )
    counts = {kind: numbers[-1] for kind, numbers in steps.items()}
    known = {tuple(counts.values()): everything}  # none is counted twice

    def tried(asked: dict[str, int]) -> Trial:
        key = tuple(asked.values())
        if key not in known:
            patch(model, _with_layers(config, asked), replace=True)
            known[key] = bench.count(_words(asked))
        return known[key]

    worth = dict.fromkeys(steps, 0.0)  # the bytes that each kind frees alone for a second that it adds
    if len(steps) > 1:
        unpatch(model)
        seconds = bench.seconds(stock)
        for kind in steps:
            trial = tried({other: number if other == kind else 0 for other, number in counts.items()})
            worth[kind] = (stock.kept - trial.kept) / max(bench.seconds(trial) - seconds, _NOISE * seconds)
    for kind in sorted(steps, key=lambda kind: worth[kind]):

        def fits(number: int, kind: str = kind) -> bool:  # the last number does
            return tried({**counts, kind: number}).fits

        counts[kind] = steps[kind][bisect_left(steps[kind][:-1], True, key=fits)]
    return counts


def _with_layers(config: MemSaveConfig, counts: Mapping[str, int]) -> MemSaveConfig:
    return replace(config, layers={**dict(config.layers or ()), **counts})


def _asked(model: nn.Module, config: Any) -> MemSaveConfig:
    if any(is_patched(module) for module in model.modules()):
        raise PlanError(
            f"expected a stock {type(model).__name__}, got one that is patched already. Call hf_memsave.unpatch(model) "
            "first, or load it without memsave=."
        )
    resolved = MemSaveConfig.resolve(config)
    if resolved is None:
        raise PlanError(f"config: expected something to convert, got {config!r}. Use config=True.")
    return resolved


def _steps(config: MemSaveConfig, model: nn.Module) -> dict[str, list[int]]:
    """For each kind of module in ``model``: at how many blocks ``config`` converts more of it, from 0."""
    numbers = block_numbers(model)
    found: dict[str, set[int]] = {}
    for name, module in model.named_modules():
        block = number_of(name, numbers)
        for kind in _kinds_of(module):
            if config.converts(kind, block):
                found.setdefault(kind, {0}).add(block + 1)
    if config.linear is not None and config.linear.attention:
        found.pop("attention", None)  # its products are sampled in every block
    return {kind: sorted(found[kind]) for kind in KINDS if kind in found}


def _kinds_of(module: nn.Module) -> set[str]:
    """The kinds that a module is of: dropout too where it is only a number, for ``torch.nn.functional.dropout``."""
    drops = any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
    is_dropout = drops or (isinstance(module, _DROPOUTS) and module.p > 0)
    return {kind for kind in (kind_of(stock_class(module)), "dropout" if is_dropout else None) if kind}


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in counts.items() if number) or "other sites alone"
