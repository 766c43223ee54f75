"""The norms that sampled linears draw by, in a checkpoint: saved by every process, read back by every process."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from transformers.utils import logging

from hf_memsave.patching.sampled_layers import sampler_of
from hf_memsave.sampling.norm_cache import merged

logger = logging.get_logger(__name__)

#: The file in a checkpoint's folder.
NORMS_NAME = "memsave_norms.safetensors"


def save_norms(model: nn.Module, folder: str | Path) -> None:
    """Write what the sampler of ``model`` has learned, and how many forwards it has seen; nothing if it has none.

    Every process must call it: what they have learned is gathered, and the first one writes.
    """
    sampler = sampler_of(model)
    if sampler is None:
        return
    states = [sampler.state_dict()]
    if distributed.is_available() and distributed.is_initialized():
        states = [{} for _ in range(distributed.get_world_size())]
        distributed.all_gather_object(states, sampler.state_dict())
        if distributed.get_rank():
            return
    target = Path(folder) / NORMS_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    save_file({name: tensor.contiguous() for name, tensor in merged(states).items()}, unfinished)
    unfinished.replace(target)


def load_norms(model: nn.Module, folder: str | Path) -> bool:
    """Go on as the run that saved ``folder`` would have.

    Returns:
        Whether there was something to read; without, the sampler starts anew, as unbiased as ever.
    """
    sampler, source = sampler_of(model), Path(folder) / NORMS_NAME
    if sampler is None:
        return False
    if not source.is_file():
        logger.warning("%s has no %s: sampled linears start without the norms of earlier steps.", folder, NORMS_NAME)
        return False
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sampler.load_state_dict(load_file(source), device)
    return True
