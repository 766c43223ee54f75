"""Load the model and the batch that a command's options name, to run a training step."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedConfig

from hf_memsave.commands.options import settle_sizes, weights_of
from hf_memsave.config.sizes import GIB, counted
from hf_memsave.device import free_main_memory
from hf_memsave.errors import CommandError, MeasureError
from hf_memsave.measure.inputs import described, fitted, make_batch, read_batch
from hf_memsave.measure.models import at_depth, count_parameters, depth_of, has_weights, load_config, load_model, period

_MOST = 10**9  # parameters that are drawn without a question: more take minutes
_COPIES = 5  # weights, their gradients, and the gradients of the three steps that are compared
_SHARE = 0.7  # of the free memory


def load_inputs(args: argparse.Namespace, console: Console) -> tuple[Any, dict[str, Any], str]:
    """Load a model in training mode, for ``verify`` perhaps with fewer layers, and a batch; return them and a title."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: expected a CUDA device, found none. Use --device cpu.")
    batch = read_batch(args.batch) if args.batch else None  # a wrong file must not cost a download
    config, dtype, note = None, weights_of(args), ""
    with console.status(f"Loading {args.model} ..."):
        if "layers" in args and not has_weights(args.model):
            config = _shrunk(args, dtype, console)
        elif getattr(args, "layers", None):
            raise CommandError(f"--layers: expected random weights, got those of {args.model}. Leave it out.")
        model, head, weights = load_model(args.model, dtype, config=config, has_batch=batch is not None)
        if batch is None:
            note = settle_sizes(args, model.config)
            batch = make_batch(head, model.config, args.batch_size, args.seq_len)
        batch = fitted(batch, model.to(args.device).train())
    return model, batch, f"{type(model).__name__}, {weights}: {described(batch)}\n{note}".rstrip()


def _shrunk(args: argparse.Namespace, dtype: torch.dtype | None, console: Console) -> PreTrainedConfig:
    """Return a configuration of a model small enough to draw and compare; print so if it has fewer layers."""
    config = load_config(args.model)
    if args.layers:
        return at_depth(config, depth_of(config, args.layers))
    whole, free = count_parameters(config), free_main_memory() * _SHARE
    each = (dtype or config.dtype or torch.float32).itemsize * _COPIES
    if whole <= _MOST and whole * each <= free:
        return config
    size, least, found = f"{args.model} has {whole / 1e6:,.0f} M parameters", "all", whole
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
