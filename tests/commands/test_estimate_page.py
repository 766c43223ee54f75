"""``memsave estimate``: it says what fits; figures of its page are its own, and the page can be read."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest
from transformers import BertConfig

from hf_memsave.cli import main
from hf_memsave.config.sizes import gib
from hf_memsave.measure.estimate import estimate

pytest.importorskip("matplotlib")
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from hf_memsave.commands.estimate_page import PARTS, rows_of, timeline_axes, write_page
from support.helpers import on_stand_in

pytestmark = on_stand_in
CONFIG = {
    "model_type": "bert", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 99,
    "num_hidden_layers": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def result():
    return estimate(BertConfig(**CONFIG), batch_size=8, seq_len=128, memory=2**29)


@pytest.fixture(scope="module")
def page(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "out.html"
    write_page(path, result, "a model", {"batch": "8 x 128 tokens"})
    return path


class Parsed(HTMLParser):
    """The figures of each section, what the page loads, and its text."""

    VOID = {"meta", "link", "br", "path", "use", "rect"}

    def __init__(self, path):
        super().__init__()
        self.open, self.figures, self.shown, self.attributes, self.text = [], {}, [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in self.VOID:
            self.open.append((tag, values.get("id")))
        if tag == "data":
            section = next(name for kind, name in reversed(self.open) if kind == "section")
            self.figures.setdefault(section, []).append(int(values["value"]))

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1][0] == "data":
            self.shown.append(data)


@pytest.mark.long
def test_the_figures_are_the_estimates_own_and_shown_as_people_write_them(page, result):
    parsed = Parsed(page)
    assert parsed.open == []
    both, figures = (result.stock, result.patched), parsed.figures
    own = result.stock.needed - result.stock.peak
    assert figures["answer"] == [m.needed for m in both]
    moments = [getattr(m, name) for name in ("in_passes", "in_optimizer", "temporaries") for m in both]
    assert figures["peak"] == [*(getattr(m, part) for part in PARTS for m in both), own, own, *moments]
    assert all(sum(getattr(memory, part) for part in PARTS) == memory.peak for memory in both)
    assert {n for m in both for n in m.by_kind.values() if n} <= set(figures["kept"])
    fields = ("peak", "needed", "parameters", "gradients", "states", "activations", "kept")
    assert figures["settings"] == [getattr(m, field) for field in fields for m in both]
    for name, memory, kept in zip(("stock", "patched"), both, figures["kept"], strict=False):
        assert kept == memory.kept == sum(row["bytes"][name] for row in rows_of(result, "by_module"))
    rounded = [gib(n) for section in ("answer", "peak", "kept") for n in figures[section]]
    assert parsed.shown == rounded + [f"{n:,}" for n in figures["settings"]]
    words = " ".join(" ".join(parsed.text).split())
    for told in ("forward", "backward", "optimizer", "peak", "kept", "constants", "does not fit in 512.00 MiB"):
        assert told in words


@pytest.mark.long
def test_the_page_loads_nothing(page):
    loaded = [value for _, attribute, value in Parsed(page).attributes if attribute in ("src", "href", "srcset")]
    assert loaded and all(value.startswith("data:") for value in loaded)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<script|@import|url\((?!#)", text)


@pytest.mark.long
def test_a_page_of_stock_alone_and_names_are_text(result, tmp_path):
    stock = dataclasses.replace(result, patched=None, memory=None)
    write_page(tmp_path / "a.html", stock, "<script>alert(1)</script>", {"batch": "<b>1</b>"})
    text, parsed = (tmp_path / "a.html").read_text(encoding="utf-8"), Parsed(tmp_path / "a.html")
    assert "<script" not in text and "&lt;script&gt;" in text and "<b>1</b>" not in text
    assert parsed.figures["answer"] == [result.stock.needed] and "patched" not in " ".join(parsed.text)


def test_the_timeline_ends_at_the_peak(result):
    for memory in (result.stock, result.patched):
        assert max(point.live for point in memory.timeline) == memory.peak
        axes = Figure().add_subplot()
        timeline_axes(axes, memory, dataclasses.replace(result, memory=None))
        drawn = [patch.get_data() for patch in axes.patches]
        tops = [float(n) * 2**20 for n in drawn[-1].values]
        assert tops == pytest.approx([point.live for point in memory.timeline])
        assert [float(n) for n in drawn[1].baseline] == pytest.approx([float(n) for n in drawn[0].values])
        assert max(tops) <= axes.get_ylim()[1] * 2**20


@pytest.mark.long
def test_the_command_writes_a_page(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    files = ["--html", tmp_path / "a.html", "--json", tmp_path / "a.json"]
    step = ["--batch-size", "2", "--seq-len", "32", "--lora", "r=2"]
    assert main(["estimate", *map(str, [tmp_path / "config.json", *step, *files])]) == 0
    assert "bert, 5 layers" in capsys.readouterr().out
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["fits"] is None and figures["stock"]["peak"] >= figures["patched"]["peak"] > 0
    assert Parsed(tmp_path / "a.html").figures["settings"][:2] == [figures[s]["peak"] for s in ("stock", "patched")]
    text = (tmp_path / "a.html").read_text()
    assert "2 x 32 tokens" in text and "LoRA: " in text and tmp_path.name in text


@pytest.mark.long
def test_the_command_says_what_fits(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = ["estimate", str(tmp_path / "config.json"), "--seq-len", "32", "--memory"]
    assert main([*command, "1GiB", "--json", str(tmp_path / "a.json")]) == 0
    assert "Fits in 1.00 GiB (1.1 GB): " in capsys.readouterr().out
    largest = json.loads((tmp_path / "a.json").read_text())["largest"]
    assert largest["patched"]["batch_size"] > largest["stock"]["batch_size"] > 1
    assert largest["stock"]["seq_len"] == 512
    assert main([*command, "100MiB"]) == 1
    assert "Does not fit in 100.00 MiB (104.9 MB): " in capsys.readouterr().out


def test_bars_are_as_wide_as_their_bytes(page, result):
    text = page.read_text(encoding="utf-8")
    bar = r'<i style="width:([\d.]+)%;background:[^"]*"></i><data value="(\d+)">'
    bars = [(float(wide), int(n)) for wide, n in re.findall(bar, text)]
    count = 2 * len(rows_of(result, "by_kind"))
    assert len(bars) == count + 2 * len(rows_of(result, "by_module"))
    for table in (bars[:count], bars[count:]):
        most = max(n for _, n in table)
        assert [wide for wide, _ in table] == pytest.approx([100 * n / most for _, n in table])
    stacks = re.findall(r'<div class="stack".*?</div>', text, re.DOTALL)
    stock, patched = (sum(map(float, re.findall(r"width:([\d.]+)%", stack))) for stack in stacks)
    assert patched / stock == pytest.approx(result.patched.needed / result.stock.needed)


def brightness(color):
    """Relative luminance, as WCAG 2 defines it."""
    red, green, blue = (n / 12.92 if n <= 0.04045 else ((n + 0.055) / 1.055) ** 2.4 for n in to_rgb(color))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_can_be_read_by_day_and_by_night(page):
    text = page.read_text(encoding="utf-8")
    assert 'name="viewport" content="width=device-width' in text
    assert "#010203" not in text  # pictures have the ink of the page
    schemes = [dict(re.findall(r"--(\w+): (#\w+)", scheme)) for scheme in re.findall(r":root {([^}]*)}", text)]
    used = set(re.findall(r"[ {]color: var\(--(\w+)\)", text))
    assert len(schemes) == 2 and used == {"ink", "soft", "good", "bad"}
    for scheme, is_dark in zip(schemes, (False, True), strict=True):
        grounds = [brightness(scheme[name]) for name in ("card", "page")]
        assert (max(grounds) < 0.1) if is_dark else (min(grounds) > 0.8)
        for name in used:
            for ground in grounds:
                high, low = sorted((brightness(scheme[name]), ground), reverse=True)
                assert (high + 0.05) / (low + 0.05) >= 4.5, name
