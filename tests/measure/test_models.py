"""Models from configurations alone: one that cannot be built is an error that says so."""

import pytest
from transformers import BertConfig, ResNetConfig

from hf_memsave.errors import MeasureError
from hf_memsave.measure.models import build_empty


def test_build_empty_refuses_a_configuration_that_is_wrong():
    with pytest.raises(MeasureError, match="cannot build a 'bert' model: .*Correct it"):
        build_empty(BertConfig(hidden_size=30, num_attention_heads=4))


@pytest.mark.parametrize("config", [BertConfig(num_hidden_layers=1), ResNetConfig(depths=[1, 1, 1, 1])], ids=str)
def test_build_empty_builds_any_family_without_a_byte(config):
    model = build_empty(config)
    assert model.training and {p.device.type for p in model.parameters()} == {"meta"}
