"""``MemSaveConfig``: frozen, strict, and the same after a trip through JSON or YAML."""

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from hf_memsave import WTACRS, ConfigError, MemSaveConfig, MemSaveError, patch
from hf_memsave.config.config import presets

#: Another value than the default, for every field.
OTHER = {
    "activation": "stock", "few_bits": 2, "norm": "stock", "dropout": "mask", "attention": "stock", "lora": "stock",
    "frozen": False, "loss": "stock", "backend": "auto", "linear": WTACRS(budget=0.5, targets=("query",)),
    "storage": "int8", "checkpoint": "up", "offload": True, "budget": "24GiB",
    "layers": {"norm": 12, "activation": 0},
}  # fmt: skip
#: Those that may be given together.
TOGETHER = {name: value for name, value in OTHER.items() if name != "budget"}
SAMPLED = {
    "budget": 0.5, "estimator": "wta", "targets": ["query"], "cache": "position", "samples": None, "minimum": 10,
    "seed": 0, "attention": False,
}  # fmt: skip
FIELDS = [field.name for field in dataclasses.fields(MemSaveConfig)]


def test_every_field_is_tested():
    assert list(OTHER) == FIELDS
    assert all(OTHER[name] != value for name, value in MemSaveConfig().to_dict().items())


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_frozen_strict_and_tells_configs_apart(name):
    config = MemSaveConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, OTHER[name])
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(config, **{name: "wrong"})
    assert MemSaveConfig(**{name: OTHER[name]}) != config


def test_fields_are_given_by_their_names():
    with pytest.raises(TypeError, match="positional"):
        MemSaveConfig("recompute")
    with pytest.raises(TypeError, match="activations"):
        MemSaveConfig(activations="stock")


CHOICES = [name for name, value in OTHER.items() if isinstance(value, str) and name not in ("storage", "budget")]


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "checkpoint"])
def test_a_wrong_value_is_refused_with_those_that_are_right(name):
    for value in ("Stock", "", None, True, 1, ["stock"]):
        message = f"MemSaveConfig.{name} must be one of .*'(stock|torch)'.*, got "
        with pytest.raises(ConfigError, match=message) as found:
            MemSaveConfig(**{name: value})
        assert repr(value) in str(found.value)
        assert f"the default, {getattr(MemSaveConfig(), name)!r}" in str(found.value)


#: Field -> wrong values, and what is said of each.
WRONG = {
    "linear": (["wta", 0.3, True, {"budget": 0.3}], r"must be None or a WTACRS, got .*Use WTACRS\(budget"),
    "few_bits": ([0, 9, 2.5, "4", True, None], "must be a whole number from 1 to 8, got .*default, 4"),
    "frozen": (["True", 1, None], "must be True or False, got .*default, True"),
    "offload": (["True", 1, None], "must be True or False, got .*default, False"),
    "storage": (["int2", "INT8", 8, True, ""], "must be one of None, 'int8', 'int4', got .*Leave it out"),
    "checkpoint": (["Up", True, ""], "must be one of None, 'o_proj', 'qkv', 'up', 'gate', 'block', got .*Leave it out"),
    "budget": (["24", "much", 0, -1, 1.5, True], ": .*expected bytes, or a text such as '16GiB'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_wrong_values_are_refused(name):
    values, message = WRONG[name]
    for value in values:
        with pytest.raises(ConfigError, match=f"MemSaveConfig.{name}.*{message}"):
            MemSaveConfig(**{name: value})


def test_a_config_error_is_a_value_error():
    assert issubclass(ConfigError, MemSaveError)
    assert issubclass(ConfigError, ValueError)


def test_to_dict_has_every_field():
    assert MemSaveConfig(**TOGETHER).to_dict() == {**TOGETHER, "budget": None, "linear": SAMPLED}


def test_storage_does_not_round_away_the_precision_bit():
    with pytest.raises(ConfigError, match="activation='precision_bit', which keeps a bit there. Use activation='inv"):
        MemSaveConfig(storage="int8", activation="precision_bit")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("norm", "must be a mapping or None, got 'norm'"),
        (6, "must be a mapping or None, got 6"),
        (["norm", 6], r"must be a mapping or None, got \['norm', 6\]"),
        ((("norm",),), "must be a mapping or None"),
        ({"norms": 6}, "expected kinds 'activation', 'norm', .*'lora', 'checkpoint', got 'norms'"),
        ({"linear": 6}, "expected kinds .*, got 'linear'"),
        ({1: 6}, "expected kinds .*, got 1"),
        ({"norm": -1}, r"\['norm'\] must be a whole number of blocks, 0 or more, got -1"),
        ({"norm": 2.0}, "got 2.0"),
        ({"norm": "2"}, "got '2'"),
        ({"norm": True}, "got True"),
        ({"norm": None}, "got None"),
    ],
    ids=repr,
)
def test_layers_are_numbers_of_blocks_by_kind(value, message):
    remedy = "Use layers={'norm': 6}, or leave it out"
    with pytest.raises(ConfigError, match=f"MemSaveConfig.layers.*{message}.*{remedy}"):
        MemSaveConfig(layers=value)


def test_layers_limit_a_checkpoint_by_blocks_or_by_a_part_of_them():
    assert MemSaveConfig(checkpoint="up", layers={"checkpoint": 0.5}).converts("checkpoint", 2, 5)
    assert not MemSaveConfig(checkpoint="up", layers={"checkpoint": 0.5}).converts("checkpoint", 3, 5)
    with pytest.raises(ConfigError, match=r"must be .* a part of them from 0.0 to 1.0, got 1.5. Use 0.5 for the first"):
        MemSaveConfig(checkpoint="up", layers={"checkpoint": 1.5})
    with pytest.raises(ConfigError, match=r"layers\['checkpoint'\]: expected a checkpoint= .*Use checkpoint='gate'"):
        MemSaveConfig(layers={"checkpoint": 6})


def test_layers_have_one_form(tmp_path):
    one, other = MemSaveConfig(layers={"norm": 1, "activation": 2}), MemSaveConfig(layers={"activation": 2, "norm": 1})
    assert one == other and hash(one) == hash(other)
    assert dataclasses.replace(one, norm="output").layers == one.layers
    assert MemSaveConfig(layers={}) == MemSaveConfig()
    assert [one.first_blocks(kind) for kind in ("norm", "activation", "dropout", None)] == [1, 2, None, None]
    MemSaveConfig(layers={"norm": 12}).to_file(tmp_path / "a.yaml")
    assert "layers:\n  norm: 12\n" in (tmp_path / "a.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("budget", 0, r"a number in \(0, 1\], got 0"),
        ("budget", 1.5, "got 1.5"),
        ("budget", float("nan"), "got nan"),
        ("budget", "0.3", "got '0.3'"),
        ("budget", True, "got True"),
        ("estimator", "WTA", "'wta', 'crs' or 'topk', got 'WTA'"),
        ("targets", "query", "names of linears, or None"),
        ("targets", (), "names of linears"),
        ("targets", ("",), "names of linears"),
        ("cache", "sample", "'position', 'sample_idx', 'content' or None, got 'sample'"),
        ("samples", 10, "None, or with cache='content' a number"),
        ("minimum", 0, "at least 1, got 0"),
        ("minimum", 2.5, "at least 1, got 2.5"),
        ("seed", -1, "at least 0, got -1"),
        ("attention", 1, "True or False, got 1"),
    ],
)
def test_a_wrong_value_of_wtacrs_is_refused_with_the_remedy(name, value, expected):
    with pytest.raises(ConfigError, match=rf"WTACRS.{name}: expected .*{expected}.* Use "):
        WTACRS(**{name: value})


def test_a_table_of_samples_needs_to_know_how_many():
    for samples in (None, 0, "10"):
        with pytest.raises(ConfigError, match=r"WTACRS.samples: expected the number of training .*len\(train_data"):
            WTACRS(cache="sample_idx", samples=samples)


def test_from_dict_takes_fields_of_its_own_and_of_linear_and_refuses_others():
    assert MemSaveConfig.from_dict({"norm": "stock"}) == MemSaveConfig(norm="stock")
    assert MemSaveConfig.from_dict({"linear": SAMPLED}) == MemSaveConfig(linear=OTHER["linear"])
    with pytest.raises(ConfigError, match="no field 1, 'norms': expected 'activation', 'few_bits', 'norm'"):
        MemSaveConfig.from_dict({"norms": "stock", 1: 2, "norm": "stock"})
    with pytest.raises(ConfigError, match="WTACRS has no field 'budgets': expected 'budget', 'estimator'"):
        MemSaveConfig.from_dict({"linear": {"budgets": 0.3}})
    for fields in (["norm"], "norm", 3):
        with pytest.raises(ConfigError, match=f"expected a mapping .* got {type(fields).__name__}"):
            MemSaveConfig.from_dict(fields)


@pytest.mark.parametrize("name", ["config.json", "config.yaml", "config.yml", "config"])
def test_a_file_gives_back_what_was_written_and_is_taken_where_a_preset_is(tmp_path, name):
    for config in (MemSaveConfig(), MemSaveConfig(**TOGETHER)):
        for kind in (str, Path):
            config.to_file(kind(tmp_path / name))
            assert MemSaveConfig.from_file(kind(tmp_path / name)) == config
            assert MemSaveConfig.resolve(kind(tmp_path / name)) == config
    start = "{\n" if name.endswith("json") else "activation: stock\n"  # JSON where the name says so
    assert (tmp_path / name).read_text().startswith(start)


#: What a file holds, and what is said of it.
FILES = {
    "": "config.yaml is empty: expected fields .* Use memsave=True",
    "# nothing\n": "is empty",
    "---\n": "is empty",
    "norm: [": "config.yaml is neither JSON nor YAML",
    "{": "is neither JSON nor YAML",
    "norm: 'stock": "is neither JSON nor YAML",
    "\tnorm: stock": "is neither JSON nor YAML",
    "norm: \0": "is neither JSON nor YAML",
    "\udcff": "config.yaml",  # no text
    "- norm": "expected a mapping",
    "3": "expected a mapping",
    "norms: stock": "config.yaml: MemSaveConfig has no field 'norms': expected .*'norm'",
    "norm: yes": "got True",
}


@pytest.mark.parametrize("text", FILES, ids=repr)
def test_a_wrong_file_is_named_by_a_config_and_by_patch(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=FILES[text]):
        MemSaveConfig.from_file(path)
    with pytest.raises(ConfigError, match=FILES[text]):
        patch(nn.GELU(), path)


def test_an_empty_mapping_is_the_default(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    assert MemSaveConfig.from_file(tmp_path / "config.yaml") == MemSaveConfig()


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for name in ("missing.yaml", "."):
        with pytest.raises(ConfigError, match="cannot read .* Expected a JSON or YAML file"):
            MemSaveConfig.from_file(tmp_path / name)


#: Preset -> whether it is exact.
PRESETS = {
    "exact": True, "few-bit": False, "invact": False, "lora-wta-crs": False, "max": True, "selective": True,
    "tempo": False, "wta-crs": False,
}  # fmt: skip


def test_presets_are_configs_and_know_whether_they_are_exact():
    assert {name: MemSaveConfig.preset(name).is_exact for name in presets()} == PRESETS
    assert not MemSaveConfig(storage="int8").is_exact
    assert MemSaveConfig(checkpoint="block", offload=True).is_exact


def test_the_exact_preset_is_the_default_and_says_every_field():
    assert MemSaveConfig.preset("exact") == MemSaveConfig()
    # So that a new default does not change what the preset means without a look at it.
    assert set(FIELDS) == {line.split(":")[0] for line in presets()["exact"].read_text().splitlines() if line[0] != "#"}


def test_an_unknown_preset_is_refused_with_those_there_are():
    for name in ("exactly", "", "../presets/exact", "exact.yaml"):
        with pytest.raises(ConfigError, match="unknown preset .*: expected one of .*'exact'"):
            MemSaveConfig.preset(name)


def test_resolve():
    config = MemSaveConfig(**TOGETHER)
    assert MemSaveConfig.resolve(config) is config
    assert MemSaveConfig.resolve(False) is None is MemSaveConfig.resolve(None)
    assert MemSaveConfig.resolve({"norm": "stock"}) == MemSaveConfig(norm="stock")
    assert all(MemSaveConfig.resolve(value) == MemSaveConfig() for value in (True, "exact", {}))
    for value in (1, 0, 1.5, ["exact"], MemSaveConfig):
        with pytest.raises(ConfigError, match=f"got {type(value).__name__}"):
            MemSaveConfig.resolve(value)


@pytest.mark.parametrize("trip", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_is_equal(trip):
    config = MemSaveConfig(**TOGETHER)
    assert trip(config) == config
    assert hash(trip(config)) == hash(config)


def test_a_preset_goes_before_a_file_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    MemSaveConfig(norm="stock").to_file("exact")
    assert MemSaveConfig.resolve("exact") == MemSaveConfig()
    assert MemSaveConfig.resolve(Path("exact")) == MemSaveConfig(norm="stock")


def test_a_model_is_patched_by_a_file(tmp_path):
    path = tmp_path / "plan.yaml"
    MemSaveConfig(checkpoint="gate", layers={"checkpoint": 1}).to_file(path)
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    for given in (str(path), path):
        report = patch(BertForSequenceClassification(config), given)
        assert report.config == MemSaveConfig(checkpoint="gate", layers={"checkpoint": 1})
        model = AutoModelForSequenceClassification.from_config(config, memsave=given)
        assert patch(model, given).config == report.config


# A budget


@pytest.mark.parametrize("fields", [{"checkpoint": "up"}, {"offload": True}, {"layers": {"checkpoint": 2}}], ids=repr)
def test_a_budget_chooses_what_it_is_given_with(fields):
    with pytest.raises(ConfigError, match="chooses checkpoint and offload, got .* Leave out either"):
        MemSaveConfig(budget="24GiB", **fields)


def test_a_budget_without_a_batch_is_refused_and_names_the_planner(tmp_path):
    config = MemSaveConfig(budget="24GiB")
    config.to_file(tmp_path / "plan.yaml")
    for given in (config, {"budget": "24GiB"}, tmp_path / "plan.yaml"):
        with pytest.raises(ConfigError, match=r"expected a batch size .* Use hf_memsave.plan\(model, budget='24GiB'"):
            patch(nn.GELU(), given)
    assert MemSaveConfig.resolve(config, may_plan=True) == config
