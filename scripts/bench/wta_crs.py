"""What a layer keeps with sampled weight gradients, beside stock and beside ``exact``, on a CUDA GPU, estimated.

    python scripts/bench/wta_crs.py [--out [DIR]]

Layers of BERT-Base, T5-Base and OPT-350M with 8 sequences of 128 tokens, whole and with LoRA (r 32 on q, k, v, as in
the paper, and on all linears). By ``hf_memsave.estimate``: no weights, no GPU, no network.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from transformers import BertConfig, OPTConfig, T5Config

from hf_memsave import WTACRS, MemSaveConfig, estimate
from publish import arguments, publish, versions

BATCH, SEQ = 8, 128
SETTINGS: dict[str, Any] = {
    "stock": False,
    "exact": MemSaveConfig(),
    "WTA-CRS @0.3": MemSaveConfig(linear=WTACRS(budget=0.3)),
    "WTA-CRS @0.1": MemSaveConfig(linear=WTACRS(budget=0.1)),
}
#: Name -> configuration, and what LoRA targets in the paper.
MODELS: dict[str, tuple[Any, str]] = {
    "BERT-Base": (BertConfig(), "query+key+value"),
    "T5-Base": (T5Config(d_model=768, d_ff=3072, num_heads=12, num_layers=12), "q+k+v"),
    "OPT-350M": (
        OPTConfig(hidden_size=1024, ffn_dim=4096, num_attention_heads=16, num_hidden_layers=24, word_embed_proj_dim=512,
                  do_layer_norm_before=False), "q_proj+k_proj+v_proj",
    ),
}  # fmt: skip
TRAINED = ("whole", "LoRA on q, k, v", "LoRA on all")
TITLE = """\
# Kept memory per layer with sampled weight gradients

*Estimated* for a CUDA GPU, not measured, in u, one activation [batch, seq, hidden] in the model's dtype; batch 8,
128 tokens, dropout .1. T5: one encoder and one decoder layer. On GELU models nothing is to be gained: a
down-projection's input is made again from what the activation keeps anyway. {versions}."""


def kept(name: str, trained: str, setting: str, dtype: str) -> float:
    """What a layer keeps, in u; of T5 one of each stack."""
    config, qkv = MODELS[name]
    training: dict[str, Any] = {"dtype": dtype}
    if trained != "whole":
        training["lora"] = {"r": 32, "dropout": 0.1, "targets": qkv if "q, k, v" in trained else "all-linear"}
    found = estimate(config, batch_size=BATCH, seq_len=SEQ, memsave=SETTINGS[setting], **training)
    return sum(added["kept"] for added in (found.patched or found.stock).per_layer.values()) / found.u


def main() -> None:
    """Estimate, print and write."""
    options = arguments(__doc__).parse_args()
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    cases = [(*of, "fp32") for of in ((name, trained) for name in MODELS for trained in TRAINED)]
    rows = []
    for case in (*cases, *((name, "whole", "bf16") for name in MODELS)):
        name, trained, dtype = case
        rows.append([*case, *(f"{kept(name, trained, setting, dtype):.2f}" for setting in SETTINGS)])
        print(*rows[-1], sep=", ", flush=True)
    header = ["model", "trained", "dtype", *SETTINGS]
    publish("wta-crs-memory", TITLE.format(versions=versions()), header, rows, {}, options.out)


if __name__ == "__main__":
    main()
