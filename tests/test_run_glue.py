"""``scripts/run_glue.py``: every task and family runs without a network, and mistakes are answered in one line."""

import json
import os
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig

import hf_memsave
from hf_memsave.glue import TASKS

REPO = Path(__file__).resolve().parents[1]
SCRIPT = REPO / "scripts" / "run_glue.py"

SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=120)
CONFIGS = {
    "bert": SIZES | {"max_position_embeddings": 32},
    "roberta": SIZES | {"max_position_embeddings": 34, "type_vocab_size": 1},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 120},
    "llama": SIZES | {"num_key_value_heads": 1, "max_position_embeddings": 32},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 120},
}
STEPS = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--max_seq_length", "32", "--use_cpu"]
STEPS += ["--report_to", "none", "--dataloader_pin_memory", "false"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    import run_glue

    return run_glue


@pytest.fixture
def bert(tmp_path):
    return config(tmp_path, "bert")


def config(folder: Path, model_type: str) -> str:
    path = folder / model_type / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": model_type} | CONFIGS[model_type]))
    return str(path.parent)


def data(folder: Path, name: str = "mrpc") -> str:
    """Sixteen made-up examples in every file of the task; in a pair, the label tells whether both halves are equal."""
    task = TASKS[name]
    folder /= task.folder
    folder.mkdir()
    rng = random.Random(0)
    for split, file in task.files.items():
        header = ["index", *task.text.values(), *[task.label_column] * (split not in task.test_splits)]
        if task.headerless and split not in task.test_splits:
            header = task.headerless
        lines = [] if header is task.headerless else ["\t".join(header)]
        for index in range(16):
            label = index % len(task.labels or range(6))
            words = [" ".join(rng.choices(["cat", "hat", "mat", "sat"], k=3)) for _ in range(2)]
            texts = [words[0], words[0 if label else 1]]
            row = dict(zip(task.text.values(), texts, strict=False))
            row[task.label_column] = task.label_names[label] if task.labels else f"{label}.5"
            lines.append("\t".join(row.get(column, str(index)) for column in header))
        (folder / file).write_text("\n".join(lines) + "\n")
    return str(folder)


def results(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text())


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> dict[str, Path]:
    """The output folders of two real processes, which differ in the flag only."""
    folder = tmp_path_factory.mktemp("processes")
    argv = ["--config_name", config(folder, "bert"), "--data_dir", data(folder), *STEPS]
    environment = os.environ | {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    running = {}
    for name, flag in {"stock": [], "patched": ["--memsave"]}.items():
        command = [sys.executable, SCRIPT, *argv, "--do_train", "--do_eval", "--do_predict", *flag]
        with (folder / f"{name}.log").open("w") as log:
            running[name] = subprocess.Popen(
                [*command, "--output_dir", folder / name], env=environment, stdout=log, stderr=log
            )
    status = {name: process.wait(timeout=300) for name, process in running.items()}
    return {name: folder / name if status[name] == 0 else folder / f"{name}.log" for name in status}


def test_a_run_leaves_a_model_its_tokenizer_metrics_and_predictions(processes):
    out = processes["stock"]
    assert out.is_dir(), out.read_text()
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


def test_the_flag_changes_no_parameter(processes):
    out = processes["patched"]
    assert out.is_dir(), out.read_text()
    stock, patched = (load_file(processes[name] / "model.safetensors") for name in ("stock", "patched"))
    assert stock.keys() == patched.keys()
    assert all(torch.equal(stock[name], patched[name]) for name in stock)
    assert results(processes["stock"])["eval_loss"] == results(out)["eval_loss"]


def test_a_mistake_ends_the_process_with_status_2(tmp_path, script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--memsave"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("run_glue.py: error: expected exactly one of")


def test_the_flag_frees_memory_and_its_absence_does_not(script, bert):
    batch = {"input_ids": torch.ones(2, 32, dtype=torch.long), "labels": torch.zeros(2, dtype=torch.long)}

    def kept(*flag: str) -> int:
        argv = ["--config_name", bert, "--task_name", "mrpc", "--use_cpu", *flag]
        args, *_ = script.parse_arguments(argv)
        model = script.load_model(args, script.load_config(args, TASKS["mrpc"]), script.memsave_flag(args))
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
    assert f"eval_{TASKS[name].metric}" in found
    assert ("eval_accuracy_mm" in found) == (name == "mnli")
    assert len(list(out.glob(f"predict_results_{name}*.txt"))) == len(TASKS[name].test_splits)


@pytest.mark.parametrize("model_type", CONFIGS)
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
    model, data_, training = script.parse_arguments(["--config", str(path), "--max_seq_length", "16"])
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
    args = script.ModelArguments(model_name_or_path=str(tmp_path))
    found = script.load_config(args, TASKS["mnli"])
    assert found.label2id == {"entailment": 2, "neutral": 1, "contradiction": 0}
    logits = torch.eye(3).numpy()  # the model is sure of contradiction, neutral, entailment
    assert script.task_values(logits, TASKS["mnli"], found).tolist() == [2, 1, 0]


# Each mistake: the options that differ from a good run (None: left out), and what the message must say.
MISTAKES = {
    "no data": ({"data_dir": None}, "exactly one of --task_name and --data_dir, got neither"),
    "two data": ({"task_name": "mrpc"}, "exactly one of --task_name and --data_dir, got --task_name and --data_dir"),
    "no model": ({"config_name": None}, "exactly one of --model_name_or_path and --config_name, got neither"),
    "unknown task": ({"data_dir": None, "task_name": "ax"}, "--task_name: expected one of cola, .* got ax"),
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
    argv = [f"--{name}={value}" for name, value in (options | different).items() if value is not None]
    assert script.main([*argv, "--output_dir=out"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("run_glue.py: error: ") and "Traceback" not in line
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()


def test_a_malformed_line_is_named(tmp_path, script, bert, capsys):
    folder = data(tmp_path)
    with (Path(folder) / "train.tsv").open("a") as file:
        file.write("1\tcat\n")
    assert script.main(["--config_name", bert, "--data_dir", folder, "--do_train", "--output_dir", str(tmp_path)]) == 2
    assert "train.tsv, line 18: expected 4 columns" in capsys.readouterr().err
