"""The package needs torch and triton alone: its imports, and a run of it where there is nothing else of ours."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "torch-ext" / "memsave_kernels"
ALLOWED = {"torch", "triton"} | set(sys.stdlib_module_names)
MOST_LINES = 300


def strangers(code: str) -> list[str]:
    """What a file imports that it may not."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(str(node.module))
        elif isinstance(node, ast.ImportFrom) and node.level > 1:
            found.append("." * node.level)
    return [name for name in found if name.partition(".")[0] not in ALLOWED]


def test_imports_torch_and_triton_only():
    files = list(SOURCE.rglob("*.py"))
    assert len(files) > 5
    assert {file.name: strangers(file.read_text()) for file in files} == {file.name: [] for file in files}


@pytest.mark.parametrize(
    "line", ["import hf_memsave", "from memsave_kernels import gated", "from ..x import y", "import numpy"]
)
def test_a_stranger_is_seen(line):
    assert strangers(f"def f():\n    {line}")


def test_no_file_is_long():
    files = [*SOURCE.rglob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("tests/**/*.py")]
    assert [file.name for file in files if len(file.read_text().splitlines()) > MOST_LINES] == []


def test_versions_agree():
    version = (ROOT / "VERSION").read_text().strip()
    assert f'\n__version__ = "{version}"\n' in (SOURCE / "__init__.py").read_text()
    assert (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1].splitlines()[0] == version


ALONE = """
import sys, torch, memsave_kernels as k
assert k.__file__.startswith(sys.argv[1]), k.__file__
x = torch.randn(3, 20, requires_grad=True)
k.rms_norm(x, torch.ones(20), 1e-6).sum().backward()
assert x.grad.isfinite().all()
assert not any(name.startswith(("hf_memsave", "transformers")) for name in sys.modules)
"""


def test_installs_and_runs_alone(tmp_path):
    target = tmp_path / "site"
    copy = tmp_path / "source"  # pip leaves its build folder there
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("__pycache__", ".*", "build", "*.egg-info"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*install, target, copy], check=True, cwd=tmp_path)
    assert sorted(path.name for path in target.iterdir() if "dist-info" not in path.name) == ["memsave_kernels"]
    environment = os.environ | {"PYTHONPATH": str(target), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", ALONE, target], check=True, cwd=tmp_path, env=environment)


BESIDE = """
import importlib.util, sys, torch, memsave_kernels
spec = importlib.util.spec_from_file_location("other.name", sys.argv[1], submodule_search_locations=[sys.argv[2]])
sys.modules["other"] = sys.modules["other.name"] = other = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other)
assert other.NAMESPACE != memsave_kernels.NAMESPACE
x = torch.ones(2, 8)
assert torch.equal(other.activate(x), memsave_kernels.activate(x))
"""


def test_is_loaded_from_any_path_beside_another_copy():
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", BESIDE, SOURCE / "__init__.py", SOURCE], check=True, env=environment)
