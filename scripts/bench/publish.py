"""How a bench writes its table and figures, and what they were measured on; importing it has tests/support found."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))


def machine() -> str:
    """What was measured on, without its name."""
    return f"1 CPU thread, {cpu()}, torch {torch.__version__}, transformers {transformers.__version__}"


def gpu() -> str:
    """The GPU, and the versions of what runs on it; nothing where there is none."""
    if not torch.cuda.is_available():
        return ""
    names = [name for name in ("torch", "triton", "transformers", "accelerate", "peft") if find_spec(name)]
    libraries = [f"{name} {import_module(name).__version__}" for name in names]
    return ", ".join([torch.cuda.get_device_name(), *libraries, f"cuDNN {torch.backends.cudnn.version()}"])


def cpu() -> str:
    """The processor's make: a ratio of times is that of one make, and compared less closely on another."""
    text = info.read_text(encoding="utf-8") if (info := Path("/proc/cpuinfo")).is_file() else ""
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    if "model name" not in known:
        return f"CPU {platform.processor() or platform.machine()}"
    return f"CPU {known['model name']} (family {known.get('cpu family')}, model {known.get('model')})"


def add_out(parser: argparse.ArgumentParser) -> None:
    """The option that has results written."""
    parser.add_argument(
        "--out", type=Path, nargs="?", const=ROOT / "scripts" / "results", metavar="DIR",
        help="write a .json and a .md there, too; scripts/results if no folder is named",
    )  # fmt: skip


def publish(
    name: str, title: str, header: list[str], rows: list[list[str]], results: dict[str, Any], out: Path | None,
    notes: str = "", quiet: bool = False,
) -> None:  # fmt: skip
    """Print the table unless ``quiet``, and write it, ``notes`` and ``results`` where ``out`` says."""
    lines = [" | ".join(header), " | ".join("---" for _ in header), *(" | ".join(row) for row in rows)]
    table = f"{title}\n\n" + "".join(f"| {line} |\n" for line in lines)
    if not quiet:
        print(table)
    if out is None:
        return
    about = {
        "command": shlex.join(["python", str(Path("scripts", "bench", Path(sys.argv[0]).name)), *sys.argv[1:]]),
        "machine": gpu() or f"{machine()}, shared with other work",
        "date": datetime.date.today().isoformat(),
    }
    said = ", ".join(filter(None, [f"`{about['command']}`", about["date"], gpu()]))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(f"{table}{notes}\n{said}\n", encoding="utf-8")
    (out / f"{name}.json").write_text(json.dumps({**results, "about": about}, indent=1) + "\n", encoding="utf-8")
