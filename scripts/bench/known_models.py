"""The peak of a training step of models that people have, on a CUDA GPU, estimated: README's first table.

    python scripts/bench/known_models.py [--only PART_OF_A_NAME] [--out [DIR]]

No weights, no GPU and no network; three minutes. ``models.py`` measures these steps on a GPU, and known-models.json is
what it expects. By ``hf_memsave.estimate``, ViT at its full depth.
Peak: the most that PyTorch's allocator gives out at once, weights, gradients and the optimizer's states included,
fragmentation and CUDA's own memory (about .5 GiB) not. The optimizer is AdamW, fused.
"""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any, NamedTuple
from unittest import mock

from transformers import AutoConfig, BertConfig, PreTrainedConfig, ViTConfig

from hf_memsave import MemSaveConfig, estimate
from hf_memsave.config.names import shape_of
from hf_memsave.measure.models import at_depth
from publish import arguments, publish, versions

LLAMA = shape_of("llama-3-8b")
LLAMA_8B, T5 = AutoConfig.for_model(**LLAMA), AutoConfig.for_model(**shape_of("t5-large"))
BERT = BertConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
VIT = ViTConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
BF16 = {"optimizer": "adamw_fused"}
LORA = {**BF16, "lora": {"r": 16, "dropout": 0.05}}
AUTOCAST = {"dtype": "fp32", "autocast": "bf16", "optimizer": "adamw_fused"}
ABOUT = """The peak of a training step on a CUDA GPU in GiB, *estimated* from configurations alone, not measured. It has
weights, gradients and the optimizer's states in it, but not fragmentation, nor about .5 GiB that CUDA takes for itself.
LoRA has rank 16 on all linears and dropout .05. Autocast is to bf16, with weights in fp32 (QLoRA: NF4). All logits are
there at once in stock, in plain gradient checkpointing and with `loss="stock"`; elsewhere a chunk of them, by
hf_memsave's chunked loss (one that runs the head once more, such as TRL's, keeps less where the head is trained)."""


class Model(NamedTuple):
    """What is trained, on how much; ``tokens`` is None for images; ``training``: fields of ``estimate``."""

    config: PreTrainedConfig
    batch: int
    tokens: int | None
    training: dict[str, Any]


class Method(NamedTuple):
    """How a step keeps less: ``memsave``, Transformers' ``checkpointing`` and a ``change`` that ``models.py`` makes."""

    memsave: MemSaveConfig | None = None
    checkpointing: bool = False
    change: str = ""


LLAMA_LORA, BERT_LARGE = "Llama-3-8B, LoRA, bf16, 4 x 2048 tokens", "BERT-Large, full, autocast, 32 x 512"
#: A quarter of the depth, which by every method fits 80 GB, and which torch.compile compiles in a minute.
EIGHT = "Llama-3-8B's first 8 of 32 layers, LoRA, bf16, 4 x 2048 tokens"
MODELS = {
    LLAMA_LORA: Model(LLAMA_8B, 4, 2048, LORA),
    "Llama-3-8B, QLoRA, autocast, 4 x 2048": Model(
        LLAMA_8B, 4, 2048, {**LORA, "autocast": "bf16", "quantized": "nf4"},
    ),
    "Llama-3-8B, full, bf16, 8-bit AdamW, 4 x 2048": Model(LLAMA_8B, 4, 2048, {"optimizer": "adamw_8bit"}),
    BERT_LARGE: Model(BERT, 32, 512, {**AUTOCAST, "padded": True}),
    "T5-Large, full, autocast, 8 x 512": Model(T5, 8, 512, {**AUTOCAST, "padded": True}),
    "ViT-L/16, full, autocast, 64 images": Model(VIT, 64, None, AUTOCAST),
    EIGHT: Model(at_depth(LLAMA_8B, {"num_hidden_layers": 8}), 4, 2048, LORA),
}  # fmt: skip
#: The default with all fields off but the chunked loss, as TRL and Liger-Kernel have one beside checkpointing.
CHUNKED_LOSS = MemSaveConfig(
    activation="stock", norm="stock", dropout="stock", attention="stock", lora="stock", frozen=False
)  # fmt: skip
#: Rungs above "gate", which the page on configuration has of two models.
RUNGS: tuple[Any, ...] = ("o_proj", "qkv", "up")
METHODS = {
    "stock": Method(),
    "memsave, whole loss": Method(MemSaveConfig(loss="stock")),
    "memsave": Method(MemSaveConfig()),
    **{rung: Method(MemSaveConfig(checkpoint=rung)) for rung in (*RUNGS, "gate", "block")},
    "checkpointing": Method(checkpointing=True),
    "checkpointing, chunked loss": Method(CHUNKED_LOSS, checkpointing=True),
    "offload": Method(MemSaveConfig(offload=True)),
    "memsave, Triton": Method(MemSaveConfig(backend="auto")),
    "memsave, compiled blocks": Method(MemSaveConfig(compile=True)),
    "checkpointing, offload": Method(checkpointing=True, change="offload"),
    "torch.compile": Method(change="compile"),
    "Liger": Method(change="liger"),
    "Liger, memsave": Method(MemSaveConfig(), change="liger"),
}
#: Method -> its column in known-models.md, and its row in README.
COLUMNS = {
    "stock": "stock", "memsave, whole loss": '`memsave=True`, `loss="stock"`', "memsave": "`memsave=True`",
    **{rung: f'`"{rung}"`' for rung in (*RUNGS, "gate", "block")}, "checkpointing": "gradient checkpointing",
    "checkpointing, chunked loss": "gradient checkpointing + chunked loss", "offload": "`offload=True`",
}  # fmt: skip
#: Methods that README shows of every model; with "loss" in the name only where logits are large.
SHOWN = [method for method in COLUMNS if method not in (*RUNGS, "offload")]


def is_estimated(name: str, method: str) -> bool:
    """Whether known-models.json has the step of a model by a method."""
    if name == EIGHT:
        return method in ("stock", "memsave", "checkpointing", "offload")  # which are measured
    if "loss" in method:  # which decides where there are more than 128 MiB of logits
        return MODELS[name].config.model_type not in ("bert", "vit")
    return method in (*SHOWN, *RUNGS * (name in (LLAMA_LORA, BERT_LARGE)))


def expected(name: str, method: str) -> dict[str, int]:
    """The bytes at the "peak" of a step and "kept"; of BERT also the "peak under cuDNN" of PyTorch before 2.12.

    That is what a Hopper GPU's own choice of kernels takes; there each layer has a mask of its own.
    """
    (config, batch, tokens, training), (memsave, checkpointing, _) = MODELS[name], METHODS[method]
    of: dict[str, Any] = dict(
        batch_size=batch, seq_len=tokens or 1, memsave=memsave or False, checkpointing=checkpointing, **training
    )
    result = estimate(config, **of)
    memory = result.patched or result.stock
    found = {"peak": memory.peak, "kept": memory.kept - memory.away}
    if name == BERT_LARGE:
        with mock.patch("hf_memsave.tape.attention.fills_finite", return_value=True):
            by_cudnn = estimate(config, attention="cudnn", **of)
        found["peak under cuDNN"] = (by_cudnn.patched or by_cudnn.stock).peak
    return found


def main() -> None:
    """Estimate all, and write the table."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="models whose name has this in it")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    results: dict[str, dict[str, dict[str, int]]] = {}
    for name in (name for name in MODELS if args.only in name):
        results[name] = {}
        for method in (method for method in COLUMNS if is_estimated(name, method)):
            results[name][method] = expected(name, method)
            gc.collect()
        print(name, results[name], flush=True)
    rows = [
        [name, *(f"{found[method]['peak'] / 2**30:.1f}" if method in found else "" for method in COLUMNS)]
        for name, found in results.items()
    ]
    title = f"# Models that people have\n\n{ABOUT} {versions()}."
    publish("known-models", title, ["model", *COLUMNS.values()], rows, results, args.out)


if __name__ == "__main__":
    main()
