"""docs/recipes.md: each block trains as it is printed, says once what it frees, and ends with the weights of stock."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file

from support.helpers import only_on_cpu
from support.steps import assert_same
from support.zoo import VOCAB

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
PARTS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
BLOCKS = {
    f"{title}, {number}": code
    for title, text in PARTS.items()
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL), start=1)
}
SCRIPT = "TRL: supervised fine-tuning, 2"
#: The lines that the page shows, by title.
SHOWN = {title: text.split("```text\n")[1].split("```")[0] for title, text in PARTS.items() if "```text\n" in text}
#: What patches, and stock in its place.
STOCK = {
    "memsave=True": "memsave=False", '"memsave": True': '"memsave": False', "hf_memsave.patch(model)": "None",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # what other libraries say of each other


def stocks(code):
    for ours, stock in STOCK.items():
        code = code.replace(ours, stock)
    return code


def form(line):
    """Of what is said after a first step: without its sizes."""
    return re.sub(r"\(.*?\)|[\d.]+ .iB|\d+%", "#", " ".join(line.split()))


@pytest.fixture
def given(folder_with_tokenizer, tmp_path, monkeypatch, device):
    """What the page takes for granted: names, data, and a GPU that knows bfloat16, which TRL asks for."""
    only_on_cpu(device)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    ids = torch.randint(5, VOCAB, (4, 12), generator=torch.Generator().manual_seed(0)).tolist()
    texts = {"text": ["w3 w4 w5 w6 w7 w8", "w9 w8 w7"] * 2}
    pairs = {"prompt": ["w3"] * 4, "chosen": ["w4 w5"] * 4, "rejected": ["w6 w7"] * 4}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts["text"]))
    monkeypatch.setattr("sys.argv", [
        "sft.py", "--config", str(ROOT / "configs" / "trl" / "sft-lora.yaml"), "--dataset_name", "data",
        "--model_name_or_path", folder_with_tokenizer, "--gradient_accumulation_steps", "1", "--output_dir", "out",
    ])  # fmt: skip
    return {
        "__name__": "__main__", "name": folder_with_tokenizer,
        "dataset": datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}).with_format("torch"),
        **{name: datasets.Dataset.from_dict(data) for name, data in (("texts", texts), ("preferences", pairs))},
        "prompts": datasets.Dataset.from_dict({"prompt": ["w3 w4", "w5 w6"] * 2}),
    }  # fmt: skip


def run(code, given):
    """What a block has trained, as it ends."""
    torch.manual_seed(0)
    names = dict(given)
    exec(compile(code, "recipe", "exec"), names)
    if "trainer" not in names and "model" not in names:
        return load_file("out/adapter_model.safetensors"), None
    model = names["trainer"].model if "trainer" in names else names["model"]
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}, names.get("trainer")


@pytest.mark.long
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_trains_as_stock_does_and_says_what_it_frees(name, given, caplog, monkeypatch):
    code = BLOCKS[name]
    if "import lightning" in code:
        pytest.importorskip("lightning")
    assert len(code.splitlines()) <= 22 and "memsave" in code
    if name == SCRIPT:
        code_of_stock, options = code, ["--model_init_kwargs", '{"memsave": false}']
    else:
        code_of_stock, options = stocks(code), []
        assert code_of_stock != code
    with caplog.at_level("INFO", "hf_memsave"):
        ours, trainer = run(code, given)
    monkeypatch.setattr("sys.argv", [*sys.argv, *options])
    stock, _ = run(code_of_stock, given)
    assert_same(ours, stock)
    start = {0.0, *(p.sum().item() for p in load_file(f"{given['name']}/model.safetensors").values())}
    assert [name for name, p in ours.items() if "lora_A" not in name and p.sum().item() not in start]
    (said,) = (r.getMessage() for r in caplog.records if "the first step keeps" in r.getMessage())
    assert form(said) == form(SHOWN.get(name.rpartition(",")[0], SHOWN["Trainer"]))
    if "memsave=True)\ntrainer" in code:
        losses = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert losses and all(entry["memsave/freed_fraction"] > 0.1 for entry in losses)


#: Two processes on CPU: all of Accelerate but what tells it which device and backend there are.
ON_CPU = """
import accelerate.state, datasets, sys, torch
accelerate.state.PartialState._prepare_backend = lambda *_, **__: ("gloo", accelerate.state.DistributedType.MULTI_GPU)
found = []
for code in (sys.argv[2], sys.argv[3]):
    ids = torch.arange(5, 53).view(4, 12).tolist()
    dataset = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}).with_format("torch")
    names = {"name": sys.argv[1], "dataset": dataset}
    exec(code, names)
    plugin = names["accelerator"].state.fsdp_plugin
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward
    assert type(names["model"]).__name__.startswith("FSDP")
    found.append([p.to_local() for p in names["model"].parameters()])
assert all(map(torch.equal, *found)) and names["accelerator"].num_processes == 2 and names["loss"] > 0
print("equal", flush=True)
"""


@pytest.mark.long
def test_the_config_for_fsdp2_trains_the_recipe_for_accelerate_as_stock(folder_with_tokenizer, tmp_path, device):
    only_on_cpu(device)
    script, code = tmp_path / "train.py", BLOCKS["Accelerate, 1"]
    script.write_text(ON_CPU)
    command = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "configs" / "accelerate" / "fsdp2.yaml")]
    environment = os.environ | {"ACCELERATE_TORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(script), folder_with_tokenizer, code, stocks(code)], env=environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("equal") == 2, done.stderr[-3000:]
    assert done.stderr.count("the first step keeps") == 1
