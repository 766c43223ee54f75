"""``accelerate launch`` on two processes: a script with ``--memsave`` saves the weights that a stock run saves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.helpers import MATRIX

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_clm.py"
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "vocab_size": 300,
}  # fmt: skip
ENGINES = {
    "ddp": [],
    "fsdp2": [
        "--use_fsdp", "--fsdp_version=2", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
        "--fsdp_transformer_layer_cls_to_wrap=LlamaDecoderLayer", "--fsdp_state_dict_type=FULL_STATE_DICT",
        "--fsdp_cpu_ram_efficient_loading=false",
    ],
}  # fmt: skip

pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="two processes over gloo, on CPU")]

#: What a thread of torch's own, still running when a process ends, says now and then, in stock runs too.
AT_EXIT = "terminate called without an active exception"


def launch(folder, engine, *flags):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text("".join(f"Line {n} of a short text, {n * n}.\n" for n in range(400)))
    out = folder / "out"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=1"]
    command += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", *ENGINES[engine], SCRIPT]
    command += ["--config_name", folder, "--train_file", folder / "text.txt", "--output_dir", out, "--block_size=32"]
    command += ["--do_train", "--max_steps=3", "--logging_steps=1", "--per_device_train_batch_size=2", "--use_cpu"]
    command += ["--report_to=none", "--dataloader_pin_memory=false", *flags]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0 or AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry], (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("engine", [pytest.param(e, marks=MATRIX) if e == "ddp" else e for e in ENGINES])
def test_a_launched_run_equals_stocks(engine, tmp_path):
    runs = []
    for number, flags in enumerate(([], ["--memsave"])):
        (folder := tmp_path / str(number)).mkdir()
        runs.append(launch(folder, engine, *flags))
    assert len(set(runs[0][0])) == 3
    assert runs[0] == runs[1]
