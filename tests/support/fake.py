"""Models of :mod:`support.zoo` on the stand-in for a CUDA device."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memsave import measure_kept, patch
from hf_memsave.count.peak import rounded
from hf_memsave.device import STAND_IN
from hf_memsave.measure.fake_device import fake_device, to_fake
from hf_memsave.measure.inputs import forward_of
from hf_memsave.measure.training import prepared
from support.lora import adapted
from support.zoo import QUOTED, batch_for, build

ATTENTION = ("flash", "efficient", "cudnn")
#: What a tensor without numbers raises when it is asked for them.
DATA_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, RuntimeError)


@contextmanager
def on_fake(make, attention="flash", size=QUOTED, padded=False):
    """The model that ``make`` makes, and its batch, without weights or numbers; with a mask if it is ``padded``."""
    with torch.device("meta"):
        model = make()
    with fake_device(attention) as device:
        batch = batch_for(to_fake(model, device), size)
        yield model, {name: value for name, value in batch.items() if padded or name != "attention_mask"}


def kept_on_fake(family, layers, mode="bf16", attention="flash", lora=False, config=True, seq=QUOTED.seq, padded=False):
    size = replace(QUOTED, layers=layers, seq=seq)
    dtype = torch.float32 if mode == "autocast" else torch.bfloat16

    def make():
        return adapted(family, size=size) if lora else build(family, size, dtype)

    with on_fake(make, attention, size, padded) as (model, batch):
        if config is not None:
            patch(model, config)
        return measure_kept(model, batch, forward_of(model, torch.bfloat16 if mode == "autocast" else None)).total


def directly(config, training, memsave):
    """A configuration's model at its full depth, and what it keeps by kind of op, each storage as CUDA rounds it."""
    with prepared(config, training, memsave, STAND_IN) as (model, batch, forward, _):
        found = Counter()
        for storage in measure_kept(model, batch, forward).storages:
            if storage.op not in ("unseen", "empty"):  # seeds and states of generators, in main memory
                found[storage.kind] += rounded(storage.nbytes, 512)
    return model, dict(found)


def u_on_fake(family, mode="bf16", attention="flash", lora=False, config=True):
    """What a layer keeps, in u of 16 bits: the mean of an even number of them."""
    first = 4 if family == "t5-decoder" else 2
    last = first + (4 if mode == "autocast" else 2)
    few, more = (kept_on_fake(family, n, mode, attention, lora, config) for n in (first, last))
    return (more - few) / (last - first) / QUOTED.u(2)


class NoTransfers(TorchDispatchMode):
    """Raises where a program copies between host and device (or to the host alone), and so would wait."""

    def __init__(self, only_to_host=False):
        super().__init__()
        self.only_to_host = only_to_host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        moved = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor) and t.dim() and t.numel()]
        of = {t.device.type for t in moved}
        is_to_host = isinstance(out, torch.Tensor) and out.device.type == "cpu"
        is_constant = func is torch.ops.aten.lift_fresh.default and out.device.type == STAND_IN and out.numel()
        if is_constant and not self.only_to_host:
            raise AssertionError(f"a constant is copied to {out.device}")
        if "copy" in str(func) and len(of) > 1 and STAND_IN in of and (is_to_host or not self.only_to_host):
            raise AssertionError(f"{func} copies between {of}")
        return out


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __getitem__(self, name):
        return self.calls[name]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
