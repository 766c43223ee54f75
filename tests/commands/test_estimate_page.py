"""``memsave estimate``: it says what fits; its page says the same as its text, and can be read."""

import dataclasses
import json
import re
from itertools import pairwise
from xml.etree.ElementTree import fromstring

import pytest
from transformers import BertConfig

from hf_memsave.cli import main
from hf_memsave.config.sizes import gib
from hf_memsave.measure.estimate import estimate
from hf_memsave.measure.figures import OWN

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from hf_memsave.commands.estimate_page import PARTS, draw_step, kept_by, picture, write_page
from support.helpers import on_stand_in

pytestmark = on_stand_in
CONFIG = dict(model_type="bert", hidden_size=64, num_attention_heads=4, intermediate_size=128, num_hidden_layers=5)


@pytest.fixture(scope="module")
def result():
    return estimate(BertConfig(**CONFIG), batch_size=8, seq_len=128, memory=2**29)


@pytest.fixture(scope="module")
def page(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "out.html"
    write_page(path, result, "<script>", {"batch": "<b>1</b>"}, ["a <i>"])
    return path.read_text(encoding="utf-8")


def text_of(page):
    """Its text in one line; the page is XML too, so every tag is closed."""
    return " ".join(" ".join(fromstring(page).itertext()).split())


@pytest.mark.long
def test_the_page_says_the_same_as_the_text_and_names_are_text_and_stock_may_stand_alone(page, result, tmp_path):
    text = text_of(page)
    assert all(" ".join(line.split()) in text for line in str(result).splitlines())
    stock, patched = (gib(memory.needed) for memory in (result.stock, result.patched))
    assert f"{stock} as it is (stock): does not fit {patched} with hf_memsave (patched): does not fit" in text
    assert "<script>: memory of one training step batch: <b>1</b>" in text and "fit, patched: a <i>" in text
    write_page(tmp_path / "a.html", dataclasses.replace(result, patched=None, memory=None), "a model", {})
    text = text_of((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert f"{stock} as it is (stock) bert" in text and "patched" not in text.lower()


@pytest.mark.long
def test_tables_are_of_all_that_is_kept_the_most_first_and_a_page_loads_nothing_and_can_be_read_by_night(page, result):
    both = result.stock, result.patched
    for field in ("by_kind", "by_module"):
        rows = kept_by(result, field)
        assert [sum(amounts) for amounts in zip(*rows.values(), strict=True)] == [memory.kept for memory in both]
        assert all(" ".join([name, *map(gib, amounts)]) in text_of(page) for name, amounts in rows.items())
        rows.pop("the rest", None)
        assert rows == {name: [getattr(memory, field).get(name, 0) for memory in both] for name in rows}
        assert list(rows) == sorted(rows, key=lambda name: -max(rows[name])) and 2 < len(rows) <= 12
    loaded = re.findall(r'\b(?:src|href|srcset)="([^"]*)', page)
    assert loaded and all(value.startswith(("data:", "#")) for value in loaded)
    assert 'name="viewport" content="width=device-width' in page and 'name="color-scheme" content="light dark"' in page
    own_colors = r"[ {;](color|background)|#000000"  # there are only the browser's, in the picture too
    assert not re.search(rf"<script|@import|url\((?!#)|{own_colors}", page)


def test_the_picture_ends_at_the_peak(result):
    for memory in (result.stock, result.patched):
        assert sum(getattr(memory, part) for part in PARTS) == memory.peak
        axes = Figure().add_subplot()
        draw_step(axes, memory, 1)
        drawn = [patch.get_data() for patch in axes.patches]
        assert list(drawn[-1].values) == [moment.live for moment in memory.timeline.values()]
        assert all(list(above.baseline) == list(below.values) for below, above in pairwise(drawn))
        heights = [(part.values - part.baseline)[drawn[-1].values.argmax()] for part in drawn]
        assert heights == [getattr(memory, part) for part in PARTS]
        assert list(axes.lines[0].get_ydata()) == [memory.peak] and memory.peak <= axes.get_ylim()[1]
        assert f"peak {gib(memory.peak)}" in picture(result) and "limit" not in picture(result)
    assert "limit" in picture(dataclasses.replace(result, memory=OWN + result.stock.peak))


@pytest.mark.long
def test_the_command_writes_a_page_and_says_what_fits(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = ["estimate", str(tmp_path / "config.json"), "--seq-len", "32", "--json", str(tmp_path / "a.json")]
    assert main([*command, "--batch-size", "2", "--lora", "r=2", "--html", str(tmp_path / "a.html")]) == 0
    assert "bert, 5 layers" in capsys.readouterr().out
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["fits"] is None and figures["stock"]["peak"] >= figures["patched"]["peak"] > 0
    text = text_of((tmp_path / "a.html").read_text())
    assert "peak of the step {} {}".format(*(gib(figures[name]["peak"]) for name in ("stock", "patched"))) in text
    assert "2 x 32 tokens" in text and "LoRA: " in text and tmp_path.name in text
    assert main([*command, "--memory", "1GiB"]) == 0
    assert "Fits in 1.00 GiB (1.1 GB): " in capsys.readouterr().out
    largest = json.loads((tmp_path / "a.json").read_text())["largest"]
    assert largest["patched"]["batch_size"] > largest["stock"]["batch_size"] > 1 and largest["stock"]["seq_len"] == 512
    assert main([*command, "--memory", "100MiB"]) == 1
    assert "Does not fit in 100.00 MiB (104.9 MB): " in capsys.readouterr().out
