"""README and docs: links lead somewhere, commands and fields exist, and every Python snippet runs."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hf_memsave import MemSaveConfig
from hf_memsave.config.config import presets

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
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
    """The page without its blocks."""
    return BLOCK.sub("", path.read_text(encoding="utf-8"))


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(path):
    """The page's relative links that lead nowhere."""
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


def test_readme_has_at_most_120_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_readme_links_every_page():
    links = LINK.findall(prose(ROOT / "README.md"))
    assert len(PAGES) >= 9
    assert [page.name for page in PAGES if f"docs/{page.name}" not in links] == []


@pytest.mark.parametrize("path", WORDS, ids=name_of)
def test_links_resolve(path):
    assert broken(path) == []


def test_links_that_lead_nowhere_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title: `x.y`\n[a](#a-title-xy) [b](page.md) [c](none.md) [d](#none) [e](page.md#none)\n")
    assert broken(page) == ["none.md", "#none", "page.md#none"]


def test_every_table_of_results_is_listed():
    listed = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
    results = [path.name for path in (ROOT / "scripts" / "results").glob("*.md")]
    assert results
    assert [name for name in results if f"](../scripts/results/{name})" not in listed] == []


def test_every_field_and_preset_has_its_row():
    rows = re.findall(r"^\| `([\w-]+)` \|", prose(ROOT / "docs" / "configuration.md"), flags=re.MULTILINE)
    fields = [field.name for field in dataclasses.fields(MemSaveConfig)]
    assert sorted(rows) == sorted([*fields, *presets()])


def commands_in(block, program):
    """The commands of a bash block that begin so, each as its words."""
    words = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    return [command for command in words if command[:1] == [program]]


def commands_of(path, program):
    """Those of all bash blocks of a page."""
    return [command for block in blocks(path, "bash") for command in commands_in(block, program)]


#: Each bash block with ``memsave`` commands: those of a block may need files of the ones before.
TYPED = {
    f"{name_of(path)}-{place}": commands
    for path in WORDS
    for place, block in enumerate(blocks(path, "bash"))
    if (commands := commands_in(block, "memsave"))
}


@pytest.mark.long
@pytest.mark.parametrize("block", TYPED)
def test_commands_run(block, tmp_path):
    """A block's ``memsave`` commands, one after the other, of a small model."""
    batch = "torch.save({'input_ids': ids, 'labels': ids}, 'batch.pt')\nfrom hf_memsave.cli import main\n"
    code = textwrap.dedent(GIVEN) + batch
    for command in TYPED[block]:
        words = [{"MODEL": "small", "MODEL_OR_CONFIG": "small"}.get(word, word) for word in command[1:]]
        words += ["--max-batch", "4"] * ("--fast" in words)
        code += f"assert not main({words}), {command}\n"
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_every_command_is_shown():
    shown = {command[1] for path in WORDS for command in commands_of(path, "memsave")}
    assert shown >= {"report", "estimate", "plan", "verify", "doctor", "auto"}


def test_targets_of_make_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    asked = [word for path in WORDS for command in commands_of(path, "make") for word in command[1:] if "=" not in word]
    assert {"demo", "test", "quick", "lint", "evidence"} <= set(asked)
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
@pytest.mark.parametrize("path", [path for path in WORDS if blocks(path, "python")], ids=name_of)
def test_snippets_run(path, tmp_path):
    """A page's snippets, from top to bottom, in one process."""
    done = run(textwrap.dedent(GIVEN) + "\n".join(blocks(path, "python")), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_snippet_that_fails_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n<!-- no-run: why -->\n```python\n1 / 0\n```\n```python\nx / 0\n```\n")
    assert blocks(page, "python") == ["x = 1\n", "x / 0\n"]
    assert "ZeroDivisionError" in run("".join(blocks(page, "python")), tmp_path).stderr
