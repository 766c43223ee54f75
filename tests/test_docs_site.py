"""The site: MkDocs renders README and docs/ without a warning, and its list of pages lacks none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


def build(folder, site):
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(folder / "mkdocs.yml"), "-d", str(site)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_sites_list_of_pages_has_every_page_of_docs():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = {path for entry in nav for path in (entry.values() if isinstance(entry, dict) else [entry])}
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= listed
    assert all((ROOT / path).is_file() for path in listed)


def test_the_site_is_built_without_a_warning_and_a_broken_link_is_one(tmp_path):
    pytest.importorskip("mkdocs")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("docs", "notebooks", "configs", "scripts", "hf_memsave/presets"):
        shutil.copytree(ROOT / name, tmp_path / name)
    kernels = Path("hf_memsave", "_vendor", "memsave_kernels", "README.md")
    (tmp_path / kernels).parent.mkdir(parents=True)
    shutil.copy(ROOT / kernels, tmp_path / kernels)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert "<table>" in (tmp_path / "site" / "docs" / "numbers" / "index.html").read_text(encoding="utf-8")
    with (tmp_path / "docs" / "limits.md").open("a", encoding="utf-8") as page:
        page.write("[nowhere](nowhere.md) and [no such part](numbers.md#nowhere)\n")
    done = build(tmp_path, tmp_path / "site")
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert done.returncode != 0 and len(warnings) == 2 and all("nowhere" in line for line in warnings)
