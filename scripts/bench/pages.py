"""Write the tables of README and docs that quote results, all pictures, and what ``gpu_check.sh`` has measured.

    python scripts/bench/pages.py [gpu-check.tgz]

The archive's tables go to scripts/results first. A test holds the pages to what this script writes.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

import fine_tuning
import inverse_errors
import papers
import techniques
from long_context import SETTINGS, TOKENS, TRAINED
from publish import RESULTS, ROOT, arguments, table
from ways_to_keep_less import BERT, FULL, LONG, LORA, WAYS

GIB = 2**30
#: What a run of ``gpu_check.sh`` leaves.
TABLES = ("gpu-bits", "gpu-models", "gpu-ops")
#: Where the table of a page begins, by its name, and ends.
BEGIN, END = "<!-- {}: written by scripts/bench/pages.py -->\n", "<!-- until here -->\n"
PICTURE = "memory-and-time.png"
#: Methods whose names stand below their points there.
BELOW = ("block", "checkpointing", "memsave, whole loss")


class Way(NamedTuple):
    """A row of README's first table: a method of known_models.py, and a way of ways_to_keep_less.py."""

    method: str
    way: str
    label: str

    @property
    def loss(self) -> str:
        """What the way does with logits."""
        return WAYS[self.way].loss


SHOWN = [
    Way("stock", "stock", "stock"),
    Way("memsave, whole loss", 'memsave=True, loss="stock"', '`memsave={"loss": "stock"}`'),
    Way("memsave", "memsave=True", "**`memsave=True`**"),
    Way("gate", '"gate"', '**`memsave="gate"`**'),
    Way("block", '"block"', '**`memsave="block"`**'),
    Way("checkpointing", "gradient checkpointing", "gradient checkpointing"),
    Way(
        "checkpointing, chunked loss", "gradient checkpointing + chunked loss", "gradient checkpointing + chunked loss"
    ),
]
#: README's columns of memory, of known_models.py, and of time.
PEAKS = {
    "8B LoRA": "Llama-3-8B, LoRA, bf16, 4 x 2048 tokens",
    "8B QLoRA": "Llama-3-8B, QLoRA, autocast, 4 x 2048",
    "8B full": "Llama-3-8B, full, bf16, 8-bit AdamW, 4 x 2048",
    "BERT-Large": "BERT-Large, full, autocast, 32 x 512",
    "T5-Large": "T5-Large, full, autocast, 8 x 512",
    "ViT-L": "ViT-L/16, full, autocast, 64 images",
}
TIMES = {"LLaMA LoRA": LORA, "LLaMA": FULL, "BERT": BERT}
#: Panel of the picture -> its column of memory, and of time.
PANELS = {
    "LoRA: Llama-3-8B, 4 x 2048 tokens": ("8B LoRA", LORA), "full: BERT-Large, 32 x 512 tokens": ("BERT-Large", BERT),
}  # fmt: skip


def unpack(archive: Path, into: Path) -> None:
    """Take the tables, and nothing else, out of an archive."""
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            name = Path(member.name)
            if name.stem in TABLES and name.suffix in (".json", ".md") and (file := packed.extractfile(member)):
                (into / name.name).write_bytes(file.read())


def results(folder: Path, name: str) -> dict[str, Any]:
    """The figures of a table; none where it was not measured."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def peak(known: dict[str, Any], column: str, way: Way) -> float:
    """The estimated peak in GiB. A model without large logits has one loss, so a way has one figure."""
    found = known[PEAKS[column]]
    plain = {"memsave, whole loss": "memsave", "checkpointing, chunked loss": "checkpointing"}
    return float(found[way.method if way.method in found else plain[way.method]]["peak"]) / GIB


def readme(folder: Path) -> str:
    """README's first table: peaks and times by way, and what a GPU has measured, if it was asked."""
    known, measured = results(folder, "known-models"), results(folder, "gpu-models")
    ways = results(folder, "ways-to-keep-less")["ways"]
    rows = []
    for way in SHOWN:
        times = [f"{ways[f'{model}; {way.way}']['time']:.2f}" for model in TIMES.values()]
        rows.append([way.label, way.loss, *(f"{peak(known, column, way):.1f}" for column in PEAKS), *times])
        on_gpu = [measured.get(f"{model}: {way.method}", {}).get("peak") for model in PEAKS.values()]
        if any(on_gpu):
            cells = [f"{one / GIB:.1f}" if one else "" for one in on_gpu]
            rows.append(["[measured](docs/numbers.md#on-a-gpu)", "", *cells, *[""] * len(TIMES)])
    times = [f"time, {model}" for model in TIMES]
    return table(["", "loss", *PEAKS, *times], rows)


def picture(folder: Path) -> Figure:
    """README's picture: the time of a step against its peak, by way, from the same figures as the table."""
    known, ways = results(folder, "known-models"), results(folder, "ways-to-keep-less")["ways"]
    figure = Figure(figsize=(10, 4.4), layout="constrained", dpi=110)
    for axes, (title, (column, model)) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for way in (way for way in SHOWN if way.method in known[PEAKS[column]]):
            x, y = peak(known, column, way), ways[f"{model}; {way.way}"]["time"]
            ours, side = "memsave" in way.label, -1 if way.method == "stock" else 1
            name = re.sub("[`*]", "", way.label).replace(" + ", "\n+ ").replace(", with ", ",\n")
            axes.scatter(x, y, color="tab:blue" if ours else "tab:gray", marker="o" if ours else "s", zorder=3)
            axes.annotate(
                name, (x, y), xytext=(6 * side, -11 if way.method in BELOW else 4), textcoords="offset points",
                fontsize=8, ha="left" if side > 0 else "right",
            )  # fmt: skip
        axes.set(title=title, xlabel="peak of a step on a GPU, GiB (estimated)", xlim=(0, None))
        axes.margins(y=0.15)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("time of a step, over stock's\n(small models on a CPU, measured)")
    return figure


def pictures(folder: Path) -> dict[str, Figure]:
    """Every picture of scripts/results by its file, from the figures there."""
    trained, rows = results(folder, "fine-tuning"), results(folder, "papers")
    names = [(name, *name.split(", ", 1)[1].rsplit(", ", 1)) for name in trained if name.startswith("MRPC, ")]
    return {
        PICTURE: picture(folder),
        "techniques.png": techniques.picture(results(folder, "techniques")["kept"]),
        "fine-tuning.png": fine_tuning.picture(
            "MRPC", 3, {("MRPC", method, int(seed)): trained[name] for name, method, seed in names}
        ),
        "inverse-derivatives.png": inverse_errors.picture(results(folder, "inverse-derivatives")["compared"]),
        **{papers.png(paper): papers.picture(title, rows[paper]) for paper, title in papers.PAPERS.items()},
    }


def on_a_gpu(folder: Path) -> str:
    """The section of docs/numbers.md."""
    if not (measured := results(folder, "gpu-models")):
        return "Not measured yet.\n"
    about = measured.pop("about")
    said = f"GiB and ms, on {about['machine']}; `{about['command']}`, {about['commit']}, {about['date']}."
    header = ["model", "method", "peak, estimated", "measured", "kept, estimated", "measured", "step, ms", "host, ms"]
    parts = [said, table(header, map(gpu_row, measured, measured.values()))]
    if bits := results(folder, "gpu-bits"):
        parts.append(f"Steps beside stock's: {len(bits['rows'])} rows, {bits['wrong']} of them wrong.\n")
    ops = results(folder, "gpu-ops")
    if machine := ops.pop("machine", None):
        (_, moved, _, bandwidth, *_), (_, product, *_) = machine
        parts.append(f"A copy {moved}: {bandwidth} GB/s. A product {product}.\n")
    ops = [rows for shape, rows in ops.items() if shape != "about"]
    if shares := [float(row[4]) for rows in ops for row in rows[1:] if row[4]]:
        parts.append(f"Kernels, of a copy's bandwidth: {min(shares):.0%} to {max(shares):.0%}.\n")
    links = ", ".join(f"[{page.stem}](../scripts/results/{page.name})" for page in sorted(folder.glob("gpu-*.md")))
    return "\n".join([*parts, f"Tables: {links}.\n"])


def gpu_row(key: str, found: dict[str, Any]) -> list[str]:
    """Of that section's table; a row that was not measured says why."""
    expected = found.get("expected", {})
    sizes = [source.get(what) for what in ("peak", "kept") for source in (expected, found)]
    times = [f"{1e3 * found[what]:.1f}" if what in found else "" for what in ("seconds", "host_seconds")]
    name, method = key.rsplit(": ", 1)
    method += f" ({found['verdict']})" if found["verdict"] else ""
    return [name, method, *(f"{size / GIB:.2f}" if size else "" for size in sizes), *times]


def long_context(folder: Path) -> str:
    """Peaks of long sequences by setting, and the time of a step at a length that a CPU can run."""
    found, ways = results(folder, "long-context"), results(folder, "ways-to-keep-less")["ways"]
    cases = [f"{trained}, {tokens // 1024}k" for trained in TRAINED for tokens in TOKENS]
    rows = []
    for setting in SETTINGS:
        time = ways.get(f"{LONG}; {setting.replace('`', '')}", {}).get("time")
        peaks = [f"{found[f'{case}, {setting}']['peak'] / GIB:,.1f}" for case in cases]
        rows.append([setting, *peaks, f"{time:.2f}" if time else ""])
    return table(["", *(re.sub(", . [a-zA-Z]+", "", case) for case in cases), "time of a step"], rows)


def longest(folder: Path) -> str:
    """The longest sequences that fit, by setting and GPU."""
    found = results(folder, "longest")
    rows = [[setting, *(f"{n:,}" for n in of.values())] for setting, of in found.items() if setting != "about"]
    return table(["tokens", "24 GiB", "48 GiB", "80 GiB"], rows)


def host_time(folder: Path) -> str:
    """The rows of two models of the first table of times."""
    lines = (folder / "host-time.md").read_text(encoding="utf-8").split("\n\n")[1].splitlines(keepends=True)
    return "".join(f"{line.strip()}\n" for line in lines if re.match(r"\| (model|---|LLaMA, LoRA|BERT) \|", line))


#: Page -> the tables in it, by name.
WRITTEN: dict[str, dict[str, Callable[[Path], str]]] = {
    "README.md": {"ways": readme},
    "docs/numbers.md": {"on a GPU": on_a_gpu},
    "docs/long-context.md": {"peaks": long_context, "longest": longest},
    "docs/fast.md": {"times": host_time},
}


def pages(folder: Path, root: Path) -> Iterable[tuple[Path, str]]:
    """Each page that has such tables, as it should be."""
    for name, tables in WRITTEN.items():
        text = (root / name).read_text(encoding="utf-8")
        for title, write in tables.items():
            before, rest = text.split(BEGIN.format(title))
            text = f"{before}{BEGIN.format(title)}\n{write(folder)}\n{END}{rest.split(END, 1)[1]}"
        yield root / name, text


def main(argv: Sequence[str] | None = None) -> None:
    """Unpack, and write the pages and the pictures."""
    parser = arguments(__doc__)
    parser.add_argument("archive", type=Path, nargs="?", help="gpu-check.tgz")
    options = parser.parse_args(argv)
    if options.archive and not options.archive.is_file():
        parser.error(f"expected a file that gpu_check.sh has written, got {options.archive}. Name its gpu-check.tgz.")
    if options.archive:
        unpack(options.archive, RESULTS)
    for page, text in pages(RESULTS, ROOT):
        page.write_text(text, encoding="utf-8")
    for name, figure in pictures(RESULTS).items():
        about = {"Description": readme(RESULTS)} if name == PICTURE else {}  # a test sees that it is of this table
        figure.savefig(RESULTS / name, metadata={"Software": None, **about})


if __name__ == "__main__":
    main()
