"""The pictures of an estimate: their figures are the estimate's own, and a browser shows the page as it is meant."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from transformers import BertConfig

from hf_memsave import commands
from hf_memsave.cli import main
from hf_memsave.measure.estimate import estimate

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from hf_memsave.commands.estimate_page import PARTS, in_units, rows_by_kind, rows_by_module, timeline_axes, write_page
from support.helpers import on_stand_in

pytestmark = on_stand_in
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
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
def test_the_figures_are_the_estimates_own(page, result):
    parsed = Parsed(page)
    assert parsed.open == []
    both = (result.stock, result.patched)
    assert parsed.figures["answer"] == [m.needed for m in both]
    own = result.stock.needed - result.stock.peak
    parts = [[getattr(m, part) for m in both] for part in PARTS]
    assert parsed.figures["peak"] == [*sum(parts, []), own, own]
    for memory in both:
        assert sum(getattr(memory, part) for part in PARTS) == memory.peak
    by_kind = {n for m in both for n in m.by_kind.values() if n}
    assert {n for n in by_kind if n} <= set(parsed.figures["kept"])
    fields = ("peak", "needed", "parameters", "gradients", "states", "activations", "kept")
    assert parsed.figures["settings"] == [getattr(m, field) for field in fields for m in both]
    for i, memory in enumerate(both):
        assert parsed.figures["kept"][i] == memory.kept == sum(row["bytes"][name(i)] for row in rows_by_module(result))


def name(index):
    return ("stock", "patched")[index]


def test_figures_are_shown_as_people_write_them(page):
    parsed = Parsed(page)
    values = [n for section in ("answer", "peak", "kept", "settings") for n in parsed.figures[section]]
    shown = [in_units(n) for n in values]
    count = len(parsed.figures["settings"])
    assert parsed.shown == shown[:-count] + [f"{n:,}" for n in parsed.figures["settings"]]
    assert [in_units(n) for n in (0, 512, 2**10, 3 * 2**20, 24 * 2**30)] == [
        "0", "512 B", "1.0 KiB", "3.0 MiB", "24.0 GiB"
    ]  # fmt: skip
    words = " ".join(" ".join(parsed.text).split())
    for told in ("forward", "backward", "optimizer", "peak", "kept", "constants", "does not fit in 512.0 MiB"):
        assert told in words


def test_the_page_loads_nothing(page):
    loaded = [value for _, attribute, value in Parsed(page).attributes if attribute in ("src", "href", "srcset")]
    assert loaded and all(value.startswith("data:") for value in loaded)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<script|@import|url\((?!#)", text)


def test_names_are_text(result, tmp_path):
    write_page(tmp_path / "a.html", result, "<script>alert(1)</script>", {"batch": "<b>1</b>"})
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;script&gt;" in text and "<b>1</b>" not in text


def test_a_page_of_stock_alone(result, tmp_path):
    write_page(tmp_path / "a.html", dataclasses.replace(result, patched=None, memory=None), "a model", {})
    parsed = Parsed(tmp_path / "a.html")
    assert parsed.figures["answer"] == [result.stock.needed]
    assert "patched" not in " ".join(parsed.text)


def test_the_timeline_ends_at_the_peak(result):
    for memory in (result.stock, result.patched):
        assert max(point.live for point in memory.timeline) == memory.peak
        axes = Figure().add_subplot()
        timeline_axes(axes, memory, result.stock.peak, None)
        drawn = [patch.get_data() for patch in axes.patches]
        tops = [float(n) * 2**20 for n in drawn[-1].values]
        assert tops == pytest.approx([point.live for point in memory.timeline])
        assert [float(n) for n in drawn[1].baseline] == pytest.approx([float(n) for n in drawn[0].values])
        assert max(tops) <= axes.get_ylim()[1] * 2**20


@pytest.mark.long
def test_the_command_writes_both(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ["--picture", tmp_path / "a.png", "--html", tmp_path / "a.html", "--json", tmp_path / "a.json"]
    step = ["--batch-size", "2", "--seq-len", "32", "--lora", "r=2"]
    assert main(["estimate", *map(str, [tmp_path / "config.json", *step, *options])]) == 0
    figures = json.loads((tmp_path / "a.json").read_text())
    assert Parsed(tmp_path / "a.html").figures["settings"][:2] == [figures[s]["peak"] for s in ("stock", "patched")]
    header = (tmp_path / "a.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(header[16:20], "big") == 1800
    text = (tmp_path / "a.html").read_text()
    assert "2 x 32 tokens" in text and "LoRA: " in text and tmp_path.name in text


ASKED = {
    "no matplotlib": (["--html", "a.html"], "matplotlib", "Run: pip install"),
    "no jinja2": (["--picture", "a.png"], "jinja2", "Run: pip install"),
    "another name": (["--html", "a.txt"], None, "expected a name that ends in .html or .htm"),
    "another picture": (["--picture", "a.jpeg"], None, "expected a name that ends in .png"),
    "no folder": (["--html", "none/a.html"], None, "Create the folder"),
}


@pytest.mark.parametrize(("options", "missing", "message"), ASKED.values(), ids=ASKED)
def test_what_cannot_be_drawn_is_told_at_once(options, missing, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    stock = commands.find_spec
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == missing else stock(name))
    assert main(["estimate", "nosuch", *options]) == 2  # before the model is looked for
    assert message in capsys.readouterr().err


FOUND = """<!doctype html><body style="margin:0"><iframe style="border:0;width:WIDTHpx;height:900px"></iframe>
<pre id="found"></pre><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.right, b.width, b.height]; };
  const style = (e) => frame.contentWindow.getComputedStyle(e);
  const found = {
    width: root.clientWidth, scroll: root.scrollWidth,
    pictures: [...page.querySelectorAll("svg")].map(box),
    labels: [...page.querySelectorAll("svg text")].map((e) => [e.textContent, ...box(e), style(e).fill]),
    bars: [...page.querySelectorAll(".bar")].map((e) => [e.querySelector("data").value, box(e.querySelector("i"))[2]]),
    stacks: [...page.querySelectorAll(".stack")].map((e) => [...e.querySelectorAll("i")].map((i) => box(i)[2])),
    texts: [...page.querySelectorAll("h1, p, b, small, td, th")].map((e) => [style(e).color, e.textContent.trim()]),
    card: style(page.querySelector("section")).backgroundColor, page: style(page.body).backgroundColor,
    headings: [...page.querySelectorAll("h2")].map((e) => e.innerText),
  };
  document.querySelector("#found").textContent = JSON.stringify(found);
};
frame.srcdoc = SOURCE;
</script>"""


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Opens a page in a headless browser, so many pixels wide, and says what it found there."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: expected one of {', '.join(BROWSERS)}")
    folder = tmp_path_factory.mktemp("browser")

    def run(source, width, is_dark=False):
        text = json.dumps(source).replace("</", "<\\/")
        (folder / "frame.html").write_text(FOUND.replace("WIDTH", str(width)).replace("SOURCE", text), encoding="utf-8")
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", f"--user-data-dir={folder / 'profile'}",
            f"--window-size={max(width, 500)},1000", "--dump-dom", (folder / "frame.html").as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "CONSOLE" not in done.stderr, done.stderr
        return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]))

    return run


@pytest.mark.parametrize("width", [320, 500, 1100])
def test_a_browser_shows_it_at_every_width(browse, page, result, width):
    found = browse(page.read_text(encoding="utf-8"), width)
    assert found["scroll"] <= found["width"]
    assert found["headings"][0] == "How much memory does a GPU need?"
    assert len(found["pictures"]) == 2
    for left, right, wide, high in found["pictures"]:
        assert 0 <= left and right <= width and wide > 200 and high > 150
    labels = [text for text, *_ in found["labels"]]
    assert [f"peak {in_units(m.peak)}" in labels for m in (result.stock, result.patched)] == [True, True]
    assert {"forward", "backward", "optimizer"} <= set(labels)
    for text, left, right, _, high, _ in found["labels"]:
        assert 0 <= left and right <= width and high >= 8, text
    count = 2 * len(rows_by_kind(result))
    for bars in (found["bars"][:count], found["bars"][count:]):
        longest, widest = max((int(n), wide) for n, wide in bars)
        assert widest > 80
        assert [wide for _, wide in bars] == pytest.approx(
            [max(widest * int(n) / longest, 1) for n, _ in bars], abs=0.1
        )
    both = [sum(widths) for widths in found["stacks"]]
    assert both[1] / both[0] == pytest.approx(result.patched.needed / result.stock.needed, rel=0.01)


def brightness(color):
    """Relative luminance, as WCAG 2 defines it."""
    numbers = [int(n) / 255 for n in re.findall(r"\d+", color)[:3]]
    red, green, blue = (n / 12.92 if n <= 0.04045 else ((n + 0.055) / 1.055) ** 2.4 for n in numbers)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_by_day_and_by_night(browse, page, is_dark):
    found = browse(page.read_text(encoding="utf-8"), 800, is_dark)
    grounds = [brightness(found[name]) for name in ("card", "page")]
    assert (max(grounds) < 0.1) if is_dark else (min(grounds) > 0.8)
    colors = {color for color, text in found["texts"] if text} | {color for *_, color in found["labels"]}
    for color in colors:
        for ground in grounds:
            high, low = sorted((brightness(color), ground), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, color


def test_what_is_too_wide_is_seen(browse, page):
    wide = page.read_text(encoding="utf-8").replace("<main>", '<main><div style="width:900px">x</div>')
    assert browse(wide, 320)["scroll"] > 320
