"""``memsave verify``: one training step of your own model and batch, stock and patched, compared to the bit."""

from __future__ import annotations

import argparse
import contextlib
import sys

from rich import box
from rich.table import Table

from hf_memsave.commands.arguments import memsave_in_words, memsave_of
from hf_memsave.commands.inputs import load_inputs
from hf_memsave.commands.options import DTYPES, GIVE_ANOTHER_BATCH, console_of, freed, write_figures
from hf_memsave.commands.progress import progress
from hf_memsave.config.sizes import gib
from hf_memsave.errors import CommandError
from hf_memsave.measure import step


def run(args: argparse.Namespace) -> int:
    """Load, compare and print; return 0, or 1 if the patched step fails, or differs by more than allowed."""
    memsave, console = memsave_of(args), console_of(args)
    try:
        with step.deterministic_kernels() if args.deterministic else contextlib.nullcontext():
            model, batch, title = load_inputs(args, console)
            with progress(console, "Running ..."):
                found = step.compare_step(model, batch, memsave, autocast=DTYPES.get(args.autocast))
    except step.StockStepError as error:
        without = " Leave --deterministic out if an op has no deterministic algorithm." if args.deterministic else ""
        raise CommandError(f"{error} {GIVE_ANOTHER_BATCH}{without}") from error
    except step.PatchedStepError as error:
        print(f"memsave verify: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    size = sum(p.numel() for p in model.parameters())
    context = [f"preset {memsave_in_words(args)}", f"{size / 1e6:,.1f} M parameters", args.device]
    context += ["bf16 autocast"] * bool(args.autocast) + ["deterministic algorithms"] * args.deterministic
    console.print(title, style="bold")
    verdict, causes = _verdict(found)
    console.print(", ".join(context), *_tables(found), verdict, sep="\n")
    figures = {name: getattr(found, name) for name in ("losses", "repeat", "tolerance", "loss", "gradients")}
    figures |= {"model": args.model, "memsave": memsave.to_dict(), "agrees": not found.differing}
    for name, kept in (("stock", found.stock), ("patched", found.patched)):
        figures[name] = {"total": kept.total, "by_kind": kept.by_kind}
    write_figures(args.json, figures, console)
    if found.differing:
        causes = causes if memsave.is_exact else f"preset {memsave_in_words(args)} has approximate gradients."
        print(f"memsave verify: {causes}", file=sys.stderr)
    return int(bool(found.differing))


def _tables(found: step.StepComparison) -> list[Table]:
    table = Table("", "stock", "patched", "", box=box.SIMPLE_HEAD)
    table.add_row("loss", *(f"{loss:.7g}" for loss in found.losses), str(found.loss))
    different = sorted((d for d in found.gradients if not d.equal), key=lambda d: -d.relative)
    count = len(found.gradients)
    table.add_row("gradients", "", "", f"{count - len(different)} of {count} equal to the bit")
    stock, patched = found.stock.total, found.patched.total
    table.add_row("kept for backward", gib(stock), gib(patched), freed(stock, patched, " freed"))
    worst = Table("worst gradients", "relative L2 distance", box=box.SIMPLE_HEAD)
    for difference in different[:5]:
        worst.add_row(difference.name, str(difference))
    return [table, worst] if different else [table]


def _verdict(found: step.StepComparison) -> tuple[str, str]:
    """Return how the steps compare, in a sentence, and what may have caused a difference."""
    limit, count, expected, order = f"{found.tolerance:.1e}", len(found.gradients), "equal bits", ""
    if found.reordered:
        expected = f"less than {limit}, as sums in another order give"
        order = f"{found.reordered} in another order, in fp32. The loss is {found.loss}."
    elif found.tolerance:
        expected = f"less than {limit}, {step.DISTANCES} times stock's own distance from itself"
        order = f"kernels add in no fixed order, and stock run twice differs from itself by up to {found.repeat:.1e}; "
        order += f"{step.DISTANCES} times that is allowed. --deterministic demands equal bits."
    if all(d.equal for d in (found.loss, *found.gradients)):
        return f"Equal to the last bit: the loss and all {count} gradients.", ""
    if not found.differing:
        return f"Equal within {limit}: {order}", ""
    worst, has_loss = found.differing[0], found.loss in found.differing
    causes = (
        f"{worst.name} differs by {worst}; expected {expected}. Last bits differ under autocast where docs/limits.md "
        "says so (What is exact). Else look for code in the model that writes to an activation unseen by PyTorch, as "
        "in C++: hf_memsave cannot see that, and what it computes again from that activation is then wrong. Write "
        "with torch, or to a copy. Otherwise please report this, with the versions that `memsave doctor` prints."
    )
    return f"Different: {len(found.differing) - has_loss} of {count} gradients{' and the loss' * has_loss}.", causes
