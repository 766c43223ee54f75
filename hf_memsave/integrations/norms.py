"""The norms that sampled linears draw by, in a checkpoint: a file with a table of samples, or text without."""

from __future__ import annotations

import base64
from pathlib import Path

import torch
from safetensors.torch import load, load_file, save, save_file
from torch import distributed, nn

from hf_memsave.errors import ConfigError
from hf_memsave.patching.sampled_layers import sampler_of
from hf_memsave.sampling.norm_cache import merged

#: The file in a checkpoint's folder.
NORMS_NAME = "memsave_norms.safetensors"
#: How the names of the table's rows end.
_SAMPLES = "/samples"


def save_norms(model: nn.Module, folder: str | Path) -> None:
    """Write what the sampler of ``model`` has learned, and how many forwards it has seen; nothing if it has none.

    Every process must call it: what they have learned is gathered, and the first one writes.
    """
    if (sampler := sampler_of(model)) is None:
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


def load_norms(model: nn.Module, folder: str | Path) -> None:
    """Go on as the run that saved ``folder`` would have; does nothing where nothing is sampled.

    Raises:
        ConfigError: There is no such file.
    """
    source = Path(folder) / NORMS_NAME
    if (sampler := sampler_of(model)) is None:
        return
    if not source.is_file():
        raise ConfigError(
            f"{folder}: expected a checkpoint with {NORMS_NAME}, found none. Name one that was saved under "
            "MemSaveCallback with a table of samples, or leave resume_from out: sampling starts over, as unbiased."
        )
    sampler.load_state_dict(load_file(source), _device(model))


def has_table(model: nn.Module) -> bool:
    """Whether the sampler of ``model`` has a table of samples."""
    return (sampler := sampler_of(model)) is not None and sampler.cache.samples > 0


def norms_to_text(model: nn.Module) -> str | None:
    """What the sampler of ``model`` has learned on this process, without a table of samples; None if it has none."""
    if (sampler := sampler_of(model)) is None:
        return None
    state = {name: t.contiguous() for name, t in sampler.state_dict().items() if not name.endswith(_SAMPLES)}
    return base64.b64encode(save(state)).decode("ascii")


def norms_from_text(model: nn.Module, text: str | None) -> None:
    """Go on as the run that wrote :func:`norms_to_text` would have."""
    if text is not None and (sampler := sampler_of(model)) is not None:
        sampler.load_state_dict(load(base64.b64decode(text)), _device(model))


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
