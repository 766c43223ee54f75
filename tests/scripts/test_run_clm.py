"""``scripts/run_clm.py``: text files, random and pretrained weights, LoRA and QLoRA, stock and patched, no network."""

import json
import math
import random
from pathlib import Path

import datasets
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_memsave
from support.script_helpers import (
    CONFIGS,
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

DO = ["--do_train", "--do_eval"]
STEPS = [*STEPS, "--block_size", "16"]
ADAPTERS = "adapter_model.safetensors"

pytestmark = pytest.mark.long


@pytest.fixture
def script(monkeypatch):
    return load_script("run_clm", monkeypatch)


@pytest.fixture
def llama(tmp_path):
    return config(tmp_path, "llama")


def text(folder: Path, name: str = "train.txt", lines: int = 120) -> str:
    words = random.Random(name)
    chosen = (" ".join(words.choices(["the", "cat", "sat", "ön", "a", "mat"], k=12)) for _ in range(lines))
    (folder / name).write_text("\n".join(chosen) + "\n", encoding="utf-8")
    return str(folder / name)


@pytest.fixture
def base(tmp_path, script):
    """A tiny LLaMA with weights and a tokenizer, whose linears are large enough for four bits."""
    tokenizer = script.train_byte_bpe(["the cat sat on a mat\n"] * 3, 280)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    return pretrained(tmp_path, "llama", AutoModelForCausalLM, tokenizer, **sizes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    options = ["--config_name", config(folder, "llama"), "--train_file", text(folder), *STEPS, *DO]
    recipe = folder / "recipe.yaml"
    recipe.write_text("memsave: exact\nblock_size: 8\ndataset_name: not/this\nmodel_type: gpt2\n")
    return run_both("run_clm", folder, options, recipe)


def test_a_run_leaves_a_model_its_tokenizer_and_its_perplexity(folders):
    out = folders["patched"]
    found = results(out)
    assert found["perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert found["train_samples"] > found["eval_samples"] > 0
    tokenizer = AutoTokenizer.from_pretrained(out)
    written = "Cats,  ön\tmats — 猫\n"
    assert tokenizer.decode(tokenizer(written)["input_ids"]) == written
    saved = AutoConfig.from_pretrained(out)
    assert saved.model_type == "llama" and saved.vocab_size == len(tokenizer) <= 300
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert (saved.pad_token_id, saved.bos_token_id, saved.eos_token_id) == special == (0, 1, 2)


def test_the_flag_changes_no_loss_no_parameter_and_no_token(folders):
    assert_same_run(folders["stock"], folders["patched"])
    assert_memory_logged(folders["stock"], folders["patched"])
    vocabularies = [(out / "tokenizer.json").read_text() for out in folders.values()]
    assert vocabularies[0] == vocabularies[1]  # trained in two processes


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("lora", [[], LORA], ids=["whole", "lora"])
def test_every_family_trains_alike_with_and_without_the_flag(tmp_path, script, model_type, lora, monkeypatch):
    models = spy_on_models(script, monkeypatch)
    argv = ["--config_name", config(tmp_path, model_type), "--train_file", text(tmp_path), *STEPS, *DO, *lora]
    stock, patched = tmp_path / "stock", tmp_path / "patched"
    assert script.main([*argv, "--output_dir", str(stock)]) == 0
    assert script.main([*argv, "--output_dir", str(patched), "--memsave"]) == 0
    assert_same_run(stock, patched, ADAPTERS if lora else "model.safetensors")
    assert_patched(*models)
    if lora:
        assert_moved(patched)
        assert_stock_adapter(patched)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_stock_peft_loads_an_adapter_with_its_random_weights(tmp_path, script, model_type):
    argv = [
        "--config_name",
        config(tmp_path, model_type),
        "--train_file",
        text(tmp_path),
        *STEPS,
        *DO,
        *LORA,
        "--memsave",
    ]
    out = tmp_path / "out"
    assert script.main([*argv, "--output_dir", str(out)]) == 0
    base = assert_stock_adapter(out)["base_model_name_or_path"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out).eval()
    lines = script.load_splits(script.parse(argv)[1])["validation"]
    blocks = script.pack(lines, AutoTokenizer.from_pretrained(out), 16, "validation", None)
    ids = torch.tensor(blocks["input_ids"])
    assert len(ids) == results(out)["eval_samples"]
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(results(out)["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("options", [[], ["--gradient_checkpointing", "--bf16", "--lora_dora"]], ids=["", "all"])
def test_qlora_trains_alike_with_and_without_the_flag(tmp_path, script, base, options):
    pytest.importorskip("bitsandbytes")
    argv = ["--model_name_or_path", base, "--train_file", text(tmp_path), *STEPS, *DO, *LORA, "--load_in_4bit"]
    stock, patched = tmp_path / "stock", tmp_path / "patched"
    assert script.main([*argv, *options, "--output_dir", str(stock)]) == 0
    assert script.main([*argv, *options, "--output_dir", str(patched), "--memsave"]) == 0
    assert_same_run(stock, patched, ADAPTERS)
    assert_moved(patched)
    assert assert_stock_adapter(patched)["base_model_name_or_path"] == base


def test_qlora_is_four_bits_and_patched(tmp_path, script, base):
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def load(*flag):
        argv = ["--model_name_or_path", base, "--train_file", text(tmp_path), "--use_cpu", *LORA, "--load_in_4bit"]
        args, _, training = script.parse([*argv, *flag, "--output_dir", str(tmp_path / "out")])
        return script.load_model(args, AutoConfig.from_pretrained(base), training).train()

    batch = {"input_ids": torch.ones(2, 32, dtype=torch.long), "labels": torch.ones(2, 32, dtype=torch.long)}
    stock, patched = load(), load("--memsave")
    linears = [module for module in patched.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(linears) == 7
    assert all(m.weight.quant_type == "nf4" and m.weight.quant_state.nested for m in linears)
    assert hf_memsave.measure_kept(patched, batch).total < 0.8 * hf_memsave.measure_kept(stock, batch).total


@pytest.mark.parametrize("lora", [[], LORA], ids=["whole", "lora"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, script, llama, lora):
    argv = ["--config_name", llama, "--train_file", text(tmp_path), *STEPS, *lora, "--do_train", "--memsave"]
    argv += ["--save_steps", "1"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert script.main([*argv, "--output_dir", str(whole)]) == 0
    halfway = ["--resume_from_checkpoint", str(whole / "checkpoint-1")]
    assert script.main([*argv, "--output_dir", str(resumed), *halfway]) == 0
    assert not (resumed / "checkpoint-1").exists()
    assert_same_run(whole, resumed, ADAPTERS if lora else "model.safetensors")


def test_blocks_are_the_text_in_order_and_never_padded(script):
    tokenizer = script.train_byte_bpe(["the cat\n"], 270)
    lines = datasets.Dataset.from_dict({"text": ["the cat\n", "\n", "sat\r\n", "on a mat"]})
    ids = [i for line in lines["text"] for i in tokenizer(line)["input_ids"]]
    blocks = script.pack(lines, tokenizer, 4, "train", None)
    assert [i for block in blocks["input_ids"] for i in block] == ids[: len(ids) // 4 * 4]
    assert list(blocks["labels"]) == [[-100, *block[1:]] for block in blocks["input_ids"]]
    assert len(script.pack(lines, tokenizer, 4, "train", 2)) == 2


def test_validation_comes_from_its_file_or_from_the_first_lines(tmp_path, script, llama):
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


def test_a_dataset_of_the_hub_gives_its_column(script, llama, monkeypatch):
    rows = {"title": ["a", "b"], "body": ["the cat", "a mat"]}
    hub = datasets.DatasetDict({split: datasets.Dataset.from_dict(rows) for split in ("train", "validation")})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or hub)
    argv = ["--config_name", llama, "--dataset_name", "some/texts", "--dataset_config_name", "en", "--use_cpu"]
    found = script.load_splits(script.parse([*argv, "--text_column", "body"])[1])
    assert asked == [("some/texts", "en")]
    assert {split: list(found[split]["text"]) for split in found} == dict.fromkeys(hub, rows["body"])


def test_the_recipe_from_scratch_runs_and_has_ten_million_parameters(tmp_path, script):
    recipe = ["--config", str(RECIPES / "clm-llama-10m-scratch.yaml")]
    words = random.Random(0)
    train = tmp_path / "train.txt"
    train.write_text("\n".join("".join(words.choices("abcdefgh", k=8)) for _ in range(12000)))
    argv = [
        *recipe,
        *STEPS,
        "--per_device_train_batch_size",
        "1",
        "--train_file",
        str(train),
        "--max_eval_samples",
        "1",
    ]
    assert script.main([*argv, "--output_dir", str(tmp_path / "out")]) == 0
    assert AutoConfig.from_pretrained(tmp_path / "out").vocab_size == 4096
    count = sum(tensor.numel() for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    assert 9.5e6 < count < 10.5e6


def test_the_lora_recipe_runs(tmp_path, script, base):
    recipe = ["--config", str(RECIPES / "clm-llama-lora.yaml"), "--model_name_or_path", base, *STEPS]
    assert script.main([*recipe, "--train_file", text(tmp_path), "--output_dir", str(tmp_path / "out")]) == 0
    assert assert_stock_adapter(tmp_path / "out")["r"] == 16
    args, _, training = script.parse([*recipe, "--output_dir", str(tmp_path / "out")])
    model = script.load_model(args, AutoConfig.from_pretrained(base), training)
    trained = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert trained == {False: torch.bfloat16, True: torch.float32}


# Each mistake: the options that differ from a good run (None: left out), and what the message must say.
PRETRAINED = {"config_name": None, "model_name_or_path": "nowhere"}
MISTAKES = {
    "no data": ({"train_file": None}, "exactly one of --train_file and --dataset_name, got none"),
    "two data": ({"dataset_name": "x"}, "exactly one of .*, got --train_file and --dataset_name"),
    "no such file": ({"train_file": "no.txt"}, "--train_file no.txt: expected a plain text file, found no such file"),
    "no such validation": ({"validation_file": "no.txt"}, "--validation_file no.txt: expected .*, found no such file"),
    "validation alone": (
        {"train_file": None, "dataset_name": "x", "validation_file": "no.txt"},
        "--validation_file: expected --train_file beside it",
    ),
    "a column of a file": ({"text_column": "x"}, "--text_column: expected --dataset_name beside it, got none"),
    "no such dataset": ({"train_file": None, "dataset_name": "no/such"}, "--dataset_name no/such: expected to find it"),
    "empty": ({"train_file": "empty.txt"}, "--train_file empty.txt: expected some text, got none"),
    "binary": ({"train_file": "binary.txt"}, "--train_file binary.txt: expected text in UTF-8, got invalid start byte"),
    "one line": ({"train_file": "line.txt"}, "expected lines to spare for evaluation, got 1 in all"),
    "short": ({"train_file": "short.txt"}, r"text: expected at least --block_size 16 tokens, got \d+\. Lower it"),
    "percentage": ({"validation_split_percentage": "100"}, "expected more than 0 and less than 100, got 100.0. Try 5"),
    "no tokens": ({"block_size": "0"}, "--block_size: expected a positive number, got 0"),
    "long": ({"block_size": "64"}, "--block_size: expected at most 32 for this model, got 64. Lower it"),
    "few tokens": ({"config_overrides": "vocab_size=100"}, "vocab_size: expected at least 259, .* got 100"),
    "nothing to do": ({"do_train": None}, "at least one of --do_train and --do_eval, got none"),
    "predict": ({"do_predict": "true"}, "expected only --do_train and --do_eval, got --do_predict. Remove it"),
    "no head": ({"config_name": None, "model_type": "t5"}, "expected a model with a causal .* got 't5'"),
    "no such model": (PRETRAINED, "configuration nowhere: "),
    "random bits": ({"load_in_4bit": "true"}, "--load_in_4bit: expected --model_name_or_path beside it, got none"),
    "trained bits": (PRETRAINED | {"load_in_4bit": "true"}, "--load_in_4bit: expected --lora_r beside it, got none"),
    "no bitsandbytes": (
        PRETRAINED | {"load_in_4bit": "true", "lora_r": "4"},
        "--load_in_4bit: expected bitsandbytes to be installed, found none. Run: pip install",
    ),
    "unknown target": ({"lora_r": "4", "lora_target_modules": "query"}, "got 'query'. Choose from .*q_proj"),
    "no such checkpoint": ({"resume_from_checkpoint": "true"}, "expected a checkpoint in out, found none"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line_and_trains_nothing(tmp_path, script, llama, mistake, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else name)
    files = {"empty.txt": b" \n\n", "binary.txt": b"\xff\xfe", "line.txt": b"the cat", "short.txt": b"a\nb\nc\n"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    options = {"config_name": llama, "train_file": text(tmp_path), "do_train": "true", "block_size": "16"}
    different, message = MISTAKES[mistake]
    assert_refused(script, options | different, message, capsys)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, script, base, capsys):
    script.train_byte_bpe(["the cat sat on a mat " * 9], 290).save_pretrained(tmp_path / "larger")
    kept = json.loads((Path(base) / "config.json").read_text())["vocab_size"]
    argv = ["--model_name_or_path", base, "--tokenizer_name", str(tmp_path / "larger"), "--train_file", text(tmp_path)]
    assert script.main([*argv, *STEPS, *DO, "--output_dir", str(tmp_path / "out")]) == 2
    assert f"expected at most the model's {kept} tokens" in capsys.readouterr().err
    assert CONFIGS["llama"]["vocab_size"] > 290 and not (tmp_path / "out").exists()
