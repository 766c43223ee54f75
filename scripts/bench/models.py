"""Peak memory and step time of whole models on this machine's GPU: stock, its alternatives, and memsave, in one run.

    python scripts/bench/models.py [--models bert-large llama-3.2-1b] [--methods stock memsave] [--out [DIR]]
    python scripts/bench/models.py --smoke     # tiny models, on CPU: whether the script runs

Random weights, random tokens, AdamW. A step is forward, backward and optimizer; its time is the median of --steps after
two to warm up, and the host's is what passes until all is launched. Peak is what PyTorch's allocator had out at once in
a step, kept what is alive between forward and backward beyond weights, gradients and states. The --largest batch is
found by doubling, and then half as much again; what runs out of memory at the first batch has a row that says so, and
so has what fails, in the error's first line: the others go on, and the exit status is 1. Liger's and PEFT's rows are
there where they are installed. After --minutes no other row is begun. --out writes models-<device>.json and .md after
every row, the first method's first, largest-<device> with --largest.

--profile takes steps of 1 x 128 tokens, where the host counts, and writes host-<device> instead, with torch.profiler's
table of each row in host-<model>-<method>.txt.
"""

from __future__ import annotations

import gc
import itertools
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch
import transformers
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig, MistralConfig, Phi3Config, PhiConfig, T5Config

from model_methods import METHODS, is_installed
from publish import arguments, publish

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
    "bert-base": Model(
        BertConfig(attention_probs_dropout_prob=0.0), "BertForSequenceClassification", 32, 128, autocast=True
    ),
    "bert-large": Model(BERT_LARGE, "BertForSequenceClassification", 16, 512, autocast=True),
    "gpt2-medium": Model(GPT2Config(n_embd=1024, n_layer=24, n_head=16), "GPT2LMHeadModel", 8, 1024, autocast=True),
    "t5-large": Model(
        T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16, decoder_start_token_id=0),
        "T5ForConditionalGeneration", 8, 512,
    ),
    "llama-3.2-1b": Model(LLAMA_1B, "LlamaForCausalLM", 4, 2048),
    "llama-3.2-1b, LoRA": Model(LLAMA_1B, "LlamaForCausalLM", 4, 2048, lora=0.05),
    "llama-3-8b, LoRA": Model(LLAMA_8B, "LlamaForCausalLM", 1, 2048, lora=0.0),
    "llama-3-8b, LoRA, dropout .05": Model(LLAMA_8B, "LlamaForCausalLM", 1, 2048, lora=0.05),
    "phi-2, LoRA": Model(
        PhiConfig(hidden_size=2560, intermediate_size=10240, num_hidden_layers=32, num_attention_heads=32),
        "PhiForCausalLM", 2, 2048, lora=0.05,
    ),
    "mistral-7b, LoRA": Model(MistralConfig(), "MistralForCausalLM", 1, 2048, lora=0.05),
    "phi-3-mini, LoRA": Model(Phi3Config(), "Phi3ForCausalLM", 1, 2048, lora=0.05),
    "llama-3-8b": Model(LLAMA_8B, "LlamaForCausalLM", 1, 2048),
}  # fmt: skip
SMALL = {
    "bert, small": Model(
        BertConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2),
        "BertForSequenceClassification", 2, 32, autocast=True,
    ),
    "t5, small": Model(
        T5Config(d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, vocab_size=128, decoder_start_token_id=0),
        "T5ForConditionalGeneration", 2, 32,
    ),
    "llama, small, LoRA": Model(
        LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=128),
        "LlamaForCausalLM", 2, 32, lora=0.05,
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run every model by every method and print the table, whatever fails; 1 where a row failed."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[m for m in METHODS if "compile" not in m])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=6.0, help="begin no row after so many")
    parser.add_argument("--largest", action="store_true", help="find each row's largest batch")
    parser.add_argument("--profile", action="store_true", help="the host's time and torch.profiler's table")
    parser.add_argument("--smoke", action="store_true", help="tiny models, on whatever device there is")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() and not options.smoke:
        parser.error("expected a CUDA device, got none. Use --smoke to see whether the script runs.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = SMALL if options.smoke else {name: MODELS[name] for name in options.models}
    if options.profile:
        models = {name: model._replace(batch=1, tokens=128) for name, model in models.items()}
    methods = [method for method in options.methods if is_installed(method)]
    kind = "host" if options.profile else "largest" if options.largest else "models"
    figures = {run: {"error": "not begun"} for run in itertools.product(models, methods)}
    most, steps = (4, 1) if options.smoke else (4096, options.steps)
    most = most if options.largest else 0
    end = time.monotonic() + 60 * options.minutes
    for method, name in itertools.product(methods, models):
        if models[name].lora is not None and not find_spec("peft"):
            figures[name, method] = {"error": "left out: peft is not installed"}
        elif time.monotonic() <= end:
            into = options.out / f"host-{slug(name)}-{slug(method)}.txt" if options.profile and options.out else None
            figures[name, method] = measured(models[name], METHODS[method], device, steps, most, into)
        print(" | ".join([name, method, *cells(figures[name, method])]), flush=True)
        tell(figures, device, options.out, kind)
    return int(any("failed" in found for found in figures.values()))


def slug(name: str) -> str:
    """As in a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())


def tell(figures: dict[tuple[str, str], dict[str, Any]], device: torch.device, out: Path | None, kind: str) -> None:
    """Write the table of (model, method) -> figures where ``out`` says."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    header = ["model", "method", "peak GiB", "kept GiB", "step ms", "host ms", "tokens/s", "largest batch"]
    rows = [[*of, *cells(found)] for of, found in figures.items()]
    results = {": ".join(of): found for of, found in figures.items()}
    title = f"{where}, {versions}, random weights, bf16, AdamW"
    publish(f"{kind}-{slug(where)}", title, [*header, "tokens/s there"], rows, results, out, quiet=True)


def measured(
    model: Model, method: Callable[[nn.Module], Any], device: torch.device, steps: int, most: int, into: Path | None
) -> dict[str, Any]:
    """Peak, kept and seconds of a step, and at the largest batch up to ``most``; "error" where it does not run.

    Where that is for another reason than memory, "failed" is true, and standard error has all of it.
    """
    try:
        run = Steps(model, method, device)
        found = run.measured(model.batch, steps)
        if into is not None:
            into.parent.mkdir(parents=True, exist_ok=True)
            into.write_text(run.profile(model.batch), encoding="utf-8")
        if not most:
            return found
        largest = run.largest(model.batch, most)
        at_largest = run.measured(largest, max(1, steps // 2))
        return {**found, "largest_batch": largest, "at_largest": at_largest}
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # the other rows' figures are worth as much
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", "failed": True}
    finally:
        functorch.activation_memory_budget = 1.0
        torch.compiler.reset()
        release(device)


def release(device: torch.device) -> None:
    """Give back what nothing holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Steps:
    """Training of one model by one method."""

    def __init__(self, model: Model, method: Callable[[nn.Module], Any], device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            built = getattr(transformers, model.head)(model.config)
            built = built.to(torch.float32 if model.autocast else torch.bfloat16).train()
        if model.lora is not None:
            from peft import LoraConfig, get_peft_model

            adapters = LoraConfig(r=16, lora_dropout=model.lora, target_modules="all-linear")
            built = get_peft_model(built, adapters).to(device)
        self.model, self.device, self.call = model, device, method(built)
        trained = self.call if isinstance(self.call, nn.Module) else built
        self.optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], 1e-5)

    def step(self, batch: int) -> tuple[int, int, float, float]:
        """Peak and kept bytes, and seconds, first those until all is launched."""
        is_cuda = self.device.type == "cuda"
        ids = torch.randint(0, self.model.config.vocab_size, (batch, self.model.tokens), device=self.device)
        labels = ids if "Sequence" not in self.model.head else ids[:, 0] % 2
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, start = (torch.cuda.memory_allocated() if is_cuda else 0), time.perf_counter()
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.model.autocast):
                loss = self.call(input_ids=ids, labels=labels).loss
            between = torch.cuda.memory_allocated() if is_cuda else 0
            loss.backward()
            del loss
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()
        launched = time.perf_counter() - start
        if is_cuda:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() if is_cuda else 0
        return peak, between - before, launched, time.perf_counter() - start

    def measured(self, batch: int, steps: int) -> dict[str, Any]:
        """The median of so many steps, after two."""
        peaks, kept, launched, seconds = zip(*[self.step(batch) for _ in range(2 + steps)][2:], strict=True)
        step = statistics.median(seconds)
        per_second = batch * self.model.tokens / step
        found = {"peak": max(peaks), "kept": kept[-1], "seconds": step, "tokens_per_second": per_second}
        return {**found, "host_seconds": statistics.median(launched)}

    def profile(self, batch: int) -> str:
        """torch.profiler's table of three steps."""
        with torch.profiler.profile() as profiler:
            for _ in range(3):
                self.step(batch)
        return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=60)

    def largest(self, batch: int, most: int) -> int:
        """The largest batch that is found to run: doubled as often as it can be, then half as much again."""
        while 2 * batch <= most and self.runs(2 * batch):
            batch *= 2
        more = batch + batch // 2
        return more if batch < more <= most and self.runs(more) else batch

    def runs(self, batch: int) -> bool:
        """Whether a step has room."""
        try:
            self.step(batch)
        except torch.OutOfMemoryError:
            return False
        finally:
            release(self.device)
        return True


def cells(found: dict[str, Any]) -> list[str]:
    """Of a table's row."""
    if "error" in found:
        return [found["error"], *[""] * 6]
    of_memory = [f"{found[name] / _GIB:.2f}" for name in ("peak", "kept")]
    times = [f"{1e3 * found[name]:.1f}" for name in ("seconds", "host_seconds")]
    there = found.get("at_largest")
    largest = [str(found["largest_batch"]), f"{there['tokens_per_second']:,.0f}"] if there else ["", ""]
    return [*of_memory, *times, f"{found['tokens_per_second']:,.0f}", *largest]


if __name__ == "__main__":
    sys.exit(main())
