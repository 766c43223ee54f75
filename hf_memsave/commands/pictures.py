"""The pictures that commands draw; needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from hf_memsave.config.files import write
from hf_memsave.config.sizes import MIB
from hf_memsave.tape.kinds import KINDS_OF_OPS

if TYPE_CHECKING:
    from hf_memsave.commands.demo import Run

# Paul Tol's muted scheme, told apart in every kind of colour vision; grey for the rest.
_SCHEME = "#332288 #88CCEE #44AA99 #117733 #DDCC77 #999933 #CC6677 #882255 #AA4499 #BBBBBB".split()
_COLORS = dict(zip(KINDS_OF_OPS, _SCHEME, strict=True))
# Shares of the highest bar: smaller segments are not drawn, or have no room for their figure.
_SMALLEST, _SMALLEST_LABELLED = 0.001, 0.022


def demo_picture(path: Path, title: str, runs: Mapping[str, tuple[Run, Run]]) -> None:
    """Write the loss curves of each model's stock and patched run, above its two stacked bars."""
    figure = Figure(figsize=(5.5 * len(runs), 8.5), layout="constrained", dpi=150)
    figure.suptitle(title, wrap=True, fontsize=11)
    rows = figure.subplots(2, len(runs), squeeze=False, height_ratios=(2, 3))
    for (name, (stock, patched)), curves, bars in zip(runs.items(), *rows, strict=True):
        steps = range(1, len(stock.losses) + 1)
        curves.plot(steps, stock.losses, color="#88CCEE", linewidth=4, label="stock")
        curves.plot(steps, patched.losses, color="#332288", linewidth=1, label="patched")
        curves.set(title=f"{name}, dev accuracy {patched.accuracy:.1%}", xlabel="step", ylabel="training loss")
        curves.legend(frameon=False)
        curves.spines[["top", "right"]].set_visible(False)
        stacked_bars(bars, {"stock": stock.kept.by_kind, "patched": patched.kept.by_kind})
    figure.savefig(drawn := io.BytesIO(), format=path.suffix[1:])
    write(path, drawn.getvalue())


def stacked_bars(axes: Axes, bars: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a bar for each setting, with a segment for each kind of op; bytes by kind, compared with the first's."""
    totals = [sum(kept.values()) for kept in bars.values()]
    highest = max(totals)
    digits = 0 if highest > 100 * MIB else 1
    bottoms = [0.0] * len(bars)
    for kind in KINDS_OF_OPS:
        heights = [kept.get(kind, 0) / MIB for kept in bars.values()]
        if max(heights) * MIB >= _SMALLEST * highest:
            color = _COLORS[kind]
            drawn = axes.bar(range(len(bars)), heights, 0.6, bottoms, color=color, label=kind, edgecolor="white")
            labels = [f"{h:,.{digits}f}" if h * MIB > _SMALLEST_LABELLED * highest else "" for h in heights]
            red, green, blue = to_rgb(color)
            ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"  # what is read better on it
            axes.bar_label(drawn, labels, label_type="center", fontsize=9, color=ink)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for index, total in enumerate(totals):
        ratio = f"\n{totals[0] / total:.2f}x less" if index else ""
        axes.annotate(
            f"{total / MIB:,.{digits}f} MiB{ratio}", (index, total / MIB), (0, 4), textcoords="offset points",
            ha="center", va="bottom", fontsize=11, fontweight="bold",
        )  # fmt: skip
    axes.set_xticks(range(len(bars)), list(bars), fontsize=11)
    axes.set(ylabel="kept between forward and backward [MiB]", ylim=(0, highest / MIB * 1.15))
    axes.legend(reverse=True, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
