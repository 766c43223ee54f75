"""MkDocs' hook: the site has the repository's own folders, so that links are the same in both."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
#: What pages are, and what they link to or show.
_SHOWN = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "LICENSE", "docs/*.md", "docs/*.css",
    "notebooks/*.ipynb", "configs/*/*.*", "hf_memsave/*.yaml", "hf_memsave/presets/*.yaml", "scripts/*.py",
    "scripts/bench/*.py", "scripts/results/*.*", "hf_memsave/tape/*.py", "hf_memsave/ops/*/*.py",
    "hf_memsave/_vendor/memsave_kernels/README.md",
)  # fmt: skip


def on_config(config: Any) -> Any:
    """Copy the pages to a folder of their own, and have MkDocs read that."""
    gathered = _ROOT / "build" / "pages"
    shutil.rmtree(gathered, ignore_errors=True)
    for pattern in _SHOWN:
        for source in sorted(_ROOT.glob(pattern)):
            target = gathered / source.relative_to(_ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    config["docs_dir"] = str(gathered)
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave out README's badges: the site loads nothing from a network."""
    return "".join(line for line in markdown.splitlines(keepends=True) if "//img.shields.io/" not in line)
