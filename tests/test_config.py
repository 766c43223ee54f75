"""``MemSaveConfig``: frozen, strict, and the same after a trip through JSON or YAML."""

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from hf_memsave import WTACRS, ConfigError, MemSaveConfig, MemSaveError, patch
from hf_memsave.config import presets

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
def test_a_field_cannot_be_assigned(name):
    config = MemSaveConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, OTHER[name])


def test_fields_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        MemSaveConfig("recompute")


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="activations"):
        MemSaveConfig(activations="stock")


#: Those with a list of values to choose from.
NO_NAMES = ("few_bits", "frozen", "linear", "storage", "checkpoint", "offload", "budget", "layers")
CHOICES = [name for name in FIELDS if name not in NO_NAMES]


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["Stock", "", None, True, 1, ["stock"]], ids=repr)
def test_a_wrong_value_is_refused_with_those_that_are_right(name, value):
    with pytest.raises(ConfigError, match=f"MemSaveConfig.{name} must be one of .*'(stock|torch)'.*, got ") as caught:
        MemSaveConfig(**{name: value})
    assert repr(value) in str(caught.value)
    assert f"the default, {getattr(MemSaveConfig(), name)!r}" in str(caught.value)


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_value_is_refused_by_replace(name):
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(MemSaveConfig(), **{name: "wrong"})


def test_a_config_error_is_a_value_error():
    assert issubclass(ConfigError, MemSaveError)
    assert issubclass(ConfigError, ValueError)


def test_to_dict_has_every_field():
    assert MemSaveConfig(**TOGETHER).to_dict() == {**TOGETHER, "budget": None, "linear": SAMPLED}


@pytest.mark.parametrize("value", ["wta", 0.3, True, {"budget": 0.3}], ids=repr)
def test_linear_takes_a_wtacrs_only(value):
    with pytest.raises(ConfigError, match=r"MemSaveConfig.linear must be None or a WTACRS, got .*Use WTACRS\(budget"):
        MemSaveConfig(linear=value)


@pytest.mark.parametrize("value", [0, 9, 2.5, "4", True, None], ids=repr)
def test_few_bits_are_one_to_eight(value):
    with pytest.raises(ConfigError, match=r"few_bits must be a whole number from 1 to 8, got .*default, 4"):
        MemSaveConfig(few_bits=value)


@pytest.mark.parametrize("value", ["True", 1, None], ids=repr)
def test_frozen_is_true_or_false(value):
    with pytest.raises(ConfigError, match="MemSaveConfig.frozen must be True or False, got .*default, True"):
        MemSaveConfig(frozen=value)


@pytest.mark.parametrize("value", ["int2", "INT8", 8, True, ""], ids=repr)
def test_storage_is_int8_or_int4(value):
    with pytest.raises(ConfigError, match="storage must be one of None, 'int8', 'int4', got .*Leave it out"):
        MemSaveConfig(storage=value)


def test_storage_does_not_round_away_the_precision_bit():
    with pytest.raises(ConfigError, match="activation='precision_bit', which keeps a bit there. Use activation='inv"):
        MemSaveConfig(storage="int8", activation="precision_bit")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("norm", "must be a mapping or None, got 'norm'"),
        (6, "must be a mapping or None, got 6"),
        (["norm"], r"must be a mapping or None, got \['norm'\]"),
        ((("norm",),), "must be a mapping or None"),
        (["norm", 6], r"must be a mapping or None, got \['norm', 6\]"),
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
    with pytest.raises(
        ConfigError, match=f"MemSaveConfig.layers.*{message}.*Use layers={{'norm': 6}}, or leave it out"
    ):
        MemSaveConfig(layers=value)


def test_layers_of_no_checkpoint_are_refused():
    with pytest.raises(ConfigError, match=r"layers\['checkpoint'\]: expected a checkpoint= .*Use checkpoint='gate'"):
        MemSaveConfig(layers={"checkpoint": 6})


def test_layers_have_one_form():
    one, other = MemSaveConfig(layers={"norm": 1, "activation": 2}), MemSaveConfig(layers={"activation": 2, "norm": 1})
    assert one == other and hash(one) == hash(other)
    assert dataclasses.replace(one, norm="output").layers == one.layers
    assert MemSaveConfig(layers={}) == MemSaveConfig()
    assert [one.first_blocks(kind) for kind in ("norm", "activation", "dropout", None)] == [1, 2, None, None]


def test_layers_are_a_mapping_in_a_file(tmp_path):
    MemSaveConfig(layers={"norm": 12}).to_file(tmp_path / "a.yaml")
    assert "layers:\n  norm: 12\n" in (tmp_path / "a.yaml").read_text()


def test_linear_is_read_from_a_mapping():
    assert MemSaveConfig.from_dict({"linear": SAMPLED}) == MemSaveConfig(linear=OTHER["linear"])


def test_an_unknown_key_of_linear_is_named():
    with pytest.raises(ConfigError, match="WTACRS has no field 'budgets': expected 'budget', 'estimator'"):
        MemSaveConfig.from_dict({"linear": {"budgets": 0.3}})


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


@pytest.mark.parametrize("samples", [None, 0, "10"])
def test_a_table_of_samples_needs_to_know_how_many(samples):
    with pytest.raises(ConfigError, match=r"WTACRS.samples: expected the number of training samples.*len\(train_data"):
        WTACRS(cache="sample_idx", samples=samples)


def test_from_dict_takes_the_default_for_what_is_left_out():
    assert MemSaveConfig.from_dict({"norm": "stock"}) == MemSaveConfig(norm="stock")


def test_from_dict_names_every_unknown_key_and_the_known_ones():
    with pytest.raises(ConfigError, match="no field 1, 'norms': expected 'activation', 'few_bits', 'norm'"):
        MemSaveConfig.from_dict({"norms": "stock", 1: 2, "norm": "stock"})


@pytest.mark.parametrize("fields", [["norm"], "norm", 3], ids=repr)
def test_from_dict_refuses_what_is_no_mapping(fields):
    with pytest.raises(ConfigError, match=f"expected a mapping .* got {type(fields).__name__}"):
        MemSaveConfig.from_dict(fields)


@pytest.mark.parametrize("name", ["config.json", "config.yaml", "config.yml", "config"])
@pytest.mark.parametrize("fields", [{}, TOGETHER], ids=["default", "other"])
def test_a_file_gives_back_what_was_written(tmp_path, name, fields):
    config = MemSaveConfig(**fields)
    config.to_file(tmp_path / name)
    assert MemSaveConfig.from_file(tmp_path / name) == config


@pytest.mark.parametrize("name", ["config.json", "config.yaml"])
def test_a_path_may_be_a_string(tmp_path, name):
    path = str(tmp_path / name)
    MemSaveConfig(**TOGETHER).to_file(path)
    assert MemSaveConfig.from_file(path) == MemSaveConfig(**TOGETHER)


def test_json_is_written_where_the_name_says_so(tmp_path):
    MemSaveConfig().to_file(tmp_path / "a.json")
    MemSaveConfig().to_file(tmp_path / "a.yaml")
    assert (tmp_path / "a.json").read_text().startswith("{\n")
    assert (tmp_path / "a.yaml").read_text().startswith("activation: recompute\n")


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"], ids=repr)
def test_an_empty_file_is_refused_with_a_remedy(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config.yaml is empty: expected fields .* Use memsave=True"):
        MemSaveConfig.from_file(path)


def test_an_empty_mapping_is_the_default(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    assert MemSaveConfig.from_file(path) == MemSaveConfig()


@pytest.mark.parametrize("text", ["norm: [", "{", "norm: 'stock", "\tnorm: stock", "norm: \0"], ids=repr)
def test_a_malformed_file_is_named(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="config.yaml is neither JSON nor YAML"):
        MemSaveConfig.from_file(path)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\x80\x02\xff")
    with pytest.raises(ConfigError, match="config.yaml"):
        MemSaveConfig.from_file(path)


@pytest.mark.parametrize("text", ["- norm", "norm", "3"], ids=repr)
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="expected a mapping"):
        MemSaveConfig.from_file(path)


@pytest.mark.parametrize(
    ("text", "message"), [("norms: stock", "no field 'norms'"), ("norm: yes", "got True")], ids=repr
)
def test_a_file_with_a_wrong_field_or_value_is_refused(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        MemSaveConfig.from_file(path)


@pytest.mark.parametrize("name", ["missing.yaml", "."], ids=["missing", "folder"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot read .* Expected a JSON or YAML file"):
        MemSaveConfig.from_file(tmp_path / name)


def test_presets_are_listed():
    assert "exact" in presets()


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_config(name):
    assert isinstance(MemSaveConfig.preset(name), MemSaveConfig)


def test_the_exact_preset_is_the_default():
    assert MemSaveConfig.preset("exact") == MemSaveConfig()


def test_the_exact_preset_says_every_field():
    # So that a new default does not change what the preset means without a look at it.
    assert set(FIELDS) == {line.split(":")[0] for line in presets()["exact"].read_text().splitlines() if line[0] != "#"}


@pytest.mark.parametrize("name", ["exactly", "", "../presets/exact", "exact.yaml"])
def test_an_unknown_preset_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match="unknown preset .*: expected one of .*'exact'"):
        MemSaveConfig.preset(name)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, MemSaveConfig()),
        (False, None),
        (None, None),
        ("exact", MemSaveConfig()),
        ({"norm": "stock"}, MemSaveConfig(norm="stock")),
        ({}, MemSaveConfig()),
        (MemSaveConfig(**TOGETHER), MemSaveConfig(**TOGETHER)),
    ],
    ids=repr,
)
def test_resolve(value, expected):
    assert MemSaveConfig.resolve(value) == expected


def test_resolve_gives_back_a_config_itself():
    config = MemSaveConfig(**TOGETHER)
    assert MemSaveConfig.resolve(config) is config


@pytest.mark.parametrize("value", [1, 0, 1.5, ["exact"], MemSaveConfig], ids=repr)
def test_resolve_refuses_anything_else(value):
    with pytest.raises(ConfigError, match=f"got {type(value).__name__}"):
        MemSaveConfig.resolve(value)


@pytest.mark.parametrize("trip", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_is_equal(trip):
    config = MemSaveConfig(**TOGETHER)
    assert trip(config) == config
    assert hash(trip(config)) == hash(config)


@pytest.mark.parametrize("name", FIELDS)
def test_configs_that_differ_are_not_equal(name):
    assert MemSaveConfig(**{name: OTHER[name]}) != MemSaveConfig()


@pytest.mark.parametrize(
    ("name", "is_exact"),
    [("exact", True), ("selective", True), ("tempo", False), ("invact", False), ("few-bit", False), ("wta-crs", False),
     ("lora-wta-crs", False)],
)  # fmt: skip
def test_a_preset_knows_whether_it_is_exact(name, is_exact):
    assert MemSaveConfig.preset(name).is_exact == is_exact
    assert not MemSaveConfig(storage="int8").is_exact
    assert MemSaveConfig(checkpoint="block", offload=True).is_exact


# Wherever a preset is, a file is accepted


@pytest.mark.parametrize("name", ["plan.yaml", "plan.yml", "plan.json", "plan"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_accepted_wherever_a_preset_is(tmp_path, name, kind):
    MemSaveConfig(**TOGETHER).to_file(tmp_path / name)
    assert MemSaveConfig.resolve(kind(tmp_path / name)) == MemSaveConfig(**TOGETHER)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("norms: stock", "plan.yaml: MemSaveConfig has no field 'norms': expected .*'norm'")],
)
def test_a_model_refuses_a_wrong_file(tmp_path, text, message):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        patch(nn.GELU(), tmp_path / "plan.yaml")


# A budget


@pytest.mark.parametrize("budget", ["24", "much", 0, -1, 1.5, True], ids=repr)
def test_a_budget_is_bytes_or_a_size_with_a_unit(budget):
    with pytest.raises(ConfigError, match=r"MemSaveConfig.budget: .*expected bytes, or a text such as '16GiB'"):
        MemSaveConfig(budget=budget)


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
