"""What a command cannot do is one line on stderr with a remedy in options, exit status 2, and nothing on stdout."""

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_memsave.cli import main
from hf_memsave.config import names
from hf_memsave.errors import MeasureError
from hf_memsave.measure.estimate import estimate
from support.helpers import on_stand_in

TINY = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
IDS = torch.arange(12).reshape(2, 6) + 3
NAMED, PADDED = "Expected tensors by name", "padded to one length"
CONFIGS = {
    "bert": {"model_type": "bert", **TINY},
    "gpt2": {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64},
    "roberta": {"model_type": "roberta", **TINY, "max_position_embeddings": 18},
    "odd": {"model_type": "bert", "hidden_size": 30, "num_attention_heads": 4}, "quux": {"model_type": "quux"},
    "contradicting": {"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4},
    "broken": {"model_type": "bert", **TINY},
    "eye": {"model_type": "clip_vision_model", **TINY, "image_size": 32, "patch_size": 16},
}  # fmt: skip
LORA = {"base_model_name_or_path": "lora-base", "peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
ADAPTERS = {
    "lora": LORA,
    "ia3": {**LORA, "peft_type": "IA3"},
    "regex": {**LORA, "target_modules": ".*q_proj"},
    "varied": {**LORA, "rank_pattern": {"0.q_proj": 2}},
    "embedding": {**LORA, "modules_to_save": ["score", "embed_tokens"]},
    "biased": {**LORA, "bias": "all"},
    "baseless": {**LORA, "base_model_name_or_path": None},
}
#: Batch file -> what to write, and the error it gives.
BATCHES = {
    "pickled.pt": (lambda path: torch.save({"input_ids": object()}, path), NAMED),
    "list.pt": (lambda path: torch.save([IDS], path), NAMED + ', such as {"input_ids": ..., "labels": ...}, got list.'),
    "mixed.pt": (lambda path: torch.save({"input_ids": IDS, "text": "hello"}, path), "'text': 'str'"),
    "empty.pt": (Path.touch, NAMED),
    "unlabelled.pt": (lambda path: torch.save({"input_ids": IDS}, path), "expected a loss in the output of Bert"),
    "other.pt": (lambda path: torch.save({"pixels": IDS}, path), "cannot run a stock step on pixels [2, 6]"),
    "far.pt": (lambda path: torch.save({"input_ids": IDS + 1000}, path), "Expected a batch that the model trains on"),
    "foreign.pt": (lambda path: torch.save({"input_ids": IDS, "batch_size": IDS}, path), "of input_ids, batch_size. "),
    "broken.json": (lambda path: path.write_text("{"), PADDED),
    "ragged.json": (lambda path: path.write_text('{"input_ids": [[1, 2], [3]]}'), PADDED),
    "words.json": (lambda path: path.write_text('{"input_ids": [["a", "b"]]}'), PADDED),
    "empty.jsonl": (Path.touch, PADDED),
    "uneven.jsonl": (lambda path: path.write_text('{"input_ids": [1], "labels": 0}\n{"input_ids": [1]}\n'), PADDED),
    "broken.safetensors": (lambda path: path.write_bytes(b"nonsense"), PADDED),
}
#: Command -> what its error says, besides what it expected.
ERRORS = {
    "report broken.json": "not a valid JSON file", "doctor other.json": "Should have a `model_type` key",
    "doctor odd": "cannot build a 'bert' model: .*Correct it",
    "report funnel --layers 2": "cannot change the depth.*Leave the number of layers out",
    "estimate contradicting --seq-len 16": "is not a multiple of",
    "estimate quux --seq-len 16": "does not recognize this architecture",
    "verify speech_to_text": "cannot make 'input_features'.*takes input_features, .*, labels. Give one with --batch",
    "report resnet --batch other.pt": "on pixels .*: its forward takes pixel_values, labels.*give a batch with --batch",
    "verify eye": "expected a loss in the output of CLIPVisionModel, got last_hidden_state.*Use a model with a head",
    "verify resnet --layers 2": "no field 'num_hidden_layers'",
    "verify broken": "Expected a model that from_pretrained loads", "report gpt2 --seq-len 100": "Lower --seq-len",
    "report gpt2 --batch-size 1000000000": "Lower --batch-size",
    "report gpt2 --lora targets=query": r"'query'.*Name modules of GPT2LMHeadModel with targets=a\+b",
    "verify bert --seq-len 1000": "expected at most 512 tokens", "verify bert --device cuda": "Use --device cpu",
    **{f"verify bert --batch {name}": re.escape(message) for name, (_, message) in BATCHES.items()},
    "auto bert --memory 1KiB": "with everything converted",
    "auto bert --memory 1GiB --seq-len 1000": "expected at most 512 tokens, the rows of .*, got 1,000. Lower --seq-len",
    "plan gpt2 --budget 1GiB --seq-len 65": "expected at most 64 tokens",
    "report roberta --seq-len 17": "expected at most 16 tokens",
    "estimate bert --seq-len 5000": "expected at most 512 tokens, .* Lower --seq-len",
    "estimate bert --check": "expected a CUDA device", "plan bert --budget 1MiB --seq-len 16": "nothing fits",
    "report xlnet --checkpoint gate --dtype fp32": "XLNetLMHeadModel.* Leave --checkpoint out",
}  # fmt: skip
#: Command -> what is said of its options, which are wrong in themselves, before any library is loaded.
WRONG = {
    "nope": "invalid choice", "report": "the following arguments are required",
    "report bert --batch-size 0": "expected a whole number from 1, got '0'",
    "report bert --tiles 0": "expected a whole number from 1, got '0'",
    "demo --steps x": "expected a whole number from 1, got 'x'",
    "auto bert --fast --smart": "not allowed with argument",
    "estimate bert --memroy 24GiB": "unrecognized arguments: --memroy 24GiB. Did you mean '--memory'",
    "report bert --batchsize 2": "--batchsize 2. Did you mean '--batch-size'", "report bert 2": "arguments: 2. Leave",
    "report bert --batch_size 0": "expected a whole number from 1, got '0'",
    "verify --model bert": "The model is the first argument: memsave verify bert",
    "demo --model bert": "unrecognized arguments: --model bert. Leave them out",
    "report nosuch --json=no_such/a_b.json": "no_such/a_b.json: expected a file in a folder that exists",
    "estimate bert --dtype fp8": "invalid choice: 'fp8'", "verify bert --checkpoint mlp": "invalid choice: 'mlp'",
    "report missing.json": "no such file or folder", "verify ./missing/folder": "no such file or folder",
    "doctor .": "expected a config.json in this folder",
    "report bert --memsave nope": "unknown preset 'nope'.* Leave --memsave out for the exact default",
    "doctor --memsave empty.yaml": "empty.yaml is empty.* Leave --memsave out for the exact default",
    "verify bert --memsave budget.yaml": "Use memsave plan --budget 24GiB",
    "verify bert --memsave budget.yaml --checkpoint gate": "Leave out either the budget or those",
    "report bert --autocast bf16 --dtype bf16": "Leave one out",
    "report nosuch --json .": "expected a file in a folder that exists",  # before the model is looked for
    "estimate nosuch --html a.txt": "expected a name that ends in .html or .htm",
    "estimate nosuch --html none/a.html": "Create the folder",
    "verify bert --batch list.pt --seq-len 4": "Leave one out",
    "verify bert --batch missing.pt": "no such file. Expected tensors by name",
    "auto bert": "expected --memory, such as --memory 16GiB",
    "auto bert --memory 1GiB --out missing/plan.yaml": "in a folder that exists",
    "auto bert --memory 1GiB --max-batch 4": "Add --fast",
    "estimate bert --memory 24": "expected bytes, or a text.* Write it with a unit",
    "estimate bert --memory 24X": "Write it with a unit", "estimate bert --quantized nf4": "Add --lora r=8",
    "estimate bert --check --devices 2": "Leave one out", "plan bert --budget much": "Write it with a unit",
    "report bert --lora rank=4": "expected r=...,alpha=...,dropout=...,targets=...,dtype=...,dora=..., each once",
    "report bert --lora r=4,r=8": "each once, got 'r=8'",
    "report bert --lora dora=yes": "expected dora=true or dora=false, got 'yes'",
    "report bert --lora targets=a+": r"each once, got 'targets=a\+'",
    "report bert --lora r=four": "expected a number for r, got 'four'",
    "report bert --lora dropout=1": r"dropout in \[0, 1\), dtype fp32 or model, got r 8, alpha 16, dropout 1.0",
    "report some/model": "expected a model in the cache or an answer from http://127.0.0.1:.*, got neither",
    "plan llama-3-9b --budget 24GiB": "llama-3-9b: expected a model in the cache .* Did you mean 'llama-3-8b'",
    "report lora": "lora-base: expected a model in the cache or an answer", "doctor lora": "found none",
    "report lora --lora r=4": "got the adapter lora. Leave it out, or name its base",
    "estimate ia3": "expected LoRA adapters, .*got {'peft_type': 'IA3'}. Name the base model, with --lora r=8",
    "estimate regex": r"alike in all modules of a list of names, got '\.\*q_proj'",
    "plan varied --budget 1GiB": "got {'rank_pattern': {'0.q_proj': 2}}",
    "report embedding": "got {'modules_to_save': \\['embed_tokens'\\]}", "estimate biased": "got {'bias': 'all'}",
    "verify baseless": "expected base_model_name_or_path, got none. Add",
}  # fmt: skip
PYTHON = r"memsave=|MemSaveConfig\(|(?<!-)\b(seq_len|batch_size)\b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    for name, config in (CONFIGS | ADAPTERS).items():
        (folder / name).mkdir()
        file = "adapter_config.json" if name in ADAPTERS else "config.json"
        (folder / name / file).write_text(json.dumps(config))
    (folder / "broken" / "model.safetensors").write_bytes(b"nonsense")
    for name, (write, _) in BATCHES.items():
        write(folder / name)
    (folder / "other.json").write_text('{"hidden_size": 3}')
    (folder / "empty.yaml").write_text("# nothing yet")
    (folder / "budget.yaml").write_text("budget: 24GiB")
    return folder


@on_stand_in
@pytest.mark.parametrize("line", ERRORS)
def test_an_error_is_one_line_with_a_remedy_in_options(line, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(shlex.split(line)) == 2
    output, error = capsys.readouterr()
    output = re.sub(r"^[\d.,]+ M parameters: weights, .* of main memory .*\n", "", output)  # told before it is taken
    assert output.strip() == "" and error.startswith(f"memsave {line.split()[0]}: error: ")
    assert error.count("\n") == 1 and re.search(ERRORS[line], error)
    assert not re.search(PYTHON, error) or "foreign" in line


def test_a_wrong_argument_is_told_before_any_library_is_loaded(folder, tmp_path):
    """Nor does it take seconds that the hub cannot be reached: here a server that never answers."""
    code = """
import sys, time
from hf_memsave.cli import main
from hf_memsave.config import names
names._SECONDS = 0.1
for line in sys.argv[1:]:
    try:
        assert main(line.split()) == 2, line
    except SystemExit as end:
        assert end.code == 2, line
print("loaded", {"torch", "transformers", "rich"} & set(sys.modules), time.process_time())
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-c", code, *WRONG]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, **where})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loaded set() ") and float(done.stdout.split()[-1]) < 2  # all of them
    told = [line for line in done.stderr.splitlines() if not line.startswith(("usage: ", " "))]
    for (line, message), error in zip(WRONG.items(), told, strict=True):
        assert re.search(rf"^memsave( {line.split()[0]})?: error: .*{message}", error), error
        assert not re.search(PYTHON, error)


@pytest.mark.parametrize("found", [None, "the file"])
def test_a_model_in_the_cache_asks_for_no_answer_of_the_hub(found, monkeypatch):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: found)
    monkeypatch.setattr(names, "hub_answers", lambda: False)
    with pytest.raises(MeasureError, match="expected a model in") if found is None else contextlib.nullcontext():
        names.refuse_unreachable("some/model")


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
#: Command -> the option that names a file which it writes, when its work is done.
WRITES = {
    "report bert": "--json", "verify bert": "--json", "estimate bert --seq-len 8": "--html",
    "plan bert --budget BUDGET --seq-len 512": "--out", "auto bert --memory 24MiB": "--out",
}  # fmt: skip


@pytest.mark.long
@FULL
@on_stand_in
@pytest.mark.parametrize("line", WRITES)
def test_what_cannot_be_written_ends_with_one_line_and_status_2(line, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    os.path.exists("full.html") or os.symlink("/dev/full", "full.html")
    least = estimate(str(folder / "bert"), batch_size=2, seq_len=512).patched.needed
    assert main([*line.replace("BUDGET", str(least)).split(), WRITES[line], "full.html"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"memsave {line.split()[0]}: error: expected to read or write full.html, got: No space")


@pytest.mark.long
@FULL
@pytest.mark.parametrize("end", ["/dev/full", "a closed pipe"])
def test_standard_output_that_takes_nothing_is_told_with_status_2(end):
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") if end == "/dev/full" else os.fdopen(writer, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "hf_memsave.cli", "doctor"], stdout=out, stderr=subprocess.PIPE, text=True
        )
    (line,) = [text for text in done.stderr.splitlines() if not text.startswith("Failed to load")]
    assert done.returncode == 2 and line.startswith("memsave doctor: error: expected to read or write standard output")


def test_a_folder_that_is_read_only_is_told_before_the_model_is_looked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # the superuser may write everywhere
    assert main(["report", "nosuch", "--json", str(tmp_path / "kept.json")]) == 2
    assert "expected a file in a folder that exists and can be written to" in capsys.readouterr().err
