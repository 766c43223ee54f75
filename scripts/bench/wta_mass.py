"""Where the probability mass of column-row pairs lies (Fig. 3 of the WTA-CRS paper), and the noise of the estimators.

    python scripts/bench/wta_mass.py --glue FOLDER [--steps 300]

Trains a small BERT on real SST-2 text, then takes each sampled linear's true H and dZ on a fresh batch. Picture: the
mass of the |C| most probable pairs (Eq. 3) over |C| / k, at k = 0.3 |D|; above the diagonal Eq. 7 holds. Table: the
variance of the weight gradient of each estimator at that k, relative to ‖dW‖², in closed form, with p from the true
norms, from the activation norms alone, and as a cache of norms by position predicts it.
Writes scripts/results/wta-mass.{md,png}.
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, set_seed

from hf_memsave.sampling.estimators import probabilities, winners
from publish import RESULTS, arguments, publish
from training import LENGTH, MODEL, PLANS, encoded

BATCH, SHARE = 32, 0.3


def main() -> None:
    """Train, measure, write; status 1 if WTA-CRS is not the best where Eq. 7 holds."""
    parser = arguments(__doc__, RESULTS)
    parser.add_argument("--glue", type=Path, required=True, help="the folder of the official tasks' folders")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    set_seed(0)
    train, _, tokenizer = encoded(options.glue, "sst2")
    batches = [collate(tokenizer, train, step) for step in range(options.steps + 21)]
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=2, **MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PLANS["sst2"].rate)
    for batch in batches[: options.steps]:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    *earlier, last = [pairs(model, batch) for batch in batches[options.steps :]]
    rows, better, curves = [], [], {}
    for name, (h, dz, mask) in last.items():
        x, y = h.norm(dim=-1), dz.norm(dim=-1)
        real = int(mask.sum())
        k = round(SHARE * real)
        p_true = probabilities(x[mask] * y[mask])
        squares = (x[mask] * y[mask]).double().square()
        total = (dz[mask].T @ h[mask]).double().square().sum()
        by_position = profile([e[name] for e in earlier], mask.shape[1])[None].expand_as(mask)[mask]
        ps = {"true": p_true, "H alone": probabilities(x[mask]), "H, position": probabilities(x[mask], by_position)}
        noise = {(w, n): float(variance(p, squares, total, k, w) / total) for n, p in ps.items() for w in (True, False)}
        uniform = float(variance(torch.full_like(p_true, 1 / real), squares, total, k, False) / total)
        mass = p_true.sort(descending=True).values.cumsum(0)[:k]
        holds = bool((mass[:-1] > torch.arange(1, k) / k).any())
        better.append(not holds or noise[True, "true"] < min(noise[False, "true"], uniform))
        rows.append([name, "yes" if holds else "no", *(f"{v:.3f}" for v in (*noise.values(), uniform))])
        curves[name] = mass
    kinds = [f"{'WTA' if w else 'CRS'}, p of {n}" for n in ps for w in (True, False)]
    title = f"""\
# Noise of the weight gradient's estimators on a trained BERT

SST-2, {options.steps} steps, width {MODEL["hidden_size"]}, batch {BATCH}; k = {SHARE} of the real tokens. Variance over
‖dW‖², closed form for independent draws; for WTA a bound from above."""
    publish("wta-mass", title, ["linear", "Eq. 7 holds", *kinds, "uniform"], rows, {}, options.out)
    picture(options.out / "wta-mass.png", curves)
    sys.exit(0 if all(better) else 1)


def collate(tokenizer: object, data: object, step: int) -> dict[str, Tensor]:
    """A batch of real sentences, padded to one length."""
    rows = [data[i % len(data)] for i in range(step * BATCH, (step + 1) * BATCH)]
    labels = torch.tensor([row["labels"] for row in rows])
    columns = {key: [row[key] for row in rows] for key in ("input_ids", "attention_mask")}
    return {**tokenizer.pad(columns, padding="max_length", max_length=LENGTH, return_tensors="pt"), "labels": labels}


def pairs(model: torch.nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """H ``[batch, seq, in]`` and dZ ``[batch, seq, out]`` of every linear in the blocks, and the real tokens."""
    found: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layer." in name:
            short = name.removeprefix("bert.encoder.")
            handles += [
                module.register_forward_hook(lambda m, i, o, n=short: found.setdefault(n, []).append(i[0].detach())),
                module.register_full_backward_hook(lambda m, i, o, n=short: found[n].append(o[0].detach())),
            ]
    model(**batch).loss.backward()
    model.zero_grad()
    for handle in handles:
        handle.remove()
    mask = batch["attention_mask"].bool()
    return {name: (h, dz, mask) for name, (h, dz) in found.items()}


def profile(earlier: list[tuple[Tensor, Tensor, Tensor]], length: int) -> Tensor:
    """The root mean square of ‖dZ‖ at each position over earlier batches, ``[seq]``."""
    total, count = torch.zeros(length), torch.zeros(length)
    for _, dz, mask in earlier:
        squared = dz.norm(dim=-1).square() * mask
        total, count = total + squared.sum(0) / squared.sum(), count + mask.sum(0) / mask.sum()
    return (total / count.clamp_min(1e-9)).sqrt()


def variance(p: Tensor, squares: Tensor, total: Tensor, k: int, is_wta: bool) -> Tensor:
    """Var of Eq. 6 (or Eq. 5), summed over the entries of dW; ``squares`` are (‖h‖ ‖dz‖)², ``total`` ‖dW‖²."""
    order = p.sort(descending=True).indices
    p, squares = p[order], squares[order]
    tail = torch.cat([p.flip(0).cumsum(0).flip(0), p.new_zeros(1)])
    c = int(winners(tail, k)) if is_wta else 0
    mass = tail[c]
    # For c > 0 the square of what C leaves is not subtracted: a bound from above.
    second = torch.where(squares[c:] > 0, squares[c:] * mass / p[c:], 0.0).sum()  # pairs of no gradient have p = 0
    return (second - (total if c == 0 else 0)).clamp_min(0) / (k - c)


def picture(path: Path, curves: dict[str, Tensor]) -> None:
    """One curve a linear; the diagonal is Eq. 7's bound."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axis = figure.subplots()
    for name, mass in curves.items():
        axis.plot(torch.arange(1, len(mass) + 1) / len(mass), mass, label=name, linewidth=1.2)
    axis.plot([0, 1], [0, 1], "k--", label="|C| / k (Eq. 7)")
    axis.set(xlabel="|C| / k", ylabel="probability mass of C", title=f"k = {SHARE} |D|, BERT trained on SST-2")
    axis.legend(fontsize=6)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
