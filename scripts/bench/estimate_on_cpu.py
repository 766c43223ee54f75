"""What an estimate says of a step on this CPU, beside the same step counted: kept bytes, and the peak.

    python scripts/bench/estimate_on_cpu.py [--family NAME ...] [--tuning NAME ...] [--out [DIR]]

Every family x full, LoRA and QLoRA x stock, exact, each preset, and gradient checkpointing. Said is what few layers
tell of all; counted are the live storages of a real step of all layers, by two meters that know nothing of the estimate
(what is kept in an allocator's units of 512 bytes, as it is said). A base in 4 bits has no values in an estimate; here
bitsandbytes quantizes it on both sides, said and counted. --out writes estimate-on-cpu.json and .md.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from rich.progress import track
from transformers import BitsAndBytesConfig, PreTrainedConfig

from hf_memsave import MemSaveConfig, MemSaveError
from hf_memsave.config.config import presets
from hf_memsave.count.peak import rounded
from hf_memsave.measure.depth import trace_few
from hf_memsave.measure.inputs import make_batch
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.models import choose_head, depth_of
from hf_memsave.measure.trace import UNIT
from hf_memsave.measure.training import Training, build
from publish import arguments, publish
from support.estimated import configs, count_step

LAYERS, BATCH, TOKENS = 7, 2, 64
CONFIGS = configs(key_value_heads=4)
TUNING: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora": Lora(dropout=0.05)},
    "LoRA bf16": {"lora": Lora(dtype="model")},
    "QLoRA": {"lora": Lora(dropout=0.05), "quantized": "nf4"},
}
SETTINGS: dict[str, tuple[MemSaveConfig | None, bool]] = {
    "stock": (None, False),
    **{name: (MemSaveConfig.preset(name), False) for name in presets()},
    "stock, checkpointing": (None, True),
    "exact, checkpointing": (MemSaveConfig(), True),
}


def said(config: PreTrainedConfig, training: Training, memsave: MemSaveConfig | None) -> tuple[float, float]:
    """Kept bytes and the peak of forward and backward, weights and the batch apart, from few layers."""
    depth = depth_of(config, LAYERS)
    full, _ = trace_few(config, depth, training, memsave, on_cpu=True)
    batch = make_batch(choose_head(config), config, training.batch_size, training.seq_len)
    of_passes = max(m.live for place, m in full.places.items() if place.phase != "optimizer")
    return sum(full.by_kind.values()), of_passes - full.parameters - sum(t.nbytes for t in batch.values())


def counted(config: PreTrainedConfig, training: Training, memsave: MemSaveConfig | None) -> tuple[int, int]:
    """Kept bytes and the peak of a real step."""
    config = type(config)(**{**config.to_dict(), **depth_of(config, LAYERS)})
    torch.manual_seed(0)
    model: Any = in_4_bits(config, training) if training.quantized else build(config, training)
    if training.quantized:
        with torch.no_grad():  # bitsandbytes casts biases in their place
            model(**make_batch(choose_head(config), config, training.batch_size, training.seq_len))
    kept, peak = count_step(model, config, training, memsave)
    return sum(rounded(storage.nbytes, UNIT) for storage in kept.storages), peak


def in_4_bits(config: PreTrainedConfig, training: Training) -> torch.nn.Module:
    """A model on a base in NF4, as bitsandbytes loads it and PEFT prepares it."""
    assert training.lora is not None
    nf4 = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        build(config, replace(training, lora=None, quantized=None)).save_pretrained(folder)
        asked = BitsAndBytesConfig(load_in_4bit=True, **nf4)
        model = choose_head(config).from_pretrained(folder, quantization_config=asked, dtype=training.dtype)
    kwargs = {"use_reentrant": False}
    model = prepare_model_for_kbit_training(model, training.checkpointing, gradient_checkpointing_kwargs=kwargs)
    of = training.lora
    lora = LoraConfig(r=of.r, lora_alpha=of.alpha, lora_dropout=of.dropout, target_modules=of.targets)
    return get_peft_model(model, lora).train()


def cases(families: Sequence[str], tunings: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Every combination that there is: bitsandbytes takes no ``Conv1D`` of GPT-2's into 4 bits here."""
    for family, tuning, setting in itertools.product(families, tunings, SETTINGS):
        if not (tuning == "QLoRA" and family == "gpt2"):
            yield family, tuning, setting


def main(argv: Sequence[str] | None = None) -> None:
    """Compare every case, print all of them, and how many are within bounds."""
    parser = arguments(__doc__)
    parser.add_argument("--family", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(all)")
    parser.add_argument("--tuning", nargs="+", choices=TUNING, default=list(TUNING), help="(all)")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows, figures = [], {}
    for family, tuning, setting in track(list(cases(options.family, options.tuning)), "comparing"):
        memsave, checkpointing = SETTINGS[setting]
        config = CONFIGS[family]
        size = {"batch_size": BATCH, "seq_len": TOKENS}
        training = Training(**size, optimizer="sgd", checkpointing=checkpointing, **TUNING[tuning])
        try:
            pairs = list(zip(said(config, training, memsave), counted(config, training, memsave), strict=True))
        except MemSaveError as error:
            rows.append([family, tuning, setting, str(error).splitlines()[0], "", "", ""])
            continue
        finally:
            gc.collect()
        kept, peak = ((ours - true) / true for ours, true in pairs)
        figures[f"{family}, {tuning}, {setting}"] = {"kept": kept, "peak": peak}
        rows.append([family, tuning, setting, f"{pairs[0][1] / 2**20:.2f}", f"{kept:+.2%}",
                     f"{pairs[1][1] / 2**20:.2f}", f"{peak:+.2%}"])  # fmt: skip
    within = {name: sum(abs(found[name]) <= most for found in figures.values())
              for name, most in (("kept", 0.01), ("peak", 0.03))}  # fmt: skip
    header = ["family", "tuning", "setting", "kept, MiB", "said is off by", "peak, MiB", "said is off by"]
    title = f"Estimates against steps counted on a CPU, {LAYERS} layers of 128, {BATCH} x {TOKENS} tokens, bf16: of "
    title += f"{len(figures)} cases {within['kept']} kept within 1%, {within['peak']} peaks within 3%"
    publish("estimate-on-cpu", title, header, rows, {"cases": figures, "within": within}, options.out)


if __name__ == "__main__":
    main()
