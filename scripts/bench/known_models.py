"""The peak of a training step of models that people have, on a CUDA GPU, estimated: README's first table.

    python scripts/bench/known_models.py [--only PART_OF_A_NAME] [--out [DIR]]

No weights, no GPU and no network. Text models by ``hf_memsave.estimate``. ViT at its full depth on the same stand-in
for a CUDA device. Peak: the most that PyTorch's allocator gives out at once, weights, gradients and the optimizer's
states included, fragmentation and CUDA's own memory (about .5 GiB) not. The optimizer is AdamW, fused.
"""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

import torch
from transformers import BertConfig, LlamaConfig, PreTrainedConfig, T5Config, ViTConfig, ViTForImageClassification

from hf_memsave import MemSaveConfig, estimate, patch
from hf_memsave.measure.fake_device import fake_device, to_fake, without_gpus
from hf_memsave.measure.inputs import forward_of
from hf_memsave.measure.trace import trace_step
from hf_memsave.measure.training import OPTIMIZERS
from publish import arguments, publish, versions

LLAMA = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=8192,
)  # fmt: skip
BERT = BertConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
T5 = T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16)
VIT = ViTConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
LORA = {"r": 16, "dropout": 0.05}
AUTOCAST = {"dtype": "fp32", "autocast": "bf16", "optimizer": "adamw_fused"}
BF16 = {"optimizer": "adamw_fused"}
ABOUT = """The peak of a training step on a CUDA GPU in GiB, *estimated* from configurations alone, not measured. It has
weights, gradients and the optimizer's states in it, but not fragmentation, nor about .5 GiB that CUDA takes for itself.
LoRA has rank 16 on all linears and dropout .05. Autocast is to bf16, with weights in fp32 (QLoRA: NF4)."""
#: What is trained, on how much -> configuration, sequences or images, tokens (None: images), how it is trained.
MODELS: dict[str, tuple[PreTrainedConfig, int, int | None, dict[str, Any]]] = {
    "Llama-3-8B, LoRA, bf16, 4 x 2048 tokens": (LLAMA, 4, 2048, {**BF16, "lora": LORA}),
    "Llama-3-8B, QLoRA, autocast, 4 x 2048": (
        LLAMA, 4, 2048, {**BF16, "autocast": "bf16", "lora": LORA, "quantized": "nf4"},
    ),
    "Llama-3-8B, full, bf16, 8-bit AdamW, 4 x 2048": (LLAMA, 4, 2048, {"optimizer": "adamw_8bit"}),
    "BERT-Large, full, autocast, 32 x 512": (BERT, 32, 512, {**AUTOCAST, "padded": True}),
    "T5-Large, full, autocast, 8 x 512": (T5, 8, 512, {**AUTOCAST, "padded": True}),
    "ViT-L/16, full, autocast, 64 images": (VIT, 64, None, AUTOCAST),
}
#: Column -> the config, and whether with gradient checkpointing.
SETTINGS: dict[str, tuple[MemSaveConfig | None, bool]] = {
    "stock": (None, False),
    "`memsave=True`": (MemSaveConfig(), False),
    '`"gate"`': (MemSaveConfig(checkpoint="gate"), False),
    '`"block"`': (MemSaveConfig(checkpoint="block"), False),
    "stock, gradient checkpointing": (None, True),
}


def peak_of(name: str, memsave: MemSaveConfig | None, checkpointing: bool) -> int:
    """The peak of a step, in bytes."""
    config, batch, tokens, training = MODELS[name]
    if tokens is None:
        return peak_on_images(name, memsave, checkpointing)
    asked: Any = memsave or False
    found = estimate(config, batch_size=batch, seq_len=tokens, memsave=asked, checkpointing=checkpointing, **training)
    return (found.patched or found.stock).peak


@without_gpus
def peak_on_images(name: str, memsave: MemSaveConfig | None, checkpointing: bool) -> int:
    """The peak of a step of ViT, all of its layers run on the stand-in."""
    config, batch, _, training = MODELS[name]
    with torch.device("meta"):
        model = ViTForImageClassification._from_config(config, attn_implementation="sdpa").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with fake_device() as device:
        to_fake(model, device)
        pixels = torch.empty(batch, 3, config.image_size, config.image_size, device=device)
        labels = torch.empty(batch, dtype=torch.int64, device=device)
        if memsave is not None:
            patch(model, memsave)
        optimizer = OPTIMIZERS[training["optimizer"]](model.parameters())
        forward = forward_of(model, torch.bfloat16)
        return trace_step(model, {"pixel_values": pixels, "labels": labels}, optimizer, forward).peak


def main() -> None:
    """Estimate all, and write the table."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="models whose name has this in it")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    results: dict[str, dict[str, int]] = {}
    for name in (name for name in MODELS if args.only in name):
        results[name] = {}
        for column, (memsave, checkpointing) in SETTINGS.items():
            results[name][column] = peak_of(name, memsave, checkpointing)
            gc.collect()
        print(name, results[name], flush=True)
    rows = [[name, *(f"{nbytes / 2**30:.1f}" for nbytes in found.values())] for name, found in results.items()]
    title = f"# Models that people have\n\n{ABOUT} {versions()}."
    publish("known-models", title, ["model", *SETTINGS], rows, results, args.out)


if __name__ == "__main__":
    main()
