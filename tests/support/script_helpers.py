"""What the tests of ``scripts/run_*.py`` share: tiny models on disk, runs in this process and in their own, results."""

import importlib
import json
import random
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from glue_data import TASKS

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = REPO / "scripts"
BENCH = SCRIPTS / "bench"

SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
CONFIGS = {
    "bert": SIZES | {"vocab_size": 120, "max_position_embeddings": 32},
    "roberta": SIZES | {"vocab_size": 120, "max_position_embeddings": 34, "type_vocab_size": 1},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 300},
    "llama": SIZES | {"vocab_size": 300, "num_key_value_heads": 1, "max_position_embeddings": 32},
    "opt": {"hidden_size": 16, "word_embed_proj_dim": 8, "ffn_dim": 32, "num_hidden_layers": 1, "vocab_size": 300}
    | {"num_attention_heads": 2, "max_position_embeddings": 32, "do_layer_norm_before": False},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 300},
    "bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 300, "max_position_embeddings": 32}
    | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
}
STEPS = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--use_cpu", "--report_to", "none"]
STEPS += ["--dataloader_pin_memory", "false", "--logging_steps", "1", "--disable_tqdm", "true"]
#: The figure that every run of a GLUE task tells, where that is not accuracy.
METRICS = {"cola": "matthews_correlation", "mrpc": "f1", "qqp": "f1", "stsb": "pearson"}


def load_script(name, monkeypatch):
    for folder in (BENCH, SCRIPTS):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    return importlib.import_module(name)


def config(folder, model_type):
    path = folder / model_type
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": model_type} | CONFIGS[model_type]))
    return str(path)


def glue_data(folder, name="mrpc"):
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


def pretrained(folder, model_type, auto, tokenizer, **changes):
    path = folder / f"pretrained-{model_type}"
    settings = CONFIGS[model_type] | {"vocab_size": len(tokenizer), "pad_token_id": 0} | changes
    torch.manual_seed(7)
    auto.from_config(AutoConfig.for_model(model_type, **settings)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def spy_on_models(script, monkeypatch, trainer="Trainer"):
    """Grows by every model that the script gives to its trainer."""
    models, stock = [], getattr(script, trainer)
    monkeypatch.setattr(script, trainer, lambda **options: models.append(options["model"]) or stock(**options))
    return models


def results(folder):
    return json.loads((folder / "all_results.json").read_text())


def log(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def assert_stock_adapter(folder):
    """Nothing of ours is in what was saved; returns the adapter's configuration."""
    saved = json.loads((folder / "adapter_config.json").read_text())
    assert saved["peft_type"] == "LORA" and "memsave" not in saved
    assert not (folder / "model.safetensors").exists()
    return saved


def assert_refused(script, options, message, capsys):
    """The run ends with status 2 and one line that matches ``message``, before there is an output folder."""
    argv = [f"--{name}={value}" for name, value in options.items() if value is not None]
    assert script.main([*argv, "--output_dir=out"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{script.__name__}.py: error: ") and "Traceback" not in line
    assert re.search(message, line), line
    assert not Path("out").exists()


def assert_moved(folder):
    """Training changed the adapters: lora_B starts at zero."""
    adapters = load_file(folder / "adapter_model.safetensors")
    assert any("lora_B" in name and tensor.any() for name, tensor in adapters.items())
