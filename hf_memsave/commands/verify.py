"""``memsave verify``: one training step of your own model and batch, stock and patched, compared to the bit."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import asdict

from rich import box
from rich.table import Table

from hf_memsave.commands.arguments import memsave_in_words, memsave_of
from hf_memsave.commands.inputs import load_inputs
from hf_memsave.commands.options import DTYPES, GIVE_ANOTHER_BATCH, console_of, write_figures
from hf_memsave.config.sizes import gib
from hf_memsave.errors import CommandError
from hf_memsave.measure import step

_WORST = 5


def run(args: argparse.Namespace) -> int:
    """Load, compare and print; returns 0, or 1 if the patched step fails, or differs by more than allowed."""
    memsave, console = memsave_of(args), console_of(args)
    try:
        with step.deterministic_kernels() if args.deterministic else contextlib.nullcontext():
            model, batch, title = load_inputs(args, console, may_shrink=True)
            with console.status("Running ..."):
                found = step.compare_step(model, batch, memsave, autocast=DTYPES.get(args.autocast))
    except step.StockStepError as error:
        without = " Leave --deterministic out if an op has no such algorithm." if args.deterministic else ""
        raise CommandError(f"{error} {GIVE_ANOTHER_BATCH}{without}") from error
    except step.PatchedStepError as error:
        print(f"memsave verify: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    size = sum(p.numel() for p in model.parameters())
    context = [f"preset {memsave_in_words(args)}", f"{size / 1e6:,.1f} M parameters", args.device]
    context += ["bf16 autocast"] * bool(args.autocast) + ["deterministic algorithms"] * args.deterministic
    console.print(title, style="bold")
    console.print(", ".join(context), *_tables(found), _verdict(found), sep="\n")
    figures = {name: getattr(found, name) for name in ("losses", "repeat", "tolerance")}
    figures |= {"model": args.model, "memsave": memsave.to_dict(), "agrees": not found.differing}
    figures |= {"loss": asdict(found.loss), "gradients": [asdict(one) for one in found.gradients]}
    for name, kept in (("stock", found.stock), ("patched", found.patched)):
        figures[name] = {"total": kept.total, "by_kind": kept.by_kind}
    write_figures(args.json, figures, console)
    if found.differing:
        why = _causes(found) if memsave.is_exact else f"preset {memsave_in_words(args)} has approximate gradients."
        print(f"memsave verify: {why}", file=sys.stderr)
    return int(bool(found.differing))


def _tables(found: step.StepComparison) -> list[Table]:
    table = Table("", "stock", "patched", "", box=box.SIMPLE_HEAD)
    table.add_row("loss", *(f"{loss:.7g}" for loss in found.losses), _distance(found.loss))
    different = sorted((d for d in found.gradients if not d.equal), key=lambda d: -d.relative)
    count = len(found.gradients)
    table.add_row("gradients", "", "", f"{count - len(different)} of {count} equal to the bit")
    stock, patched = found.stock.total, found.patched.total
    table.add_row("kept", gib(stock), gib(patched), f"{stock / max(patched, 1):.2f}x less")
    worst = Table("worst gradients", "relative L2 distance", box=box.SIMPLE_HEAD)
    for difference in different[:_WORST]:
        worst.add_row(difference.name, _distance(difference))
    return [table, worst] if different else [table]


def _verdict(found: step.StepComparison) -> str:
    if all(d.equal for d in (found.loss, *found.gradients)):
        return f"Equal to the last bit: the loss and all {len(found.gradients)} gradients."
    if found.differing:
        loss = found.loss in found.differing
        gradients = f"{len(found.differing) - loss} of {len(found.gradients)} gradients"
        return f"Different: {gradients}{' and the loss' * loss}."
    if found.is_tiled:
        return (
            f"Equal within {found.tolerance:.1e}: modules that run in rows sum the gradients of weights, in fp32, in "
            f"another order than stock. The loss is {_distance(found.loss)}."
        )
    return (
        f"Equal within {found.tolerance:.1e}: kernels add in no fixed order, and stock run twice differs from itself "
        f"by up to {found.repeat:.1e}, of which {step.DISTANCES} times are allowed. --deterministic asks for equal "
        "bits."
    )


def _causes(found: step.StepComparison) -> str:
    worst, expected = found.differing[0], "equal bits"
    if found.is_tiled:
        expected = f"less than {found.tolerance:.1e}, as of sums in another order"
    elif found.tolerance:
        expected = f"less than {found.tolerance:.1e}, {step.DISTANCES} times stock's own distance from itself"
    return (
        f"{worst.name} differs by {worst.relative:.1e}; expected {expected}. Look first for code in the model that "
        "writes to an activation through NumPy or a pointer: nothing can see that, and what is computed again from "
        "that activation is then wrong. Write with torch, or to a copy. Under autocast, bits may also differ where "
        "docs/limits.md says so (What is exact). Otherwise please report this, with the versions that `memsave doctor` "
        "prints."
    )


def _distance(difference: step.Difference) -> str:
    return "equal to the bit" if difference.equal else f"{difference.relative:.1e}"
