"""Load the model and the batch that a command's options name, to run a training step."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedConfig

from hf_memsave.commands.options import settle_sizes, weights_of
from hf_memsave.commands.progress import progress
from hf_memsave.config.lora import adapter_in
from hf_memsave.config.sizes import GIB, counted, gib
from hf_memsave.device import free_main_memory
from hf_memsave.errors import CommandError, MeasureError
from hf_memsave.measure.inputs import described, fitted, make_batch, read_batch
from hf_memsave.measure.models import at_depth, count_parameters, depth_of, has_weights, load_config, load_model, period

_MOST = 10**9  # parameters that are drawn without a question: more take minutes
_COPIES = 4  # weights, and gradients of up to three steps
_SHARE = 0.7  # of the free memory


def load_inputs(args: argparse.Namespace, console: Console) -> tuple[Any, dict[str, Any], str]:
    """Load a model in training mode, for ``verify`` perhaps with fewer layers, and a batch; return them and a title."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: expected a CUDA device, found none. Use --device cpu.")
    batch = read_batch(args.batch) if args.batch else None  # a wrong file must not cost a download
    with progress(console, f"Loading {args.model} ..."):
        config = load_config(args.model)
        note = settle_sizes(args, config) * (batch is None)
        if "layers" in args:
            config = _that_fits(args, config, console)
        model, head, weights = load_model(args.model, weights_of(args), config=config, has_batch=batch is not None)
        if batch is None:
            batch = make_batch(head, model.config, args.batch_size, args.seq_len)
        batch = fitted(batch, model.to(args.device).train())
    return model, batch, f"{type(model).__name__}, {weights}: {described(batch)}\n{note}".rstrip()


def _that_fits(args: argparse.Namespace, config: PreTrainedConfig, console: Console) -> PreTrainedConfig:
    """Return the configuration of what is compared, of random weights perhaps fewer layers; print what it takes."""
    is_saved = has_weights(args.model, config)
    if args.layers and is_saved:
        raise CommandError(f"--layers: expected random weights, got those of {args.model}. Leave it out.")
    if is_saved and getattr(config, "quantization_config", None):  # whose bytes are not known here
        return config
    parts, copies = ("weights", 1) if adapter_in(args.model) else ("weights, gradients and their comparison", _COPIES)
    each = (weights_of(args) or config.dtype or torch.float32).itemsize * copies
    free, of = (free_main_memory(), "main") if args.device == "cpu" else (torch.cuda.mem_get_info()[0], "GPU")
    if args.layers:
        config = at_depth(config, depth_of(config, args.layers))
    elif not is_saved:
        config = _shrunk(args.model, config, each, free * _SHARE, console)
    count = count_parameters(config)
    told = f"{count / 1e6:,.1f} M parameters: {parts} take about {gib(count * each)} of {of} memory"
    if count * each > free:
        raise CommandError(
            f"{args.model}, {told}: expected at most {gib(free)}, which are free. Free more, use --dtype bf16, or name "
            "a config.json, of which random weights and fewer layers are compared."
        )
    console.print(f"{told} ({gib(free)} free)")
    return config


def _shrunk(name: str, config: PreTrainedConfig, each: int, free: float, console: Console) -> PreTrainedConfig:
    """Return a configuration of a model small enough to draw and compare; print so if it has fewer layers."""
    whole = count_parameters(config)
    if whole <= _MOST and whole * each <= free:
        return config
    size, least, found = f"{name} has {whole / 1e6:,.0f} M parameters", "all", whole
    with contextlib.suppress(MeasureError):  # not every depth can be changed
        own, every = depth_of(config), period(config)
        for number in (max(2, every), every):
            few, least = at_depth(config, {field: min(number, full) for field, full in own.items()}), f"even {every}"
            if (found := count_parameters(few)) * each <= free and found < whole:
                told = f"{counted(number, 'layer')} of that width, {found / 1e6:,.0f} M; --layers N takes others."
                console.print(f"{size} in {sum(own.values())} layers. Compared: {told}")
                return few
    if whole * each > free:
        raise CommandError(
            f"{size}, and {least} of its layers need {found * each / GIB:.1f} GiB with what is compared: expected at "
            f"most {free / GIB:.1f}. Use --dtype bf16, or name a config.json of less width."
        )
    console.print(f"{size}, and its depth cannot be changed: drawing the weights takes minutes.")
    return config
