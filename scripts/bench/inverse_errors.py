"""How far the approximate slopes of activations are from f', over every half-precision input and against the papers'.

    python scripts/bench/inverse_errors.py [--out [DIR]]

Writes inverse-derivatives.{json,md,png}. The errors of half precision stand beside the floor: those of the exact
inverse (by bisection in float64) of the same forward's own rounded y.
"""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from torch import Tensor

from hf_memsave.ops.approximate.few_bit import RANGE, few_bit
from hf_memsave.ops.approximate.inverse import ACTIVATIONS
from publish import RESULTS, arguments, table, write
from slopes import (
    HALVES,
    dense,
    every,
    invact,
    slope_from_output,
    slope_from_precision_bit,
    slope_of_exact_inverse,
    true_slope,
)

#: Where the slope is 0 or 1 to five digits.
FAR = 15.0
FIGURE = ("gelu", "silu")
TITLE = "Slope of an activation from what is kept instead of its input"
MARKDOWN = """\
# Slopes of activations from their outputs: errors

The largest |slope - f'(x)|, f' in float64: over a dense grid on [-100, 100] (fp32), and over every finite input (bf16,
fp16). Floor: the same for the exact inverse of that forward's own rounded y. Bit: `precision_bit`, the others `invert`.

{errors}

On x in [-{range:g}, {range:g}], in fp32: the largest error, and L2, the root of the integral of its square. InvAct: its
own Eqs. 5-9 (1 bit beside the output, as ours). FewBit: levels by dynamic programming (nothing but the bits).

{compared}

![errors of GELU and SiLU](inverse-derivatives.png)
"""


def errors(name: str) -> dict[str, float]:
    """The largest errors of an activation, by dtype and method."""
    found: dict[str, float] = {}
    far = 0.0
    for dtype in (torch.float32, *HALVES):
        x = dense() if dtype == torch.float32 else every(dtype)
        true, short = true_slope(name, x), str(dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
        error = (slope_from_output(name, x) - true).abs()
        far = max(far, error[x.abs() >= FAR].max().item())
        found[short] = error.max().item()
        found[f"{short} bit"] = (slope_from_precision_bit(name, x) - true).abs().max().item()
        if dtype in HALVES:
            found[f"{short} floor"] = (slope_of_exact_inverse(name, x) - true).abs().max().item()
    order = [f"{short}{what}" for short in ("fp32", "bf16", "fp16") for what in ("", " floor", " bit")]
    return {key: found[key] for key in order if key in found} | {f"beyond ±{FAR:g}": far}


def compare(name: str) -> dict[str, tuple[float, float]]:
    """Largest and L2 error on [-10, 10]: ours, InvAct's and FewBit's."""
    x = torch.linspace(-RANGE, RANGE, 400_001)
    true = true_slope(name, x)

    def both(slope: Tensor) -> tuple[float, float]:
        error = (slope - true).abs()
        return error.max().item(), (error.square().mean() * 2 * RANGE).sqrt().item()

    return {
        "ours": both(slope_from_output(name, x)),
        "InvAct": both(invact(name, x)),
        **{f"FewBit, {_bits(bits)}": both(_few_bit_slope(name, x, bits)) for bits in range(1, 9)},
    }


def _bits(bits: int) -> str:
    return f"{bits} bit{'s' if bits > 1 else ''}"


def _few_bit_slope(name: str, x: Tensor, bits: int) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(few_bit(leaf, name, ACTIVATIONS[name], bits).sum(), leaf)[0]


def cells(rows: dict[str, list[float]]) -> list[list[str]]:
    """Two digits a number."""
    return [[name, *map(_number, row)] for name, row in rows.items()]


def _number(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-3 else f"{value:.1e}"


def picture(compared: dict[str, dict[str, tuple[float, float]]]) -> Figure:
    """FewBit's errors by bits against InvAct's and ours, and below them the numbers."""
    figure = Figure(figsize=(11, 11), layout="constrained", dpi=110)
    figure.suptitle(f"{TITLE}: error on x in [-{RANGE:g}, {RANGE:g}]", fontsize=12)
    top, bottom = figure.subfigures(2, 1, height_ratios=(5, 2))
    for axes, name, which in zip(top.subplots(2, 2).T.flat, sorted(FIGURE * 2), (1, 0, 1, 0), strict=True):
        found = compared[name]
        few = [pair[which] for key, pair in found.items() if key.startswith("FewBit")]
        axes.semilogy(range(1, len(few) + 1), few, "o-", color="#332288", label="FewBit")
        axes.axhline(found["InvAct"][which], linestyle="--", color="#CC3311", label="InvAct (1 bit)")
        axes.axhline(found["ours"][which], color="#117733", label="hf_memsave invert (1 bit)")
        axes.set(title=f"{name}, {'L2' if which else 'largest'} error", xlabel="bits an element", ylim=(1e-4, 1))
        axes.spines[["top", "right"]].set_visible(False)
    top.legend(*axes.get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=3)
    axes = bottom.subplots()
    axes.axis("off")
    cells = axes.table(
        [[_number(v) for name in FIGURE for v in compared[name][row]] for row in compared[FIGURE[0]]],
        rowLabels=list(compared[FIGURE[0]]),
        colLabels=[f"{name}, {what}" for name in FIGURE for what in ("largest", "L2")],
        loc="center",
    )
    cells.scale(0.8, 1.2)
    return figure


def main() -> None:
    """Measure and write."""
    options = arguments(__doc__, RESULTS).parse_args()
    torch.set_num_threads(1)
    found = {name: errors(name) for name in ACTIVATIONS}
    compared = {name: compare(name) for name in FIGURE}
    columns = [f"{name}, {what}" for name in FIGURE for what in ("largest", "L2")]
    beside = {slope: [v for name in FIGURE for v in compared[name][slope]] for slope in compared["gelu"]}
    text = MARKDOWN.format(
        errors=table(["activation", *found["gelu"]], cells({name: [*row.values()] for name, row in found.items()})),
        compared=table(["slope", *columns], cells(beside)),
        range=RANGE,
    )
    write("inverse-derivatives", text, {"errors": found, "compared": compared}, options.out)
    picture(compared).savefig(options.out / "inverse-derivatives.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
