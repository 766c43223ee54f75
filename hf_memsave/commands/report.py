"""``memsave report``: what would be patched in a model, and what it keeps, from its configuration alone."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from rich import box
from rich.table import Column, Table

from hf_memsave.commands.arguments import memsave_in_words, memsave_of
from hf_memsave.commands.options import console_of, freed, name_of, settle_sizes, step_in_words, step_of, write_figures
from hf_memsave.commands.progress import progress
from hf_memsave.config.sizes import gib
from hf_memsave.measure.estimate import Estimate, estimate
from hf_memsave.measure.figures import AWAY, Trace
from hf_memsave.measure.inputs import read_batch
from hf_memsave.measure.models import load_config
from hf_memsave.tape.kinds import KINDS_OF_OPS


def run(args: argparse.Namespace) -> int:
    """Trace, print, and write what was asked for; return 0."""
    memsave, config, console = memsave_of(args), load_config(args.model), console_of(args)
    note = settle_sizes(args, config) * (args.batch is None)
    with progress(console, f"Tracing {args.model} ..."):
        batch = read_batch(args.batch) if args.batch else None
        result = estimate(config, batch=batch, memsave=memsave, **step_of(args, "layers"))
    stock, patched = result.stock, result.step
    console.print(f"{name_of(args.model)}: {step_in_words(args, result)}", style="bold")
    console.print(f"{note}preset {memsave_in_words(args)}, {stock.numbers['parameters'] / 1e6:,.1f} M parameters")
    console.print(f"LoRA on a frozen model: {args.lora}\n" if args.lora else "")
    console.print(sites_table(patched.sites), kept_table(stock, patched), sep="\n")
    kept = f"Kept for backward: {gib(patched.kept)}, where stock keeps {gib(stock.kept)}"
    console.print(f"{kept}: {freed(stock.kept, patched.kept, ' freed')}.", style="bold")
    if memsave.compile:
        console.print("Blocks were counted as they run op by op; compiled blocks keep about as much.")
    console.print(*explain(result, args.autocast or args.dtype or "bf16"), sep="\n")
    figures = {"memsave": memsave.to_dict(), "batch_size": args.batch_size, "seq_len": args.seq_len}
    write_figures(args.json, {**result.to_dict(), **figures, "model": args.model}, console)
    return 0


def sites_table(sites: Mapping[tuple[str, str, str, str], int]) -> Table:
    """Tabulate (status, op, class, reason) -> count: what was patched, and what was not and why."""
    count_of = Column("count", justify="right")
    table = Table("status", count_of, "op", "class", "why", box=box.SIMPLE_HEAD, title="Sites", title_justify="left")
    for (status, *what), count in sorted(sites.items()):
        table.add_row(status, str(count), *what)
    return table


def kept_table(stock: Trace, patched: Trace) -> Table:
    """Tabulate kept memory by kind of op, stock beside patched, and the share that is freed."""
    columns = [Column(name, justify="right") for name in ("stock", "patched", "freed")]
    table = Table("made by", *columns, box=box.SIMPLE_HEAD, title="Kept for backward", title_justify="left")
    for kind in (*KINDS_OF_OPS, AWAY):
        before, after = (memory.by_kind.get(kind, 0) for memory in (stock, patched))
        if before or after:
            table.add_row(kind, gib(before), gib(after), freed(before, after))
    table.add_section()
    table.add_row("all", gib(stock.kept), gib(patched.kept), freed(stock.kept, patched.kept), style="bold")
    return table


def explain(result: Estimate, dtype: str) -> list[str]:
    """Explain how the figures were found, and what they do not mean."""
    lines, columns = [], [*result.columns.values()]
    for field in columns[0].per_layer:
        each = [memory.per_layer[field]["kept"] for memory in columns]
        which = "" if len(result.depth) == 1 else " of the decoder" if "decoder" in field else " of the encoder"
        units = f" ({' and '.join(f'{n / result.u:.2f}' for n in each)} u)" if result.u else ""
        lines.append(f"A layer{which} keeps {gib(each[0])} stock, {gib(each[-1])} patched{units}.")
    if result.u:
        lines.append(f"u is one activation, batch x seq x hidden in {dtype}: {gib(result.u)}.")
    traced = "of the whole model."
    if columns[0].per_layer:
        depths = [[" + ".join(map(str, depth.values())) for depth in memory.depths] for memory in columns]
        stock, patched = " and ".join(depths[0]), " and ".join(depths[-1])
        traced = f"of {patched} layers of full width (stock: {stock}); further layers are taken to be like them."
    lines.append(f"These are all bytes alive after a forward on a stand-in for a CUDA device, {traced}")
    lines.append("A tensor counts for the op that made it: what an op keeps of its input counts for the op before it.")
    if not result.step.has_loss:
        lines.append(f"{result.step.model} returns no loss for this batch, so its whole output was held.")
    return lines
