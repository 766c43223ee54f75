"""``scripts/run_summarization.py``: files of texts and summaries, T5 and BART, LoRA, ROUGE, stock and patched."""

import csv
import json
import random
import re
from pathlib import Path

import datasets
import evaluate
import numpy as np
import pytest
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from support.script_helpers import (
    LORA,
    RECIPES,
    STEPS,
    assert_memory_logged,
    assert_moved,
    assert_patched,
    assert_refused,
    assert_same_run,
    assert_stock_adapter,
    config,
    load_script,
    pretrained,
    results,
    run_both,
    spy_on_models,
)

DO = ["--do_train", "--do_eval", "--predict_with_generate"]
STEPS = [*STEPS, "--max_source_length", "32", "--max_target_length", "8"]

pytestmark = pytest.mark.long


@pytest.fixture
def script(monkeypatch):
    return load_script("run_summarization", monkeypatch)


@pytest.fixture
def t5(tmp_path):
    return config(tmp_path, "t5")


@pytest.fixture
def base(tmp_path, script):
    tokenizer = script.train_byte_bpe(["the cat sat on a mat\n"] * 3, 280, ends_texts=True)
    return pretrained(tmp_path, "t5", AutoModelForSeq2SeqLM, tokenizer, decoder_start_token_id=0)


def rows(count: int = 12) -> list[dict[str, str]]:
    words = random.Random(0)
    texts = (words.choices(["the", "cat", "sat", "ön", "a", "mat,\tor"], k=8) for _ in range(count))
    return [{"id": str(i), "document": " ".join(text), "gist": " ".join(text[:2])} for i, text in enumerate(texts)]


def write(folder: Path, name: str = "train.jsonl") -> str:
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        if "json" in name:
            file.writelines(json.dumps(row) + "\n" for row in rows())
        else:
            writer = csv.DictWriter(file, list(rows()[0]), delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writeheader()
            writer.writerows(rows())
    return str(folder / name)


def data(folder: Path) -> list[str]:
    files = ["--train_file", write(folder), "--validation_file", write(folder, "valid.csv")]
    return [*files, "--text_column", "document", "--summary_column", "gist"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    options = ["--config_name", config(folder, "t5"), *data(folder), *STEPS, *DO]
    options += ["--source_prefix", "summarize: ", "--do_predict", "--test_file", write(folder, "test.tsv")]
    recipe = folder / "recipe.json"
    recipe.write_text(json.dumps({"memsave": True, "max_target_length": 4, "dataset_name": "not/this"}))
    return run_both("run_summarization", folder, options, recipe)


def test_a_run_leaves_a_model_its_tokenizer_rouge_and_summaries(folders):
    out = folders["patched"]
    found = results(out)
    assert {"eval_rouge1", "eval_rouge2", "eval_rougeL", "eval_gen_len", "predict_rougeL"} <= found.keys()
    assert found["train_samples"] == found["eval_samples"] == found["predict_samples"] == 12
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("the  cat\n猫")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the  cat\n猫"
    assert ids[-1] == tokenizer.eos_token_id == 2 and tokenizer.pad_token_id == 0
    assert json.loads((out / "config.json").read_text())["decoder_start_token_id"] == 0
    assert len((out / "generated_predictions.txt").read_text(encoding="utf-8").splitlines()) == 12


def test_the_flag_changes_no_loss_no_parameter_and_no_summary(folders):
    assert_same_run(folders["stock"], folders["patched"])
    assert_memory_logged(folders["stock"], folders["patched"])
    summaries = [(out / "generated_predictions.txt").read_bytes() for out in folders.values()]
    assert summaries[0] == summaries[1]


@pytest.mark.parametrize("model_type", ["t5", "bart"])
@pytest.mark.parametrize("lora", [[], LORA], ids=["whole", "lora"])
def test_every_family_trains_alike_with_and_without_the_flag(tmp_path, script, model_type, lora, monkeypatch):
    models = spy_on_models(script, monkeypatch, "Seq2SeqTrainer")
    argv = ["--config_name", config(tmp_path, model_type), *data(tmp_path), *STEPS, *DO, *lora]
    stock, patched = tmp_path / "stock", tmp_path / "patched"
    assert script.main([*argv, "--output_dir", str(stock)]) == 0
    assert script.main([*argv, "--output_dir", str(patched), "--memsave"]) == 0
    assert_same_run(stock, patched, "adapter_model.safetensors" if lora else "model.safetensors")
    assert_patched(*models)
    assert results(stock)["eval_rouge1"] == results(patched)["eval_rouge1"]
    if lora:
        assert_moved(patched)
        assert_stock_adapter(patched)


def test_stock_peft_loads_the_adapter_and_the_script_evaluates_it(tmp_path, script, base):
    argv = ["--model_name_or_path", base, *data(tmp_path), *STEPS, *DO, *LORA, "--memsave"]
    out, again = tmp_path / "out", tmp_path / "again"
    assert script.main([*argv, "--lora_target_modules", "q", "v", "--output_dir", str(out)]) == 0
    saved = assert_stock_adapter(out)
    assert (saved["base_model_name_or_path"], set(saved["target_modules"])) == (base, {"q", "v"})
    loaded = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(base), out).state_dict()
    found = {name.replace(".default", ""): tensor for name, tensor in loaded.items()}
    for name, tensor in load_file(out / "adapter_model.safetensors").items():
        assert found[name].equal(tensor)
    evaluate = ["--model_name_or_path", str(out), *data(tmp_path), *STEPS, "--do_eval", "--predict_with_generate"]
    assert script.main([*evaluate, "--output_dir", str(again)]) == 0
    assert results(again)["eval_loss"] == results(out)["eval_loss"]


def test_the_recipe_runs(tmp_path, script, base):
    recipe = ["--config", str(RECIPES / "summarization-t5-lora.yaml"), "--model_name_or_path", base]
    assert script.main([*recipe, *data(tmp_path), *STEPS, "--output_dir", str(tmp_path / "out")]) == 0
    assert assert_stock_adapter(tmp_path / "out")["r"] == 16
    assert results(tmp_path / "out")["eval_samples"] == 12


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, script, t5):
    argv = ["--config_name", t5, *data(tmp_path), *STEPS, *LORA, "--do_train", "--memsave", "--save_steps", "1"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert script.main([*argv, "--output_dir", str(whole)]) == 0
    halfway = ["--resume_from_checkpoint", str(whole / "checkpoint-1")]
    assert script.main([*argv, "--output_dir", str(resumed), *halfway]) == 0
    assert_same_run(whole, resumed, "adapter_model.safetensors")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_every_kind_of_file_gives_the_same_pairs(tmp_path, script, name):
    found = script.read_pairs("train_file", write(tmp_path, name), ("document", "gist"))
    assert list(found["text"]) == [row["document"] for row in rows()]
    assert list(found["summary"]) == [row["gist"] for row in rows()]
    assert list(script.read_pairs("train_file", write(tmp_path, name), (None, None))["text"])[0] == "0"


def test_examples_are_the_prefix_and_the_text_and_as_labels_the_summary(tmp_path, script, t5):
    argv = ["--config_name", t5, *data(tmp_path), "--source_prefix", "Sum: ", "--do_train", "--use_cpu"]
    _, args, training = script.parse([*argv, "--max_target_length", "3", "--max_train_samples", "2"])
    tokenizer = script.train_byte_bpe(["the cat"], 270, ends_texts=True)
    found = script.encode(script.load_splits(args, training)["train"], args, tokenizer, "train")
    assert tokenizer.batch_decode(list(found["input_ids"])) == [f"Sum: {row['document']}</s>" for row in rows(2)]
    assert [len(ids) for ids in found["labels"]] == [3, 3]
    assert all(ids[-1] == tokenizer.eos_token_id for ids in found["labels"])


def test_a_dataset_of_the_hub_gives_its_columns(tmp_path, script, t5, monkeypatch):
    hub = datasets.DatasetDict(train=datasets.Dataset.from_list(rows(3)))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: hub)
    argv = ["--config_name", t5, "--dataset_name", "some/texts", "--use_cpu", "--do_train"]
    columns = ["--text_column", "gist", "--summary_column", "document"]
    found = script.load_splits(*script.parse([*argv, *columns])[1:])["train"]
    assert list(found["text"]) == [row["gist"] for row in rows(3)]
    with pytest.raises(script.UsageError, match="--do_eval: expected --validation_file or a dataset with a split"):
        script.load_splits(*script.parse([*argv, *columns, "--do_eval"])[1:])


# Worked by hand: prediction, reference, then ROUGE-1, ROUGE-2 and ROUGE-L as (common words, of predicted + expected).
ROUGE = [
    ("The cat sat.", "the CAT sat", (6, 6), (4, 4), (6, 6)),
    ("the cat sat on the mat", "the mat", (4, 8), (2, 6), (4, 8)),
    ("police killed the gunman", "the gunman killed police", (8, 8), (2, 6), (4, 8)),
    ("the the the", "the cat", (2, 5), (0, 3), (2, 5)),
    ("un_café 7", "café, un? 7!", (6, 6), (0, 4), (4, 6)),
    ("", "the cat", (0, 2), (0, 1), (0, 2)),
    ("...", "", (0, 1), (0, 1), (0, 1)),
]


@pytest.mark.parametrize("case", ROUGE, ids=lambda case: case[0])
def test_rouge_is_what_one_counts_by_hand(script, case):
    found = evaluate.load(str(script.METRIC)).compute(predictions=[case[0]], references=[case[1]])
    expected = {
        name: twice / total for name, (twice, total) in zip(("rouge1", "rouge2", "rougeL"), case[2:], strict=True)
    }
    assert found == pytest.approx(expected)


def test_rouge_is_the_mean_over_examples_and_ignores_padding(script):
    tokenizer = script.train_byte_bpe(["the cat"], 270, ends_texts=True)
    ids = [tokenizer(text)["input_ids"] for text in ("the cat", "a dog", "the cat", "the cat")]
    padded = np.array([row + [-100] * (max(map(len, ids)) - len(row)) for row in ids])
    prediction = script.EvalPrediction(predictions=padded[:2], label_ids=padded[2:])
    found = script.metrics_for(tokenizer)(prediction)
    assert found == {"rouge1": 50, "rouge2": 50, "rougeL": 50, "gen_len": np.mean([len(row) for row in ids[:2]])}


@pytest.mark.parametrize("name", ["run_glue", "run_clm", "run_summarization"])
def test_every_script_explains_its_options(name, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        load_script(name, monkeypatch).main(["--help"])
    assert ended.value.code == 0
    assert {"--config", "--memsave", "--lora_target_modules"} <= set(re.findall(r"--\w+", capsys.readouterr().out))


# Each mistake: the options that differ from a good run (None: left out), and what the message must say.
MISTAKES = {
    "no data": ({"train_file": None}, "exactly one of --dataset_name and --train_file, got none"),
    "two data": ({"dataset_name": "x"}, "exactly one of .*, got --dataset_name and --train_file"),
    "no such file": ({"train_file": "no.csv"}, "--train_file no.csv: expected .*, found no such file"),
    "unknown kind": ({"train_file": "a.txt"}, "a.txt: expected a file of .json, .jsonl, .csv, .tsv, got '.txt'"),
    "not json": ({"train_file": "bad.json"}, "bad.json, line 2: expected a JSON object on each line, got Expecting"),
    "a list": ({"train_file": "list.jsonl"}, "list.jsonl, line 1: expected a JSON object on each line, got list"),
    "no text": ({"train_file": "null.jsonl"}, "null.jsonl, line 3: expected text in 'gist', got None. Correct"),
    "columns": ({"train_file": "short.csv"}, "short.csv, line 2: expected 2 columns, got 1. Correct the line"),
    "empty": ({"train_file": "empty.csv"}, "--train_file empty.csv: expected some examples, got none"),
    "binary": ({"train_file": "binary.csv"}, "binary.csv: expected text in UTF-8, got invalid start byte"),
    "no such column": (
        {"text_column": "x"},
        "expected column 'x', got 'id', .*with --text_column and --summary_column",
    ),
    "one column": ({"train_file": "one.csv", "summary_column": None}, "one.csv: expected 2 columns, got 'document'"),
    "no such dataset": ({"train_file": None, "dataset_name": "no/such"}, "--dataset_name no/such: expected to find it"),
    "no validation": ({"do_eval": "true"}, "--do_eval: expected --validation_file or a dataset with .*, got none"),
    "predict": ({"do_predict": "true"}, "--do_predict: expected --predict_with_generate beside it, got none"),
    "nothing to do": ({"do_train": None}, "at least one of --do_train, --do_eval and --do_predict, got none"),
    "no decoder": ({"config_name": None, "model_type": "bert"}, "expected a model with an encoder .* got 'bert'"),
    "long": (
        {"config_name": None, "model_type": "bart", "max_source_length": "2000"},
        "--max_source_length: expected at most 1024 for this model, got 2000. Lower it",
    ),
    "no target": ({"max_target_length": "0"}, "--max_target_length: expected a positive number, got 0"),
    "unknown target": ({"lora_r": "4", "lora_target_modules": "query"}, "got 'query'. Choose from .*wi, wo"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line_and_trains_nothing(tmp_path, script, t5, mistake, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = '{"document": "a", "gist": "b"}\n'
    files = {"a.txt": "x", "bad.json": good + "{", "list.jsonl": "[1]\n", "null.jsonl": good * 2 + '{"document": "a"}'}
    files |= {"short.csv": "document,gist\na\n", "empty.csv": "document,gist\n", "one.csv": "document\na\n"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe")
    options = {"config_name": t5, "train_file": write(tmp_path), "do_train": "true"}
    options |= {"text_column": "document", "summary_column": "gist"}
    different, message = MISTAKES[mistake]
    assert_refused(script, options | different, message, capsys)
