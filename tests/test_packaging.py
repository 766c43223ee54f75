"""What is released: the wheel, that it works away from the repository, the sdist, and what GitHub runs and shows."""

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
import yaml
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet

import hf_memsave
from hf_memsave.cli import COMMANDS, main
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


def test_the_release_has_one_version_one_date_and_the_papers_of_the_readme():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    cited = yaml.safe_load((REPO / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.findall(r"^## \[(\d.*)\] - (.*)$", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == (hf_memsave.__version__, str(cited["date-released"]))
    assert (cited["cff-version"], cited["version"]) == ("1.2.0", hf_memsave.__version__)
    assert (cited["authors"], cited["license"]) == (PROJECT["authors"], PROJECT["license"])
    papers = re.findall(r"https://arxiv.org/abs/[\d.]+", (REPO / "README.md").read_text(encoding="utf-8"))
    assert len(papers) == 4 and {paper["url"] for paper in cited["references"]} == set(papers)
    assert f"| {hf_memsave.__version__.rpartition('.')[0]}.x | yes |" in (REPO / "SECURITY.md").read_text()


#: What a working copy has beside its files, and no archive may have.
LEFT_BY_TOOLS = (
    "build/pages/old.md", "dist/old.whl", "tests/__pycache__/a.cpython-311.pyc", "scripts/b.pyc", "docs/.DS_Store",
    ".venv/lib/c.py", ".pytest_cache/d", ".mypy_cache/e.json", "out/model.bin",
)  # fmt: skip


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True).stdout
    if not listed:
        pytest.skip("no git repository says what belongs to the project")
    return set(listed.split("\0")) - {""}


@pytest.fixture(scope="module")
def clone(tracked, tmp_path_factory) -> Path:
    """The project's files under the name of a clone, and what tools leave: a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("above") / "hf_memsave"
    for name in {*tracked, *LEFT_BY_TOOLS}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, folder / name) if name in tracked else (folder / name).touch()
    return folder


@pytest.fixture(scope="module")
def wheel(clone) -> Path:
    """The wheel that the clone builds."""
    command = "import setuptools.build_meta as b; print(b.build_wheel('..'))"
    run([sys.executable, "-c", command], clone)
    return next(clone.parent.glob("*.whl"))


def contents(wheel: Path) -> dict[str, int]:
    """A wheel's files, each with its checksum."""
    with zipfile.ZipFile(wheel) as archive:
        return {file.filename: file.CRC for file in archive.infolist()}


def test_the_wheel_holds_the_package_and_its_presets_only_in_one_version(wheel):
    assert wheel.name == f"hf_memsave-{hf_memsave.__version__}-py3-none-any.whl"
    files = {name for name in contents(wheel) if ".dist-info/" not in name}
    sources = (REPO / "hf_memsave").rglob("*.py")
    package = {str(p.relative_to(REPO)) for p in sources if "_vendor" not in p.parts or "torch-ext" in p.parts}
    assert {name for name in files if name.endswith(".py")} == package
    others = {name for name in files if not name.endswith(".py")}
    presets = {f"hf_memsave/presets/{p.name}" for p in (REPO / "hf_memsave" / "presets").iterdir()}
    assert len(presets) >= 8 and presets < others and {"hf_memsave/py.typed", "hf_memsave/shapes.yaml"} < others
    vendored = {f"hf_memsave/_vendor/memsave_kernels/{name}" for name in ("LICENSE", "VERSION")}
    assert vendored < others
    rest = r"hf_memsave/(py\.typed|shapes\.yaml|(\w+/)+\w+\.(json|html))"
    assert all(re.fullmatch(rest, name) for name in others - presets - vendored)


def test_the_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        said = Metadata.from_email(archive.read(f"{folder}/METADATA"))
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
    assert (said.name, str(said.version)) == ("hf_memsave", hf_memsave.__version__)
    assert (said.license_expression, said.license_files) == ("Apache-2.0", ["LICENSE"])
    assert (said.description_content_type, said.requires_python) == ("text/markdown", SpecifierSet(">=3.10"))
    assert said.description.strip() == (REPO / "README.md").read_text(encoding="utf-8").strip()
    assert set(said.provides_extra) == PROJECT["optional-dependencies"].keys()
    plain = {one.name for one in said.requires_dist if "extra" not in str(one.marker)}
    assert plain == names(PROJECT["dependencies"])


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


def empty_environment(folder: Path, libraries: Path, *install: object) -> Path:
    """Make an environment in which this alone is installed beside the libraries; return its folder of programs."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], folder).strip()
    Path(site, "libraries.pth").write_text(str(libraries), encoding="utf-8")
    run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", *install], folder)
    return python.parent


@pytest.mark.long
def test_an_editable_install_is_found_from_anywhere_also_beside_a_clone_of_its_name(clone, libraries, tmp_path):
    programs = empty_environment(tmp_path / "venv", libraries, "-e", clone)
    for folder in (clone.parent, tmp_path):
        (folder / "script.py").write_text(PATCH, encoding="utf-8")
        printed = run([programs / "python", folder / "script.py"], folder)
        assert printed.splitlines()[-1] == str(clone / "hf_memsave" / "__init__.py")


@pytest.mark.long
def test_the_wheel_works_away_from_the_repository(wheel, libraries, tmp_path):
    programs = empty_environment(tmp_path / "venv", libraries, wheel)
    assert run([programs / "memsave", "--version"], tmp_path) == f"hf_memsave {hf_memsave.__version__}\n"
    build("llama").save_pretrained(tmp_path / "model")
    printed = run([programs / "python", "-c", USE, tmp_path / "venv"], tmp_path, HF_HUB_OFFLINE="1")
    assert "Equal to the last bit" in " ".join(printed.split())


@pytest.mark.long
def test_the_sdist_is_the_repository_builds_the_same_wheel_and_its_tests_run(clone, tracked, wheel, tmp_path):
    for module in ("build", "twine"):
        pytest.importorskip(module)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, clone], tmp_path)
    (sdist,), (again,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    run([sys.executable, "-m", "twine", "check", "--strict", sdist, again], tmp_path)
    assert contents(again) == contents(wheel)  # the first is built from the sdist
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    made = {name for name in found if name in ("PKG-INFO", "setup.cfg") or name.startswith("hf_memsave.egg-info/")}
    assert found - made == {name for name in tracked if name.startswith(".github/") or not name.startswith(".")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_config.py"]
    run(command, unpacked, PYTHONPATH=str(unpacked))


WORKFLOWS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (REPO / ".github/workflows").glob("*.yml")}
JOBS = {name: job for workflow in WORKFLOWS.values() for name, job in workflow["jobs"].items()}
STEPS = [step for job in JOBS.values() for step in job.get("steps", ())]


def test_workflows_use_pythons_targets_and_modules_that_are_there_and_may_only_read():
    pythons = {str(step["with"]["python-version"]) for step in STEPS if "setup-python" in step.get("uses", "")}
    pythons = {*pythons, *JOBS["test"]["strategy"]["matrix"]["python"], *JOBS["wheel"]["strategy"]["matrix"]["python"]}
    pythons.remove("${{ matrix.python }}")
    classified = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert pythons == classified and all(SpecifierSet(PROJECT["requires-python"]).contains(one) for one in classified)
    commands = "\n".join(step.get("run", "") for step in STEPS)
    targets = re.findall(r"^make (\S+)", commands, re.MULTILINE)
    assert {*targets} == {"lint", "test"} <= {*re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.MULTILINE)}
    modules = set(re.findall(r"python\"? -m (\w+)", commands))
    assert {"build", "twine"} <= modules and modules - {"pip", "venv"} <= names(
        PROJECT["optional-dependencies"]["test"]
    )
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[\w-]+@v\d+|pypa/[\w-]+@release/v\d+", action) for action in used)
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    assert {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job} == {
        "publish": {"id-token": "write"}
    }


def test_a_release_has_links_of_its_tag_in_its_readme(tmp_path):
    """PyPI shows README without the repository's files."""
    (code,) = (step["run"] for step in STEPS if step.get("shell") == "python")
    readme = (REPO / "README.md").read_text(encoding="utf-8") + "\n[![badge](https://a.b/c.svg)](LICENSE) [a](#more)"
    (tmp_path / "README.md").write_text(readme, encoding="utf-8")
    run([sys.executable, "-c", code], tmp_path, GITHUB_REPOSITORY="owner/name", GITHUB_REF_NAME="v1")
    changed = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https://|#)", readme) and not re.findall(r"\]\((?!https://|#)", changed)
    at = "https://github.com/owner/name"
    assert f"]({at}/blob/v1/docs/limits.md#what-is-exact)" in changed
    assert changed.endswith(f"[![badge](https://a.b/c.svg)]({at}/blob/v1/LICENSE) [a](#more)")
    pictures = re.findall(r"!\[[^]]*\]\((.*)\)", changed)
    assert any(link.startswith(f"{at}/raw/v1/scripts/results/") for link in pictures)
    assert re.sub(rf"{at}/(blob|raw)/v1/", "", changed) == readme


def test_issue_forms_ask_for_what_the_commands_give(capsys):
    for path in (REPO / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"):
        text = path.read_text(encoding="utf-8")
        form = yaml.safe_load(text)
        assert form["name"] and form["description"]
        ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert "doctor" in ids and len(set(ids)) == len(ids)
        commands = re.findall(r"`memsave (\w+)", text)
        for command in commands:
            with pytest.raises(SystemExit):
                main([command, "--help"])
        known = capsys.readouterr().out
        assert [word for word in re.findall(r"--[\w-]+", text) if word not in known] == []
        assert {*commands} <= COMMANDS.keys()
