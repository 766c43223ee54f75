"""The papers' own tables of memory, rebuilt on the stand-in for a CUDA device, beside ours.

    python scripts/bench/papers.py [--only PAPER ...] [--out [DIR]]

A row is a figure of a paper: with stock, there and as estimated here (the check), with the paper's method, and what
hf_memsave's settings make of that step. No figure is fitted: where stock differs by more than 10%, a note says why.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import torch
from matplotlib.figure import Figure

from paper_tables.rows import WITHIN, Result, Row, result_of
from publish import arguments, table, versions, write

#: Module of paper_tables, which has rows() -> the paper.
PAPERS = {
    "tempo": "Tempo (Andoorveedu et al., 2210.10246)",
    "wta_crs": "WTA-CRS (Liu et al., 2305.15265)",
    "invact": "InvAct (Novikov and Oseledets, 2407.15545)",
    "selective": "Selective differentiation (Bhatia and Dangel, 2404.12406)",
}
ABOUT = """Figures of the papers beside *estimates* on the stand-in for a CUDA device that `hf_memsave.estimate` uses:
what PyTorch's allocator gives out at most, without fragmentation and what CUDA takes for itself. Nothing is fitted, and
no paper's code was run. GB are 10^9 bytes, if nothing else is said, GiB 2^30.

- *stock*: with the paper's attention and today's libraries; *then*: with what those of its time kept besides.
- *distance*: of stock here from the paper's stock. Rows of one stock count once.
- In brackets: over stock, the paper's over its own, ours over ours.
- *here*: the paper's method as hf_memsave has it, approximate where the paper's is. All columns after it give stock's
  gradients (`"tiles"` up to the order of sums).
- *loss*: stock and gradient checkpointing make all logits at once; *here* and the settings a chunk above 128 MiB.
- *behind*: the exact setting named there takes a larger share of stock than the paper's method in the paper, or than
  that method here, by more than half a percent of stock. It is `"exact"`; beside WTA-CRS, which adds a fifth to a step
  there, `"gate"`; beside checkpointing `"block"`."""
#: Column of the table -> of the results.
SHOWN = {
    "here": "method", "`True`": "exact", '`"gate"`': "gate", '`"block"`': "block", '`"tiles"`': "tiles",
    "gradient checkpointing": "checkpointing",
}  # fmt: skip
HEADER = [
    "table", "work", "method", "unit", "paper: stock", "stock", "distance", "paper: method", *SHOWN, "behind", "note",
]  # fmt: skip
#: What a panel of a picture shows -> whether of rows that count sequences; all other rows are of memory.
AXES = {"memory, over stock's": False, "largest batch, over stock's": True}
#: Series of the pictures -> its mark and label.
MARKS = {
    "paper": ("kx", "the paper's method, there"), "method": ("C1o", "the paper's method, here"),
    "exact": ("C2+", "memsave=True"), "gate": ("C3^", 'memsave="gate"'), "block": ("C4s", 'memsave="block"'),
    "checkpointing": ("C5D", "gradient checkpointing"),
}  # fmt: skip


def rows_of(paper: str) -> Iterable[Row]:
    """The rows of a module of paper_tables."""
    rows: Callable[[], Iterable[Row]] = import_module(f"paper_tables.{paper}").rows
    return rows()


def cell(figure: float | None, stock: float | None) -> str:
    """A figure, and its share of stock."""
    if figure is None:
        return ""
    return f"{number(figure)} ({figure / stock:.2f})" if stock else number(figure)


def number(figure: float) -> str:
    """To three digits; whole numbers and those above 100 without decimals."""
    digits = 0 if figure == int(figure) else max(0, 2 - math.floor(math.log10(abs(figure))))
    return f"{figure:,.{min(digits, 2)}f}"


def cells(result: Result) -> list[str]:
    """The row of the table."""
    row, ours, stock, then = result.row, result.ours, result.ours.get("stock"), result.ours.get("then")
    distance = "" if result.distance is None else f"{result.distance:+.1f}%"
    method = cell(row.figure, row.stock) or ("" if row.share is None else f"({row.share:.2f})")
    return [
        row.table, row.work, row.method, row.unit, "" if row.stock is None else f"{row.stock:g}",
        cell(stock, None) + (f", then {number(then)}" if then else ""),
        distance + (f", then {result.distance_then:+.1f}%" if then and distance else ""),
        method, *(cell(ours.get(name), stock) for name in SHOWN.values()),
        behind(result), row.note,
    ]  # fmt: skip


def behind(result: Result) -> str:
    """What the setting that the row names is beaten by."""
    return f"`{result.row.rung}`: {' and '.join(result.behind)}" if result.behind else ""


def count_line(results: Sequence[Result]) -> str:
    """How many rows there are, are rebuilt, complete and agree, and how many are behind."""
    stocks = {(one.row.unit, one.row.stock, one.ours["stock"]): one for one in results if one.distance is not None}
    complete = [*stocks.values()]
    found = [[one.distance for one in complete], [one.distance_then for one in complete]]
    now, then = (sum(abs(distance or 0) <= WITHIN for distance in one) for one in found)
    return (
        f"{len(results)} rows, {sum(bool(one.ours) for one in results)} rebuilt. Of {len(complete)} published figures "
        f"of stock {now} are within {WITHIN:g}% with today's libraries, {then} as of then. "
        f"Behind in {sum(bool(one.behind) for one in results)}."
    )


def picture(title: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """Shares of stock, the paper's and ours, a line a rebuilt row of the .json (not of 0): memory and batches apart."""
    shown = [row for row in rows if row["share"] and row["ours"].get("stock")]
    split = {axis: [row for row in shown if (row["unit"] == "sequences") == of] for axis, of in AXES.items()}
    panels = {axis: there for axis, there in split.items() if there}
    figure = Figure(figsize=(9, 0.8 + 0.6 * len(panels) + 0.18 * len(shown)), layout="constrained", dpi=110)
    figure.suptitle(title, fontsize=11)
    plots = figure.subplots(len(panels), squeeze=False, height_ratios=[len(there) + 1 for there in panels.values()])
    for axes, (axis, there) in zip(plots.flat, panels.items(), strict=True):
        for name, (mark, label) in MARKS.items():
            shares = [row["ours"].get(name, math.nan) / row["ours"]["stock"] for row in there]
            shares = [row["share"] for row in there] if name == "paper" else shares
            axes.plot(shares, range(len(there)), mark, label=label, fillstyle="none", clip_on=False)
        axes.axvline(1, color="gray", linewidth=0.8)
        names = [f"{row['table']}: {row['work']}, {row['method']}" for row in there]
        axes.set_yticks(range(len(there)), names, fontsize=8)
        axes.set(xlabel=axis, xlim=(0, None), ylim=(len(there) - 0.5, -0.5))
        axes.grid(axis="y", alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def main() -> None:
    """Estimate all, and write the tables and pictures."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=PAPERS, default=[*PAPERS], metavar="PAPER", help=", ".join(PAPERS))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    found: dict[str, list[Result]] = {}
    for paper in args.only:
        found[paper] = []
        for row in rows_of(paper):
            found[paper].append(result_of(row))
            print(paper, *cells(found[paper][-1])[:-1], sep=" | ", flush=True)
    every = count_line([result for one in found.values() for result in one])
    parts = [f"# The papers' tables\n\n{ABOUT}\n\n{versions()}. All: {every}\n"]
    for paper, results in found.items():
        parts.append(f"## {PAPERS[paper]}\n\n{count_line(results)}\n\n{table(HEADER, map(cells, results))}")
        parts += [f"![Shares of stock]({png(paper)})\n"] if args.out else []
    data = {paper: list(map(as_data, one)) for paper, one in found.items()}
    write("papers", "\n".join(parts), data, args.out)
    for paper, rows in data.items() if args.out else ():
        picture(PAPERS[paper], rows).savefig(args.out / png(paper), metadata={"Software": None})


def png(paper: str) -> str:
    """The file of its picture."""
    return f"papers-{paper.replace('_', '-')}.png"


def as_data(result: Result) -> dict[str, Any]:
    """A row for the .json: the paper's figures, and ours."""
    names = ("table", "work", "unit", "method", "stock", "figure", "rung", "note")
    row = {name: getattr(result.row, name) for name in names}
    row |= {name: getattr(result, name) for name in ("share", "ours", "distance", "behind")}
    return row


if __name__ == "__main__":
    main()
