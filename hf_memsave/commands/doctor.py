"""``memsave doctor``: versions and devices, and what would be patched in a model and what not."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib.metadata import distributions, requires
from importlib.resources import files

import torch
from packaging.requirements import Requirement
from rich import box
from rich.table import Table

from hf_memsave import PatchError, __version__, patch
from hf_memsave.commands.arguments import memsave_of
from hf_memsave.commands.options import console_of
from hf_memsave.commands.report import sites_table
from hf_memsave.config.sizes import counted
from hf_memsave.measure.models import build_empty, load_config

_PACKAGES = """torch transformers peft accelerate trl bitsandbytes triton liger_kernel unsloth""".split()


def run(args: argparse.Namespace) -> int:
    """Print versions, devices and what would be patched; return 0, or 1 if something prevents patching."""
    memsave, config = memsave_of(args), load_config(args.model) if args.model else None
    found, problems = versions()
    model = build_empty(config) if config is not None and not problems else None
    console = console_of(args)
    for title, rows in (("Versions", found), ("Devices", devices())):
        table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
        for row in rows.items():
            table.add_row(*row)
        console.print(table)
    if model is not None:
        try:
            report = patch(model, memsave)
            others = sum(site.op not in ("block", "model") for site in report.patched)
            console.print(
                sites_table(report.counts),
                f"{report.covered}, {counted(others, 'other module')} patched, {len(report.skipped)} skipped.",
                "Every function that runs inside is recorded: `memsave report` measures what that frees.", sep="\n",
            )  # fmt: skip
        except PatchError as error:
            problems.append(f"{args.model}: {error.on_command_line}")
    for problem in problems:
        print(f"memsave doctor: {' '.join(problem.split())}", file=sys.stderr)
    if not problems:
        console.print("Nothing found that prevents patching.")
    return int(bool(problems))


def versions() -> tuple[dict[str, str], list[str]]:
    """Return each package's version with what hf_memsave needs, ours and Python's first; and the problems found."""
    wanted, problems = [Requirement(text) for text in requires("hf_memsave") or ()], []
    needed = {one.name: one.specifier for one in wanted if one.specifier and one.marker is None}
    kernels = (files("hf_memsave") / "_vendor/memsave_kernels/VERSION").read_text().strip()
    found = {"hf_memsave": __version__, "memsave_kernels": kernels, "python": platform.python_version()}
    for name in _PACKAGES:
        installed = next((one.version for one in distributions(name=name)), "")
        found[name] = torch.__version__ if name == "torch" else installed or "not installed"  # with its build: "+cu130"
        if bound := needed.get(name):
            found[name] += f" (needs {bound})"
            if installed and not bound.contains(installed, prereleases=True):
                problems.append(f"{name}: expected {bound}, got {installed}. Run: pip install '{name}{bound}'")
    return found, problems


def devices() -> dict[str, str]:
    """Return the name of each device and what it can compute."""
    bf16 = {True: "native", False: "emulated, slow"}
    cpu: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    is_native = any(cpu.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    name = cpu.get("cpu_name", platform.machine())
    found = {"cpu": f"{name}, {counted(torch.get_num_threads(), 'thread')}, bf16 {bf16[is_native]}"}
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        found[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, capability {major}.{minor}, bf16 {bf16[major >= 8]}"
    return found if len(found) > 1 else found | {"cuda": "none found"}
