"""The model and the batch that a command runs a training step of, as its options name them."""

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
from hf_memsave.measure.models import at_depth, build_empty, depth_of, has_weights, load_config, load_model, period

#: Parameters that are compared without a question; drawing more takes minutes.
_MOST = 10**9
#: Weights, their gradients, and the gradients of the three steps that are compared.
_COPIES = 5
#: A part of the free memory.
_SHARE = 0.7


def load_inputs(
    args: argparse.Namespace, console: Console, *, may_shrink: bool = False
) -> tuple[Any, dict[str, Any], str]:
    """A model in training mode, perhaps with fewer layers if its weights are random; a batch for it; both in words."""
    dtype = weights_of(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: expected a CUDA device, found none. Use --device cpu.")
    batch = read_batch(args.batch) if args.batch else None  # a wrong file must not cost a download
    with console.status(f"Loading {args.model} ..."):
        config = None
        if may_shrink and not has_weights(args.model):
            whole = load_config(args.model)
            config, note = shrunk(args.model, whole, dtype or whole.dtype or torch.float32, args.layers)
            console.print(note, end="\n" if note else "")
        elif may_shrink and args.layers:
            raise CommandError(f"--layers: expected random weights, got those of {args.model}. Leave it out.")
        model, head, weights = load_model(args.model, dtype, config=config, has_batch=batch is not None)
        note = ""
        if batch is None:
            note = settle_sizes(args, model.config)
            batch = make_batch(head, model.config, args.batch_size, args.seq_len)
        model.to(args.device).train()
        batch = fitted(batch, model)
    return model, batch, f"{type(model).__name__}, {weights}: {described(batch)}\n{note}".rstrip()


def shrunk(name: str, config: PreTrainedConfig, dtype: torch.dtype, layers: int | None) -> tuple[PreTrainedConfig, str]:
    """A configuration whose model is small enough to be drawn and compared, and what to say of its layers, if fewer."""
    if layers is not None:
        return at_depth(config, depth_of(config, layers)), ""
    free = free_main_memory() * _SHARE
    each = dtype.itemsize * _COPIES
    whole = _count(config)
    if whole <= _MOST and whole * each <= free:
        return config, ""
    size, least, found = f"{name} has {whole / 1e6:,.0f} M parameters", "all", whole
    with contextlib.suppress(MeasureError):
        own, every = depth_of(config), period(config)
        for number in (max(2, every), every):
            few, least = at_depth(config, {field: min(number, full) for field, full in own.items()}), f"even {every}"
            if (found := _count(few)) * each <= free and found < whole:
                less = f"Compared {'is' if number == 1 else 'are'} {counted(number, 'layer')} of that width, "
                less += f"{found / 1e6:,.0f} M; --layers N takes others."
                return few, f"{size} in {sum(own.values())} layers. {less}"
    if found == whole and whole * each <= free:
        return config, f"{size}, which cannot be made less: drawing them takes minutes."
    raise CommandError(
        f"{size}, and {least} of its layers need {found * each / GIB:.1f} GiB with what is compared: expected at "
        f"most {free / GIB:.1f}. Use --dtype bf16, or name a config.json of less width."
    )


def _count(config: PreTrainedConfig) -> int:
    return int(sum(p.numel() for p in build_empty(config).parameters()))
