"""README and docs quote figures of committed tables: each is the table's, rounded."""

import os
import re
from pathlib import Path

import pytest
import yaml
from PIL import Image
from transformers import LlamaConfig

from hf_memsave import PlanError, plan
from support.helpers import on_stand_in
from support.script_helpers import load_script

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
#: Page -> its quotes: ``text`` on the page, and how lines of ``table`` begin that have its figures, in that order, or
#: the shares of which it tells how many percent are ``freed``.
QUOTES = yaml.safe_load((Path(__file__).parent / "quotes.yaml").read_text(encoding="utf-8"))
NUMBER = re.compile(r"(?<![\w.,])[-+]?(?:\d[\d,]*)?\.?\d+")
#: What has figures of its own: code, links' targets, tables that a script writes, numbers of versions and papers.
ELSEWHERE = re.compile(
    r"```.*?```|`[^`]*`|\]\([^)]*\)|<!-- .*?: written by .*?<!-- until here -->|\d{4}\.\d{5}"
    r"|(?:Python|PyTorch|torch|Transformers|PEFT|Apache-)[ ]?\d+\.\d+(?: (?:to|and) \d+\.\d+)?",
    flags=re.DOTALL,
)


def words(text):
    return " ".join(text.split())


def page(name):
    return words((ROOT / name).read_text(encoding="utf-8"))


def rows(table, start):
    """The lines of a committed table that begin so: one, or one of each of its parts."""
    lines = (RESULTS / f"{table}.md").read_text(encoding="utf-8").splitlines()
    return " ".join(line for line in lines if line.lstrip("|- ").startswith(start))


def missing(text, source, freed=False):
    """Figures of the text to which no number of the source rounds, after the number of the figure before."""
    numbers, found = iter(NUMBER.findall(source)), []
    for figure in NUMBER.findall(text):
        digits = len(figure.partition(".")[2])
        values = (float(number.replace(",", "")) for number in numbers)
        if float(figure.replace(",", "")) not in (round(100 - 100 * n if freed else n, digits) for n in values):
            found.append(figure)
    return found


@pytest.mark.parametrize(("name", "quote"), [(name, quote) for name, quotes in QUOTES.items() for quote in quotes])
def test_a_quoted_figure_is_that_of_its_table(name, quote):
    source = rows(quote["table"], quote["row"])
    assert words(quote["text"]) in page(name)
    assert missing(quote["text"], source, "freed" in quote) == []


@pytest.mark.parametrize("wrong", ["1.2 -> 3.5", "3.4 -> 1.2", "+5.6%", "44%"])
def test_a_wrong_figure_order_sign_or_share_is_seen(wrong):
    source = "| a row | 1.21 | 3.44 (0.56) | -5.6% |"
    assert missing("1.2 -> 3.4 | -5.6%", source) == [] == missing("44% freed", "| a row | 0.56 |", freed=True)
    assert missing(wrong, source) != []


def test_every_decimal_and_percent_of_readme_is_quoted():
    text = words(ELSEWHERE.sub(" ", (ROOT / "README.md").read_text(encoding="utf-8")))
    for quote in QUOTES["README.md"]:
        text = text.replace(words(ELSEWHERE.sub(" ", quote["text"])), "")
    assert re.findall(r".{,30}\d\.\d.{,10}|.{,30}\d%.{,5}", text) == []


def test_the_tokens_of_128_mib_of_logits_are_told():
    for name in ("README.md", "docs/limits.md"):
        assert all(f"{2**25 // vocabulary:,}" in page(name) for vocabulary in (32_000, 128_256))


def test_the_presets_have_the_estimates_and_times_of_the_tables(monkeypatch):
    pages = load_script("pages", monkeypatch)
    known, ways = (pages.results(RESULTS, name) for name in ("known-models", "ways-to-keep-less"))
    lines = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines()
    for name in ("stock", "`exact`", "`o_proj`", "`qkv`", "`up`", "`gate`", "`block`"):
        (line,) = (line for line in lines if line.startswith(f"| {name} |"))
        bare = name.strip("`")
        method, way = {"exact": ("memsave", "memsave=True"), "stock": ("stock",) * 2}.get(bare, (bare, f'"{bare}"'))
        peaks = [known[pages.PEAKS[model]][method]["peak"] / pages.GIB for model in ("8B LoRA", "BERT-Large")]
        time = ways["ways"][f"{pages.LORA}; {way}"]["time"]
        assert line.endswith(f"| {peaks[0]:.1f} | {time:.2f} | {peaks[1]:.1f} |")


def test_the_picture_is_of_the_table(monkeypatch):
    pages = load_script("pages", monkeypatch)
    assert Image.open(RESULTS / pages.PICTURE).text["Description"] == pages.readme(RESULTS)
    points = {tuple(mark.get_offsets()[0]) for axes in pages.picture(RESULTS).axes for mark in axes.collections}
    known, ways = (pages.results(RESULTS, name) for name in ("known-models", "ways-to-keep-less"))
    gate = known[pages.PEAKS["8B LoRA"]]["gate"]["peak"] / pages.GIB, ways["ways"][f'{pages.LORA}; "gate"']["time"]
    assert gate in points and len(points) == 7 + 5


def test_memory_and_batches_share_no_axis_and_no_row_is_empty(monkeypatch):
    pages = load_script("pages", monkeypatch)
    drawn = pages.pictures(RESULTS)
    assert {path.name for path in RESULTS.glob("*.png")} == drawn.keys()
    rows = [row for paper, of in pages.results(RESULTS, "papers").items() if paper != "about" for row in of]
    units = {f"{row['table']}: {row['work']}, {row['method']}": row["unit"] for row in rows}
    for axes in (axes for paper in pages.papers.PAPERS for axes in drawn[pages.papers.png(paper)].axes):
        labels = [label.get_text() for label in axes.get_yticklabels()]
        batches = "batch" in axes.get_xlabel()
        assert [units[label] == "sequences" for label in labels] == [batches] * len(labels)
        marks = [line.get_data() for line in axes.lines if line.get_marker() != "None"]
        filled = {at for shares, places in marks for share, at in zip(shares, places, strict=True) if share >= 0}
        assert filled == {*range(len(labels))}
    (settings,) = drawn["techniques.png"].axes
    labels = {label.get_text().split(" (")[0] for label in settings.get_yticklabels()}
    assert len(settings.patches) == 3 * len(labels) and all(bar.get_width() > 0 for bar in settings.patches)
    assert {"stock", "gradient checkpointing", "exact", "gate", "block", "tiles", "max"} <= labels


@pytest.mark.long
@on_stand_in
def test_the_plans_on_the_page_are_todays(monkeypatch):
    """Llama-3-8B's, in the words of the page."""
    known = load_script("known_models", monkeypatch)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    step = {"batch_size": 4, "seq_len": 2048, **known.LORA}
    found = {
        budget: plan(LlamaConfig(**known.LLAMA), budget=budget, **step)
        for budget in ("60GiB", "40GiB", "24GiB", "20GiB")
    }
    gib = {budget: f"{one.best.needed / 2**30:.1f}" for budget, one in found.items()}
    stock = f"{found['60GiB'].stock['stock'][0] / 2**30:.1f}"
    assert found["60GiB"].best.config.checkpoint is None and found["20GiB"].best.config.offload
    assert f"| 60 GiB | the default ({gib['60GiB']} GiB needed; stock: {stock}) | 0 |" in text
    for budget in ("40GiB", "24GiB"):
        best = found[budget].best
        assert best.config.checkpoint == "gate"
        layers = dict(best.config.layers)["checkpoint"]
        assert f'| {budget[:2]} GiB | `"gate"` in {layers} layers | {best.cost:.1%} |' in text
    away = f"{found['20GiB'].best.away / 2**30:.1f}"
    assert f"| 20 GiB | offload ({gib['20GiB']} GiB needed, {away} in main memory) | 0 |" in text
    with pytest.raises(PlanError):
        plan(LlamaConfig(**known.LLAMA), budget="10GiB", **step)
