"""Training under every engine, stock and patched: losses, parameters, and the bytes kept in each step.

    python scripts/bench/engines.py [--only ddp "fsdp2*/lora"] [--orders before after] [--json FILE] [--out [DIR]]

Two processes over gloo on CPU train a LLaMA of two blocks for 4 steps of SGD, for every engine x {full, LoRA} x {no
checkpointing, reentrant, not} x {exact, gate, block, offload}, patched before it is wrapped and after. A row is
engine/training/checkpointing; --only takes patterns of its beginning. A cell has "=" where losses and final parameters
are stock's to the bit in both processes, then what is kept of stock, beside that of the model alone in one process:
one figure where all steps have it, else one for each step. Exit status 1 where a cell is neither right nor explained.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from engine_steps import CHECKPOINTING, ENGINES, RANKS, STEPS, TRAININGS, VARIANTS, llama, trained  # noqa: E402
from publish import arguments, as_json, publish  # noqa: E402

#: Seconds that a cell may take, and that the other process may take when one has failed.
LIMIT, GRACE = 120, 10
#: How far what is kept of stock may be from the model's alone.
SLACK = 0.05
ORDERS = ("before", "after")
#: Row, order and variant (a pattern) -> why that cell is as it is, though losses or kept bytes are not as asked.
REASONS: dict[str, str] = {
    "tp/full/*": "what every process holds whole, and results of collectives, weigh more beside halves",
    "tp/lora/*": "stock raises: PEFT's adapters of a column-parallel linear are not sharded",
}


class Pair:
    """Two processes with a process group, which answer one cell after another."""

    def __init__(self, folder: Path) -> None:
        self._rendezvous = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("fork")  # of a process that has imported all and started no thread
        ends = [context.Pipe() for _ in range(RANKS)]
        self._here = [here for here, _ in ends]
        self._processes = [
            context.Process(target=_serve, args=(rank, there, self._rendezvous.name, folder), daemon=True)
            for rank, (_, there) in enumerate(ends)
        ]
        for process, (_, there) in zip(self._processes, ends, strict=True):
            process.start()
            there.close()

    def run(self, *cell: str) -> list[dict[str, Any]]:
        """What each process found; first those that came first."""
        answers: dict[int, dict[str, Any]] = {}
        for here in self._here:
            here.send(cell)
        end = time.monotonic() + LIMIT
        while len(answers) < RANKS and time.monotonic() < end:
            waiting = [here for rank, here in enumerate(self._here) if rank not in answers]
            for here in wait(waiting, max(0.0, end - time.monotonic())):
                rank = self._here.index(here)  # type: ignore[arg-type]
                answers[rank] = self._answer(rank)
                if "error" in answers[rank]:
                    end = min(end, time.monotonic() + GRACE)
        silent = {"error": "Hangs", "text": f"no answer in {LIMIT} s", "is_refusal": False, "frames": []}
        return [*answers.values(), *[silent] * (RANKS - len(answers))]

    def _answer(self, rank: int) -> dict[str, Any]:
        try:
            return {"rank": rank, **self._here[rank].recv()}
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(GRACE)
            text = f"the process died with exit code {self._processes[rank].exitcode}"
            return {"rank": rank, "error": "Dies", "text": text, "is_refusal": False, "frames": []}

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.join()
        self._rendezvous.cleanup()


def _serve(rank: int, there: Connection, rendezvous: str, folder: Path) -> None:
    if not os.environ.get("ENGINES_LOG"):
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}/file", rank=rank, world_size=RANKS)
    while True:
        there.send(trained(*there.recv(), rank, folder))


def rows(patterns: Iterable[str] = ("*",)) -> list[tuple[str, str, str]]:
    """Engine, training, checkpointing, of those that a pattern is the beginning of."""
    every = [(e, t, c) for e in ENGINES if e != "alone" for t in TRAININGS for c in CHECKPOINTING]
    return [row for row in every if any(fnmatchcase("/".join(row), f"{p}*") for p in patterns)]


def measured(
    chosen: Iterable[tuple[str, str, str]], orders: Sequence[str], variants: Sequence[str]
) -> Iterator[list[dict[str, Any]]]:
    """The cells of each of these rows, and of the model alone in the rows that they are compared with."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llama().save_pretrained(folder)
        alone = dict.fromkeys(("alone", training, checkpointing) for _, training, checkpointing in chosen)
        for row in (*alone, *chosen):
            begin, found = time.monotonic(), _of_row(row, orders, variants, folder)
            said = ", ".join(f"{c['variant']}{' after' * (c['order'] == 'after')} {verdict(c)}" for c in found)
            print(f"{'/'.join(row)} ({time.monotonic() - begin:.0f} s): {said}", file=sys.stderr, flush=True)
            yield found


def _of_row(
    row: tuple[str, str, str], orders: Sequence[str], variants: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    ways = [("stock", "before")]
    if row[0] in ("alone", "tp"):  # wrapped as it is loaded, or never
        orders = [ORDERS[row[0] == "tp"]]
    ways += [(variant, order) for order in orders for variant in variants]
    pair, stock, cells = Pair(folder), [], []
    for variant, order in ways:
        answers = pair.run(*row, variant, order)
        failed = next((answer for answer in answers if "error" in answer), None)
        answers.sort(key=lambda answer: answer.get("rank", RANKS))
        cell = {"row": "/".join(row), "variant": variant, "order": order, "kept": answers[0].get("kept", [])}
        if failed:
            cell |= {key: failed[key] for key in ("error", "text", "is_refusal", "frames", "losses") if key in failed}
            cell["traceback"] = failed.get("traceback", "")
            pair.close()
            pair = Pair(folder)
        else:
            cell["losses"] = [answer["losses"] for answer in answers]
            if variant == "stock":
                stock = answers
            elif stock:
                cell["is_equal"] = _without_kept(answers) == _without_kept(stock)
        cells.append(cell)
        if failed and variant == "stock":
            break
        if variant != "stock":
            cell["ratios"] = [a / b for a, b in zip(cell["kept"], stock[0]["kept"], strict=False)]
    pair.close()
    return cells


def _without_kept(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in answer.items() if key != "kept"} for answer in answers]


def verdict(cell: dict[str, Any]) -> str:
    """Whether it equals stock ("="), "differs", or is "refused: ..." or a "crash: ..."."""
    if "error" in cell:
        kind = "refused" if cell["is_refusal"] else "crash"
        return f"{kind}: {cell['error']}"
    return "=" if cell["variant"] == "stock" or cell["is_equal"] else "differs"


def reason(cell: dict[str, Any]) -> str | None:
    """Why a cell is as it is, of :data:`REASONS`."""
    name = f"{cell['row']}/{cell['order']}/{cell['variant']}"
    return next((why for pattern, why in REASONS.items() if fnmatchcase(name, pattern)), None)


def expected(cell: dict[str, Any], cells: list[dict[str, Any]]) -> list[float]:
    """What the model alone keeps of stock, in each step."""
    row = cell["row"].split("/")
    row[0] = "alone"
    return next(c["ratios"] for c in cells if c["row"] == "/".join(row) and c["variant"] == cell["variant"])


def is_right(cell: dict[str, Any], cells: list[dict[str, Any]]) -> bool:
    """Whether a cell refuses, or equals stock and keeps what the model alone keeps of stock."""
    if cell["variant"] == "stock":
        return "error" not in cell
    if "error" in cell:
        return bool(cell["is_refusal"])
    pairs = zip(cell["ratios"], expected(cell, cells), strict=True)
    return cell["is_equal"] and all(ours <= (1 + SLACK) * alone for ours, alone in pairs)


def line(row: str, order: str, cells: list[dict[str, Any]]) -> list[str]:
    """Of the table."""
    here = {c["variant"]: c for c in cells if c["row"] == row and c["order"] in (order, "before")}
    here |= {c["variant"]: c for c in cells if c["row"] == row and c["order"] == order}
    if "error" in here["stock"]:
        return [row, order, *[f"stock raises: {here['stock']['error']}"] * len(VARIANTS)]
    return [row, order, *(shown(here[v], cells) if v in here else "" for v in VARIANTS)]


def shown(cell: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    """A cell of the table, emphasized where it is not right."""
    said = verdict(cell)
    if "error" not in cell:
        ours, alone = (_figures(r) for r in (cell["ratios"], expected(cell, cells)))
        said += f" {ours} / {alone}"
    said = said if is_right(cell, cells) else f"**{said}**"
    return f"{said} ({why})" if (why := reason(cell)) else said


def _figures(ratios: list[float]) -> str:
    shown = [f"{ratio:.3f}".lstrip("0") for ratio in ratios]
    return shown[0] if len(set(shown)) == 1 else " ".join(shown)


def errors(cells: list[dict[str, Any]]) -> str:
    """Every error that cells end with, and which do."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        if "error" in cell:
            name = f"{cell['row']}, {cell['variant']}" + f", patched {cell['order']}" * (cell["variant"] != "stock")
            found.setdefault(f"{verdict(cell)}: {cell['text'][:300]}", []).append(name)
    return "".join(f"\n- {text}\n" + "".join(f"  - {name}\n" for name in names) for text, names in found.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Every row that is asked for, and the table; 1 where a cell is neither right nor explained, else 0."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="beginnings of rows")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=tuple(VARIANTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every cell there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    chosen = rows([pattern for asked in options.only for pattern in asked.split(",")])
    if any(engine.startswith("zero") for engine, *_ in chosen):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # before processes are forked

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which takes minutes to compile
    cells: list[dict[str, Any]] = []
    for found in measured(chosen, options.orders, options.variants):
        cells += found
        if options.json:  # after each row: a run that was cut short is worth its rows
            options.json.write_text(as_json(cells) + "\n", encoding="utf-8")
    kinds = dict.fromkeys((c["row"], c["order"]) for c in cells if c["variant"] != "stock" or "error" in c)
    lines = [line(row, order, cells) for row, order in kinds]
    wrong = [cell for cell in cells if not is_right(cell, cells) and not reason(cell)]
    title = (
        f"Losses and parameters after {STEPS} steps, {RANKS} processes, and what is kept of stock, beside the model "
        f"alone; {len(wrong)} of {len(cells)} cells are neither right nor explained"
    )
    about = [{key: value for key, value in cell.items() if key != "traceback"} for cell in cells]
    publish("engines", title, ["row", "patched", *VARIANTS], lines, {"cells": about}, options.out, errors(cells))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
