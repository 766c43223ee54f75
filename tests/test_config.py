"""``MemSaveConfig``: frozen, strict, and the same after a trip through JSON or YAML."""

import copy
import dataclasses
import errno
import inspect
import os
import pickle
from pathlib import Path

import pytest
import transformers
from peft import get_peft_model
from torch import nn

import hf_memsave
from hf_memsave import WTACRS, ConfigError, MemSaveConfig, MemSaveError, patch
from hf_memsave.config.config import RUNGS, presets
from hf_memsave.patching.swap import patched_models

#: Another value than the default, for every field.
OTHER = {
    "checkpoint": "up", "tiles": 4096, "offload": True, "budget": "24GiB", "storage": "int8",
    "linear": WTACRS(budget=0.5, targets=("query",)), "activation": "stock", "few_bits": 2, "norm": "stock",
    "dropout": "mask", "attention": "stock", "lora": "stock", "frozen": False, "loss": "stock", "backend": "auto",
    "compile": True, "layers": {"norm": 12, "activation": 0},
}  # fmt: skip
#: Those that may be given together.
TOGETHER = {name: value for name, value in OTHER.items() if name not in ("budget", "compile", "tiles")}
SAMPLED = {
    "budget": 0.5, "estimator": "wta", "targets": ["query"], "cache": "position", "samples": None, "minimum": 10,
    "seed": 0, "attention": False,
}  # fmt: skip
FIELDS = [field.name for field in dataclasses.fields(MemSaveConfig)]


def test_every_field_is_frozen_strict_and_tells_configs_apart():
    config = MemSaveConfig()
    assert list(OTHER) == FIELDS
    for name, value in config.to_dict().items():
        assert OTHER[name] != value and MemSaveConfig(**{name: OTHER[name]}) != config
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, OTHER[name])
    defaults = {"budget": None, "compile": False, "tiles": None}
    assert MemSaveConfig(**TOGETHER).to_dict() == TOGETHER | defaults | {"linear": SAMPLED}
    for args, fields, message in (
        (["gate"], {}, r"got 'gate'.*checkpoint=\.\.\.\); a preset.* memsave= itself"),
        ([], {"activations": "stock"}, "activations"),
    ):
        with pytest.raises(TypeError, match=message):
            MemSaveConfig(*args, **fields)
    assert list(inspect.signature(MemSaveConfig).parameters) == FIELDS  # what an editor completes


CHOICE = "must be one of .*'(stock|torch)'.*, got .*the default, '{}'"
#: Fields, wrong values of them, and what is said of each.
WRONG = {
    name: (["wrong", "Stock", "", None, True, 1, ["stock"]], CHOICE.format(getattr(MemSaveConfig(), name)))
    for name in ("activation", "norm", "dropout", "attention", "lora", "loss", "backend")
} | {
    "linear": (["wta", 0.3, True, {"budget": 0.3}], r"must be None or a WTACRS, got .*Use WTACRS\(budget"),
    "few_bits": ([0, 9, 2.5, "4", True, None], "must be a whole number from 1 to 8, got .*default, 4"),
    "frozen": (["True", 1, None], "must be True or False, got .*default, True"),
    **dict.fromkeys(["compile", "offload"], (["True", 1, None], "must be True or False, got .*default, False")),
    "storage": (["int2", "INT8", 8, True, ""], "must be one of None, 'int8', 'int4', got .*Leave it out"),
    "checkpoint": (["Up", True, ""], "must be one of None, 'o_proj', 'qkv', 'up', 'gate', 'block', 'tiles', got"),
    "tiles": ([0, -1, 1.5, True, "Auto", ""], "must be None, 'auto' or a whole number .*, got .*Use 'auto', or leave"),
    "budget": (["24", "much", 0, -1, 1.5, True], ": .*expected bytes, or a text such as '16GiB'"),
    "layers": (["norm", 6, ["norm", 6], (("norm",),)], "must be a mapping or None, got .*Use layers={'norm': 6}, or"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_value_is_refused_with_those_that_are_right(name):
    values, message = WRONG[name]
    for value in values:
        with pytest.raises(ConfigError, match=f"MemSaveConfig.{name}.*{message}") as found:
            MemSaveConfig(**{name: value})
        assert repr(value) in str(found.value)
    assert issubclass(ConfigError, MemSaveError) and issubclass(ConfigError, ValueError)


def test_tiles_and_their_rung_go_together():
    assert MemSaveConfig(tiles=64).checkpoint == MemSaveConfig.preset("tiles").checkpoint == "tiles"
    assert MemSaveConfig(checkpoint="tiles").tiles == "auto" and MemSaveConfig(tiles="auto", offload=True).is_exact
    assert MemSaveConfig.from_dict(MemSaveConfig(tiles=64).to_dict()) == MemSaveConfig(tiles=64)
    for fields in ({"storage": "int8"}, {"linear": WTACRS(budget=0.5)}, {"compile": True}, {"checkpoint": "block"}):
        with pytest.raises(ConfigError, match=f"tiles.*got {next(iter(fields))}=.*[Ll]eave"):
            MemSaveConfig(tiles=64, **fields)


def test_storage_does_not_round_away_the_precision_bit():
    with pytest.raises(ConfigError, match="activation='precision_bit', which keeps a bit there. Use activation='inv"):
        MemSaveConfig(storage="int8", activation="precision_bit")


#: Layers, and what is said of them.
WRONG_LAYERS = [
    ({"norms": 6}, "expected kinds 'activation', 'norm', .*'lora', 'checkpoint', got 'norms'"),
    ({"linear": 6}, "expected kinds .*, got 'linear'"),
    ({1: 6}, "expected kinds .*, got 1"),
    *(({"norm": n}, rf"\['norm'\] must be a whole .*, 0 or more, got {n!r}") for n in (-1, 0.5, 2.0, "2", True, None)),
]


def test_layers_are_numbers_of_blocks_by_kind_and_a_part_of_them_for_a_checkpoint():
    remedy = "Use layers={'norm': 6}, or leave it out"
    for value, message in WRONG_LAYERS:
        with pytest.raises(ConfigError, match=f"MemSaveConfig.layers.*{message}.*{remedy}"):
            MemSaveConfig(layers=value)
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


#: Field of WTACRS -> wrong values, and what is expected.
WRONG_SAMPLING = {
    "budget": ([0, 1.5, float("nan"), "0.3", True], r"a number in \(0, 1\]"),
    "estimator": (["WTA"], "'wta', 'crs' or 'topk'"), "targets": (["query", (), ("",)], "names of linears, or None"),
    "cache": (["sample"], "'position', 'sample_idx', 'content' or None"),
    "samples": ([10], "None, or with cache='content' a number"), "minimum": ([0, 2.5], "at least 1"),
    "seed": ([-1], "at least 0"), "attention": ([1], "True or False"),
}  # fmt: skip


def test_a_wrong_value_of_wtacrs_is_refused_with_the_remedy():
    for name, (values, expected) in WRONG_SAMPLING.items():
        for value in values:
            with pytest.raises(ConfigError, match=rf"WTACRS.{name}: expected .*{expected}.* Use ") as found:
                WTACRS(**{name: value})
            assert f"got {value!r}" in str(found.value)
    for samples in (None, 0, "10"):
        with pytest.raises(ConfigError, match=r"WTACRS.samples: expected the number of training .*len\(train_data"):
            WTACRS(cache="sample_idx", samples=samples)


def test_from_dict_takes_fields_of_its_own_and_of_linear_and_refuses_others():
    assert MemSaveConfig.from_dict({"norm": "stock"}) == MemSaveConfig(norm="stock")
    assert MemSaveConfig.from_dict({"linear": SAMPLED}) == MemSaveConfig(linear=OTHER["linear"])
    expected = "expected 'checkpoint', 'tiles', 'offload', 'budget', .*'norm',"
    with pytest.raises(ConfigError, match=rf"no field 1, 'norms': {expected} .*Did you mean 'norm'\?"):
        MemSaveConfig.from_dict({"norms": "stock", 1: 2, "norm": "stock"})
    for misspelt in (lambda: MemSaveConfig.from_dict({"linear": {"budgets": 0.3}}), lambda: WTACRS(budgets=0.3)):
        with pytest.raises(ConfigError, match=r"WTACRS has no field 'budgets': expected 'budget', .*mean 'budget'\?"):
            misspelt()
    for fields in (["norm"], "norm", 3):
        with pytest.raises(ConfigError, match=f"expected a mapping .* got {type(fields).__name__}"):
            MemSaveConfig.from_dict(fields)


def test_a_misspelt_field_is_told_alike_by_every_door():
    config = MemSaveConfig()
    for misspelt in (
        lambda: MemSaveConfig(chekpoint="gate"), lambda: MemSaveConfig.from_dict({"chekpoint": "gate"}),
        lambda: patch(nn.GELU(), chekpoint="gate"), lambda: dataclasses.replace(config, chekpoint="gate"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"no field 'chekpoint': expected 'checkpoint', .*mean .checkpoint.") as e:
            misspelt()
        assert isinstance(e.value, TypeError)  # as for every function of Python
    with pytest.raises(ConfigError, match="no field 'may_plan'.* Check the spelling"):
        patch(nn.GELU(), may_plan=True)


def test_repr_shows_what_differs_from_the_default_and_gives_the_config_back():
    assert repr(MemSaveConfig(checkpoint="gate")) == "MemSaveConfig(checkpoint='gate')"
    assert repr(MemSaveConfig(linear=WTACRS(minimum=2))) == "MemSaveConfig(linear=WTACRS(minimum=2))"
    for config in (MemSaveConfig(), MemSaveConfig(**TOGETHER), *map(MemSaveConfig.preset, presets())):
        assert eval(repr(config)) == config


BERT = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)


def test_fields_are_set_in_a_config_by_keyword():
    def found(*args, **fields):
        return patch(transformers.BertForSequenceClassification(BERT), *args, **fields).config

    assert found(checkpoint="gate") == found("gate") == MemSaveConfig(checkpoint="gate")
    assert found("gate", offload=True) == found(MemSaveConfig(offload=True), checkpoint="gate")
    fields = {"norm": "stock", "checkpoint": "up"}
    assert found("tempo", **fields) == MemSaveConfig(activation="invert", **fields)
    assert found("max", checkpoint="block") == MemSaveConfig.preset("max")
    for config in ("block", {"checkpoint": "block"}):
        with pytest.raises(ConfigError, match="checkpoint='gate': expected a preset or .*got 'block'. Leave out one"):
            found(config, checkpoint="gate")
    with pytest.raises(ConfigError, match="chooses checkpoint and offload, got checkpoint='gate'.* Leave out either"):
        found({"budget": "24GiB"}, checkpoint="gate")
    with pytest.raises(ConfigError, match="budget='24GiB': expected a batch size"):
        found(budget="24GiB")


def test_patch_says_what_to_type_instead_of_memsave():
    for given, typed in ((True, r"patch\(model\)"), ("gate", r"patch\(model, 'gate'\)")):
        with pytest.raises(ConfigError, match=rf"after the model, got memsave=\. Use {typed}\."):
            patch(nn.GELU(), memsave=given)


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
    **dict.fromkeys(["# nothing\n", "---\n"], "is empty"),
    "norm: [": "config.yaml is neither JSON nor YAML",
    **dict.fromkeys(["{", "norm: 'stock", "\tnorm: stock", "norm: \0"], "is neither JSON nor YAML"),
    "\udcff": "config.yaml",  # no text
    **dict.fromkeys(["- norm", "3"], "expected a mapping"),
    "norms: stock": "config.yaml: MemSaveConfig has no field 'norms': expected .*'norm'",
    "norm: yes": "got True",
}


@pytest.mark.parametrize("text", FILES, ids=repr)
def test_a_wrong_file_is_named_by_a_config_and_by_patch(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    for read in (MemSaveConfig.from_file, lambda path: patch(nn.GELU(), path)):
        with pytest.raises(ConfigError, match=FILES[text]):
            read(path)


def test_an_empty_mapping_is_the_default_and_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("{}")
    assert MemSaveConfig.from_file(tmp_path / "config.yaml") == MemSaveConfig()
    for name in ("missing.yaml", "."):
        with pytest.raises(ConfigError, match="cannot read .* Expected a JSON or YAML file"):
            MemSaveConfig.from_file(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot read missing.yaml in {tmp_path}: No such file .*plan --out"):
        MemSaveConfig.resolve("missing.yaml")


#: Preset -> whether it is exact.
PRESETS = {
    "exact": True, "few-bit": False, "invact": False, "lora-wta-crs": False, "max": True, "selective": True,
    "tempo": False, "wta-crs": False,
}  # fmt: skip


def test_presets_are_configs_and_know_whether_they_are_exact():
    assert {name: MemSaveConfig.preset(name).is_exact for name in presets()} == PRESETS
    assert not MemSaveConfig(storage="int8").is_exact
    assert MemSaveConfig(checkpoint="block", offload=True).is_exact
    assert MemSaveConfig.preset("exact") == MemSaveConfig()
    # So that a new default does not change what the preset means without a look at it.
    assert set(FIELDS) == {line.split(":")[0] for line in presets()["exact"].read_text().splitlines() if line[0] != "#"}
    for name in ("exactly", "", "../presets/exact", "exact.yaml"):
        with pytest.raises(ConfigError, match="unknown preset .*: expected one of 'exact', .*'block', 'tiles', or a"):
            MemSaveConfig.preset(name)
    with pytest.raises(ConfigError, match="Did you mean 'gate'?"):
        MemSaveConfig.preset("gat")


@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_is_a_preset_by_its_name(rung, tmp_path, monkeypatch):
    expected = MemSaveConfig(checkpoint=rung)
    monkeypatch.chdir(tmp_path)
    (tmp_path / rung).write_text("norm: stock")  # a file of that name comes after it
    assert MemSaveConfig.preset(rung) == MemSaveConfig.resolve(rung) == MemSaveConfig.named(rung) == expected


def test_resolve_takes_what_memsave_takes_a_preset_before_a_file_of_its_name(tmp_path, monkeypatch):
    config = MemSaveConfig(**TOGETHER)
    assert MemSaveConfig.resolve(config) is config
    assert MemSaveConfig.resolve(False) is None is MemSaveConfig.resolve(None)
    assert MemSaveConfig.resolve({"norm": "stock"}) == MemSaveConfig(norm="stock")
    assert all(MemSaveConfig.resolve(value) == MemSaveConfig() for value in (True, "exact", {}))
    for value in (1, 0, 1.5, ["exact"], MemSaveConfig):
        with pytest.raises(ConfigError, match=f"got {type(value).__name__}"):
            MemSaveConfig.resolve(value)
    monkeypatch.chdir(tmp_path)
    MemSaveConfig(norm="stock").to_file("exact")
    assert MemSaveConfig.resolve("exact") == MemSaveConfig()
    assert MemSaveConfig.resolve(Path("exact")) == MemSaveConfig(norm="stock")


@pytest.mark.parametrize("trip", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_is_equal(trip):
    config = MemSaveConfig(**TOGETHER)
    assert trip(config) == config
    assert hash(trip(config)) == hash(config)


def by_every_door(given, folder):
    """The configs that models are patched with by a ``memsave`` argument of every kind."""
    models, args = [transformers.BertForSequenceClassification(BERT) for _ in range(5)], transformers.TrainingArguments
    patch(models[0], given)
    models[1] = transformers.AutoModelForSequenceClassification.from_config(BERT, memsave=given)
    transformers.Trainer(models[2], args(folder), memsave=given)
    hf_memsave.MemSaveTrainer(models[3], args(folder), memsave=given)
    adapters = hf_memsave.MemSaveLoraConfig(memsave=given, target_modules=["query"])
    models.append(get_peft_model(transformers.BertForSequenceClassification(BERT), adapters))
    transformers.Trainer(models[4], args(folder), callbacks=[hf_memsave.MemSaveCallback(given)])
    return [patched_models(model)[0][1] for model in models]


def test_a_rung_and_a_plans_file_from_any_folder_are_taken_by_every_door(tmp_path, monkeypatch):
    (tmp_path / "plans").mkdir()
    path = tmp_path / "plans" / "plan.yaml"
    plan = MemSaveConfig(checkpoint="gate", layers={"checkpoint": 1})
    plan.to_file(path)
    monkeypatch.chdir(tmp_path)
    for given in (str(path), path, "plans/plan.yaml"):
        assert by_every_door(given, tmp_path) == [plan] * 6
    assert by_every_door("block", tmp_path) == [MemSaveConfig(checkpoint="block")] * 6
    monkeypatch.setenv("HOME", str(tmp_path / "plans"))
    assert MemSaveConfig.resolve("~/plan.yaml") == plan


def test_a_budget_chooses_what_it_is_given_with_and_needs_a_batch(tmp_path):
    for fields in ({"checkpoint": "up"}, {"offload": True}, {"layers": {"checkpoint": 2}}):
        with pytest.raises(ConfigError, match="chooses checkpoint and offload, got .* Leave out either"):
            MemSaveConfig(budget="24GiB", **fields)
    config = MemSaveConfig(budget="24GiB")
    config.to_file(tmp_path / "plan.yaml")
    for given in (config, {"budget": "24GiB"}, tmp_path / "plan.yaml"):
        with pytest.raises(ConfigError, match=r"expected a batch size .* Use hf_memsave.plan\(model, budget='24GiB'"):
            patch(nn.GELU(), given)
    assert MemSaveConfig.resolve(config, may_plan=True) == config


def test_a_file_keeps_its_permissions_and_its_link_and_none_is_left_beside_it(tmp_path):
    path, link = tmp_path / "plan.yaml", tmp_path / "link.yaml"
    path.write_text("an earlier one")
    path.chmod(0o640)
    link.symlink_to(path.name)
    MemSaveConfig(norm="stock").to_file(link)
    assert link.is_symlink() and MemSaveConfig.from_file(path).norm == "stock"
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [link, path]


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_file_that_cannot_be_written_is_what_it_was(step, tmp_path, monkeypatch):
    def fail(self, *args):
        if step == "write_bytes":
            self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "plan.yaml"
    path.write_text("an earlier one")
    monkeypatch.setattr(Path, step, fail)
    with pytest.raises(OSError, match="No space left on device") as error:
        MemSaveConfig().to_file(path)
    assert error.value.filename == str(path)
    assert path.read_text() == "an earlier one"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_to(tmp_path):
    reader, writer = os.pipe()
    MemSaveConfig().to_file(f"/dev/fd/{writer}")
    os.close(writer)
    with open(reader) as read:
        assert "norm: " in read.read()
