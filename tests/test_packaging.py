"""What a wheel holds and asks for, and that it works away from the repository."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import hf_memsave
from support.zoo import build

REPO = Path(__file__).parents[1]
tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
#: Asked for without an import: Trainer refuses to work without it.
UNSEEN = {"accelerate"}
#: Import -> the extra that brings it. The package does without where it is not there.
OPTIONAL = {"bitsandbytes": "quantized", "matplotlib": "plot", "jinja2": "plot"}

#: Measured beside ours, where they are installed.
RIVALS = {"liger_kernel", "unsloth"}


def names(requirements):
    return {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


def imported(folder: Path) -> set[str]:
    """Names of the libraries that the files below a folder import, but for those in ``_vendor``."""
    found = set()
    for path in (path for path in folder.rglob("*.py") if "_vendor" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                found |= {name.partition(".")[0] for name in modules}
    return found - {*sys.stdlib_module_names, "hf_memsave", ""}


def test_dependencies_are_what_is_imported(tmp_path):
    (tmp_path / "new.py").write_text("import os\nfrom polars.io import x\n")
    assert imported(tmp_path) == {"polars"}  # so that a missing one is seen
    distributions, extras = packages_distributions(), PROJECT["optional-dependencies"]
    given, package = names(PROJECT["dependencies"]), imported(REPO / "hf_memsave")
    assert {distributions[name][0].lower() for name in package - OPTIONAL.keys()} == given - UNSEEN
    assert OPTIONAL.keys() <= package
    assert all(library in names(extras[extra]) for library, extra in OPTIONAL.items())
    scripts = [*(REPO / "scripts").rglob("*.py")]
    mine = {path.stem for path in scripts} | {path.parent.name for path in scripts} | {"tests", "support", "cases"}
    needed = {distributions.get(name, [name])[0].lower() for name in imported(REPO / "scripts") - mine - RIVALS}
    given |= set().union(*(names(extras[extra]) for extra in ("scripts", "plot", "test", "kernels")))
    assert needed - given == set()
    assert names(extras["scripts"]) <= needed


def test_lower_bounds_are_those_that_are_tested():
    pinned = dict(
        line.split("==") for line in (REPO / "constraints-oldest.txt").read_text().splitlines() if "==" in line
    )
    bounded = dict(requirement.split(">=") for requirement in PROJECT["dependencies"] if ">=" in requirement)
    assert {"torch", "transformers", "peft", "accelerate"} == bounded.keys() <= pinned.keys()
    for name, bound in bounded.items():
        assert pinned[name].startswith(bound), name
    readme = " ".join((REPO / "README.md").read_text().split())
    assert f"PyTorch {bounded['torch']} or newer, Transformers {bounded['transformers']} or newer" in readme


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy under the name of a clone: a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("above") / "hf_memsave"
    shutil.copytree(REPO / "hf_memsave", folder / "hf_memsave", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPO / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(clone) -> Path:
    command = "import setuptools.build_meta as b; print(b.build_wheel('..'))"
    run([sys.executable, "-c", command], clone)
    return next(clone.parent.glob("*.whl"))


def test_the_wheel_holds_the_package_and_its_presets_only_in_one_version(wheel):
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert wheel.name.split("-")[1] == hf_memsave.__version__
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = (REPO / "hf_memsave").rglob("*.py")
    package = {str(p.relative_to(REPO)) for p in sources if "_vendor" not in p.parts or "torch-ext" in p.parts}
    assert {name for name in files if name.endswith(".py")} == package
    others = {name for name in files if not name.endswith(".py")}
    presets = {f"hf_memsave/presets/{p.name}" for p in (REPO / "hf_memsave" / "presets").iterdir()}
    assert len(presets) >= 8 and presets < others and "hf_memsave/py.typed" in others
    rest = r"hf_memsave/(py\.typed|(\w+/)+\w+\.(json|html)|_vendor/\w+/(LICENSE|VERSION))"
    assert all(re.fullmatch(rest, name) for name in others - presets)


USE = """
import sys
import hf_memsave
from hf_memsave.cli import main
from hf_memsave.ops.fused.kernels import kernels
from hf_memsave.patching.swap import is_patched
from transformers import AutoModelForCausalLM
assert hf_memsave.__file__.startswith(sys.argv[1]) and kernels().__file__.startswith(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained("model", memsave=True)
assert is_patched(model)
for name in ("exact", "tempo", "wta-crs"):
    hf_memsave.unpatch(model)
    hf_memsave.patch(model, name)
sizes = ["--batch-size", "2", "--seq-len", "8"]
for command in (["report", "model", *sizes], ["verify", "model", *sizes], ["doctor", "model"],
                ["estimate", "model", *sizes, "--html", "page.html"]):
    assert main(command) == 0, command
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> Path:
    """All that is installed here, but the package itself, which a .pth or a finder brings."""
    folder = tmp_path_factory.mktemp("libraries")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "hf_memsave" not in path.name and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


PATCH = """
import hf_memsave
from torch import nn
print(hf_memsave.__file__)
assert hf_memsave.patch(nn.Sequential(nn.Linear(4, 4), nn.GELU()), "exact").patched
"""


def run(command: list, folder: Path, **environment: str) -> str:
    """What a command prints, without the repository on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
def test_an_editable_install_is_found_from_anywhere_also_beside_a_clone_of_its_name(clone, libraries, tmp_path):
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], tmp_path).strip()
    Path(site, "libraries.pth").write_text(str(libraries), encoding="utf-8")
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    run([python, "-m", "pip", "install", "-q", *offline, "-e", clone], tmp_path)
    for folder in (clone.parent, tmp_path):
        (folder / "script.py").write_text(PATCH, encoding="utf-8")
        printed = run([python, folder / "script.py"], folder)
        assert printed.splitlines()[-1] == str(clone / "hf_memsave" / "__init__.py")


@pytest.mark.long
def test_the_wheel_works_away_from_the_repository(wheel, libraries, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    build("llama").save_pretrained(tmp_path / "model")
    path = f"{site}{os.pathsep}{libraries}"
    printed = run([sys.executable, "-S", "-c", USE, site], tmp_path, PYTHONPATH=path, HF_HUB_OFFLINE="1")
    assert "Equal to the last bit" in " ".join(printed.split())


@pytest.mark.long
def test_the_sdist_is_the_repository_and_its_tests_run(tmp_path):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git repository says what belongs to the project")
    files = {name for name in listed.stdout.split("\0") if name and not name.startswith(".")}
    source = tmp_path / "source"
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, source / name)
    run([sys.executable, "-c", f"import setuptools.build_meta as b; print(b.build_sdist({str(tmp_path)!r}))"], source)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("hf_memsave-*/")
    assert {name for name in files if not (unpacked / name).is_file()} == set()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_config.py"]
    run(command, unpacked, PYTHONPATH=str(unpacked))
