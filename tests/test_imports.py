"""The floors of the house: imports point down, and never round."""

import ast
import graphlib
import itertools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import hf_memsave

NAME = "hf_memsave"
SOURCE = Path(hf_memsave.__file__).parent
#: The floor of each module and package directly under the root; the root itself may import anything.
FLOORS = {
    "errors": 0, "logs": 0, "config": 0,
    "device": 1, "arch": 1,
    "tape": 2,
    "ops": 3, "count": 3,
    "patching": 4,
    "measure": 5,
    "integrations": 6, "planner": 6,
    "cli": 7, "commands": 7,
}  # fmt: skip
#: Who may use what the root exports.
TOP = {"cli", "commands"}
#: Which package may use another one on its own floor.
SIDEWAYS = {("config", "errors"), ("integrations", "planner"), ("cli", "commands")}


class Import(NamedTuple):
    """An import: where it stands, the module it asks for, what it takes from it, and whether it runs at once.

    In a function it does not, nor for types only.
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
        if "_vendor" not in path.parts:  # a project of its own, with a test of its own
            parts = (NAME, *path.relative_to(root).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path) -> list[Import]:
    """Every import of ours in a file, those in functions included."""
    found = []
    for node, runs in statements(ast.parse(path.read_text(encoding="utf-8")), True):
        if isinstance(node, ast.Import):
            found += [Import(module, node.lineno, alias.name, (), runs) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            target = "." * node.level + (node.module or "")
            found.append(Import(module, node.lineno, target, tuple(alias.name for alias in node.names), runs))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(name, ast.Constant):
                found.append(Import(module, node.lineno, name.value.rstrip("."), (), False))
    return [one for one in found if f"{one.target}.".startswith((f"{NAME}.", "."))]


def statements(node: ast.AST, runs: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below this one, and whether it runs when the file is imported."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        runs = False
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        runs = False
    for child in ast.iter_child_nodes(node):
        yield child, runs
        yield from statements(child, runs)


def needs(one: Import, known: Collection[str]) -> set[str]:
    """The modules whose files run before the line after an import, but for those that run already: its own packages."""
    files = {f"{one.target}.{name}" for name in one.names} & set(known)
    is_own = f"{one.source}.".startswith(f"{one.target}.")
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
    """Every import under ``root`` that points up, sideways into another package, or to a name that is not full."""
    found = []
    for one in (one for module, path in modules(root).items() for one in imports(module, path)):
        mine, theirs = part(one.source), part(one.target)
        if one.target.startswith("."):
            found.append(f"{one}, which is relative: name the module in full")
        elif not theirs and mine and mine not in TOP:
            found.append(f"{one}, which is above everything: import what you need from where it is defined")
        elif missing := {mine, theirs} - {""} - FLOORS.keys():
            found.append(f"{one}: {missing} has no floor: give it one in FLOORS")
        elif mine and theirs and FLOORS[theirs] > FLOORS[mine]:
            found.append(f"{one}, which is on floor {FLOORS[theirs]}, above floor {FLOORS[mine]}")
        elif mine and theirs and FLOORS[theirs] == FLOORS[mine] and not are_neighbours(mine, theirs, root):
            found.append(f"{one}, which is another package on the same floor, {FLOORS[mine]}")
    return found


def are_neighbours(mine: str, theirs: str, root: Path) -> bool:
    """Whether two parts on one floor are in one package: the same one, or both modules of the root."""
    is_package = any((root / name).is_dir() for name in (mine, theirs))
    return mine == theirs or not is_package or (mine, theirs) in SIDEWAYS


def test_imports_point_down_and_do_not_go_round():
    assert faults(SOURCE) + cycles(SOURCE) == []
    known = modules(SOURCE)
    asked = {(name, file) for name, path in known.items() for one in imports(name, path) for file in needs(one, known)}
    assert not [pair for pair in asked if pair[::-1] in asked], "files that import each other, if only in functions"
    assert {part(module) for module in modules(SOURCE)} - {""} == FLOORS.keys()
    seen = {one.target for name, path in modules(SOURCE).items() for one in imports(name, path)}
    assert {f"{NAME}.tape", f"{NAME}.errors", f"{NAME}.config.config"} <= seen


RING = "a ring of imports"
#: Files, in which US is the package, and what is said of them.
TREES = {
    "up at the top": ({"tape/a.py": "from US.ops import OPS"}, ["above floor 2"]),
    "up in a function": ({"tape/a.py": "def f():\n    from US.ops import OPS"}, ["above floor 2"]),
    "up as a module": ({"errors.py": "import US.tape.meter"}, ["above floor 0"]),
    "up by a string": ({"config/a.py": "def f(): importlib.import_module('US.patching.b')"}, ["above floor 0"]),
    "up by a string with a name in it": ({"tape/a.py": "import_module(f'US.ops.{name}')"}, ["above floor 2"]),
    "up for types only": ({"config/a.py": "if TYPE_CHECKING:\n    import US.patching"}, ["above floor 0"]),
    "relative": ({"tape/a.py": "from ..errors import x\nfrom . import b"}, ["relative", "relative"]),
    "of the root": ({"ops/a.py": "from US import MemSaveConfig"}, ["above everything"]),
    "of the root as a module": ({"ops/a.py": "import US"}, ["above everything"]),
    "sideways": ({"count/a.py": "from US.ops.op import Op"}, ["another package"]),
    "in a new module": ({"novel.py": "import US.errors"}, ["has no floor"]),
    "of a new module": ({"cli.py": "import US.novel"}, ["has no floor"]),
    "down": ({"measure/step.py": "from US.tape import Tape"}, []),
    "a neighbour in its package": ({"arch/phi.py": "from US.arch.llama import ARCH"}, []),
    "a neighbour in the root": ({"device.py": "from US.errors import MemSaveError"}, []),
    "another library": ({"errors.py": "import US_plugin"}, []),
    "the root, from the command line": ({"cli.py": "from US import patch"}, []),
    "a pair": ({"ops/a.py": "from US.ops.b import x", "ops/b.py": "import US.ops.a"}, [RING]),
    "three": ({"ops/a.py": "import US.ops.b", "ops/b.py": "import US.ops.c", "ops/c.py": "import US.ops.a"}, [RING]),
    "of a package": ({"ops/__init__.py": "from US.ops.a import x", "ops/a.py": "from US.ops import x"}, [RING]),
    "in a class": ({"ops/a.py": "class A:\n    from US.ops.b import x", "ops/b.py": "from US.ops import a"}, [RING]),
    "in a try": ({"ops/a.py": "try:\n    import US.ops.b\nfinally:\n    x = 1", "ops/b.py": "import US.ops.a"}, [RING]),
    "two of one module": (
        {"ops/a.py": "from US.ops import b, c", "ops/b.py": "import US.ops.a", "ops/c.py": "import US.ops.a"},
        [RING, RING],
    ),
    "round in a function": ({"ops/a.py": "import US.ops.b", "ops/b.py": "def f():\n    import US.ops.a"}, []),
    "round for types": ({"ops/a.py": "import US.ops.b", "ops/b.py": "if TYPE_CHECKING:\n    import US.ops.a"}, []),
    "by way of the package": (
        {"ops/__init__.py": "import US.ops.a", "ops/a.py": "from US.ops import b", "ops/b.py": "x = 1"}, []
    ),
    "twice": (
        {"ops/a.py": "from US.ops import b, c", "ops/b.py": "import US.errors", "ops/c.py": "import US.errors"}, []
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "messages"), TREES.values(), ids=TREES)
def test_a_planted_import_is_caught_where_it_is_wrong(tmp_path, files, messages):
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code.replace("US", NAME), encoding="utf-8")
    found = faults(tmp_path) + cycles(tmp_path)
    assert len(found) == len(messages)
    assert all(message in fault for message, fault in zip(messages, found, strict=True))
    named = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]
    assert not messages or all(any(f"{NAME}.{module}:" in fault for fault in found) for module in named)


def test_no_parameter_that_is_a_tape_hides_its_type():
    """``tape: Any`` hides who calls back up from the walk of imports, and from mypy."""
    hidden = []
    for module, path in modules(SOURCE).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for one in [*node.args.args, *node.args.kwonlyargs] if isinstance(node, ast.FunctionDef) else ():
                if one.arg in ("tape", "storages") and ast.unparse(one.annotation or ast.Name("Any")) == "Any":
                    hidden.append(f"{module}:{node.lineno} {node.name}")
    assert not hidden
