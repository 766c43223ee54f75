"""The floors of the house: imports point down, and never round."""

import ast
import functools
import graphlib
import itertools
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import hf_memsave

NAME = "hf_memsave"
SOURCE = Path(hf_memsave.__file__).parent
#: The floor of each module and package directly under the root; the root itself may import anything.
FLOORS = {
    "errors": 0, "config": 0,
    "data": 1, "device": 1, "arch": 1,
    "tape": 2, "sampling": 2,
    "ops": 3,
    "patching": 4,
    "measure": 5,
    "integrations": 6, "planner": 6,
    "cli": 7, "commands": 7,
}  # fmt: skip
#: Tests of a block that type checkers alone read.
FOR_TYPES = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
#: Who may use what the root exports.
TOP = {"cli", "commands"}
#: Which package may use another one on its own floor.
SIDEWAYS = {("config", "errors"), ("integrations", "planner")}


class Import(NamedTuple):
    """One import: where it stands, the full name of the module it asks for, and what it takes from it.

    ``runs`` says whether it runs as soon as its file is imported: in a function it does not, nor for types only.
    """

    source: str
    line: int
    target: str
    names: tuple[str, ...]
    runs: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def modules(root: Path) -> dict[str, Path]:
    """Full name -> file, of every module under the package at ``root``."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        if "_vendor" in path.parts:  # a project of its own, with a test of its own
            continue
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
    for node, runs in statements(ast.parse(code), True):
        names: tuple[str, ...] = ()
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            targets, names = [base], tuple(alias.name for alias in node.names)
        else:
            continue
        ours = [t for t in targets if t == NAME or t.startswith(f"{NAME}.")]
        found += [Import(module, node.lineno, target, names, runs) for target in ours]
    return tuple(found)


def statements(node: ast.AST, runs: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below this one, and whether it runs when the file is imported."""
    for field, value in ast.iter_fields(node):
        below = runs and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and field == "body" and ast.unparse(node.test) in FOR_TYPES:
            below = False
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child, below
                yield from statements(child, below)


def needs(one: Import, known: Collection[str]) -> set[str]:
    """The modules whose files run before the line after an import, but for those that run already: its own packages."""
    files = {f"{one.target}.{name}" for name in one.names} & set(known)
    is_own = one.source == one.target or one.source.startswith(f"{one.target}.")
    if not is_own or len(files) < len(one.names):
        files.add(one.target)
    return files & set(known) - {one.source}


def cycles(root: Path) -> list[str]:
    """Every ring of modules under ``root`` of which each needs the next to be imported; one for each import to undo."""
    known = modules(root)
    graph: dict[str, dict[str, int]] = {module: {} for module in known}
    for module, path in known.items():
        for one in imports(module, path):
            for target in sorted(needs(one, known)) if one.runs else ():
                graph[module].setdefault(target, one.line)
    found = []
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            ring = error.args[1][::-1]  # each needs the next one, and the last is the first
            steps = [f"{a}:{graph[a][b]} imports {b}" for a, b in itertools.pairwise(ring)]
            found.append(f"a ring of imports: {', '.join(steps)}")
            del graph[ring[0]][ring[1]]
        else:
            return found


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


def test_imports_do_not_go_round():
    assert cycles(SOURCE) == []


def test_the_walk_sees_the_package():
    found = modules(SOURCE)
    assert {NAME, f"{NAME}.tape", f"{NAME}.tape.tape", f"{NAME}.measure.step", f"{NAME}.config.config"} <= found.keys()
    seen = {one.target for name, path in found.items() for one in imports(name, path)}
    assert {f"{NAME}.tape", f"{NAME}.errors", f"{NAME}.config.config"} <= seen


PLANTED = {
    "at the top": ("tape/tape.py", "from hf_memsave.ops import OPS", "above floor 2"),
    "in a function": ("ops/op.py", "def f():\n    from hf_memsave.patching import patch", "above floor 3"),
    "as a module": ("errors.py", "import hf_memsave.tape.meter", "above floor 0"),
    "relative": ("tape/tape.py", "from ..patching.swap import set_class", "above floor 2"),
    "relative, of the parent": ("tape/tape.py", "from .. import patch", "above everything"),
    "of the root": ("ops/op.py", "from hf_memsave import MemSaveConfig", "above everything"),
    "of the root as a module": ("ops/op.py", "import hf_memsave", "above everything"),
    "for types only": ("config/config.py", "if TYPE_CHECKING:\n    import hf_memsave.patching", "above floor 0"),
    "sideways": ("sampling/batch.py", "from hf_memsave.tape import Tape", "another package"),
    "in a new module": ("novel.py", "import torch", "has no floor"),
    "of a new module": ("cli.py", "import hf_memsave.novel", "has no floor"),
}


def planted(tmp_path, where, code) -> list[str]:
    """The new faults of a copy with this code added to a file."""
    copy = tmp_path / NAME
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", "_vendor"))
    with (copy / where).open("a", encoding="utf-8") as file:
        file.write(f"\n{code}\n")
    return [fault for fault in faults(copy) if fault not in faults(SOURCE)]


@pytest.mark.parametrize(("where", "code", "message"), PLANTED.values(), ids=PLANTED)
def test_a_planted_import_is_caught(tmp_path, where, code, message):
    (new,) = planted(tmp_path, where, code)
    assert message in new


#: Files, and how many rings they make.
RINGS = {
    "a pair": ({"tape/a.py": "from hf_memsave.tape.b import x", "tape/b.py": "import hf_memsave.tape.a"}, 1),
    "three": (
        {"ops/a.py": "from .b import x", "ops/b.py": "from . import c", "ops/c.py": "from hf_memsave.ops.a import x"}, 1
    ),
    "of a package": ({"ops/__init__.py": "from .a import x", "ops/a.py": "from hf_memsave.ops import x"}, 1),
    "in a class": (
        {"ops/a.py": "class A:\n    from hf_memsave.ops.b import x", "ops/b.py": "from hf_memsave.ops import a"}, 1
    ),
    "in a try": (
        {"tape/a.py": "try:\n    from .b import x\nexcept ImportError:\n    x = 1", "tape/b.py": "from .a import x"}, 1
    ),
    "two that share a module": (
        {"ops/a.py": "from . import b, c", "ops/b.py": "from .a import x", "ops/c.py": "from .a import x"}, 2
    ),
}  # fmt: skip
STRAIGHT = {
    "in a function": {"tape/a.py": "from .b import x", "tape/b.py": "def f():\n    from .a import x"},
    "for types": {"tape/a.py": "from .b import x", "tape/b.py": "if TYPE_CHECKING:\n    from .a import x"},
    "of a neighbour by way of the package": {
        "ops/__init__.py": "from .a import x", "ops/a.py": "from hf_memsave.ops import b", "ops/b.py": "x = 1"
    },
    "twice": {
        "ops/a.py": "from . import b, c", "ops/b.py": "from .d import x", "ops/c.py": "from .d import x", "ops/d.py": ""
    },
}  # fmt: skip


def write(root: Path, files: dict[str, str]) -> None:
    for name, code in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(code, encoding="utf-8")


@pytest.mark.parametrize(("files", "count"), RINGS.values(), ids=RINGS)
def test_a_planted_ring_is_caught(tmp_path, files, count):
    write(tmp_path, files)
    found = cycles(tmp_path)
    assert len(found) == count
    planted = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files}
    assert all(any(f"{NAME}.{module}:" in ring for ring in found) for module in planted)


@pytest.mark.parametrize("files", STRAIGHT.values(), ids=STRAIGHT)
def test_imports_that_do_not_go_round_are_not_caught(tmp_path, files):
    write(tmp_path, files)
    assert cycles(tmp_path) == []


ALLOWED = {
    "down": ("measure/step.py", "from hf_memsave.tape import Tape"),
    "a neighbour in its package": ("arch/phi.py", "from hf_memsave.arch.llama import ARCH as LLAMA"),
    "a neighbour in the root": ("device.py", "from hf_memsave.errors import MemSaveError"),
    "another library": ("errors.py", "import hf_memsave_plugin"),
    "the root, from the command line": ("cli.py", "from hf_memsave import patch"),
}


@pytest.mark.parametrize(("where", "code"), ALLOWED.values(), ids=ALLOWED)
def test_an_import_that_points_down_is_not_caught(tmp_path, where, code):
    assert planted(tmp_path, where, code) == []




def test_no_parameter_that_is_a_tape_hides_its_type():
    """``tape: Any`` hides who calls back up from the walk of imports, and from mypy."""
    hidden = []
    for module, path in modules(SOURCE).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for one in [*node.args.args, *node.args.kwonlyargs] if isinstance(node, ast.FunctionDef) else ():
                if one.arg in ("tape", "store", "plan") and ast.unparse(one.annotation or ast.Name("Any")) == "Any":
                    hidden.append(f"{module}:{node.lineno} {node.name}")
    assert not hidden
