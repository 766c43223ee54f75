"""``scripts/run_glue.py``: every task and family runs without a network, and mistakes are answered in one line."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

import hf_memsave
from hf_memsave.data.glue import TASKS
from hf_memsave.data.wordpiece import train_wordpiece
from support.script_helpers import (
    CONFIGS,
    LORA,
    METRICS,
    RECIPES,
    SCRIPTS,
    STEPS,
    assert_memory_logged,
    assert_moved,
    assert_refused,
    assert_same_run,
    assert_stock_adapter,
    config,
    load_script,
    pretrained,
    results,
    run_both,
)
from support.script_helpers import glue_data as data

FAMILIES = ["bert", "roberta", "gpt2", "llama", "opt", "t5"]
STEPS = [*STEPS, "--max_seq_length", "32"]
DO = ["--do_train", "--do_eval", "--do_predict"]

pytestmark = pytest.mark.long


@pytest.fixture
def script(monkeypatch):
    return load_script("run_glue", monkeypatch)


@pytest.fixture
def bert(tmp_path):
    return config(tmp_path, "bert")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    options = ["--config_name", config(folder, "bert"), "--data_dir", data(folder), *STEPS, *DO]
    recipe = folder / "recipe.yaml"
    recipe.write_text("memsave: exact\nmax_seq_length: 16\n")
    return run_both("run_glue", folder, options, recipe)


def test_a_run_leaves_a_model_its_tokenizer_metrics_and_predictions(folders):
    out = folders["patched"]
    found = results(out)
    assert found["train_samples"] == found["eval_samples"] == 16
    assert found["eval_combined_score"] == pytest.approx((found["eval_accuracy"] + found["eval_f1"]) / 2)
    saved = json.loads((out / "config.json").read_text())
    assert saved["label2id"] == {"not_equivalent": 0, "equivalent": 1}
    assert saved["vocab_size"] == len(json.loads((out / "tokenizer.json").read_text())["model"]["vocab"])
    header, *lines = (out / "predict_results_mrpc.txt").read_text().splitlines()
    assert header == "index\tprediction"
    assert [line.split("\t")[0] for line in lines] == [str(index) for index in range(16)]
    assert {line.split("\t")[1] for line in lines} <= {"0", "1"}


def test_the_flag_changes_no_loss_and_no_parameter(folders):
    assert_same_run(folders["stock"], folders["patched"])
    assert_memory_logged(folders["stock"], folders["patched"])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_lora_trains_the_same_adapters_and_head_with_the_flag(tmp_path, script, model_type, capsys):
    common = ["--data_dir", data(tmp_path), *STEPS]
    argv = ["--config_name", config(tmp_path, model_type), *common, *LORA]
    stock, patched, again = (tmp_path / name for name in ("stock", "patched", "again"))
    assert script.main([*argv, "--do_train", "--do_eval", "--output_dir", str(stock)]) == 0
    assert script.main([*argv, "--do_train", "--do_eval", "--memsave", "--output_dir", str(patched)]) == 0
    assert_same_run(stock, patched, "adapter_model.safetensors")
    assert_moved(patched)
    head = {"score", "classifier", "classification_head"} & set(assert_stock_adapter(patched)["modules_to_save"])
    trained = load_file(patched / "adapter_model.safetensors")
    assert any(name.split(".")[2] in head and "lora" not in name for name in trained)
    assert not any("lora" in name and name.split(".")[2] in head for name in trained)

    evaluate = ["--model_name_or_path", str(patched), *common, "--do_eval"]
    assert script.main([*evaluate, "--memsave", "--output_dir", str(tmp_path / "evaluated")]) == 0
    assert results(tmp_path / "evaluated")["eval_loss"] == results(patched)["eval_loss"]
    assert script.main([*evaluate, *LORA, "--output_dir", str(again)]) == 2
    assert "expected a model without adapters" in capsys.readouterr().err


def test_stock_peft_loads_the_adapter_onto_the_pretrained_model(tmp_path, script):
    tokenizer = train_wordpiece(["cat hat mat sat"], 120)
    base = pretrained(tmp_path, "bert", AutoModelForSequenceClassification, tokenizer)
    argv = ["--model_name_or_path", base, "--data_dir", data(tmp_path), *STEPS, *LORA, "--do_train", "--memsave"]
    out = tmp_path / "out"
    targets = ["--lora_target_modules", "query", "value", "--lora_dora", "--lora_alpha", "8"]
    assert script.main([*argv, *targets, "--output_dir", str(out)]) == 0
    saved = assert_stock_adapter(out)
    assert set(saved["target_modules"]) == {"query", "value"}
    assert (saved["r"], saved["lora_alpha"], saved["lora_dropout"], saved["use_dora"]) == (4, 8, 0.1, True)
    assert saved["base_model_name_or_path"] == base and not (out / "base_model").exists()
    loaded = PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base), out)
    found = {name.replace(".default", ""): tensor for name, tensor in loaded.state_dict().items()}
    for name, tensor in load_file(out / "adapter_model.safetensors").items():
        key = name.replace("classifier.", "classifier.modules_to_save.").replace(
            "magnitude_vector", "magnitude_vector.weight"
        )
        assert torch.equal(found[key], tensor)


def test_the_recipe_runs(tmp_path, script):
    tokenizer = train_wordpiece(["cat hat mat sat"], 120)
    base = pretrained(tmp_path, "bert", AutoModelForSequenceClassification, tokenizer)
    recipe = ["--config", str(RECIPES / "glue-bert-mrpc-lora.yaml"), *STEPS, "--output_dir", str(tmp_path / "out")]
    assert script.main([*recipe, "--model_name_or_path", base, "--data_dir", data(tmp_path)]) == 0
    assert assert_stock_adapter(tmp_path / "out")["r"] == 8


def test_a_mistake_ends_the_process_with_status_2(tmp_path, script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_glue.py", "--memsave"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / "run_glue.py"), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("run_glue.py: error: expected exactly one of")


@pytest.mark.parametrize("lora", [[], LORA], ids=["whole", "lora"])
def test_the_flag_frees_memory_and_its_absence_does_not(tmp_path, script, bert, lora):
    batch = {"input_ids": torch.ones(32, 32, dtype=torch.long), "labels": torch.zeros(32, dtype=torch.long)}

    def kept(*flag: str) -> int:
        argv = ["--config_name", bert, "--task_name", "mrpc", "--use_cpu", *lora, *flag, "--output_dir", str(tmp_path)]
        args, _, training = script.parse(argv)
        config = script.load_config(args, TASKS["mrpc"])
        model = script.models.load_model(AutoModelForSequenceClassification, args, config)
        if lora:
            model = script.models.add_lora(model, args, "SEQ_CLS", training)
        return hf_memsave.measure_kept(model.train(), batch).total

    stock = kept()
    assert kept("--memsave", "false") == stock
    assert kept("--memsave") == kept("--memsave", "exact") < 0.9 * stock


@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_and_reports_its_metrics(tmp_path, script, bert, name):
    out = tmp_path / "out"
    argv = ["--config_name", bert, "--data_dir", data(tmp_path, name), "--output_dir", str(out), *STEPS]
    assert script.main([*argv, "--do_train", "--do_eval", "--do_predict", "--no_pad_to_max_length"]) == 0
    found = results(out)
    assert f"eval_{METRICS.get(name, 'accuracy')}" in found
    assert ("eval_accuracy_mm" in found) == (name == "mnli")
    assert len(list(out.glob(f"predict_results_{name}*.txt"))) == len(TASKS[name].test_splits)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_trains_from_random_weights(tmp_path, script, model_type):
    argv = ["--config_name", config(tmp_path, model_type), "--data_dir", data(tmp_path), *STEPS]
    assert script.main([*argv, "--do_train", "--output_dir", str(tmp_path / "out")]) == 0


def test_a_saved_model_evaluates_to_the_same_metrics(tmp_path, script, bert):
    argv = ["--data_dir", data(tmp_path), "--do_eval", *STEPS]
    first, second = tmp_path / "first", tmp_path / "second"
    assert script.main([*argv, "--config_name", bert, "--do_train", "--output_dir", str(first)]) == 0
    assert script.main([*argv, "--model_name_or_path", str(first), "--output_dir", str(second)]) == 0
    assert results(second)["eval_loss"] == results(first)["eval_loss"]


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, script, bert):
    argv = ["--config_name", bert, "--data_dir", data(tmp_path), "--do_train", *STEPS, "--save_steps", "1"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert script.main([*argv, "--output_dir", str(whole)]) == 0
    halfway = ["--resume_from_checkpoint", str(whole / "checkpoint-1")]
    assert script.main([*argv, "--output_dir", str(resumed), *halfway]) == 0
    assert not (resumed / "checkpoint-1").exists()
    expected, found = (load_file(folder / "model.safetensors") for folder in (whole, resumed))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("write", [yaml.safe_dump, json.dumps], ids=["yaml", "json"])
def test_the_command_line_overrides_the_config_file(tmp_path, script, bert, write):
    options = {"config_name": bert, "task_name": "mrpc", "do_train": True, "learning_rate": 1e-5, "memsave": True}
    path = tmp_path / "recipe"
    path.write_text(write(options | {"max_seq_length": 64, "pad_to_max_length": False, "seed": None}))
    model, data_, training = script.parse(["--config", str(path), "--max_seq_length", "16"])
    assert (model.config_name, model.memsave, data_.task_name) == (bert, "true", "mrpc")
    assert (data_.max_seq_length, data_.pad_to_max_length) == (16, False)
    assert (training.do_train, training.learning_rate, training.seed) == (True, 1e-5, 42)


def test_config_overrides_reach_the_model(tmp_path, script, bert):
    argv = ["--config_name", bert, "--config_overrides", "num_hidden_layers=2", "--data_dir", data(tmp_path), *STEPS]
    assert script.main([*argv, "--do_train", "--output_dir", str(tmp_path / "out")]) == 0
    assert AutoConfig.from_pretrained(tmp_path / "out").num_hidden_layers == 2


def test_a_model_with_its_own_order_of_labels_keeps_it(tmp_path, script):
    own = ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"]
    AutoConfig.for_model("bert", **CONFIGS["bert"], id2label=dict(enumerate(own))).save_pretrained(tmp_path)
    args = script.GlueModelArguments(model_name_or_path=str(tmp_path))
    found = script.load_config(args, TASKS["mnli"])
    assert found.label2id == {"entailment": 2, "neutral": 1, "contradiction": 0}
    logits = torch.eye(3).numpy()  # the model is sure of contradiction, neutral, entailment
    assert script.task_values(logits, TASKS["mnli"], found).tolist() == [2, 1, 0]


# Each mistake: the options that differ from a good run (None: left out), and what the message must say.
MISTAKES = {
    "no data": ({"data_dir": None}, "exactly one of --task_name and --data_dir, got none"),
    "two data": ({"task_name": "mrpc"}, "exactly one of --task_name and --data_dir, got --task_name and --data_dir"),
    "no model": ({"config_name": None}, "--config_name and --model_type, got none"),
    "unknown task": ({"data_dir": None, "task_name": "ax"}, "--task_name: expected one of cola, .* got ax"),
    "unknown type": ({"config_name": None, "model_type": "lama"}, "--model_type: expected an architecture .* got lama"),
    "override of weights": (
        {"config_name": None, "model_name_or_path": "here", "config_overrides": "depth=2"},
        "--config_overrides: expected --config_name or --model_type, got pretrained weights",
    ),
    "no head": ({"config_name": None, "model_type": "vit"}, "expected a model with a sequence .* got 'vit'"),
    "no rank": ({"lora_r": "0"}, "--lora_r: expected a positive number, got 0"),
    "no lora": ({"lora_dropout": "0.1"}, "--lora_dropout: expected --lora_r beside it, got none"),
    "all dropped": ({"lora_r": "4", "lora_dropout": "1"}, r"--lora_dropout: expected a number in \[0, 1\), got 1.0"),
    "unknown target": ({"lora_r": "4", "lora_target_modules": "q_proj"}, "got 'q_proj'. Choose from .*query, value"),
    "no linear": ({"lora_r": "4", "lora_target_modules": "embeddings"}, "--lora_target_modules: .* is not supported"),
    "bad dtype": ({"dtype": "int8"}, "--dtype: invalid choice: 'int8'"),
    "unknown preset": ({"memsave": "nope"}, "preset 'nope': expected one of .*exact"),
    "unknown option": ({"learnin_rate": "1"}, "got --learnin_rate=1"),
    "bad value": ({"learning_rate": "fast"}, "--learning_rate.*'fast'"),
    "bad strategy": ({"eval_strategy": "often"}, "often"),
    "nothing to do": ({"do_train": None}, "at least one of --do_train, --do_eval and --do_predict, got none"),
    "no such folder": ({"data_dir": "nowhere"}, "nowhere/train.tsv: expected .* found no such folder"),
    "no such config": ({"config_name": "nowhere.json"}, "nowhere.json"),
    "bad override": ({"config_overrides": "depth=2"}, "depth"),
    "no such file": ({"config": "nowhere.yaml"}, "--config nowhere.yaml: expected a YAML or JSON file, found none"),
    "no such checkpoint": ({"resume_from_checkpoint": "nowhere"}, "expected a checkpoint in nowhere, found none"),
    "no such vocabulary": ({"vocab_file": "nowhere.txt"}, "nowhere.txt: expected a BERT vocab.txt, found no such file"),
    "no samples": ({"max_train_samples": "0"}, "--max_train_samples: expected a positive number, got 0"),
    "too long": ({"max_seq_length": "64"}, "--max_seq_length: expected at most 32 for this model, got 64"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line_and_trains_nothing(tmp_path, script, bert, mistake, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"config_name": bert, "data_dir": data(tmp_path), "do_train": "true", "max_seq_length": "32"}
    different, message = MISTAKES[mistake]
    assert_refused(script, options | different, message, capsys)


def test_a_malformed_line_is_named(tmp_path, script, bert, capsys):
    folder = data(tmp_path)
    with (Path(folder) / "train.tsv").open("a") as file:
        file.write("1\tcat\n")
    assert script.main(["--config_name", bert, "--data_dir", folder, "--do_train", "--output_dir", str(tmp_path)]) == 2
    assert "train.tsv, line 18: expected 4 columns" in capsys.readouterr().err
