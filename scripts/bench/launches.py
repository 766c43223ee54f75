"""Launches of a layer, and the bytes they move, stock beside both backends: counted without a GPU.

    python scripts/bench/launches.py [--out [DIR]]

Counted are forward and backward, on the stand-in for a CUDA device, of operations that make something new: each is a
launch on a GPU, a norm's backward two, and ours another one to round; a draw of rows is three. Products and attention
have no bytes here, and attention is a launch. Nothing is known of time. --out writes launches.json and .md.
"""

from __future__ import annotations

from collections.abc import Sequence

from publish import arguments, publish
from support.launches import EXACT, METHODS, SETTINGS, counted

#: Where what is not exact is counted too.
_WITH_ALL = "BERT-Large, S512, bf16", "Llama-3-8B, full"


def main(argv: Sequence[str] | None = None) -> None:
    """Count every setting by every method and print the table."""
    parser = arguments(__doc__)
    options = parser.parse_args(argv)
    rows, figures = [], {}
    for name in SETTINGS:
        found = counted(name, tuple(METHODS) if name in _WITH_ALL else EXACT)
        launches, nbytes = found["stock"]
        figures[name] = {m: {"launches": n, "bytes": size} for m, (n, size) in found.items()}
        for method, (n, size) in found.items():
            rows.append([name, method, f"{n:.1f}", f"{n / launches:.2f}", f"{size / 1e6:.0f}", f"{size / nbytes:.2f}"])
    header = ["setting", "method and backend", "launches", "of stock's", "MB", "of stock's"]
    title = "A layer's launches beside its products, and the bytes they move; counted, not measured"
    publish("launches", title, header, rows, figures, options.out)


if __name__ == "__main__":
    main()
