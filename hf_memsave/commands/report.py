"""``memsave report``: what would be patched in a model, and what it keeps, from its configuration alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hf_memsave import MemSaveConfig
from hf_memsave.commands import check_folder, check_picture, positive_int
from hf_memsave.commands.options import DTYPES, NAMES, add_config, add_lora, quiet, weights_of
from hf_memsave.sizes import MIB
from hf_memsave.tape.meter import KINDS_OF_OPS

if TYPE_CHECKING:
    from hf_memsave.measure.depth import Affine, FullDepth, Setting


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``memsave``."""
    parser = commands.add_parser(
        "report",
        help="what would be patched in a model, and what it keeps, from its config alone",
        description="Lists the sites that patch() finds in a model, and measures what one training step keeps between "
        "forward and backward, stock beside patched. Needs the configuration alone: no weights are read. Small "
        "depths are measured on the CPU; further layers are taken to be like theirs, whose parameters are counted.",
    )
    add_config(parser)
    parser.add_argument("--memsave", metavar="PRESET", default="exact", help="a preset or YAML file (%(default)s)")
    parser.add_argument("--batch-size", type=positive_int, default=4, metavar="N", help="sequences (%(default)s)")
    parser.add_argument("--seq-len", type=positive_int, default=128, metavar="N", help="tokens in each (%(default)s)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of the weights (bf16; with --autocast fp32)")
    parser.add_argument("--autocast", choices=["bf16"], help="compute in bf16 with fp32 weights (Trainer's bf16=True)")
    add_lora(parser)
    parser.add_argument(
        "--layers", type=positive_int, metavar="N", help="the depth, instead of the configuration's own"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the table as stacked bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure, in bytes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for.

    Returns:
        0.

    Raises:
        CommandError: The options contradict each other.
        MeasureError: There is no such model, or it cannot be measured.
    """
    memsave = MemSaveConfig.named(args.memsave)
    dtype = weights_of(args) or torch.bfloat16
    if args.plot:
        check_picture(args.plot)
    if args.json:
        check_folder(args.json)

    from hf_memsave.measure.depth import Setting, measure_full_depth
    from hf_memsave.measure.models import load_config

    quiet()
    setting = Setting(
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        dtype=dtype,
        autocast=bool(args.autocast),
        memsave=memsave,
        lora=args.lora,
    )
    console = Console(highlight=False)
    with console.status(f"Reading the configuration {args.model} ..."):
        config = load_config(args.model)
    with console.status("Measuring ..."):
        result = measure_full_depth(config, setting, args.layers)

    title = describe(args.model, result, setting)
    console.print(title, style="bold", markup=False)
    console.print(f"preset {args.memsave}, {result.parameters / 1e6:,.1f} M parameters")
    console.print(f"LoRA on a frozen model: {args.lora}\n" if args.lora else "", markup=False)
    console.print(sites_table(result), kept_table(result), sep="\n")
    console.print(*explain(result, setting), sep="\n")
    if args.plot:
        from hf_memsave.commands.pictures import kept_bars

        kept_bars(args.plot, title, {"stock": result.stock.total, f"patched ({args.memsave})": result.patched.total})
        console.print(f"Picture: {args.plot}", markup=False)
    if args.json:
        figures = {"model": args.model, "memsave": memsave.to_dict(), **to_dict(result, setting)}
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        console.print(f"Figures: {args.json}", markup=False)
    return 0


def describe(name: str, result: FullDepth, setting: Setting) -> str:
    """One line: the model, its depth, the batch and the dtype."""
    path = Path(name).resolve()
    name = path.parent.name if path.is_file() else path.name if path.is_dir() else name
    depth = " + ".join(map(str, result.depth.values()))
    dtype = f"bf16 autocast, {NAMES[setting.dtype]} weights" if setting.autocast else NAMES[setting.dtype]
    return f"{name}: {result.cls}, {depth} layers, batch {setting.batch_size} x {setting.seq_len} tokens, {dtype}"


def sites_table(result: FullDepth) -> Table:
    """Every site at full depth: what was patched, and what was not and why."""
    table = Table(box=box.SIMPLE_HEAD, title="Sites", title_justify="left")
    table.add_column("count", justify="right")
    for header in ("class", "op", "status"):
        table.add_column(header)
    for (status, op, cls, reason), count in sorted(result.sites.items()):
        table.add_row(str(count), cls, op, f"{status}: {reason}" if reason else status)
    return table


def kept_table(result: FullDepth) -> Table:
    """Kept memory by kind of op, stock beside patched: MiB in all, and u in a layer of each stack."""
    table = Table(box=box.SIMPLE_HEAD, title="Kept between forward and backward", title_justify="left")
    table.add_column("made by")
    for setting in ("stock", "patched"):
        table.add_column(f"{setting}\nMiB", justify="right")
    for field in result.depth:
        stack = "" if len(result.depth) == 1 else "\ndecoder" if "decoder" in field else "\nencoder"
        for setting in ("stock", "patched"):
            table.add_column(f"{setting}\nu/layer{stack}", justify="right")
    for kind in KINDS_OF_OPS:
        if kind in result.stock.total or kind in result.patched.total:
            table.add_row(kind, *_cells(result, kind))
    table.add_section()
    table.add_row("all", *_cells(result, None), style="bold")
    return table


def explain(result: FullDepth, setting: Setting) -> list[str]:
    """How the figures were found, and what they are not."""
    stock, patched = _amount(result.stock.total), _amount(result.patched.total)
    stock_runs, runs = (
        " and ".join(" + ".join(map(str, depth.values())) for depth in result.measured[setting])
        for setting in ("stock", "patched")
    )
    lines = [
        f"[bold]{stock / patched:.2f}x less: {(stock - patched) / MIB:,.1f} MiB freed.[/bold]",
        f"u is one activation, batch x seq x hidden in {NAMES[setting.u_dtype]}: {result.u / MIB:.3g} MiB.",
        f"Measured: every byte alive after a forward with {runs} layers of full width (stock: {stock_runs}). "
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
        return {
            "total": _amount(affine.total),
            "by_kind": affine.total,
            "per_layer": {field: {"total": _amount(kept), "by_kind": kept} for field, kept in affine.per_layer.items()},
        }

    return {
        "class": result.cls,
        "parameters": result.parameters,
        "batch_size": setting.batch_size,
        "seq_len": setting.seq_len,
        "dtype": NAMES[setting.dtype],
        "autocast": "bf16" if setting.autocast else None,
        "lora": dataclasses.asdict(setting.lora) if setting.lora else None,
        "depth": result.depth,
        "measured": result.measured,
        "changes": result.changes,
        "u": result.u,
        "u_dtype": NAMES[setting.u_dtype],
        "sites": [
            {"status": status, "op": op, "class": cls, "reason": reason, "count": count}
            for (status, op, cls, reason), count in sorted(result.sites.items())
        ],
        "stock": figures(result.stock),
        "patched": figures(result.patched),
    }


def _cells(result: FullDepth, kind: str | None) -> list[str]:
    stock, patched = _amount(result.stock.total, kind), _amount(result.patched.total, kind)
    cells = [f"{amount / MIB:,.1f}" for amount in (stock, patched)]
    for field in result.depth:
        for affine in (result.stock, result.patched):
            cells.append(f"{_amount(affine.per_layer[field], kind) / result.u:.2f}")
    return cells


def _amount(kept: Mapping[Any, float], kind: str | None = None) -> float:
    return sum(kept.values()) if kind is None else kept.get(kind, 0)
