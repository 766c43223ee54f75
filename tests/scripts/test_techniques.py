"""``scripts/bench/techniques.py`` on narrow models: what its figures say of the techniques, and its files."""

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_memsave import measure_kept

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
from techniques import kept, made, main, measure_peak  # noqa: E402
from techniques_settings import OFF, SETTINGS, models  # noqa: E402

MODELS = models(quick=True, batch=2)
FULL, LORA = tuple(MODELS["full"]), tuple(MODELS["lora"])
ALL = [*(("full", name) for name in FULL), *(("lora", name) for name in LORA)]

pytestmark = pytest.mark.long


@functools.cache
def total(part, model, setting):
    return kept(MODELS[part][model], SETTINGS[part][setting])["total"]


@functools.cache
def freed(part, model, setting):
    return total(part, model, "stock") - total(part, model, setting)


@functools.cache
def kept_with_all_off(model):
    """Less than stock keeps by what no field leaves out, such as sums that can be made again."""
    return kept(MODELS["full"][model], OFF)["total"]


@pytest.mark.parametrize(("part", "model"), ALL)
def test_exact_keeps_less_than_stock(part, model):
    assert total(part, model, "exact") < total(part, model, "stock")


@pytest.mark.parametrize("model", FULL)
def test_inverting_keeps_exacts_bytes_and_a_bit_an_element(model):
    assert total("full", model, "exact") < total("full", model, "invact") <= 17 / 16 * total("full", model, "exact")
    assert freed("full", model, 'activation="invert"') > 0.2 * total("full", model, "stock")


@pytest.mark.parametrize("model", FULL)
def test_the_techniques_of_exact_free_together_what_they_free_alone(model):
    off = kept_with_all_off(model)
    together = off - total("full", model, "exact")
    alone = [off - total("full", model, f'{field}="recompute"') for field in ("activation", "norm", "attention")]
    assert together == sum(alone) and alone[0] > 0 and alone[1] > 0
    assert 0 <= total("full", model, "stock") - off < together / 100


@pytest.mark.parametrize("model", LORA)
def test_few_bits_keep_less_than_exact_before_a_frozen_linear(model):
    few, exact = total("lora", model, "few-bit"), total("lora", model, "exact")
    assert few < 0.8 * exact if model.startswith("q, v") else few == exact


@pytest.mark.parametrize("model", LORA)
def test_inverting_keeps_no_less_than_exact_before_a_frozen_linear(model):
    assert total("lora", model, "invact") > total("lora", model, "exact")


def test_selective_differentiation_has_nothing_to_do_in_bert():
    assert total("full", FULL[0], "selective") == kept_with_all_off(FULL[0])


def test_the_full_depth_follows_from_two():
    model = MODELS["lora"]["q, v, fp32"]
    module, batch = made(model, {"layers": 3}, SETTINGS["lora"]["exact"])
    three = SimpleNamespace(make=model.make, depth={"layers": 3})
    assert kept(three, SETTINGS["lora"]["exact"])["total"] == measure_kept(module, batch).total


class Scratch(nn.Module):
    """Keeps 1,000 floats, and makes and drops 5,000 meanwhile."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))

    def forward(self):
        y = self.weight.exp()
        torch.zeros(5000)
        return SimpleNamespace(loss=y.sum())


def test_the_peak_counts_what_is_dropped_before_backward():
    assert measure_peak(Scratch(), {}) == 4 * (1000 + 5000)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    main(["--quick", "--parts", "tempo", "step", "--rounds", "1", "--out", str(folder)])
    assert (folder / "techniques.png").stat().st_size > 10_000
    return json.loads((folder / "techniques.json").read_text()), (folder / "techniques.md").read_text()


def test_percentages_are_those_of_the_bytes(results):
    found, text = results
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    table = {row[0]: row for row in rows if len(row) == 5 and row[0] in SETTINGS["tempo"]}
    assert len(table) == len(SETTINGS["tempo"]) - 1  # stock's has empty cells
    for setting, row in table.items():
        for index, model in enumerate(MODELS["tempo"]):
            ours, stock = (found["tempo"][model][s]["per_layer"]["layers"] for s in (setting, "stock"))
            assert row[2 + 2 * index] == f"{100 * (stock - ours) / stock:.1f}%"


def test_tempo_frees_what_its_parts_free(results):
    for rows in results[0]["tempo"].values():
        layer = {setting: row["per_layer"]["layers"] for setting, row in rows.items()}
        assert layer["stock"] == layer["eager attention, dropout kept"] > layer["dropout, hidden"]
        parts = ("in-place GELU", "in-place LayerNorm", "dropout, hidden and in attention")
        assert layer["stock"] - layer["tempo"] >= sum(layer["stock"] - layer[part] for part in parts)


def test_a_peak_is_no_less_than_what_is_kept(results):
    step = results[0]["step"]["settings"]
    assert all(row["peak"] >= row["kept"] for row in step.values())
    assert step["exact"]["peak"] < step["stock"]["peak"]
