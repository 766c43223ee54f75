"""What a training step of Llama-3-8B takes at 32k, 128k and 512k tokens, by setting, on a CUDA GPU, estimated.

    python scripts/bench/long_context.py [--only PART_OF_A_ROW] [--longest] [--out [DIR]]

One sequence on each device, weights in bf16, AdamW fused: LoRA of rank 16 on all linears, in fp32 as PEFT has it, on
one GPU; and all parameters over 8, sharded (FSDP, ZeRO-3). With --longest instead: the longest sequence that fits a
GPU with QLoRA, rank 16 on all linears. By ``hf_memsave.estimate``: no weights, no GPU, no network.
"""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

from transformers import AutoConfig

from hf_memsave import MemSaveConfig, estimate
from hf_memsave.measure.largest import largest
from hf_memsave.measure.models import depth_of
from hf_memsave.measure.training import training_of
from known_models import CHUNKED_LOSS, LLAMA
from publish import arguments, publish, versions

TOKENS = (2**15, 2**17, 2**19)
CONFIG = AutoConfig.for_model(**(LLAMA | {"max_position_embeddings": TOKENS[-1]}))
#: What is trained -> arguments of :func:`hf_memsave.estimate`.
TRAINED: dict[str, dict[str, Any]] = {
    "LoRA, 1 GPU": {"lora": {"r": 16}},
    "full, 8 shards": {"devices": 8, "sharding": "fsdp"},
}
#: Setting -> arguments, too.
SETTINGS: dict[str, dict[str, Any]] = {
    "gradient checkpointing": {"memsave": False, "checkpointing": True},
    "gradient checkpointing + chunked loss": {"memsave": CHUNKED_LOSS, "checkpointing": True},
    '`memsave=True`, `loss="stock"`': {"memsave": {"loss": "stock"}},
    "`memsave=True`": {"memsave": {}},
    '`"block"`': {"memsave": {"checkpoint": "block"}},
    '`"max"`': {"memsave": "max"},
    '`"tiles"`': {"memsave": "tiles"},
    '`"tiles"`, offload': {"memsave": {"checkpoint": "tiles", "offload": True}},
}
ABOUT = """*Estimated* from the configuration alone, not run on a GPU. GiB on each device: weights, what is kept there
between forward and backward beside them, and the peak, which has gradients, the optimizer's states and the work of a
step in it too, but not fragmentation, buffers of communication, nor about .5 GiB that CUDA takes for itself. Offloaded:
kept in main memory. Plain gradient checkpointing and `loss="stock"` make all logits at once, the others a chunk."""
LONGEST = [setting for setting in SETTINGS if "memsave" not in setting and setting != '`"max"`']
#: GiB of a GPU.
CARDS = (24, 48, 80)
QLORA: dict[str, Any] = {
    "batch_size": 1, "optimizer": "adamw_fused", "lora": {"r": 16}, "quantized": "nf4", "autocast": "bf16",
}  # fmt: skip
HEADER = ["trained", "tokens", "setting", "weights", "kept", "offloaded", "peak", "the peak is"]


def measured(tokens: int, of: dict[str, Any]) -> dict[str, Any]:
    """One row: bytes, and where the peak is."""
    result = estimate(CONFIG, batch_size=1, seq_len=tokens, optimizer="adamw_fused", **of)
    memory = result.patched or result.stock
    found = {name: getattr(memory, name) for name in ("parameters", "away", "peak", "where")}
    return {**found, "kept": memory.kept - memory.away}


def longest(out: str | None) -> None:
    """Find the longest sequences, and write their table."""
    config = AutoConfig.for_model(**(LLAMA | {"max_position_embeddings": 2**22}))
    results: dict[str, dict[str, int]] = {}
    for setting in LONGEST:
        options: dict[str, Any] = SETTINGS[setting]
        memsave = MemSaveConfig.resolve(options["memsave"])
        training = QLORA | {"checkpointing": options.get("checkpointing", False), "seq_len": 2**14}
        results[setting] = {}
        for gib in CARDS:
            step = config, depth_of(config, None), training_of(**training), memsave
            found = largest(*step, "seq_len", gib * 2**30, ("ddp", 1))
            results[setting][f"{gib} GiB"] = found
            print(setting, gib, found, sep=", ", flush=True)
            gc.collect()
    rows = [[setting, *(f"{n:,}" for n in of.values())] for setting, of in results.items()]
    about = "The longest sequence, in tokens, *estimated*; with CUDA's own .5 GiB in it. Plain gradient checkpointing "
    about += f"makes all logits at once, the others a chunk. {versions()}."
    title = f"# Llama-3.1-8B, QLoRA of rank 16 on all linears, one sequence\n\n{about}"
    publish("longest", title, ["setting", *(f"{gib} GiB" for gib in CARDS)], rows, results, out)


def main() -> None:
    """Estimate all, and write the table."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="rows with this in what is trained, the setting or the tokens")
    parser.add_argument("--longest", action="store_true", help="the longest sequences that fit, instead")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.longest:
        return longest(args.out)
    results: dict[str, dict[str, Any]] = {}
    rows = []
    for trained, training in TRAINED.items():
        for tokens in TOKENS:
            for setting, options in SETTINGS.items():
                names = [trained, f"{tokens // 1024}k", setting]
                if args.only not in ", ".join(names):
                    continue
                found = results[", ".join(names)] = measured(tokens, training | options)
                gib = [f"{found[name] / 2**30:,.1f}" for name in ("parameters", "kept", "away", "peak")]
                rows.append([*names, *gib, found["where"]])
                print(*rows[-1], sep=", ", flush=True)
                gc.collect()
    publish("long-context", f"# Long context\n\n{ABOUT} {versions()}.", HEADER, rows, results, args.out)


if __name__ == "__main__":
    main()
