"""Transformers' common model tests, with a small tester for each of some families; to be run by equal_under.py.

    pip install parameterized; pip download --no-deps --no-binary :all: transformers==<the installed version>
    tar xf transformers-*.tar.gz && touch transformers-*/tests/__init__.py
    PYTHONPATH=$PWD/transformers-<version> python scripts/equal_under.py -- scripts/equal_under_families.py -k training

Those tests are in the source distribution; the testers of single models are not, nor are two classes that the common
tests inherit from, which stay empty here.
"""

from __future__ import annotations

import functools
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from small_configs import LENGTH, small_config  # noqa: E402
from small_models import BATCH, make_batch  # noqa: E402

for module, name in (
    ("exporters.test_export", "ExportTesterMixin"),
    ("generation.test_utils", "GenerationTesterMixin"),
):
    sys.modules[f"tests.{module}"] = empty = types.ModuleType(module)
    setattr(empty, name, type(name, (), {}))
from tests.test_modeling_common import ModelTesterMixin  # noqa: E402

FAMILIES = (
    "albert bart beit bert bloom convnext deberta-v2 distilbert electra gemma2 gpt2 gpt_neox llama mamba mistral "
    "mixtral opt phi phi3 qwen3 roberta t5 vit wav2vec2"
).split()
#: Those whose labels the common tests make.
HEADS = (
    "CAUSAL_LM MASKED_LM SEQ_TO_SEQ_CAUSAL_LM SEQUENCE_CLASSIFICATION QUESTION_ANSWERING IMAGE_CLASSIFICATION CTC"
).split()


class Tester:
    """A small configuration and a batch, as the common tests ask for them."""

    __test__ = False  # to be collected as one
    is_training, batch_size, seq_length, num_choices = True, BATCH, LENGTH, 3

    def __init__(self, model_type: str, model_class: type[PreTrainedModel]) -> None:
        self.model_type, self.model_class = model_type, model_class

    def get_config(self) -> Any:
        """Always the same."""
        return small_config(CONFIG_MAPPING[self.model_type])

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """The configuration, and inputs without labels."""
        return self.get_config(), dict(_batch(self.model_type, self.model_class))

    def __getattr__(self, name: str) -> Any:
        """A size, from the configuration."""
        if name.startswith("_") or name not in vars(config := self.get_config()):
            raise AttributeError(name)
        return getattr(config, name)


@functools.cache
def _batch(model_type: str, model_class: Any) -> dict[str, Any]:
    with torch.random.fork_rng():  # whichever test comes first
        config = small_config(CONFIG_MAPPING[model_type])
        batch = make_batch(model_class(config), None)
    if config.is_encoder_decoder:
        batch["input_ids"][:, 0] = config.eos_token_id  # what BART's and T5's classifiers look for
        batch["decoder_input_ids"] = batch["input_ids"].clone()
    return batch


def classes_of(model_type: str) -> tuple[type[PreTrainedModel], ...]:
    """The base model and the heads of a family; not a decoder alone, which lacks what its blocks attend to."""
    config_class = CONFIG_MAPPING[model_type]
    heads = [head for head in HEADS if head != "CAUSAL_LM" or not config_class().is_encoder_decoder]
    mappings = [
        getattr(modeling_auto, name) for name in ("MODEL_MAPPING", *(f"MODEL_FOR_{head}_MAPPING" for head in heads))
    ]
    found = [mapping[config_class] for mapping in mappings if config_class in mapping]
    return tuple(dict.fromkeys(cls for each in found for cls in (each if isinstance(each, tuple) else (each,))))


def _set_up(self: Any, model_type: str) -> None:
    self.model_tester = Tester(model_type, self.all_model_classes[0])


def _test_case(model_type: str) -> type[unittest.TestCase]:
    body = {"all_model_classes": classes_of(model_type), "__module__": __name__}
    body["setUp"] = functools.partialmethod(_set_up, model_type)
    body["has_attentions"] = model_type not in ("convnext", "mamba")
    body["is_encoder_decoder"] = CONFIG_MAPPING[model_type]().is_encoder_decoder
    return type(f"Test_{model_type.replace('-', '_')}", (ModelTesterMixin, unittest.TestCase), body)


globals().update({cls.__name__: cls for cls in map(_test_case, FAMILIES)})
