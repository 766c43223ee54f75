"""An estimate as a page that needs no network; matplotlib draws it, and jinja2 writes it."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_memsave.config.files import write
from hf_memsave.config.sizes import GIB, MIB, gib
from hf_memsave.measure.estimate import CONTEXT, WORKSPACES, Estimate, Memory

#: What is alive -> its colour: Paul Tol's bright scheme, told apart in every kind of colour vision, on black and white.
PARTS = {"parameters": "#4477AA", "states": "#66CCEE", "gradients": "#CCBB44", "activations": "#EE6677"}
OWN = "#AA3377"
#: Setting -> its colour.
SETTINGS = {"stock": "#8A8A8A", "patched": "#228833"}
# Where a phase of the step begins and ends along a timeline, which shows the order and not the time.
_SPANS = {"forward": (0.0, 1.0), "backward": (1.0, 2.0), "optimizer": (2.0, 2.3)}
# A colour that nothing else has; a page replaces it by the colour of its own text.
_INK = "#010203"
# Rows of a table; the rest is summed.
_ROWS = 12


def timeline_axes(axes: Axes, memory: Memory, result: Estimate) -> None:
    """Draw what is alive over the step, in its parts, with the peak and the limit marked; alike for both settings."""
    highest, limit = max(shown.peak for shown in result.columns.values()), result.memory
    unit, name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    points = memory.timeline
    edges: list[float] = []
    for phase, (start, end) in _SPANS.items():
        count = sum(point.phase == phase for point in points)
        edges += [start + (end - start) * i / count for i in range(count)]
    edges.append(_SPANS["optimizer"][1])
    held = memory.parameters + memory.states
    stairs = ((memory.parameters, memory.states, p.gradients, p.live - held - p.gradients) for p in points)
    base = [0.0] * len(points)
    for (part, color), nbytes in zip(PARTS.items(), zip(*stairs, strict=True), strict=True):
        top = [low + n / unit for low, n in zip(base, nbytes, strict=True)]
        axes.stairs(top, edges, baseline=base, fill=True, color=color, label=part, linewidth=0)
        base = top
    until, line = highest, None
    if limit is not None and limit < 2 * highest:
        until, line = max(highest, limit), (limit - CONTEXT - WORKSPACES) / unit
        axes.axhline(line, color=_INK, linestyle="--", linewidth=1)
        place = ((edges[-1], line), (-3, 3))
        axes.annotate("limit", *place, textcoords="offset points", color=_INK, fontsize=9, ha="right")
    height = max(base)
    at = (edges[base.index(height)] + edges[base.index(height) + 1]) / 2
    axes.plot(at, height, "o", color=_INK, markersize=6)
    is_crossed = line is not None and 0 <= line - height < 0.12 * until / unit  # the line would go through the text
    axes.annotate(
        f"peak {gib(memory.peak)}", (at, line if is_crossed else height), (0, 4 if is_crossed else 8),
        textcoords="offset points", color=_INK, fontweight="bold", va="bottom",
        ha="right" if at > 1.5 else "left" if at < 0.5 else "center",
    )  # fmt: skip
    for _, end in list(_SPANS.values())[:-1]:
        axes.axvline(end, color=_INK, linewidth=0.6, alpha=0.5)
    axes.set_xticks([(start + end) / 2 for start, end in _SPANS.values()], list(_SPANS))
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(0, edges[-1]), ylim=(0, 1.18 * until / unit), ylabel=f"memory [{name}]")
    axes.spines[["top", "right"]].set_visible(False)


def rows_of(result: Estimate, field: str) -> list[dict[str, Any]]:
    """A row for each name in a field of ``Memory`` ("by_kind", "by_module"), the most bytes first; the rest in one."""
    amounts = {setting: getattr(memory, field) for setting, memory in result.columns.items()}
    names = dict.fromkeys(name for amount in amounts.values() for name, nbytes in amount.items() if nbytes)
    rows = [{"name": name, "bytes": {s: amount.get(name, 0) for s, amount in amounts.items()}} for name in names]
    rows.sort(key=lambda row: -max(row["bytes"].values()))
    if len(rows) <= _ROWS:
        return rows
    rows, rest = rows[: _ROWS - 1], rows[_ROWS - 1 :]
    total = {name: sum(row["bytes"][name] for row in rest) for name in amounts}
    return [*rows, {"name": f"{len(rest)} others", "bytes": total}]


def write_page(
    path: Path, result: Estimate, title: str, settings: Mapping[str, str], changes: Sequence[str] = ()
) -> None:
    """Write one HTML file with everything in it: a model's name, and in words what was estimated and would fit."""
    environment = Environment(
        loader=PackageLoader("hf_memsave.commands", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"units": gib, "dictmax": lambda amounts: max(amounts.values())}
    shown = result.columns
    page = environment.get_template("estimate_page.html").render(
        title=title, settings=settings, changes=changes, result=result, shown=shown, parts=PARTS, own=OWN,
        colors=SETTINGS, own_bytes=CONTEXT + WORKSPACES,
        widest=max(*(memory.needed for memory in shown.values()), result.memory or 0),
        pictures={name: _svg(memory, result, name) for name, memory in shown.items()},
        kinds=rows_of(result, "by_kind"), modules=rows_of(result, "by_module"),
    )  # fmt: skip
    write(path, page)


def _svg(memory: Memory, result: Estimate, name: str) -> str:
    """A timeline as SVG whose text is text, in the colour and the font of the page around it."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "axes.edgecolor": _INK, "text.color": _INK,
                         "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK}):  # fmt: skip
        figure = Figure(figsize=(4.5, 3.4), layout="constrained")
        timeline_axes(figure.add_subplot(), memory, result)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()[drawn.getvalue().index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>| id=\"[a-z0-9.]+_\d+\"", "", svg, flags=re.DOTALL)  # no id twice in a page
    svg = re.sub(r"font(-family)?: *([^;\"]*?)'?DejaVu Sans'?[^;\"]*", r"font\1: \2system-ui, sans-serif", svg)
    label = f"{name}: memory over the step, at most {gib(memory.peak)}"
    svg = re.sub(r'width="[^"]*pt"|height="[^"]*pt"', "", svg, count=2)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
