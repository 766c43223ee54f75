"""``memsave report``: what would be patched in a model, and what it keeps, from its configuration alone."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hf_memsave import MemSaveConfig
from hf_memsave.commands import options
from hf_memsave.config.sizes import MIB
from hf_memsave.count.kept import KINDS_OF_OPS
from hf_memsave.measure.kept_in_full import FullDepth, measure_full_depth
from hf_memsave.measure.models import load_config
from hf_memsave.measure.training import Training


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.description = (
        "Lists the sites that patch() finds in a model, and measures what one training step keeps between forward and "
        "backward, stock beside patched. Needs the configuration alone: no weights are read. Small depths are measured "
        "on the CPU; further layers are taken to be like theirs, whose parameters are counted."
    )
    options.add(parser, "model", "--memsave")
    options.add(parser, "--batch-size", default=4, help="sequences (%(default)s)")
    options.add(parser, "--seq-len", default=128)
    options.add(parser, "--dtype", "--autocast", "--lora", "--layers")
    parser.add_argument("--plot", **options.PICTURE, help="draw the table as stacked bars")
    options.add(parser, "--json")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; returns 0."""
    memsave = MemSaveConfig.named(args.memsave)
    autocast = options.DTYPES.get(args.autocast)
    setting = Training(
        batch_size=args.batch_size, seq_len=args.seq_len, dtype=options.weights_of(args) or torch.bfloat16,
        autocast=autocast, lora=args.lora,
    )  # fmt: skip
    console = Console(highlight=False, markup=False)
    with console.status(f"Measuring {args.model} ..."):
        result = measure_full_depth(load_config(args.model), setting, memsave, args.layers)
    dtype = f"bf16 autocast, {options.NAMES[setting.dtype]} weights" if autocast else options.NAMES[setting.dtype]
    batch = f"batch {args.batch_size} x {args.seq_len} tokens, {dtype}"
    title = f"{options.name_of(args.model)}: {result.cls}, {_layers(result.depth)} layers, {batch}"
    console.print(title, style="bold")
    console.print(f"preset {args.memsave}, {result.parameters / 1e6:,.1f} M parameters")
    console.print(f"LoRA on a frozen model: {args.lora}\n" if args.lora else "")
    console.print(sites_table(result.sites), kept_table(result), sep="\n")
    stock, patched = (sum(affine.total.values()) for affine in (result.stock, result.patched))
    console.print(f"{stock / patched:.2f}x less: {(stock - patched) / MIB:,.1f} MiB freed.", style="bold")
    console.print(*explain(result, setting), sep="\n")
    if args.plot:
        from hf_memsave.commands.pictures import kept_bars

        kept_bars(args.plot, title, {"stock": result.stock.total, f"patched ({args.memsave})": result.patched.total})
        console.print(f"Picture: {args.plot}")
    figures = {"model": args.model, "memsave": memsave.to_dict(), **to_dict(result, setting)}
    options.write_figures(args.json, figures, console)
    return 0


def sites_table(sites: Mapping[tuple[str, ...], int]) -> Table:
    """(status, op, class, reason) -> how many: what was patched, and what was not and why."""
    table = Table(box=box.SIMPLE_HEAD, title="Sites", title_justify="left")
    for header in ("status", "count", "op", "class", "why"):
        table.add_column(header, justify="right" if header == "count" else "left")
    for (status, *what), count in sorted(sites.items()):
        table.add_row(status, str(count), *what)
    return table


def kept_table(result: FullDepth) -> Table:
    """Kept memory by kind of op, stock beside patched: MiB in all, and u in a layer of each stack."""
    table = Table("made by", box=box.SIMPLE_HEAD, title="Kept between forward and backward", title_justify="left")
    columns = []
    for stack in ("", *result.depth):
        words = "" if len(result.depth) == 1 else "\ndecoder" if "decoder" in stack else "\nencoder"
        for name, affine in (("stock", result.stock), ("patched", result.patched)):
            table.add_column(f"{name}\nu/layer{words}" if stack else f"{name}\nMiB", justify="right")
            columns.append(affine.per_layer[stack] if stack else affine.total)

    def add_row(name: str, amounts: Sequence[float], style: str | None = None) -> None:
        cells = [f"{n / result.u:.2f}" if i > 1 else f"{n / MIB:,.1f}" for i, n in enumerate(amounts)]
        table.add_row(name, *cells, style=style)

    for kind in KINDS_OF_OPS:
        if kind in result.stock.total or kind in result.patched.total:
            add_row(kind, [kept.get(kind, 0) for kept in columns])
    table.add_section()
    add_row("all", [sum(kept.values()) for kept in columns], "bold")
    return table


def explain(result: FullDepth, setting: Training) -> list[str]:
    """How the figures were found, and what they are not."""
    stock, patched = (" and ".join(map(_layers, result.measured[name])) for name in ("stock", "patched"))
    lines = [
        f"u is one activation, batch x seq x hidden in {options.NAMES[setting.u_dtype]}: {result.u / MIB:.3g} MiB.",
        f"Measured: every byte alive after a forward with {patched} layers of full width (stock: {stock}). "
        "Extrapolated: the depth, of layers like those; the number of parameters was compared with the full model's.",
        "A tensor counts for the op that made it: an op that keeps its input, not its output, moves bytes to the op "
        "before it.",
    ]
    if result.changes:
        lines.append(
            f"For the measurement, {' and '.join(result.changes)}: else the CPU's attention keeps seq x seq tensors, "
            "which a fused GPU kernel does not."
        )
    return lines


def to_dict(result: FullDepth, setting: Training) -> dict[str, Any]:
    """Every figure, for ``--json``; memory in bytes."""

    def figures(kept: Mapping[Any, float]) -> dict[str, Any]:
        return {"total": sum(kept.values()), "by_kind": kept}

    found = {
        "class": result.cls,
        "parameters": result.parameters,
        "batch_size": setting.batch_size,
        "seq_len": setting.seq_len,
        "dtype": options.NAMES[setting.dtype],
        "autocast": "bf16" if setting.autocast else None,
        "lora": dataclasses.asdict(setting.lora) if setting.lora else None,
        "depth": result.depth,
        "measured": result.measured,
        "changes": result.changes,
        "u": result.u,
        "u_dtype": options.NAMES[setting.u_dtype],
        "sites": [
            dict(zip(("status", "op", "class", "reason", "count"), (*site, count), strict=True))
            for site, count in sorted(result.sites.items())
        ],
    }
    for name, affine in (("stock", result.stock), ("patched", result.patched)):
        layers = {field: figures(kept) for field, kept in affine.per_layer.items()}
        found[name] = figures(affine.total) | {"per_layer": layers}
    return found


def _layers(depth: Mapping[str, int]) -> str:
    return " + ".join(map(str, depth.values()))
