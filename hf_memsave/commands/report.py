"""``memsave report``: what would be patched in a model, and what it keeps, from its configuration alone."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from rich import box
from rich.table import Column, Table

from hf_memsave.commands import options
from hf_memsave.commands.arguments import memsave_in_words, memsave_of
from hf_memsave.config.sizes import counted, gib
from hf_memsave.measure.inputs import read_batch, shapes
from hf_memsave.measure.kept_in_full import EVERY_LAYER, FullDepth, measure_full_depth
from hf_memsave.measure.models import load_config
from hf_memsave.measure.training import Training
from hf_memsave.tape.kinds import KINDS_OF_OPS


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; returns 0."""
    memsave, config, console = memsave_of(args), load_config(args.model), options.console_of(args)
    note = options.settle_sizes(args, config) * (args.batch is None)
    autocast = options.DTYPES.get(args.autocast)
    setting = Training(
        batch_size=args.batch_size, seq_len=args.seq_len, dtype=options.weights_of(args) or torch.bfloat16,
        autocast=autocast, lora=args.lora,
    )  # fmt: skip
    batch = read_batch(args.batch) if args.batch else None
    with console.status(f"Measuring {args.model} ..."):
        result = measure_full_depth(config, setting, memsave, args.layers, batch)
    dtype = f"bf16 autocast, {options.NAMES[setting.dtype]} weights" if autocast else options.NAMES[setting.dtype]
    depth = f"{counted(_layers(result.depth), 'layer')}, " if result.depth else ""
    is_text = depth and not batch
    words = f"{args.batch_size} x {counted(args.seq_len, 'token')}" if is_text else shapes(result.inputs)
    title = f"{options.name_of(args.model)}: {result.cls}, {depth}batch {words}, {dtype}"
    console.print(title, style="bold")
    console.print(note, end="")
    console.print(f"preset {memsave_in_words(args)}, {result.parameters / 1e6:,.1f} M parameters")
    console.print(f"LoRA on a frozen model: {args.lora}\n" if args.lora else "")
    stock, patched = (sum(affine.total.values()) for affine in (result.stock, result.patched))
    kept = f"Kept for backward: {gib(patched)}, where stock keeps {gib(stock)}: {freed(stock, patched)} freed."
    console.print(sites_table(result.sites), kept_table(result), sep="\n")
    console.print(kept, style="bold")
    if memsave.compile:
        console.print("Blocks were counted as they run op by op; compiled they keep about as much.")
    console.print(*explain(result, setting), sep="\n")
    figures = {"model": args.model, "memsave": memsave.to_dict(), **to_dict(result, setting)}
    options.write_figures(args.json, figures, console)
    return 0


def sites_table(sites: Mapping[tuple[str, ...], int]) -> Table:
    """(status, op, class, reason) -> how many: what was patched, and what was not and why."""
    count_of = Column("count", justify="right")
    table = Table("status", count_of, "op", "class", "why", box=box.SIMPLE_HEAD, title="Sites", title_justify="left")
    for (status, *what), count in sorted(sites.items()):
        table.add_row(status, str(count), *what)
    return table


def kept_table(result: FullDepth) -> Table:
    """Kept memory by kind of op, stock beside patched, and what is freed."""
    table = Table(box=box.SIMPLE_HEAD, title="Kept between forward and backward", title_justify="left")
    for i, header in enumerate(("made by", "stock", "patched", "freed")):
        table.add_column(header, justify="right" if i else "left")

    def add_row(name: str, stock: float, patched: float, style: str | None = None) -> None:
        table.add_row(name, gib(stock), gib(patched), freed(stock, patched), style=style)

    stock, patched = result.stock.total, result.patched.total
    for kind in KINDS_OF_OPS:
        if kind in stock or kind in patched:
            add_row(kind, stock.get(kind, 0), patched.get(kind, 0))
    table.add_section()
    add_row("all", sum(stock.values()), sum(patched.values()), "bold")
    return table


def freed(stock: float, patched: float) -> str:
    """The share of stock's bytes that is freed."""
    return "more" if patched > stock else f"{1 - patched / max(stock, 1):.0%}"


def explain(result: FullDepth, setting: Training) -> list[str]:
    """How the figures were found, and what they are not."""
    lines = []
    for field in result.depth:
        each = [sum(affine.per_layer[field].values()) for affine in (result.stock, result.patched)]
        which = "" if len(result.depth) == 1 else " of the decoder" if "decoder" in field else " of the encoder"
        units = f" ({' and '.join(f'{n / result.u:.2f}' for n in each)} u)" if result.u else ""
        lines.append(f"A layer{which} keeps {gib(each[0])} stock, {gib(each[1])} patched{units}.")
    if result.u:
        dtype = options.NAMES[setting.u_dtype]
        lines.append(f"u is one activation, batch x seq x hidden in {dtype}: {gib(result.u)}.")
    if result.depth:
        stock, patched = (" and ".join(map(_layers, result.measured[name])) for name in ("stock", "patched"))
        lines.append(
            f"Measured: every byte alive after a forward with {patched} layers of full width (stock: {stock}). "
            "Extrapolated: the depth, of layers like those; the number of parameters was compared with the full "
            "model's."
        )
    else:
        lines.append("Measured: every byte alive after a forward of the whole model, with random weights.")
    lines.append(
        "A tensor counts for the op that made it: an op that keeps its input, not its output, moves bytes to the op "
        "before it."
    )
    if changes := [change for change in result.changes if change != EVERY_LAYER]:
        lines.append(
            f"For the measurement, {' and '.join(changes)}: else the CPU's attention keeps seq x seq tensors, "
            "which a fused GPU kernel does not."
        )
    if EVERY_LAYER in result.changes:
        lines.append("No layer is dropped for the measurement: layerdrop is 0.")
    if not result.has_loss:
        lines.append(f"{result.cls} returns no loss for this batch, so its whole output was held.")
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
        "inputs": result.inputs,
        "dtype": options.NAMES[setting.dtype],
        "autocast": "bf16" if setting.autocast else None,
        "lora": dataclasses.asdict(setting.lora) if setting.lora else None,
        **{name: getattr(result, name) for name in ("depth", "measured", "changes", "u")},
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
