"""Peak memory and step time of whole models on this machine's GPU: stock, its alternatives, and memsave, in one run.

    python scripts/bench/models.py [--models bert-large llama-3.2-1b] [--methods stock memsave] [--out [DIR]]
    python scripts/bench/models.py --smoke     # tiny models, on CPU: whether the script runs

Random weights, random tokens, AdamW. A step is forward, backward and optimizer; its time is the median of --steps after
two to warm up, by CUDA events. Peak is what PyTorch's allocator had out at once in a step, kept what is alive between
forward and backward beyond weights, gradients and states. A method that runs out of memory has a row that says so.
--out writes models-<device>.json and .md.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import Progress
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig, PhiConfig, T5Config

from hf_memsave import MemSaveConfig, patch
from peak_memory import add_out, publish

_GIB = 2**30


class Model(NamedTuple):
    """A shape, and how it is trained."""

    config: Any
    head: str
    batch: int
    tokens: int
    lora: float | None = None
    autocast: bool = False


LLAMA_1B = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                       num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True)  # fmt: skip
LLAMA_8B = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                       num_key_value_heads=8, vocab_size=128256)  # fmt: skip
BERT_LARGE = BertConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
                        attention_probs_dropout_prob=0.0)  # fmt: skip
MODELS = {
    "bert-large": Model(BERT_LARGE, "BertForSequenceClassification", 16, 512, autocast=True),
    "gpt2-medium": Model(GPT2Config(n_embd=1024, n_layer=24, n_head=16), "GPT2LMHeadModel", 8, 1024, autocast=True),
    "t5-large": Model(
        T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16), "T5ForConditionalGeneration", 8, 512
    ),
    "llama-3.2-1b": Model(LLAMA_1B, "LlamaForCausalLM", 4, 2048),
    "llama-3.2-1b, LoRA": Model(LLAMA_1B, "LlamaForCausalLM", 4, 2048, lora=0.05),
    "llama-3-8b, LoRA": Model(LLAMA_8B, "LlamaForCausalLM", 1, 2048, lora=0.0),
    "llama-3-8b, LoRA, dropout .05": Model(LLAMA_8B, "LlamaForCausalLM", 1, 2048, lora=0.05),
    "phi-2, LoRA": Model(
        PhiConfig(hidden_size=2560, intermediate_size=10240, num_hidden_layers=32, num_attention_heads=32),
        "PhiForCausalLM", 2, 2048, lora=0.05,
    ),
}  # fmt: skip
SMALL = {
    "bert, small": Model(
        BertConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2),
        "BertForSequenceClassification", 2, 32, autocast=True,
    ),
    "llama, small, LoRA": Model(
        LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=128),
        "LlamaForCausalLM", 2, 32, lora=0.05,
    ),
}  # fmt: skip


def checkpointed(model: nn.Module) -> nn.Module:
    """With Transformers' gradient checkpointing."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    return model


def patched(**fields: Any) -> Callable[[nn.Module], nn.Module]:
    """With memsave, so configured."""

    def change(model: nn.Module) -> nn.Module:
        patch(model, MemSaveConfig(**fields))
        return model

    return change


METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "stock": lambda model: model,
    "checkpointing": checkpointed,
    "torch.compile": torch.compile,
    "memsave": patched(),
    "memsave, up to the gate": patched(checkpoint="gate"),
    "memsave, whole blocks": patched(checkpoint="block"),
    "memsave, Triton": patched(backend="auto"),
    "memsave, offload": patched(offload=True),
    "memsave, torch.compile": lambda model: torch.compile(patched()(model)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every model by every method and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[m for m in METHODS if "compile" not in m])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny models, on whatever device there is")
    add_out(parser)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not options.smoke:
        parser.error("expected a CUDA device, got none. Use --smoke to see whether the script runs.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = SMALL if options.smoke else {name: MODELS[name] for name in options.models}
    rows, figures = [], {}
    with Progress(console=Console(stderr=True)) as progress:
        runs = [(name, method) for name in models for method in options.methods]
        for name, method in progress.track(runs, description="measuring"):
            found = measured(models[name], METHODS[method], device, options.steps)
            figures[f"{name}: {method}"] = found
            rows.append([name, method, *cells(found)])
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    header = ["model", "method", "peak GiB", "kept GiB", "step ms", "tokens/s"]
    name = f"models-{where.lower().replace(' ', '-')}"
    publish(name, f"{where}, {versions}, random weights, bf16, AdamW", header, rows, figures, options.out)


def measured(model: Model, method: Callable[[nn.Module], Any], device: torch.device, steps: int) -> dict[str, Any]:
    """Peak, kept and seconds of a step; "error" where it does not run."""
    try:
        return _measured(model, method, device, steps)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    finally:
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(model: Model, method: Callable[[nn.Module], Any], device: torch.device, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    dtype = torch.float32 if model.autocast else torch.bfloat16
    with device:
        built = getattr(transformers, model.head)(model.config).to(dtype).train()
    if model.lora is not None:
        adapters = LoraConfig(r=16, lora_dropout=model.lora, target_modules="all-linear")
        built = get_peft_model(built, adapters).to(device)
    trained = method(built)
    optimizer = torch.optim.AdamW([p for p in built.parameters() if p.requires_grad], 1e-5)
    ids = torch.randint(0, model.config.vocab_size, (model.batch, model.tokens), device=device)
    labels = ids if "Sequence" not in model.head else torch.zeros(model.batch, dtype=torch.long, device=device)
    peaks, kept, seconds = [], [], []
    for _ in range(2 + steps):
        is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, start = (torch.cuda.memory_allocated() if is_cuda else 0), time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=model.autocast):
            loss = trained(input_ids=ids, labels=labels).loss
        between = torch.cuda.memory_allocated() if is_cuda else 0
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        if is_cuda:
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
        kept.append(between - before)
        seconds.append(time.perf_counter() - start)
    step = statistics.median(seconds[2:])
    peak = max(peaks[2:], default=0)
    return {"peak": peak, "kept": kept[-1], "seconds": step, "tokens_per_second": ids.numel() / step}


def cells(found: dict[str, Any]) -> list[str]:
    """Of a table's row."""
    if "error" in found:
        return [found["error"], "", "", ""]
    per_second = f"{found['tokens_per_second']:,.0f}"
    return [f"{found['peak'] / _GIB:.2f}", f"{found['kept'] / _GIB:.2f}", f"{1e3 * found['seconds']:.1f}", per_second]


if __name__ == "__main__":
    main()
