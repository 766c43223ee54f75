"""The tables, the text and the picture of ``techniques.py``, from its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from publish import MIB, table

#: Percent of the activation memory that InvAct frees by itself, by the paper's Listing 1.
INVACT = {"BERT-Base": 22.9, "ViT-B/16": 23.8, "CLIP-L/14": 23.4}
ALONE = 'activation="invert"'
TITLES = {
    "full": "Trained whole, fp32",
    "lora": "BERT-Base with LoRA",
    "tempo": "Tempo's parts on BERT-Large",
}
#: Paul Tol's muted scheme.
COLORS = ("#332288", "#88CCEE", "#117733", "#DDCC77")
INTRO = """\
# Kept memory of each technique, alone and together

Bytes alive between forward and backward (`measure_kept`: every storage), batch {batch}. Each model has its real width;
one and two layers of each stack are measured, and the whole model follows, since its layers are alike. Freed: percent
of what stock keeps. A technique alone is written as its field, every other field being "stock"; a name is a preset's.
SDPA and no dropout, if nothing else is said. Models have random weights and a vocabulary of 512: no byte kept depends
on them.
"""
OF_FULL = """\
`selective` finds no layer of its kinds in BERT; ViT's and CLIP's one convolution reads the images, which a step keeps
anyway.
"""
OF_INVACT = """\
InvAct's own figures (its Listing 1: freed of all activations, by its activations alone) beside those of
`activation="invert"` alone. CLIP's QuickGELU is two ops in Transformers, and stock keeps a tensor more for it: this is
freed, too.
"""
OF_LORA = """\
PEFT's defaults (r 8, no dropout, adapters in fp32), base model in fp32 or bf16. With adapters on q and v alone, the
linear after the activation is frozen and keeps nothing: `few-bit` then keeps less than `exact`, and inverting, which
keeps the output where stock keeps the input, gains nothing. With adapters on all linears that linear's lora_A keeps its
input, in its own dtype.
"""
OF_TEMPO = """\
fp32, eager attention, dropout .1 in hidden states and attention, MiB per layer. Tempo's in-place GELU and LayerNorm are
`activation="invert"` and `norm="output"`; its dropout recomputation is `dropout="seed"` with `attention="recompute"`.
Its fourth saving, softmax's input, is none here: PyTorch's softmax keeps its output alone, so that without dropout
`attention="recompute"` frees nothing. Hidden dropouts are no part of Tempo, and are here.
"""
OF_STEP = """\
{model}, fp32, 1 thread.
Peak: the most bytes alive at once in forward and backward of the whole model: every storage that an op returns, without
parameters, their gradients and the scratch of single kernels; carried to the full depth like the rest. On CUDA it has
not been measured. Time: forward and backward of one layer, embeddings and head, in {rounds} rounds of alternating
steps: the ratio of the medians, and that of the quickest.
"""
CHOICE = """\
## When to choose what

- **`exact`** first. When all weights are trained, `invert`, `precision_bit` and `norm="output"` free next to nothing
  below it: they keep the output *instead of* the input, the same bytes, and `invert` a bit an element more.
- **`invact`, `tempo`** spare recomputation in backward: an activation is not made again from its input. (A norm's
  output is, from what `tempo` keeps.) Whether that is faster depends on the device. Here, on CPU, with slopes made by
  PyTorch's elementwise ops:
  {compared}
- **`few-bit`** keeps less than `exact` where the linear after the activation is frozen and has no adapter. Its slopes
  err more there than those of `invact`. Elsewhere it keeps `exact`'s bytes and has its gradients, but makes its codes
  in vain, which takes time and a higher peak.
- **`storage="int8"`** frees the most, alone or on top of a preset, at a gradient error of about 1% (int4: 10%) and for
  the time that coding takes.
- **`selective`** is for convolutions, batch norms, pools and ReLUs, most of all where not every gradient is wanted: a
  ResNet-101 trained for its input alone keeps .52 of stock, and .02 with its batch norms in eval
  ([table](selective.md)). In transformers without ReLU it has nothing to do. `exact` contains it.
- **`wta-crs`** frees bytes where an input is not promised, as on ReLU models ([table](wta-crs-memory.md)); here it
  keeps `exact`'s bytes and a few for its rows.
"""


def markdown(results: dict[str, Any]) -> str:
    """All that was measured."""
    parts = [INTRO.format(batch=results["batch"])]
    if full := results.get("full"):
        parts += [f"## {TITLES['full']}\n", OF_FULL, kept_table(full), "## Beside InvAct's figures\n", OF_INVACT]
        parts += [invact_table(full)]
    if lora := results.get("lora"):
        parts += [f"## {TITLES['lora']}\n", OF_LORA, kept_table(lora)]
    if tempo := results.get("tempo"):
        parts += [f"## {TITLES['tempo']}\n", OF_TEMPO, kept_table(tempo, per_layer=True)]
    if step := results.get("step"):
        text = OF_STEP.format(model=step["model"], rounds=len(step["settings"]["stock"]["seconds"]))
        parts += ["## A step\n", text, step_table(step["settings"]), CHOICE.format(compared=compared(step["settings"]))]
    if full or lora or tempo:
        parts += ["![what each setting keeps](techniques.png)\n"]
    return "\n".join(parts)


def freed(rows: dict[str, Any], setting: str) -> float | None:
    """Percent of what stock keeps; None where there was nothing to patch."""
    row = rows[setting]
    return None if row is None else 100 * (1 - row["total"] / rows["stock"]["total"])


def kept_table(part: dict[str, dict[str, Any]], per_layer: bool = False) -> str:
    """Setting by model: MiB, and percent freed; per layer, or of whole models."""
    rows = []
    for setting in next(iter(part.values())):
        row = [setting if " " in setting or "=" not in setting else f"`{setting}`"]
        for settings in part.values():
            found = settings[setting]
            if found is None:
                row += ["nothing to patch", ""]
                continue
            both = (found, settings["stock"])
            ours, stock = (sum(s["per_layer"].values()) if per_layer else s["total"] for s in both)
            row += [f"{ours / MIB:.1f}", "" if setting == "stock" else f"{100 * (1 - ours / stock):.1f}%"]
        rows.append(row)
    unit = "MiB/layer" if per_layer else "MiB"
    return table(["setting", *(f"{name}{what}" for name in part for what in (f", {unit}", ", freed"))], rows)


def invact_table(full: dict[str, dict[str, Any]]) -> str:
    """Is what inverting alone frees at least what the paper says?"""
    rows = []
    for name, rows_of_model in full.items():
        claimed = next(percent for model, percent in INVACT.items() if name.startswith(model))
        ours = freed(rows_of_model, ALONE)
        verdict = (
            "nothing to patch" if ours is None else "yes" if ours >= claimed else f"no: {claimed - ours:.1f} short"
        )
        exact = freed(rows_of_model, "exact")
        rows.append([name, f"{claimed:.1f}%", "" if ours is None else f"{ours:.1f}%", verdict, f"{exact:.1f}%"])
    return table(["model", "InvAct", "here, alone", "at least InvAct's?", "`exact`"], rows)


def step_table(step: dict[str, dict[str, Any]]) -> str:
    """Peaks and times, beside stock's."""
    stock = step["stock"]
    rows = []
    for name, row in step.items():
        memory = [f"{row['kept'] / MIB:.1f}", f"{row['peak'] / MIB:.1f}", f"{row['peak'] / stock['peak']:.2f}"]
        quickest = min(row["seconds"]) / min(stock["seconds"])
        times = [f"{1000 * row['median']:.0f}", f"{row['median'] / stock['median']:.2f}", f"{quickest:.2f}"]
        rows.append([name, *memory, *times])
    header = ["setting", "kept MiB", "peak MiB", "peak, ratio", "layer, ms", "time, ratio", "time, ratio of quickest"]
    return table(header, rows)


def compared(step: dict[str, dict[str, Any]]) -> str:
    """Times and peaks of inverting, over those of exact."""
    exact = step["exact"]
    said = [
        f"`{name}` takes {step[name]['median'] / exact['median']:.2f} times as long as `exact`, at "
        f"{step[name]['peak'] / exact['peak']:.2f} times its peak"
        for name in ("invact", "tempo")
    ]
    return ", and\n  ".join(said) + "."


def picture(path: Path, results: dict[str, Any]) -> None:
    """For each part, what every setting keeps, in percent of stock: a bar a model."""
    parts = [part for part in TITLES if part in results]
    if not parts:
        return
    figure = Figure(figsize=(6 * len(parts), 9), layout="constrained", dpi=110)
    figure.suptitle("kept between forward and backward, percent of stock", fontsize=12)
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        settings = list(next(iter(results[part].values())))
        height = 0.8 / len(results[part])
        for index, (name, rows) in enumerate(results[part].items()):
            shares = [100 - (freed(rows, setting) or 0.0) for setting in settings]
            places = [i + (index + 0.5) * height - 0.4 for i in range(len(settings))]
            drawn = axes.barh(places, shares, height, color=COLORS[index], label=name)
            labels = [
                "nothing to patch" if rows[s] is None else f"{v:.0f}" for s, v in zip(settings, shares, strict=True)
            ]
            axes.bar_label(drawn, labels, fontsize=7, padding=2)
        axes.set_yticks(range(len(settings)), settings)
        axes.set(title=TITLES[part], xlim=(0, 130), ylim=(len(settings) - 0.5, -0.5))
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.03), ncols=2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})
