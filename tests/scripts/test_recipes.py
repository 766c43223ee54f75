"""``--recipe``: what the tables say, and every one runs; and what else ``--memsave`` may be."""

import json
from dataclasses import replace
from math import ceil

import pytest
import torch
import yaml
from transformers import get_scheduler

from hf_memsave import WTACRS, MemSaveConfig
from hf_memsave.ops.sampled.wta_crs import LAYER
from support import script_helpers as scripts

pytestmark = pytest.mark.long


@pytest.fixture
def script(monkeypatch):
    return scripts.load_script("run_glue", monkeypatch)


@pytest.fixture
def table(monkeypatch):
    return scripts.load_script("glue_recipes", monkeypatch)


def test_there_is_a_recipe_for_every_row_of_the_tables(table, capsys):
    names = table.names()
    # fourteen rows of Tables 9 and 10, and OPT's of Table 4
    assert len(set(names)) == len(names) == 14 * 8 + 4
    opt = [f"opt-350m/{task}/lora-wta-crs" for task in ("cola", "mrpc", "rte", "stsb")]
    assert [name for name in names if name.startswith("opt")] == opt
    assert table.main([]) == 0 and capsys.readouterr().out.split() == names
    assert table.main([names[0]]) == 0 and yaml.safe_load(capsys.readouterr().out)["task_name"] == "cola"
    assert table.main(["bert-base/cola"]) == 2 and "expected model/task/method" in capsys.readouterr().err


# Recipe -> rate, epochs and batch, off the paper: a corner, or a cell that differs from its neighbours, of each row.
CELLS = {
    "bert-base/cola/wta-crs": (2e-5, 20, 128), "bert-base/sst2/lora-wta-crs": (5e-4, 20, 128),
    "bert-base/stsb/lora-wta-crs": (3e-4, 40, 16), "t5-base/qnli/wta-crs": (3e-6, 10, 100),
    "t5-base/qnli/wta-crs-0.1": (3e-5, 10, 100), "t5-base/mnli/lora-wta-crs": (3e-5, 20, 100),
    "t5-base/rte/lora-wta-crs-0.1": (3e-4, 50, 100), "bert-large/cola/wta-crs": (2e-5, 60, 128),
    "bert-large/sst2/lora-wta-crs": (2e-4, 20, 128), "bert-large/rte/lora-wta-crs": (3e-4, 40, 128),
    "t5-large/cola/wta-crs": (3e-5, 20, 100), "t5-large/qnli/wta-crs-0.1": (3e-6, 10, 100),
    "t5-large/mrpc/lora-wta-crs": (3e-4, 40, 100), "t5-large/mrpc/lora-wta-crs-0.1": (3e-4, 20, 100),
    "t5-3b/mnli/lora-wta-crs": (3e-4, 10, 100), "t5-3b/qnli/lora-wta-crs-0.1": (3e-5, 10, 100),
    "opt-350m/rte/lora-wta-crs": (3e-4, 60, 100),
}  # fmt: skip


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_the_tables(name, table):
    recipe = yaml.safe_load(table.recipe(name))
    found = (recipe["learning_rate"], recipe["num_train_epochs"], recipe["per_device_train_batch_size"])
    assert found == CELLS[name]


QKV = {"bert": ["query", "key", "value"], "t5": ["q", "k", "v"], "opt": ["q_proj", "k_proj", "v_proj"]}


@pytest.mark.parametrize("family", QKV)
def test_every_recipe_is_a_run_of_its_name(script, table, family):
    for name in (name for name in table.names() if name.startswith(family)):
        model, data, training = script.parse(["--recipe", name])
        assert training.output_dir == f"runs/glue/{name.replace('/', '-')}"
        size, task, method = name.removeprefix(f"{family}-").split("/")
        assert model.model_name_or_path.rpartition("/")[2].startswith(f"{family}-{size}")
        assert (data.task_name, data.max_seq_length, data.pad_to_max_length) == (task, 128, True)
        budget = 0.1 if method.endswith("0.1") else 0.3
        if method.startswith("lora"):
            assert model.memsave_config() == MemSaveConfig(linear=WTACRS(budget=budget, targets=("lora_A",)))
            assert (model.lora_r, model.lora_alpha, model.lora_dropout) == (32, 32, 0.1)
        else:
            assert model.memsave_config() == MemSaveConfig(linear=WTACRS(budget=budget))
        assert model.lora_target_modules == (QKV[family] if method.startswith("lora") else None)
        adam = (training.adam_beta1, training.adam_beta2, training.adam_epsilon, training.weight_decay)
        assert (training.optim, *adam) == ("adamw_torch", 0.9, 0.999, 1e-8, 0.0)


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps are specified")
@pytest.mark.parametrize("name", ["bert-base/mrpc/lora-wta-crs", "t5-base/rte/wta-crs", "bert-base/rte/wta-crs"])
def test_the_rate_is_constant_for_500_steps_then_falls_on_a_line_to_zero(script, table, name):
    _, data, training = script.parse(["--recipe", name])
    batches = ceil(table.TASKS[data.task_name] / training.per_device_train_batch_size)
    steps = batches * int(training.num_train_epochs)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    options = {"num_warmup_steps": training.get_warmup_steps(steps), "num_training_steps": steps}
    scheduler = get_scheduler(
        training.lr_scheduler_type, optimizer, **options, scheduler_specific_kwargs=training.lr_scheduler_kwargs
    )
    rates = []
    for _ in range(steps + 1):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([min(1, (steps - i) / (steps - 500)) if i > 500 else 1 for i in range(steps + 1)])
    assert rates[-1] == (0 if steps > 500 else 1)


# One of each family and method, and another task.
RUNS = {
    "bert-large/mrpc/wta-crs": ("bert", 6), "bert-base/mrpc/lora-wta-crs": ("bert", 3),
    "t5-large/stsb/wta-crs-0.1": ("t5", 16), "t5-3b/rte/lora-wta-crs-0.1": ("t5", 9),
    "opt-350m/cola/lora-wta-crs": ("opt", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_trains_a_tiny_model(tmp_path, script, table, monkeypatch, name):
    family, sampled = RUNS[name]
    recipe = yaml.safe_load(table.recipe(name))
    models, out = scripts.spy_on_models(script, monkeypatch), tmp_path / "out"
    size = {"bert": "hidden_size", "t5": "d_model", "opt": "hidden_size"}[family]
    argv = ["--recipe", name, "--config_name", scripts.config(tmp_path, family)]
    argv += ["--config_overrides", f"{size}=32", "--data_dir", scripts.glue_data(tmp_path, recipe["task_name"])]
    argv += ["--max_seq_length", "32", *scripts.STEPS, "--save_strategy", "steps", "--save_steps", "1"]
    assert script.main([*argv, "--output_dir", str(out)]) == 0

    losses = [entry for entry in scripts.log(out) if "loss" in entry]
    assert [entry["learning_rate"] for entry in losses] == [recipe["learning_rate"]] * 2
    assert all(entry["memsave/kept_gib"] > 0 for entry in losses)
    assert any(f"eval_{scripts.METRICS.get(recipe['task_name'], 'accuracy')}" in entry for entry in scripts.log(out))
    layers = [path for path, module in models[0].named_modules() if LAYER in module.__dict__]
    assert len(layers) == sampled
    if "lora" in name:
        saved = scripts.assert_stock_adapter(out)
        assert set(saved["target_modules"]) == set(recipe["lora_target_modules"])
        head = {"bert": "classifier", "t5": "classification_head", "opt": "score"}[family]
        assert head in saved["modules_to_save"]
        assert all(".lora_A." in path for path in layers)
        scripts.assert_moved(out)


def test_the_command_line_wins_over_a_recipe(script):
    argv = ["--recipe", "bert-base/mrpc/lora-wta-crs"]
    model, _, training = script.parse([*argv, "--memsave", "exact", "--lr_scheduler_type", "linear"])
    assert model.memsave_config() == MemSaveConfig()
    assert training.lr_scheduler_kwargs is None  # those of the recipe's own scheduler


def test_a_recipe_that_does_not_exist_is_told_in_one_line(tmp_path, script, capsys):
    scripts.assert_refused(
        script, {"recipe": "bert-base/wnli/wta-crs"}, "expected model/task/method, as in bert-base", capsys
    )
    both = {"recipe": "bert-base/cola/wta-crs", "config": "run.yaml"}
    (tmp_path / "run.yaml").write_text("task_name: cola")
    scripts.assert_refused(
        script, both | {"config": str(tmp_path / "run.yaml")}, "expected --config or --recipe, got", capsys
    )


FIELDS = {"dropout": "mask", "linear": {"budget": 0.1, "targets": ["lora_A"]}}
CONFIG = MemSaveConfig(dropout="mask", linear=WTACRS(budget=0.1, targets=("lora_A",)))


@pytest.mark.parametrize("write", [yaml.safe_dump, json.dumps], ids=["yaml", "json"])
def test_a_config_file_may_hold_the_fields_of_memsave(tmp_path, script, write):
    path = tmp_path / "run"
    common = {"config_name": "here", "task_name": "mrpc"}
    for value, expected in ((FIELDS, CONFIG), ({}, MemSaveConfig()), ({"linear": None}, MemSaveConfig())):
        path.write_text(write(common | {"memsave": value}))
        assert script.parse(["--config", str(path)])[0].memsave_config() == expected
        assert script.parse(["--config", str(path), "--memsave", "false"])[0].memsave_config() is None


@pytest.mark.parametrize("name", ["fields.yaml", "fields.json", "fields"])
def test_memsave_may_name_a_file_of_fields(tmp_path, script, name):
    CONFIG.to_file(tmp_path / name)
    argv = ["--config_name", "here", "--task_name", "mrpc", "--memsave"]
    assert script.parse([*argv, str(tmp_path / name)])[0].memsave_config() == CONFIG
    assert script.parse(argv)[0].memsave_config() == MemSaveConfig()
    assert script.parse([*argv, "wta-crs"])[0].memsave_config() == MemSaveConfig(linear=WTACRS(budget=0.3))


def test_checkpoint_and_offload_are_set_in_what_memsave_names_or_in_the_default(tmp_path, script):
    argv, options = ["--config_name", "here", "--task_name", "mrpc"], ["--checkpoint", "gate", "--offload"]
    expected = MemSaveConfig(checkpoint="gate", offload=True)
    for memsave in ([], ["--memsave"], ["--memsave", "gate"]):
        assert script.parse([*argv, *memsave, *options])[0].memsave_config() == expected
    CONFIG.to_file(tmp_path / "fields.yaml")
    memsave = ["--memsave", str(tmp_path / "fields.yaml")]
    both = replace(CONFIG, checkpoint="gate", offload=True)
    assert script.parse([*argv, *memsave, *options])[0].memsave_config() == both
    (tmp_path / "run.yaml").write_text("checkpoint: gate\noffload: true")
    assert script.parse(["--config", str(tmp_path / "run.yaml"), *argv])[0].memsave_config() == expected


MISTAKES = {
    "no such file": ("nowhere.yaml", "cannot read nowhere.yaml"),
    "no such preset": ("nowhere", "unknown preset 'nowhere'"),
    "empty": ("", "unknown preset ''"),
    "no such field": ('{"linea": null}', "MemSaveConfig has no field 'linea'"),
    "bad value": ('{"linear": {"budget": 2}}', "WTACRS.budget: expected a number in"),
    "no JSON": ("{linear", "--memsave: expected fields as JSON, got {linear"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_memsave_is_told_in_one_line(tmp_path, script, mistake, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value, message = MISTAKES[mistake]
    scripts.assert_refused(script, {"config_name": "here", "task_name": "mrpc", "memsave": value}, message, capsys)
