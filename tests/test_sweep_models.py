"""``scripts/bench/sweep_models.py``: small models of many types train as in stock, bit for bit, and a sweep says so."""

import importlib
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
#: Text encoders and decoders, both together, experts, a recurrent mixer; images, sound, and images with text.
TYPES = ["bert", "deberta-v2", "gpt2", "llama", "gemma2", "mixtral", "mamba2", "t5", "bart", "vit", "wav2vec2", "llava"]


@pytest.fixture
def sweep(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("sweep_models")


@pytest.mark.long
@pytest.mark.parametrize("model_type", TYPES)
def test_equal_to_stock_in_every_mode(sweep, model_type):
    model, batch = sweep.small_model(model_type)
    for mode in sweep.MODES:
        *_, run = sweep.compare(model_type, mode, model, batch)
        assert (run.status, run.finite) == (sweep.SAME, True), run
        assert run.patched < run.stock or mode == "checkpointing", run


@pytest.mark.long
def test_small_models_cover_most_types_and_one_left_out_says_why(sweep):
    with pytest.raises(LookupError, match="stays large"):
        sweep.small_model("evolla")
    types = set(sweep.model_types())
    assert len(types) >= 200 and set(TYPES) < types
    model, batch = sweep.small_model("qwen2_vl")
    assert sum(weight.numel() for weight in model.parameters()) < 1e6
    assert batch["attention_mask"].sum(1).tolist() == [64 // 4 + 48, 64 // 4 + 32] and "pixel_values" in batch


def test_differences(sweep):
    one = {"loss": torch.tensor([1.0, float("nan")]), "gradient of a": torch.tensor([2.0]), "gradient of b": None}
    assert sweep.differences(one, one) == ""
    assert sweep.differences(one, {"loss": one["loss"]}) == "other parameters or buffers"
    assert sweep.differences(one, one | {"gradient of a": torch.tensor([3.0])}) == "gradient of a, by up to 5e-01"
    other = one | {"gradient of a": torch.tensor([2]), "gradient of b": torch.tensor([0.0])}
    assert sweep.differences(one, other) == "gradient of a and 1 more of 3 values, by up to inf"
