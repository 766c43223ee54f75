"""README and docs: links lead somewhere, commands and fields exist, every snippet runs, and MkDocs renders them."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_memsave import MemSaveConfig
from hf_memsave.cli import main
from hf_memsave.config.config import RUNGS, presets
from support.browser import CHROMIUM, sticking_out

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
WIDTHS = (400, 800, 1300)  # pixels
WORDS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
#: In front of a snippet: why no test can run it.
NO_RUN = re.compile(r"<!-- no-run: \S.*? -->\n\Z")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")

#: What a page may take for granted: a small model, saved and at hand, and what it is trained on.
GIVEN = """
import torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=64, pad_token_id=0, use_cache=False,
)).train()
name = "small"
model.save_pretrained(name)
ids = torch.randint(1, 64, (2, 16))
images = torch.randn(2, 3, 8, 8)
dataset = [{"input_ids": row, "labels": row} for row in ids]
"""


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path, language):
    """The page's blocks in that language that run, in order."""
    text = path.read_text(encoding="utf-8")
    found = [(m.group(1), m.group(2), text[: m.start()]) for m in BLOCK.finditer(text)]
    return [code for tag, code, before in found if tag == language and not NO_RUN.search(before)]


def prose(path):
    return BLOCK.sub("", path.read_text(encoding="utf-8"))


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(path):
    found = []
    for link in LINK.findall(prose(path)):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        there = (path.parent / target).resolve() if target else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            found.append(link)
    return found


def run(code, folder):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


def test_readme_has_at_most_120_lines_and_links_every_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    links = LINK.findall(prose(ROOT / "README.md"))
    assert len(PAGES) >= 9
    assert [page.name for page in PAGES if f"docs/{page.name}" not in links] == []


def test_links_resolve(tmp_path):
    assert {name_of(path): found for path in WORDS if (found := broken(path))} == {}
    page = tmp_path / "page.md"
    page.write_text("# A title: `x.y`\n[a](#a-title-xy) [b](page.md) [c](none.md) [d](#none) [e](page.md#none)\n")
    assert broken(page) == ["none.md", "#none", "page.md#none"]


def test_every_table_of_results_is_listed_and_every_field_and_preset_has_its_row():
    listed = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
    results = [path.name for path in (ROOT / "scripts" / "results").glob("*.md")]
    assert results
    assert [name for name in results if f"](../scripts/results/{name})" not in listed] == []
    rows = re.findall(r"^\| `([\w-]+)` \|", prose(ROOT / "docs" / "configuration.md"), flags=re.MULTILINE)
    fields = [field.name for field in dataclasses.fields(MemSaveConfig)]
    assert sorted(rows) == sorted([*fields, *presets(), *RUNGS])


def commands_of(path, program):
    """The commands of a page's bash blocks that begin so, each as its words."""
    lines = "\n".join(blocks(path, "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))[:1] == [program]]


#: Page -> its ``memsave`` commands in order: one may need files of those before it.
TYPED = {name_of(path): commands for path in WORDS if (commands := commands_of(path, "memsave"))}


@pytest.mark.long
@pytest.mark.parametrize("page", TYPED)
def test_commands_run(page, tmp_path):
    """A page's ``memsave`` commands, one after the other, of a small model."""
    batch = "torch.save({'input_ids': ids, 'labels': ids}, 'batch.pt')\nfrom hf_memsave.cli import main\n"
    code = GIVEN + batch
    for command in TYPED[page]:
        words = [{"MODEL": "small", "MODEL_OR_CONFIG": "small"}.get(word, word) for word in command[1:]]
        words += ["--max-batch", "4"] * ("--fast" in words)
        code += f"assert not main({words}), {command}\n"
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_every_command_is_shown_and_targets_of_make_exist():
    shown = {command[1] for path in WORDS for command in commands_of(path, "memsave")}
    assert shown >= {"report", "estimate", "plan", "verify", "doctor", "auto"}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    asked = [word for path in WORDS for command in commands_of(path, "make") for word in command[1:] if "=" not in word]
    assert {"demo", "test", "test-all", "lint", "evidence"} <= set(asked)
    assert [target for target in asked if target not in targets] == []


@pytest.mark.long
def test_scripts_have_their_options_and_files():
    """Every ``python scripts/...`` of a bash block: the script knows the options, and the recipes are there."""
    commands = [command for path in WORDS for command in commands_of(path, "python")]
    assert len(commands) >= 3
    for _, script, *words in commands:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(ROOT / script), "--help"], env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        known = set(re.findall(r"--[\w-]+", done.stdout))
        assert [word for word in words if word.startswith("--") and word not in known] == []
        assert [word for word in words if word.startswith("configs/") and not (ROOT / word).is_file()] == []


@pytest.mark.long
@pytest.mark.parametrize(
    "path",
    [p for p in WORDS if blocks(p, "python") and p.name != "recipes.md"],
    ids=name_of,  # test_recipes_page.py
)
def test_snippets_run(path, tmp_path):
    """A page's snippets, from top to bottom, in one process."""
    done = run(GIVEN + "\n".join(blocks(path, "python")), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_blocks_are_those_that_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n<!-- no-run: why -->\n```python\n1 / 0\n```\n```python\nx / 0\n```\n")
    assert blocks(page, "python") == ["x = 1\n", "x / 0\n"]


def build_site(folder, site):
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(folder / "mkdocs.yml"), "-d", str(site)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built in a copy of what it is built from."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("clone")
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "CITATION.cff",
        "LICENSE",
        "mkdocs.yml",
    ):
        shutil.copy(ROOT / name, folder / name)
    leave = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("docs", "notebooks", "configs", "scripts", "hf_memsave"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    done = build_site(folder, folder / "site")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder / "site"


def test_the_site_lists_every_page_and_asks_no_network(site):
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = {path for entry in nav for path in (entry.values() if isinstance(entry, dict) else [entry])}
    assert {f"docs/{path.name}" for path in PAGES} <= listed
    assert all((ROOT / path).is_file() for path in listed)
    asked = re.compile(r"""<(script|img|iframe|source|link)[^>]*\s(src|href)=["']?(https?:)?//""")
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > len(PAGES)
    assert [str(path) for path, text in pages.items() if asked.search(text)] == []
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles and not re.search(r"@import|url\([\"']?(https?:)?//", "".join(styles))
    assert '<span style="' in pages[site / "docs" / "configuration" / "index.html"]  # code has colours


def test_a_broken_link_and_one_to_a_folder_are_errors_of_the_site(site):
    with (site.parent / "docs" / "limits.md").open("a", encoding="utf-8") as page:
        page.write("[nowhere](nowhere.md), [no such part](numbers.md#nowhere) and [a folder](../notebooks)\n")
    done = build_site(site.parent, site.parent / "broken")
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    found = [re.findall("nowhere|notebooks", line)[0] for line in warnings]
    assert done.returncode != 0 and sorted(found) == ["notebooks", "nowhere", "nowhere"]


@pytest.mark.long
def test_no_page_has_anything_wider_than_the_window(site, tmp_path):
    """The site's pages, and the page of ``memsave estimate --html``, in a browser; a wide table planted is seen."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium. Run: apt-get install chromium")
    estimate = tmp_path / "estimate.html"
    command = ["estimate", "bert", "--layers", "2", "--batch-size", "2", "--seq-len", "64"]
    assert main([*command, "--html", str(estimate)]) == 0
    table = "<table><tr><td style='min-width: 2000px'>wide</td></tr></table>"
    planted = {"bare": table, "hidden": f"<div style='overflow: hidden'>{table}</div>"}
    planted["scrolling"] = f"<div style='overflow: auto'>{table}</div>"
    for name, text in planted.items():
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
    found = sticking_out([*site.rglob("*.html"), *tmp_path.glob("*.html")], WIDTHS)
    faults = {key: found.pop(key, []) for name in planted for key in [f"{tmp_path / name}.html at {WIDTHS[-1]} pixels"]}
    assert all(any("<table> wide" in line for line in lines) for lines in faults.values()), faults
    for name in ("bare", "hidden"):  # on a phone a table may scroll
        assert all(found.pop(f"{tmp_path / name}.html at {width} pixels") for width in WIDTHS[:-1])
    assert found == {}
