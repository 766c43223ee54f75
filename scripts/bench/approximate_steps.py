"""Train a deep net a few steps with approximate gradients, in fp32 and bf16: how far from exact training it goes.

    python scripts/bench/approximate_steps.py [--seeds 200:220] [--out DIR]

Frozen linears stand between activations, so that slopes multiply; trained are a shift before each, and norms. Each run
has fp32's rates and batches, and weights of its own in float64, which are rounded to its dtype for each step: so what
separates two runs of one dtype is their gradients. Small steps let rounding average out, and leave what a method does.
"""

import logging
import statistics
from math import exp, log

import torch
from torch import Tensor, nn

from hf_memsave import MemSaveConfig, patch
from publish import RESULTS, arguments, table, write

WIDTH, DEPTH, STEPS, BATCH, RATE = 16, 9, 20, 512, 0.01
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
METHODS = {
    "norm output": MemSaveConfig(norm="output"),
    "invert": MemSaveConfig(activation="invert"),
    "precision_bit": MemSaveConfig(activation="precision_bit"),
    "few_bit 8": MemSaveConfig(activation="few_bit", few_bits=8),
    "int8": MemSaveConfig(storage="int8"),
    "int4": MemSaveConfig(storage="int4"),
    "few_bit 2": MemSaveConfig(activation="few_bit", few_bits=2),
    "few_bit 1": MemSaveConfig(activation="few_bit", few_bits=1),
}


class Deep(nn.Module):
    """Linears between activations."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        self.acts = nn.ModuleList(nn.GELU() for _ in range(DEPTH))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(DEPTH))
        self.norms = nn.ModuleDict({str(number): nn.LayerNorm(WIDTH) for number in range(0, DEPTH, 3)})
        self.linears.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """A norm before every third linear."""
        for number, (linear, act, shift) in enumerate(zip(self.linears, self.acts, self.shifts, strict=True)):
            if str(number) in self.norms:
                x = self.norms[str(number)](x)
            x = linear(act(2 * x + shift))
        return x


def moved(dtype: torch.dtype, config: MemSaveConfig | None, seed: int) -> Tensor:
    """How far a few steps move all trained parameters, in one vector; None is exact."""
    torch.manual_seed(seed)
    model = Deep().to(dtype)
    if config is not None:
        patch(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    wide = [p.detach().double() for p in trained]
    start = [w.clone() for w in wide]
    batches = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        x, y = (torch.randn(BATCH, WIDTH, generator=batches) for _ in "xy")
        (model(x.to(dtype)).float() - y).pow(2).mean().backward()
        for parameter, w in zip(trained, wide, strict=True):
            w.sub_(parameter.grad, alpha=RATE)
            parameter.data.copy_(w)
            parameter.grad = None
    return torch.cat([(w - s).flatten() for w, s in zip(wide, start, strict=True)])


def distances(dtype: torch.dtype, seed: int) -> dict[str, dict[str, float]]:
    """From what exact training moves in this dtype, and in float64, each as a part of that."""
    exact, true = moved(dtype, None, seed), moved(torch.float64, None, seed)
    found = {name: moved(dtype, config, seed) for name, config in METHODS.items()}
    from_exact = {name: share(vector, exact) for name, vector in found.items()}
    return {"exact": from_exact, "float64": {name: share(v, true) for name, v in {"exact": exact, **found}.items()}}


def share(vector: Tensor, of: Tensor) -> float:
    """The distance between both, as a part of the second."""
    return float((vector - of).norm() / of.norm())


#: Dtype and origin -> method -> distances by seed.
Found = dict[str, dict[str, list[float]]]


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """The geometric mean, and the standard deviation of the natural logarithms."""
    logs = [log(value) for value in values]
    return exp(statistics.mean(logs)), statistics.stdev(logs)


def parsed(text: str) -> range:
    """``A:B``."""
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def main() -> None:
    """Measure all, and write the results."""
    parser = arguments(__doc__, RESULTS)
    parser.add_argument("--seeds", type=parsed, default=range(200, 220), metavar="A:B", help="from A, below B")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("hf_memsave").setLevel(logging.ERROR)
    found: Found = {}
    for dtype in DTYPES:
        for seed in options.seeds:
            for origin, by_name in distances(DTYPES[dtype], seed).items():
                for name, value in by_name.items():
                    by_origin = found.setdefault(f"{dtype}, from {origin}", {})
                    by_origin.setdefault(name, []).append(float(f"{value:.4g}"))
    header = ["dtype", "method", "mean", "least", "largest", "spread", "from float64"]
    text = f"""\
# How far a few steps with approximate gradients go from exact training

{DEPTH} frozen linears and GELUs of width {WIDTH}, three LayerNorms; shifts and norms are trained {STEPS} steps of SGD,
batch {BATCH}, from seeds {options.seeds.start}:{options.seeds.stop}. Of what a method moves, the distance from what
exact training moves in the same dtype, as a part of that: geometric mean, least and largest, and spread (the standard
deviation of the natural logarithm). And the mean distance from what exact training moves in float64.

"""
    text += "\n".join(table(header, rows(dtype, found)) for dtype in DTYPES)
    text += "\nOn CPU stock adds the gradients of a bf16 LayerNorm's parameters in bf16, `norm output` in fp32.\n"
    write("approximate-steps", text, found, options.out)


def rows(dtype: str, found: Found) -> list[list[str]]:
    """Of the table, one a method."""
    lines = []
    for name, from_float64 in found[f"{dtype}, from float64"].items():
        numbers = ["-"] * 4
        if name != "exact":
            values = found[f"{dtype}, from exact"][name]
            mean, spread = mean_and_spread(values)
            numbers = [f"{mean:.1e}", f"{min(values):.1e}", f"{max(values):.1e}", f"{spread:.2f}"]
        lines.append([dtype, name, *numbers, f"{mean_and_spread(from_float64)[0]:.1e}"])
    return lines


if __name__ == "__main__":
    main()
