"""What PEFT asks of the layers it adapts, by their exact type for one, is true on a patched model."""

import pytest
import torch
from peft import get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from test_peft_methods import CASES, SIZE, adapted, batch_of, config_of, experts, train  # noqa: F401
from torch import nn

from hf_memsave import measure_kept, patch, unpatch
from support.families import batch_for, build
from support.steps import assert_same

LINEAR_METHODS = ["GLORA", "LORA", "IA3", "LOHA", "LOKR", "MISS", "OFT"]


def places(model: nn.Module) -> dict[str, str]:
    """Path -> kind of every layer that PEFT put in."""
    return {name: type(m).__qualname__ for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}


@pytest.mark.parametrize(("method", "family"), CASES)
def test_adapters_land_on_the_modules_they_land_on_in_stock(method, family, experts):  # noqa: F811
    stock, ours = (adapted(method, family, when, experts, {}) for when in ("never", "before"))
    assert places(ours) == places(stock)
    assert [(n, p.requires_grad) for n, p in ours.named_parameters()] == [
        (n, p.requires_grad) for n, p in stock.named_parameters()
    ]


@pytest.mark.parametrize("method", LINEAR_METHODS)
def test_what_an_adapter_wraps_is_a_plain_linear(method):
    model = adapted(method, "llama", "before", "", {})
    found = [m.get_base_layer() for m in model.modules() if isinstance(m, BaseTunerLayer)]
    assert len(found) == 3 * SIZE.layers and {type(m) for m in found} == {nn.Linear}


@pytest.mark.parametrize("method", LINEAR_METHODS)
def test_a_merged_model_is_stocks(method, device):
    merged = []
    for when in ("never", "before"):
        model = adapted(method, "llama", when, "", {})
        train(model, method)
        merged.append(model.merge_and_unload())
    assert_same(merged[1].state_dict(), merged[0].state_dict())
    batch = batch_for(merged[0], SIZE)
    kept = [measure_kept(model.train().requires_grad_(), batch).total for model in merged]
    assert kept[1] < kept[0]
    assert {type(m) for m in merged[1].modules() if isinstance(m, nn.Linear)} == {nn.Linear}


def test_a_second_glora_goes_onto_a_patched_model_and_away_again():
    model = adapted("GLORA", "llama", "before", "", {})
    first = places(model)
    model.add_adapter("second", config_of("GLORA", "llama", "", {"r": 2}))
    model.delete_adapter("default")
    model.set_adapter("second")
    assert places(model) == first and "second" in str(list(model.state_dict()))
    model(**batch_of(model, "GLORA", seed=0)).loss.backward()
    trained = [n for n, p in model.named_parameters() if p.grad is not None]
    assert trained and all(".second." in name for name in trained)


def test_glora_on_an_unpatched_model_is_stocks():
    base = build("llama", SIZE)
    patch(base)
    unpatch(base)
    torch.manual_seed(0)
    model = get_peft_model(base, config_of("GLORA", "llama", "", {}))
    assert places(model) == places(adapted("GLORA", "llama", "never", "", {})) and places(model)
