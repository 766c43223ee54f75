"""Train small models of many types with checkpoint="tiles", beside stock and float64.

    python scripts/bench/tiles.py [--types bert llama] [--tiles 11] [--jobs 2] [--out [DIR]]

A type's loss in fp32, its dropouts drawing, is compared with stock's: equal to the bit where CPU's products of fewer
rows have the same bits, and else within a few roundings. Without dropout, the distance of all gradients to those of a
float64 model is divided by stock's distance, in fp32, under autocast and in bf16: a root mean square over draws of
weights, as either distance is that of rounding. In float64 each gradient must be within 1e-4 of stock's: it is within
1e-15 but where a model's own code computes in fp32. Kept bytes are what is alive between forward and backward. The exit
status is 1 where a promise is broken without an entry in EXPLAINED.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

from hf_memsave import MemSaveConfig, PatchError, measure_kept, patch
from hf_memsave.patching.rows import reasons
from hf_memsave.patching.swap import stock_class
from publish import RESULTS, arguments, publish, versions
from small_models import loss_of, model_types, small_model

#: The mode -> how far from float64 tiles may be, as a multiple of stock's distance.
MODES = {"fp32": 1.1, "autocast": 1.1, "bf16": 1.1}
#: What is compared unless other types are named: those that people fine-tune most, and some that do not run in tiles.
TYPES = """llama mistral mixtral qwen2 qwen3 qwen3_moe phi phi3 gemma gemma2 gemma3_text gpt2 gpt_neo gpt_neox gptj opt
falcon bloom mpt stablelm olmo olmo2 cohere granite starcoder2 bert roberta distilbert electra albert deberta-v2
xlm-roberta mpnet camembert vit deit dinov2 beit siglip t5 mt5 bart mbart pegasus marian whisper wav2vec2 hubert
videomae nllb-moe mamba rwkv gpt_oss deepseek_v3 smollm3 helium glm4 exaone4""".split()
#: Broken promises that are understood: (type, column) -> reason.
EXPLAINED: dict[tuple[str, str], str] = {}


@dataclass
class Row:
    """One type: classes of modules that ran in rows, reasons of others, and what was compared."""

    type: str
    in_rows: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    loss: str = ""
    #: What the loss differs by, as a part of stock's.
    off: float = math.inf
    float64: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    #: Bytes kept by stock, with checkpoint="block", and in rows.
    kept: list[int] = field(default_factory=list)
    skipped: str = ""

    @property
    def broken(self) -> list[str]:
        """The columns in which a promise is broken."""
        found = [] if self.loss == "" or self.off <= 1e-6 else ["loss"]
        found += [] if self.float64 is None or self.float64 <= 1e-4 else ["float64"]
        found += [mode for mode, ratio in self.ratios.items() if not ratio <= MODES[mode]]
        return [name for name in found if (self.type, name) not in EXPLAINED]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and write the table; the exit status."""
    parser = arguments(__doc__, RESULTS)
    parser.add_argument("--types", nargs="+", metavar="TYPE", default=TYPES, help="model types, or all")
    parser.add_argument("--tiles", type=int, default=11, help="tokens of each sequence at a time, at most")
    parser.add_argument("--draws", type=int, default=3, help="draws of weights")
    parser.add_argument("--jobs", type=int, default=2, help="types at a time, each on one thread")
    options = parser.parse_args(argv)
    types = model_types() if options.types == ["all"] else options.types
    tasks = [(name, options.tiles, options.draws) for name in types]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiles", "hf_memsave", "peft", "transformers.models.auto.modeling_auto"])
    with context.Pool(options.jobs, maxtasksperchild=8) as pool:
        rows = list(tqdm(pool.imap(row_of, tasks), "types", len(types), unit="type"))
    report(rows, options)
    return int(any(row.broken for row in rows))


def row_of(task: tuple[str, int, int]) -> Row:
    """A type, or why nothing is said of it."""
    model_type, tiles, draws = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable()
    gc.freeze()  # measure_kept walks all objects
    row = Row(model_type)
    try:
        model, batch = small_model(model_type)
        loss, _ = step(copy.deepcopy(model), batch)
    except Exception as error:
        row.skipped = f"stock: {type(error).__name__}: {error}"[:150]
        return row
    try:
        compare(row, model, batch, MemSaveConfig(tiles=tiles), draws, loss)
        configs = (None, MemSaveConfig(checkpoint="block"), MemSaveConfig(tiles=tiles))
        row.kept = [measure_kept(patched(model, one), batch).total for one in configs] if row.in_rows else []
    except PatchError as error:
        row.skipped = str(error)[:150]
    except Exception as error:
        row.loss = f"fails: {type(error).__name__}: {error}"[:150]
        with contextlib.suppress(Exception):
            step(patched(model, MemSaveConfig(checkpoint="block")), batch)
            return row
        row.loss, row.skipped = "", f"checkpoint='block' fails, too: {row.loss}"
    return row


def compare(
    row: Row, model: nn.Module, batch: dict[str, Tensor], tiles: MemSaveConfig, draws: int, loss: Tensor,
    modes: Sequence[str] = tuple(MODES),
) -> None:  # fmt: skip
    """Fill a row, but for what is kept."""
    ours = patched(model, tiles)
    found, _ = step(ours, batch)
    found_of = [(stock_class(m).__name__, why) for m in ours.modules() for why in reasons(m)]
    row.in_rows = sorted({name for name, why in found_of if not why})
    row.refused = sorted({f"{name}: {why}" for name, why in found_of if why})
    row.off = float((found - loss).abs() / loss.abs())
    row.loss = "equal" if torch.equal(found, loss) else f"differs by {row.off:.0e}"
    if not row.in_rows:
        return
    squares: dict[str, list[float]] = {mode: [0.0, 0.0] for mode in modes}
    for draw in range(draws):
        plain = without_dropout(model, draw)
        exact_batch = cast(batch, torch.float64)
        try:
            exact = step(in_float64(plain), exact_batch)[1]
            if not all(bool(gradient.isfinite().all()) for gradient in exact.values()):
                raise ArithmeticError("not finite")
        except Exception as error:
            row.refused.append(f"not compared, stock in float64: {type(error).__name__}")
            return
        if not draw:
            double = step(patched(in_float64(plain), tiles), exact_batch)[1]
            row.float64 = farthest(double, exact)
        for mode in list(squares):
            dtype = torch.bfloat16 if mode == "bf16" else torch.float32
            plain = plain.to(dtype)  # bf16 comes last
            of = cast(batch, dtype), mode == "autocast"
            try:
                stock = distance(step(patched(plain, None), *of)[1], exact)
            except Exception:  # stock's own code knows no such dtype
                stock = math.nan
            if not math.isfinite(stock):
                del squares[mode]
                continue
            squares[mode][0] += stock**2
            squares[mode][1] += distance(step(patched(plain, tiles), *of)[1], exact) ** 2
    row.ratios = {mode: (mine / max(stock, 1e-300)) ** 0.5 for mode, (stock, mine) in squares.items()}


def step(model: nn.Module, batch: dict[str, Tensor], is_autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one forward and backward."""
    transformers.set_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def patched(model: nn.Module, config: MemSaveConfig | None) -> nn.Module:
    """A copy, patched."""
    model = copy.deepcopy(model)
    if config is not None:
        patch(model, config)
    return model


def without_dropout(model: Any, draw: int) -> nn.Module:
    """The model without dropout, its weights moved a little by each draw but the first."""
    config = copy.deepcopy(model.config)
    for one in configs_in(config):
        for name, value in list(vars(one).items()):
            if "drop" in name and isinstance(value, float):
                setattr(one, name, 0.0)
    plain = type(model)(config).train()
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(draw)
    with torch.no_grad():
        for parameter in plain.parameters() if draw else ():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return plain


def in_float64(model: Any) -> nn.Module:
    """A copy, which computes experts one by one: products of groups know no float64."""
    model = copy.deepcopy(model).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def configs_in(config: Any) -> list[Any]:
    """A configuration and those within."""
    return [config, *(c for one in vars(config).values() if hasattr(one, "model_type") for c in configs_in(one))]


def cast(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The batch with its floats of a dtype."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def distance(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Of all gradients to the exact ones, relative to these."""
    if ours.keys() != exact.keys():
        return float("inf")
    error = sum(float((ours[n].double() - exact[n]).square().sum()) for n in exact)
    return (error / max(sum(float(g.square().sum()) for g in exact.values()), 1e-300)) ** 0.5


def farthest(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest distance of one gradient, relative to its norm, or to a millionth of that of all where it is zero."""
    if ours.keys() != exact.keys():
        return float("inf")
    least = 1e-6 * float(sum(g.square().sum() for g in exact.values())) ** 0.5
    return max(float((ours[n] - g).norm()) / max(float(g.norm()), least, 1e-300) for n, g in exact.items())


def report(rows: Sequence[Row], options: Any) -> None:
    """The table of types that have modules in rows, and a list of the reasons of the others."""
    tiled = [row for row in rows if row.in_rows]
    lines = [
        [
            row.type, ", ".join(row.in_rows), row.loss, f"{row.float64 or 0:.0e}",
            *(f"{row.ratios[mode]:.2f}" if mode in row.ratios else "" for mode in MODES),
            *(f"{row.kept[i] / row.kept[0]:.2f}" if row.kept else "" for i in (1, 2)),
            "; ".join([*row.refused, *(f"{name}!" for name in row.broken)]),
        ]
        for row in tiled
    ]  # fmt: skip
    header = [
        "type", "in rows", "fp32 loss", "float64, at most", *(f"from float64, {mode}" for mode in MODES),
        "kept, block", "kept, tiles", "whole",
    ]  # fmt: skip
    worst = {mode: max((row.ratios.get(mode, 0.0) for row in tiled), default=0.0) for mode in MODES}
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row.in_rows:
            why = row.skipped or "; ".join(row.refused) or row.loss.startswith("fails") and row.loss or "none ran"
            reasons.setdefault(why, []).append(row.type)
    title = (
        f"{versions()}, CPU: {options.tiles} tokens of each sequence at a time, {options.draws} draws of weights\n\n"
        f"- {len(tiled)} types with modules in rows, the fp32 loss equal to the bit in "
        f"{sum(row.loss == 'equal' for row in tiled)}; broken promises: {sum(bool(row.broken) for row in rows)}\n"
        f"- gradients' distance to float64 over stock's, at most: "
        + ", ".join(f"{ratio:.2f} {mode}" for mode, ratio in worst.items())
    )
    notes = "\nNone in rows:\n\n" + "".join(f"- {why}: {', '.join(names)}\n" for why, names in sorted(reasons.items()))
    publish("tiles", title, header, lines, {"rows": [asdict(row) for row in rows]}, options.out, notes)


if __name__ == "__main__":
    sys.exit(main())
