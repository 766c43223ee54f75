"""``memsave report``: what would be patched in a model, and what it keeps, from its configuration alone."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hf_memsave import MemSaveConfig
from hf_memsave.commands import options
from hf_memsave.config.sizes import MIB
from hf_memsave.measure.depth import Affine, FullDepth, Setting, measure_full_depth
from hf_memsave.measure.models import load_config
from hf_memsave.tape.meter import KINDS_OF_OPS


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
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the table as stacked bars")
    options.add(parser, "--json")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; returns 0."""
    memsave = MemSaveConfig.named(args.memsave)
    dtype = options.weights_of(args) or torch.bfloat16
    if args.plot:
        options.check_picture(args.plot)
    options.check_folder(args.json)
    options.quiet()
    setting = Setting(
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        dtype=dtype,
        autocast=bool(args.autocast),
        memsave=memsave,
        lora=args.lora,
    )
    console = Console(highlight=False, markup=False)
    with console.status(f"Measuring {args.model} ..."):
        result = measure_full_depth(load_config(args.model), setting, args.layers)
    title = describe(args.model, result, setting)
    console.print(title, style="bold")
    console.print(f"preset {args.memsave}, {result.parameters / 1e6:,.1f} M parameters")
    console.print(f"LoRA on a frozen model: {args.lora}\n" if args.lora else "")
    console.print(sites_table(result.sites), kept_table(result), sep="\n")
    stock, patched = _amount(result.stock.total), _amount(result.patched.total)
    console.print(f"{stock / patched:.2f}x less: {(stock - patched) / MIB:,.1f} MiB freed.", style="bold")
    console.print(*explain(result, setting), sep="\n")
    if args.plot:
        from hf_memsave.commands.pictures import kept_bars

        kept_bars(args.plot, title, {"stock": result.stock.total, f"patched ({args.memsave})": result.patched.total})
        console.print(f"Picture: {args.plot}")
    figures = {"model": args.model, "memsave": memsave.to_dict(), **to_dict(result, setting)}
    options.write_figures(args.json, figures, console)
    return 0


def describe(name: str, result: FullDepth, setting: Setting) -> str:
    """One line: the model, its depth, the batch and the dtype."""
    dtype = options.NAMES[setting.dtype]
    dtype = f"bf16 autocast, {dtype} weights" if setting.autocast else dtype
    batch = f"batch {setting.batch_size} x {setting.seq_len} tokens"
    return f"{options.name_of(name)}: {result.cls}, {_sum(result.depth)} layers, {batch}, {dtype}"


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
    settings = {"stock": result.stock, "patched": result.patched}
    for name in settings:
        table.add_column(f"{name}\nMiB", justify="right")
    for field in result.depth:
        stack = "" if len(result.depth) == 1 else "\ndecoder" if "decoder" in field else "\nencoder"
        for name in settings:
            table.add_column(f"{name}\nu/layer{stack}", justify="right")

    def cells(kind: str | None) -> list[str]:
        found = [f"{_amount(affine.total, kind) / MIB:,.1f}" for affine in settings.values()]
        layers = [affine.per_layer[field] for field in result.depth for affine in settings.values()]
        return found + [f"{_amount(layer, kind) / result.u:.2f}" for layer in layers]

    for kind in KINDS_OF_OPS:
        if kind in result.stock.total or kind in result.patched.total:
            table.add_row(kind, *cells(kind))
    table.add_section()
    table.add_row("all", *cells(None), style="bold")
    return table


def explain(result: FullDepth, setting: Setting) -> list[str]:
    """How the figures were found, and what they are not."""
    stock, patched = (" and ".join(map(_sum, result.measured[name])) for name in ("stock", "patched"))
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


def to_dict(result: FullDepth, setting: Setting) -> dict[str, Any]:
    """Every figure, for ``--json``; memory in bytes."""

    def figures(affine: Affine) -> dict[str, Any]:
        layers = {field: {"total": _amount(kept), "by_kind": kept} for field, kept in affine.per_layer.items()}
        return {"total": _amount(affine.total), "by_kind": affine.total, "per_layer": layers}

    sites = (dict(zip(("status", "op", "class", "reason"), site, strict=True)) for site in sorted(result.sites))
    return {
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
        "sites": [site | {"count": result.sites[tuple(site.values())]} for site in sites],
        "stock": figures(result.stock),
        "patched": figures(result.patched),
    }


def _sum(depth: Mapping[str, int]) -> str:
    return " + ".join(map(str, depth.values()))


def _amount(kept: Mapping[Any, float], kind: str | None = None) -> float:
    return sum(kept.values()) if kind is None else kept.get(kind, 0)
