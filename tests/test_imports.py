"""The floors of the house: imports only point down, and importing the package loads no more than it must."""

import ast
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import hf_memsave

NAME = "hf_memsave"
SOURCE = Path(hf_memsave.__file__).parent
#: The floor of each module and package directly under the root; the root itself may import anything.
FLOORS = {
    "errors": 0, "config": 0,
    "tape": 2, "sampling": 2,
    "ops": 3,
    "arch": 4, "swap": 4,
    "adapters": 5, "attention_name": 5, "blocks": 5, "collect": 5, "patch": 5, "sampled_layers": 5,
    "integrations": 6, "planner": 6, "glue": 6, "wordpiece": 6,
    "cli": 7, "commands": 7,
}  # fmt: skip
#: Who may use what the root exports.
TOP = {"cli", "commands"}
#: Which package may use another one on its own floor.
SIDEWAYS = {("cli", "commands")}


class Import(NamedTuple):
    """One import: where it stands, and the full name of the module it asks for."""

    source: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def modules(root: Path) -> dict[str, Path]:
    """Full name -> file, of every module under the package at ``root``."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join((NAME, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def imports(module: str, path: Path) -> tuple[Import, ...]:
    """Every import of ours in a file, those in functions included."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return _imports(module, package, path.read_text(encoding="utf-8"))


@functools.cache
def _imports(module: str, package: str, code: str) -> tuple[Import, ...]:
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            targets = [base]
        else:
            continue
        found += [Import(module, node.lineno, t) for t in targets if t == NAME or t.startswith(f"{NAME}.")]
    return tuple(found)


def part(module: str) -> str:
    """The module or package directly under the root that ``module`` belongs to; empty for the root itself."""
    return module.removeprefix(NAME).lstrip(".").split(".")[0]


def faults(root: Path) -> list[str]:
    """Every import under ``root`` that points up, or sideways into another package."""
    found = []
    for module, path in modules(root).items():
        mine = part(module)
        if not mine:
            continue
        if mine not in FLOORS:
            found.append(f"{module} has no floor: give {mine!r} one in FLOORS")
            continue
        for one in imports(module, path):
            theirs = part(one.target)
            if not theirs:
                if mine not in TOP:
                    found.append(f"{one}, which is above everything: import what you need from where it is defined")
            elif theirs not in FLOORS:
                found.append(f"{one}, which has no floor: give {theirs!r} one in FLOORS")
            elif FLOORS[theirs] > FLOORS[mine]:
                found.append(f"{one}, which is on floor {FLOORS[theirs]}, above floor {FLOORS[mine]}")
            elif FLOORS[theirs] == FLOORS[mine] and not are_neighbours(mine, theirs, root):
                found.append(f"{one}, which is another package on the same floor, {FLOORS[mine]}")
    return found


def are_neighbours(mine: str, theirs: str, root: Path) -> bool:
    """Whether two parts on one floor are in one package: the same one, or both modules of the root."""
    is_package = any((root / name).is_dir() for name in (mine, theirs))
    return mine == theirs or not is_package or (mine, theirs) in SIDEWAYS


def test_imports_point_down():
    assert faults(SOURCE) == []


def test_the_walk_sees_the_package():
    found = modules(SOURCE)
    assert {NAME, f"{NAME}.tape", f"{NAME}.tape.promise", f"{NAME}.ops.rms_norm", f"{NAME}.patch"} <= found.keys()
    seen = {one.target for name, path in found.items() for one in imports(name, path)}
    assert {f"{NAME}.tape", f"{NAME}.errors", f"{NAME}.config"} <= seen


PLANTED = {
    "at the top": ("tape/hooks.py", "from hf_memsave.ops import OPS", "above floor 2"),
    "in a function": ("ops/cast.py", "def f():\n    from hf_memsave.patch import patch", "above floor 3"),
    "as a module": ("errors.py", "import hf_memsave.tape.meter", "above floor 0"),
    "relative": ("tape/promise.py", "from ..swap import set_class", "above floor 2"),
    "relative, of the parent": ("tape/promise.py", "from .. import patch", "above everything"),
    "of the root": ("ops/op.py", "from hf_memsave import MemSaveConfig", "above everything"),
    "of the root as a module": ("ops/op.py", "import hf_memsave", "above everything"),
    "for types only": (
        "config.py",
        "if TYPE_CHECKING:\n    from hf_memsave.collect import SiteReport",
        "above floor 0",
    ),
    "sideways": ("arch/spec.py", "from hf_memsave.swap import set_class", "another package"),
    "in a new module": ("novel.py", "import torch", "has no floor"),
    "of a new module": ("cli.py", "import hf_memsave.novel", "has no floor"),
}


@pytest.mark.parametrize(("where", "code", "message"), PLANTED.values(), ids=PLANTED)
def test_a_planted_import_is_caught(tmp_path, where, code, message):
    copy = tmp_path / NAME
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / where).open("a", encoding="utf-8") as file:
        file.write(f"\n{code}\n")
    new = [fault for fault in faults(copy) if fault not in faults(SOURCE)]
    assert len(new) == 1
    assert message in new[0]


ALLOWED = {
    "down": ("patch.py", "from hf_memsave.tape import Tape"),
    "a neighbour in its package": ("arch/phi.py", "from hf_memsave.arch.llama import ARCH as LLAMA"),
    "a neighbour in the root": ("config.py", "from hf_memsave.errors import MemSaveError"),
    "another library": ("errors.py", "import hf_memsave_plugin"),
    "the root, from the command line": ("cli.py", "from hf_memsave import patch"),
}


@pytest.mark.parametrize(("where", "code"), ALLOWED.values(), ids=ALLOWED)
def test_an_import_that_points_down_is_not_caught(tmp_path, where, code):
    copy = tmp_path / NAME
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / where).open("a", encoding="utf-8") as file:
        file.write(f"\n{code}\n")
    assert faults(copy) == faults(SOURCE)


LOADED = """
import json, sys
import transformers.modeling_utils
before = set(sys.modules)
import hf_memsave
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


@pytest.fixture(scope="module")
def loaded():
    """The libraries that ``import hf_memsave`` loads beyond those that Transformers has loaded by then."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, cwd=SOURCE.parent)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("library", ["peft", "triton", "bitsandbytes", "datasets", "evaluate", "matplotlib", "rich"])
def test_importing_the_package_does_not_load(loaded, library):
    assert NAME in loaded
    assert library not in loaded
