"""Write an estimate as a page that needs no network: jinja2 fills it, and matplotlib draws its picture."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_memsave.config.files import write
from hf_memsave.config.sizes import GIB, MIB, gib, html_table
from hf_memsave.measure.estimate import Estimate
from hf_memsave.measure.figures import OWN, Trace

#: Part of a step's memory -> its colour: Paul Tol's bright scheme, told apart in every kind of colour vision.
PARTS = {"parameters": "#4477AA", "states": "#66CCEE", "gradients": "#CCBB44", "activations": "#EE6677"}
# Phase of a step -> its width in the picture, which shows the order and not the time.
_WIDTHS = {"forward": 1.0, "backward": 1.0, "optimizer": 0.3}


def draw_step(axes: Axes, memory: Trace, unit: int) -> None:
    """Draw the memory over a step, stacked by part, and mark the peak."""
    moments, phases = memory.timeline.values(), [place.phase for place in memory.timeline]
    edges = np.cumsum([0, *(_WIDTHS[phase] / phases.count(phase) for phase in phases)])
    held = memory.parameters + memory.states
    tops = np.array([(memory.parameters, held, held + moment.gradients, moment.live) for moment in moments]).T / unit
    for (part, color), base, top in zip(PARTS.items(), [0, *tops[:-1]], tops, strict=True):
        axes.stairs(top, edges, baseline=base, fill=True, color=color, label=part)
    highest = tops[-1].argmax()
    axes.plot(edges[highest : highest + 2].mean(), tops[-1, highest], "ko")
    widths = np.array([*_WIDTHS.values()])
    for end in widths.cumsum()[:-1]:
        axes.axvline(end, color="gray", linewidth=0.6)
    axes.set_xticks(widths.cumsum() - widths / 2, list(_WIDTHS))
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)


def picture(result: Estimate) -> str:
    """Draw the step in each setting, to one scale, as SVG whose black becomes the surrounding text's colour."""
    highest, limit = max(memory.peak for memory in result.columns.values()), (result.memory or 0) - OWN
    unit, name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    plots = figure.subplots(1, len(result.columns), sharey=True, squeeze=False)[0]
    for axes, (setting, memory) in zip(plots, result.columns.items(), strict=True):
        draw_step(axes, memory, unit)
        axes.set_title(f"{setting}: peak {gib(memory.peak)}")
        if 0 < limit < 2 * highest:
            axes.axhline(limit / unit, color="black", linestyle="--", label="limit, less CUDA's own")
    plots[0].set_ylabel(f"memory [{name}]")
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memsave"}):
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(drawn := io.StringIO(), format="svg", transparent=True, metadata=no_metadata)
    return drawn.getvalue()[drawn.getvalue().index("<svg") :].replace("#000000", "currentColor")


def kept_by(result: Estimate, field: str) -> dict[str, list[int]]:
    """Return each setting's kept bytes by name ("by_kind", "by_module"), the most first, all beyond 12 names as one."""
    amounts = [+Counter(getattr(memory, field)) for memory in result.columns.values()]
    names = sorted(set().union(*amounts), key=lambda name: (-max(n[name] for n in amounts), name))[:12]
    rows = {name: [amount[name] for amount in amounts] for name in names}
    rest = [amount.total() - sum(amount[name] for name in names) for amount in amounts]
    return rows | ({"the rest": rest} if any(rest) else {})


def write_page(
    path: Path, result: Estimate, title: str, settings: Mapping[str, str], changes: Sequence[str] = ()
) -> None:
    """Write an estimate, its settings in words, and changes that each alone make it fit, as one HTML file."""
    tables = []
    for words, field in (("By kind of op", "by_kind"), ("By module", "by_module")):
        rows = [[name, *map(gib, row)] for name, row in kept_by(result, field).items()]
        tables.append(html_table(words, [["", *result.columns], *rows]))
    here = PackageLoader("hf_memsave.commands", ".")
    page = Environment(loader=here, autoescape=True, undefined=StrictUndefined).get_template("estimate_page.html")
    shown = {"result": result, "gib": gib, "tables": tables, "picture": picture(result)}
    write(path, page.render(title=title, settings=settings, changes=changes, **shown))
