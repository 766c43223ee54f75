"""``scripts/run_*.py``: every task, family and way to train runs without a network, stock and patched alike."""

import csv
import importlib.util
import json
import math
import os
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import hf_memsave
from glue_data import TASKS
from hf_memsave.patching.swap import is_patched
from support import script_helpers as scripts
from support.script_helpers import CONFIGS, SCRIPTS, STEPS, config, glue_data, load_script, pretrained, results
from wordpiece import train_wordpiece

REPO, RECIPES = SCRIPTS.parent, SCRIPTS.parent / "configs" / "recipes"
ADAPTERS, WEIGHTS = "adapter_model.safetensors", "model.safetensors"
LORA = ["--lora_r", "4", "--lora_dropout", "0.1"]
DO = ["--do_train", "--do_eval"]
RUNS = ("run_glue", "run_clm", "run_summarization")
HEADS = ("SequenceClassification", "CausalLM", "Seq2SeqLM")
AUTO = {run: getattr(transformers, f"AutoModelFor{head}") for run, head in zip(RUNS, HEADS, strict=True)}
SHORT = {
    "run_glue": ["--max_seq_length", "32"],
    "run_clm": ["--block_size", "16"],
    "run_summarization": ["--max_source_length", "32", "--max_target_length", "8", "--predict_with_generate"],
}
FAMILIES = {"run_glue": ["bert", "roberta", "gpt2", "llama", "opt", "t5"], "run_clm": ["llama", "gpt2"]}
FAMILIES["run_summarization"] = ["t5", "bart"]

pytestmark = pytest.mark.long


@pytest.fixture
def load(monkeypatch):
    return lambda name: load_script(name, monkeypatch)


def text(folder: Path, name: str = "train.txt", lines: int = 120) -> str:
    words = random.Random(name)
    chosen = (" ".join(words.choices(["the", "cat", "sat", "ön", "a", "mat"], k=12)) for _ in range(lines))
    (folder / name).write_text("\n".join(chosen) + "\n", encoding="utf-8")
    return str(folder / name)


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


def data(run: str, folder: Path) -> list[str]:
    """Options that name small data, and few steps of it."""
    if run == "run_glue":
        found = ["--data_dir", glue_data(folder)]
    elif run == "run_clm":
        found = ["--train_file", text(folder)]
    else:
        found = ["--train_file", write(folder), "--validation_file", write(folder, "valid.csv")]
        found += ["--text_column", "document", "--summary_column", "gist"]
    return [*found, *STEPS, *SHORT[run]]


def base(run: str, folder: Path, load) -> str:
    """The folder of a tiny pretrained model; LLaMA's linears are large enough for four bits."""
    if run == "run_glue":
        return pretrained(folder, "bert", AUTO[run], train_wordpiece(["cat hat mat sat"], 120))
    train_byte_bpe = load(run).train_byte_bpe
    if run == "run_clm":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
        return pretrained(folder, "llama", AUTO[run], train_byte_bpe(["the cat sat on a mat\n"] * 3, 280), **sizes)
    tokenizer = train_byte_bpe(["the cat sat on a mat\n"] * 3, 280, ends_texts=True)
    return pretrained(folder, "t5", AUTO[run], tokenizer, decoder_start_token_id=0)


def ended(script, *argv: str) -> None:
    assert script.main(list(argv)) == 0


def assert_same_run(first, second, weights=WEIGHTS):
    """Equal losses at every step, and equal saved weights, bit for bit."""
    losses = [[entry["loss"] for entry in scripts.log(folder) if "loss" in entry] for folder in (first, second)]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    expected, found = (load_file(folder / weights) for folder in (first, second))
    assert expected.keys() == found.keys() and len(found) > 1
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert results(first).get("eval_loss") == results(second).get("eval_loss")


#: What a file says that the command line overrules, but for memsave.
FILES = {
    "run_glue": "memsave: exact\nmax_seq_length: 16\n",
    "run_clm": "memsave: exact\nblock_size: 8\ndataset_name: not/this\nmodel_type: gpt2\n",
    "run_summarization": json.dumps({"memsave": True, "max_target_length": 4, "dataset_name": "not/this"}),
}


@pytest.fixture(scope="module", params=RUNS)
def both(request, tmp_path_factory):
    """A script, and what its stock and its patched run leave; that in a process of its own and from a file."""
    run, folder = request.param, tmp_path_factory.mktemp("runs")
    options = ["--config_name", config(folder, FAMILIES[run][0]), *data(run, folder), *DO]
    if run != "run_clm":
        options += ["--do_predict"]
    if run == "run_summarization":
        options += ["--source_prefix", "summarize: ", "--test_file", write(folder, "test.tsv")]
    (recipe := folder / "recipe.yaml").write_text(FILES[run])
    environment = os.environ | {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPTS / f"{run}.py", "--config", recipe, *options, "--output_dir", folder / "patched"]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patches:
        ended(load_script(run, patches), *options, "--output_dir", str(folder / "stock"))
    return run, {name: folder / name for name in ("stock", "patched")}


def check_glue(out, found):
    assert found["train_samples"] == found["eval_samples"] == 16
    assert found["eval_combined_score"] == pytest.approx((found["eval_accuracy"] + found["eval_f1"]) / 2)
    saved = json.loads((out / "config.json").read_text())
    assert saved["label2id"] == {"not_equivalent": 0, "equivalent": 1}
    assert saved["vocab_size"] == len(json.loads((out / "tokenizer.json").read_text())["model"]["vocab"])
    header, *lines = (out / "predict_results_mrpc.txt").read_text().splitlines()
    assert header == "index\tprediction"
    assert [line.split("\t")[0] for line in lines] == [str(index) for index in range(16)]
    assert {line.split("\t")[1] for line in lines} <= {"0", "1"}


def check_clm(out, found):
    assert found["perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert found["train_samples"] > found["eval_samples"] > 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    written = "Cats,  ön\tmats — 猫\n"
    assert tokenizer.decode(tokenizer(written)["input_ids"]) == written
    saved = AutoConfig.from_pretrained(out)
    assert saved.model_type == "llama" and saved.vocab_size == len(tokenizer) <= 300
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert (saved.pad_token_id, saved.bos_token_id, saved.eos_token_id) == special == (0, 1, 2)


def check_summarization(out, found):
    assert {"eval_rouge1", "eval_rouge2", "eval_rougeL", "eval_gen_len", "predict_rougeL"} <= found.keys()
    assert found["train_samples"] == found["eval_samples"] == found["predict_samples"] == 12
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer("the  cat\n猫")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the  cat\n猫"
    assert ids[-1] == tokenizer.eos_token_id == 2 and tokenizer.pad_token_id == 0
    assert json.loads((out / "config.json").read_text())["decoder_start_token_id"] == 0
    assert len((out / "generated_predictions.txt").read_text(encoding="utf-8").splitlines()) == 12


def test_a_run_leaves_what_it_should_and_the_flag_changes_none_of_it(both):
    run, folders = both
    checks = {"run_glue": check_glue, "run_clm": check_clm, "run_summarization": check_summarization}
    checks[run](folders["patched"], results(folders["patched"]))
    assert_same_run(folders["stock"], folders["patched"])
    losses = [[entry for entry in scripts.log(folder) if "loss" in entry] for folder in folders.values()]
    names = [[name for entry in entries for name in entry if name.startswith("memsave/")] for entries in losses]
    totals = [[name for name in some if "freed_gib" not in name] for some in names]
    assert totals == [[], ["memsave/freed_fraction", "memsave/kept_gib"] * 2] and len(names[1]) > len(totals[1])
    name = "generated_predictions.txt" if run == "run_summarization" else "tokenizer.json"
    files = [(out / name).read_bytes() for out in folders.values()]
    assert files[0] == files[1]  # the tokenizer was trained in two processes


@pytest.mark.parametrize("lora", [[], LORA], ids=["whole", "lora"])
@pytest.mark.parametrize(("run", "family"), [(run, family) for run in RUNS for family in FAMILIES[run]])
def test_every_family_trains_alike_with_and_without_the_flag(tmp_path, load, run, family, lora, monkeypatch, capsys):
    script, stock, patched = load(run), tmp_path / "stock", tmp_path / "patched"
    models = scripts.spy_on_models(script, monkeypatch, "Seq2SeqTrainer" if run == "run_summarization" else "Trainer")
    common = data(run, tmp_path)
    argv = ["--config_name", config(tmp_path, family), *common, *DO, *lora]
    ended(script, *argv, "--output_dir", str(stock))
    ended(script, *argv, "--output_dir", str(patched), "--memsave")
    assert_same_run(stock, patched, ADAPTERS if lora else WEIGHTS)
    assert [any(map(is_patched, model.modules())) for model in models] == [False, True]
    assert results(stock).get("eval_rouge1") == results(patched).get("eval_rouge1")
    evaluated = ["--model_name_or_path", str(patched), *common, "--do_eval"]
    if run != "run_clm":  # which takes its validation lines off the training text, by the tokenizer
        flag = ["--memsave"] if lora else []
        ended(script, *evaluated, *flag, "--output_dir", str(tmp_path / "evaluated"))
        assert results(tmp_path / "evaluated")["eval_loss"] == results(patched)["eval_loss"]
    if not lora:
        return
    scripts.assert_moved(patched)
    saved = scripts.assert_stock_adapter(patched)
    if run == "run_glue":
        head = {"score", "classifier", "classification_head"} & set(saved["modules_to_save"])
        trained = load_file(patched / ADAPTERS)
        assert any(name.split(".")[2] in head and "lora" not in name for name in trained)
        assert not any("lora" in name and name.split(".")[2] in head for name in trained)
    assert script.main([*evaluated, *LORA, "--output_dir", str(tmp_path / "again")]) == 2
    assert "expected a model without adapters" in capsys.readouterr().err


@pytest.mark.parametrize(("run", "targets", "more"), [
    ("run_glue", ["query", "value"], ["--lora_dora", "--lora_alpha", "8"]), ("run_clm", ["q_proj", "v_proj"], []),
    ("run_summarization", ["q", "v"], []),
])  # fmt: skip
def test_stock_peft_loads_the_adapter_onto_the_pretrained_model(tmp_path, load, run, targets, more):
    model, out = base(run, tmp_path, load), tmp_path / "out"
    argv = ["--model_name_or_path", model, *data(run, tmp_path), *LORA, "--do_train", "--memsave", *more]
    ended(load(run), *argv, "--lora_target_modules", *targets, "--output_dir", str(out))
    saved = scripts.assert_stock_adapter(out)
    assert set(saved["target_modules"]) == set(targets)
    has_more = (8, True) if more else (16, False)
    assert (saved["r"], saved["lora_dropout"], saved["lora_alpha"], saved["use_dora"]) == (4, 0.1, *has_more)
    assert saved["base_model_name_or_path"] == model and not (out / "base_model").exists()
    loaded = PeftModel.from_pretrained(AUTO[run].from_pretrained(model), out).state_dict()
    found = {name.replace(".default", ""): tensor for name, tensor in loaded.items()}
    for name, tensor in load_file(out / ADAPTERS).items():
        key = name.replace("classifier.", "classifier.modules_to_save.")
        assert torch.equal(found[key.replace("magnitude_vector", "magnitude_vector.weight")], tensor)


@pytest.mark.parametrize("model_type", FAMILIES["run_clm"])
def test_stock_peft_loads_an_adapter_with_its_random_weights(tmp_path, load, model_type):
    script, out = load("run_clm"), tmp_path / "out"
    argv = ["--config_name", config(tmp_path, model_type), *data("run_clm", tmp_path), *DO, *LORA, "--memsave"]
    ended(script, *argv, "--output_dir", str(out))
    model = AutoModelForCausalLM.from_pretrained(scripts.assert_stock_adapter(out)["base_model_name_or_path"])
    model = PeftModel.from_pretrained(model, out).eval()
    lines = script.load_splits(script.parse(argv)[1])["validation"]
    blocks = script.pack(lines, transformers.AutoTokenizer.from_pretrained(out), 16, "validation", None)
    ids = torch.tensor(blocks["input_ids"])
    assert len(ids) == results(out)["eval_samples"]
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(results(out)["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("options", [[], ["--activation_checkpointing", "--bf16", "--lora_dora"]], ids=["", "all"])
def test_qlora_trains_alike_with_and_without_the_flag(tmp_path, load, options):
    pytest.importorskip("bitsandbytes")
    script, model = load("run_clm"), base("run_clm", tmp_path, load)
    argv = ["--model_name_or_path", model, *data("run_clm", tmp_path), *DO, *LORA, "--load_in_4bit", *options]
    stock, patched = tmp_path / "stock", tmp_path / "patched"
    ended(script, *argv, "--output_dir", str(stock))
    ended(script, *argv, "--output_dir", str(patched), "--memsave")
    assert_same_run(stock, patched, ADAPTERS)
    scripts.assert_moved(patched)
    assert scripts.assert_stock_adapter(patched)["base_model_name_or_path"] == model


def test_qlora_is_four_bits_and_patched(tmp_path, load):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    script, folder = load("run_clm"), base("run_clm", tmp_path, load)
    argv = ["--model_name_or_path", folder, "--train_file", text(tmp_path), "--use_cpu", *LORA, "--load_in_4bit"]

    def made(*flag):
        args, _, training = script.parse([*argv, *flag, "--output_dir", str(tmp_path / "out")])
        return script.load_model(args, AutoConfig.from_pretrained(folder), training).train()

    batch = {"input_ids": torch.ones(2, 32, dtype=torch.long), "labels": torch.ones(2, 32, dtype=torch.long)}
    stock, patched = made(), made("--memsave")
    linears = [module for module in patched.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(linears) == 7
    assert all(m.weight.quant_type == "nf4" and m.weight.quant_state.nested for m in linears)
    assert hf_memsave.measure_kept(patched, batch).total < 0.8 * hf_memsave.measure_kept(stock, batch).total


def test_train_only_knows_a_tied_weight_by_each_of_its_names(tmp_path, load):
    script = load("run_clm")
    argv = ["--model_type", "gpt2", "--train_only", "lm_head", "ln_f.bias", "--output_dir", "none"]
    args, *_ = script.parse([*argv, "--train_file", text(tmp_path)])
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, vocab_size=32)
    model = script.load_model(args, config, None)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["transformer.wte.weight", "transformer.ln_f.bias"]


@pytest.mark.parametrize(("run", "lora"), [("run_glue", []), ("run_clm", []), ("run_clm", LORA), (RUNS[2], LORA)])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, load, run, lora):
    script, whole, resumed = load(run), tmp_path / "whole", tmp_path / "resumed"
    argv = ["--config_name", config(tmp_path, FAMILIES[run][0]), *data(run, tmp_path), *lora, "--do_train", "--memsave"]
    argv += ["--save_steps", "1"]
    ended(script, *argv, "--output_dir", str(whole))
    ended(script, *argv, "--output_dir", str(resumed), "--resume_from_checkpoint", str(whole / "checkpoint-1"))
    assert not (resumed / "checkpoint-1").exists()
    assert_same_run(whole, resumed, ADAPTERS if lora else WEIGHTS)


@pytest.mark.parametrize(("run", "name", "rank"), [
    ("run_glue", "glue-bert-mrpc-lora", 8), ("run_clm", "clm-llama-lora", 16), (RUNS[2], "summarization-t5-lora", 16),
])  # fmt: skip
def test_the_lora_recipe_runs(tmp_path, load, run, name, rank):
    model, out = base(run, tmp_path, load), str(tmp_path / "out")
    recipe = ["--config", str(RECIPES / f"{name}.yaml"), "--model_name_or_path", model, "--output_dir", out]
    ended(load(run), *recipe, *data(run, tmp_path))
    assert scripts.assert_stock_adapter(tmp_path / "out")["r"] == rank
    assert results(tmp_path / "out")["eval_samples"] > 0
    if run == "run_clm":
        args, _, training = load(run).parse([*recipe, *STEPS])
        model = load(run).load_model(args, AutoConfig.from_pretrained(model), training)
        trained = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
        assert trained == {False: torch.bfloat16, True: torch.float32}


def test_the_recipe_from_scratch_runs_and_has_ten_million_parameters(tmp_path, load):
    words, train, out = random.Random(0), tmp_path / "train.txt", tmp_path / "out"
    train.write_text("\n".join("".join(words.choices("abcdefgh", k=8)) for _ in range(12000)))
    argv = ["--config", str(RECIPES / "clm-llama-10m-scratch.yaml"), *STEPS, *SHORT["run_clm"]]
    argv += ["--per_device_train_batch_size", "1", "--train_file", str(train), "--max_eval_samples", "1"]
    ended(load("run_clm"), *argv, "--output_dir", str(out))
    assert AutoConfig.from_pretrained(out).vocab_size == 4096
    assert 9.5e6 < sum(tensor.numel() for tensor in load_file(out / WEIGHTS).values()) < 10.5e6


@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_and_reports_its_metrics(tmp_path, load, name):
    out = tmp_path / "out"
    argv = ["--config_name", config(tmp_path, "bert"), "--data_dir", glue_data(tmp_path, name), *STEPS]
    argv += ["--config_overrides", "num_hidden_layers=2", *SHORT["run_glue"], *DO, "--do_predict"]
    ended(load("run_glue"), *argv, "--no_pad_to_max_length", "--output_dir", str(out))
    found = results(out)
    assert f"eval_{scripts.METRICS.get(name, 'accuracy')}" in found
    assert ("eval_accuracy_mm" in found) == (name == "mnli")
    assert len(list(out.glob(f"predict_results_{name}*.txt"))) == len(TASKS[name].test_splits)
    assert AutoConfig.from_pretrained(out).num_hidden_layers == 2


def test_a_task_is_found_in_glues_folder_or_is_the_folder(tmp_path, load):
    (tmp_path / "SST-2").mkdir()
    script = load("run_glue")
    for folder in (tmp_path, tmp_path / "SST-2"):
        args = script.GlueArguments(task_name="sst2", data_dir=str(folder))
        assert (args.task_name, args.data_dir) == (None, str(tmp_path / "SST-2"))
    for task, folder, words in (
        ("mrpc", tmp_path, "expected the folder of MRPC, or one with it in it"),
        ("mrpc", tmp_path / "SST-2", "expected the folder of MRPC"),
        ("mrpc", "nowhere", "--data_dir nowhere: expected the folder of MRPC"),
        ("sst-2", tmp_path, "--task_name: expected one of .*, got sst-2"),
    ):
        with pytest.raises(script.UsageError, match=words):
            script.GlueArguments(task_name=task, data_dir=str(folder))


def test_a_model_with_its_own_order_of_labels_keeps_it(tmp_path, load):
    script, own = load("run_glue"), ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"]
    AutoConfig.for_model("bert", **CONFIGS["bert"], id2label=dict(enumerate(own))).save_pretrained(tmp_path)
    found = script.load_config(script.ModelArguments(model_name_or_path=str(tmp_path)), TASKS["mnli"])
    assert found.label2id == {"entailment": 2, "neutral": 1, "contradiction": 0}
    logits = torch.eye(3).numpy()  # the model is sure of contradiction, neutral, entailment
    assert script.task_values(logits, TASKS["mnli"], found).tolist() == [2, 1, 0]


def test_blocks_are_the_text_in_order_and_never_padded(load):
    script = load("run_clm")
    tokenizer = script.train_byte_bpe(["the cat\n"], 270)
    lines = datasets.Dataset.from_dict({"text": ["the cat\n", "\n", "sat\r\n", "on a mat"]})
    ids = [i for line in lines["text"] for i in tokenizer(line)["input_ids"]]
    blocks = script.pack(lines, tokenizer, 4, "train", None)
    assert [i for block in blocks["input_ids"] for i in block] == ids[: len(ids) // 4 * 4]
    assert list(blocks["labels"]) == [[-100, *block[1:]] for block in blocks["input_ids"]]
    assert len(script.pack(lines, tokenizer, 4, "train", 2)) == 2


def test_validation_comes_from_its_file_or_from_the_first_lines(tmp_path, load):
    script, llama = load("run_clm"), config(tmp_path, "llama")

    def splits(*options):
        argv = ["--config_name", llama, "--train_file", text(tmp_path, lines=10), "--use_cpu", *options]
        return script.load_splits(script.parse(argv)[1])

    lines = Path(text(tmp_path, lines=10)).read_text(encoding="utf-8").splitlines(keepends=True)
    found = splits("--validation_split_percentage", "20")
    assert (list(found["validation"]["text"]), list(found["train"]["text"])) == (lines[:2], lines[2:])
    other = text(tmp_path, "valid.txt", 3)
    found = splits("--validation_file", other)
    assert "".join(found["validation"]["text"]) == Path(other).read_text(encoding="utf-8")
    assert list(found["train"]["text"]) == lines


def test_a_dataset_of_the_hub_gives_its_columns(tmp_path, load, monkeypatch):
    hub = datasets.DatasetDict({split: datasets.Dataset.from_list(rows(3)) for split in ("train", "validation")})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or hub)
    argv = ["--dataset_name", "some/texts", "--dataset_config_name", "en", "--use_cpu", "--text_column", "gist"]
    script = load("run_clm")
    found = script.load_splits(script.parse(["--config_name", config(tmp_path, "llama"), *argv])[1])
    assert asked == [("some/texts", "en")]
    gists = [row["gist"] for row in rows(3)]
    assert {split: list(found[split]["text"]) for split in found} == dict.fromkeys(hub, gists)
    script = load("run_summarization")
    argv += ["--config_name", config(tmp_path, "t5"), "--summary_column", "document", "--do_train"]
    assert list(script.load_splits(*script.parse(argv)[1:])["train"]["text"]) == gists
    del hub["validation"]
    with pytest.raises(script.UsageError, match="--do_eval: expected --validation_file or a dataset with a split"):
        script.load_splits(*script.parse([*argv, "--do_eval"])[1:])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_every_kind_of_file_gives_the_same_pairs(tmp_path, load, name):
    read_pairs = load("run_summarization").read_pairs
    found = read_pairs("train_file", write(tmp_path, name), ("document", "gist"))
    assert list(found["text"]) == [row["document"] for row in rows()]
    assert list(found["summary"]) == [row["gist"] for row in rows()]
    assert list(read_pairs("train_file", write(tmp_path, name), (None, None))["text"])[0] == "0"


def test_examples_are_the_prefix_and_the_text_and_as_labels_the_summary(tmp_path, load):
    script = load("run_summarization")
    argv = ["--config_name", config(tmp_path, "t5"), *data(RUNS[2], tmp_path), "--source_prefix", "Sum: ", "--do_train"]
    _, args, training = script.parse([*argv, "--max_target_length", "3", "--max_train_samples", "2"])
    tokenizer = script.train_byte_bpe(["the cat"], 270, ends_texts=True)
    args.max_source_length = 1024
    found = script.encode(script.load_splits(args, training)["train"], args, tokenizer, "train")
    assert tokenizer.batch_decode(list(found["input_ids"])) == [f"Sum: {row['document']}</s>" for row in rows(2)]
    assert [len(ids) for ids in found["labels"]] == [3, 3]
    assert all(ids[-1] == tokenizer.eos_token_id for ids in found["labels"])


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


def test_rouge_is_what_one_counts_by_hand_and_the_mean_over_examples(load):
    script = load("run_summarization")
    metric = script.evaluate.load(str(script.METRIC))
    for prediction, reference, *counts in ROUGE:
        found = metric.compute(predictions=[prediction], references=[reference])
        expected = (twice / total for twice, total in counts)
        assert found == pytest.approx(dict(zip(("rouge1", "rouge2", "rougeL"), expected, strict=True))), prediction
    tokenizer = script.train_byte_bpe(["the cat"], 270, ends_texts=True)
    ids = [tokenizer(text)["input_ids"] for text in ("the cat", "a dog", "the cat", "the cat")]
    padded = np.array([row + [-100] * (max(map(len, ids)) - len(row)) for row in ids])
    found = script.rouge(script.EvalPrediction(predictions=padded[:2], label_ids=padded[2:]), tokenizer)
    assert found == {"rouge1": 50, "rouge2": 50, "rougeL": 50, "gen_len": np.mean([len(row) for row in ids[:2]])}


@pytest.mark.parametrize("run", RUNS)
def test_every_script_explains_its_options(run, load, capsys):
    with pytest.raises(SystemExit) as end:
        load(run).main(["--help"])
    assert end.value.code == 0
    options = {"--config", "--memsave", "--checkpoint", "--offload", "--lora_target_modules"}
    assert options <= set(re.findall(r"--\w+", capsys.readouterr().out))


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps], ids=["yaml", "json"])
def test_the_command_line_overrides_the_config_file(tmp_path, load, dump):
    options = {"config_name": "here", "task_name": "mrpc", "do_train": True, "learning_rate": 1e-5, "memsave": True}
    path = tmp_path / "recipe"
    path.write_text(dump(options | {"max_seq_length": 64, "pad_to_max_length": False, "seed": None}))
    model, data_, training = load("run_glue").parse(["--config", str(path), "--max_seq_length", "16"])
    assert (model.config_name, model.memsave, data_.task_name) == ("here", "true", "mrpc")
    assert (data_.max_seq_length, data_.pad_to_max_length) == (16, False)
    assert (training.do_train, training.learning_rate, training.seed) == (True, 1e-5, 42)


def test_a_mistake_ends_the_process_with_status_2(load, monkeypatch, capsys):
    load("run_glue")
    monkeypatch.setattr(sys, "argv", ["run_glue.py", "--memsave"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / "run_glue.py"), run_name="__main__")
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("run_glue.py: error: expected exactly one of")


MISTAKES = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text(encoding="utf-8"))
#: Files that some of them name.
WRONG = {
    "empty.txt": b" \n\n", "binary.txt": b"\xff\xfe", "line.txt": b"the cat", "short.txt": b"a\nb\nc\n", "a.txt": b"x",
    "bad.json": b'{"document": "a", "gist": "b"}\n{', "list.jsonl": b"[1]\n", "binary.csv": b"\xff\xfe",
    "null.jsonl": b'{"document": "a", "gist": "b"}\n' * 2 + b'{"document": "a"}', "one.csv": b"document\na\n",
    "short.csv": b"document,gist\na\n", "empty.csv": b"document,gist\n",
}  # fmt: skip


@pytest.mark.parametrize(("run", "mistake"), [(run, mistake) for run in RUNS for mistake in MISTAKES[run]])
def test_a_mistake_is_told_in_one_line_and_trains_nothing(tmp_path, load, run, mistake, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    find_spec = importlib.util.find_spec
    without = lambda name, *given: None if name == "bitsandbytes" else find_spec(name, *given)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", without)
    for name, content in WRONG.items():
        (tmp_path / name).write_bytes(content)
    good = {"config_name": config(tmp_path, FAMILIES[run][0]), "do_train": "true"}
    good |= {
        "run_glue": lambda: {"data_dir": glue_data(tmp_path), "max_seq_length": "32"},
        "run_clm": lambda: {"train_file": text(tmp_path), "block_size": "16"},
        RUNS[2]: lambda: {"train_file": write(tmp_path), "text_column": "document", "summary_column": "gist"},
    }[run]()
    options, said = MISTAKES[run][mistake]
    scripts.assert_refused(load(run), good | options, said, capsys)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, load, capsys):
    script, model = load("run_clm"), base("run_clm", tmp_path, load)
    script.train_byte_bpe(["the cat sat on a mat " * 9], 290).save_pretrained(tmp_path / "larger")
    kept = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    argv = ["--model_name_or_path", model, "--tokenizer_name", str(tmp_path / "larger"), *data("run_clm", tmp_path)]
    assert script.main([*argv, *DO, "--output_dir", str(tmp_path / "out")]) == 2
    assert f"expected at most the model's {kept} tokens" in capsys.readouterr().err
    assert CONFIGS["llama"]["vocab_size"] > 290 and not (tmp_path / "out").exists()


# `accelerate launch` on two processes. (That engines have stock's bits is in tests/integrations/test_engines.py.)

FSDP2 = [
    "--use_fsdp", "--fsdp_version=2", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
    "--fsdp_transformer_layer_cls_to_wrap=LlamaDecoderLayer", "--fsdp_state_dict_type=FULL_STATE_DICT",
    "--fsdp_cpu_ram_efficient_loading=false",
]  # fmt: skip

#: What a thread of torch's own, still running when a process ends, says now and then, in stock runs too.
AT_EXIT = "terminate called without an active exception"


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes over gloo, on CPU")
def test_a_launched_run_trains_and_saves_the_whole_model(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=1"]
    command += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", *FSDP2, SCRIPTS / "run_clm.py"]
    command += ["--config_name", config(tmp_path, "llama"), "--config_overrides", "num_hidden_layers=2", "--do_train"]
    command += [*data("run_clm", tmp_path), "--max_steps=3", "--memsave", "--output_dir", tmp_path / "out"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0 or AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [entry for entry in scripts.log(tmp_path / "out") if "loss" in entry]
    assert len({entry["loss"] for entry in losses}) == 3 and losses[0]["memsave/freed_fraction"] > 0
    saved, built = load_file(tmp_path / "out" / WEIGHTS), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sum(tensor.numel() for tensor in saved.values()) >= built.num_parameters()
