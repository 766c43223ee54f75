"""The peak of whole steps: less than stock's, and what the allocator says."""

import gc
import itertools
from dataclasses import replace

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from hf_memsave import patch
from hf_memsave.count.peak import count_peak
from support.helpers import halved
from support.lora import adapted
from support.zoo import Size, batch_for, build


def allocated(step):
    """The most bytes that torch's CPU allocator had out at once, by the trace of the profiler.

    Without what an op takes and gives back before it returns: a kernel's own buffer, which the count does not see.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    made, changes = {}, {}  # address -> the ops that made what lies there, and when; time -> bytes

    def walk(event, ops):
        if event.tag == _EventType.Allocation:
            key, address = (event.start_time_ns, event.id), event.extra_fields.ptr
            nbytes = event.extra_fields.alloc_size
            changes[key] = nbytes
            if nbytes > 0:
                made[address] = ops, key
            elif address in made:
                makers, before = made.pop(address)
                if ops and ops[-1][0].startswith("aten::") and ops == makers[: len(ops)]:
                    del changes[key], changes[before]
        for child in sorted(event.children, key=lambda e: e.start_time_ns):
            walk(child, (*ops, (event.name, event.id)))

    for event in sorted(trace.profiler.kineto_results.experimental_event_tree(), key=lambda e: e.start_time_ns):
        walk(event, ())
    return max(itertools.accumulate(changes[key] for key in sorted(changes)))


#: The size at which limits are quoted.
LAYERS = Size(hidden=256, heads=4, layers=6, batch=8, seq=128)
HALF = replace(LAYERS, batch=4)  # for products in bf16, which may be slow
#: Family, whether it has adapters, bf16 autocast; and the most that the peak may be of stock's.
STEPS = {
    "bert": ("bert", False, False, 0.63), "llama": ("llama", False, False, 0.595),
    "llama, bf16, LoRA": ("llama", True, False, 0.295), "bert, autocast": ("bert", False, True, 0.51),
    "llama, autocast": ("llama", False, True, 0.44), "llama, autocast, a cache": ("llama", False, True, 0.45),
}  # fmt: skip
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="figures are those of CPU kernels")


def made(family, has_adapters, is_autocast, size, patched):
    """A model, and one step of it; the step leaves its gradients."""
    model = adapted(family, size=size) if has_adapters else build(family, size)
    model.config.use_cache = False  # as Trainer has it: the cache of keys and values would stand in both peaks
    if patched:
        patch(model, dropout="seed" if has_adapters or is_autocast else "auto")  # bits are more beside 16 bits
    batch = batch_for(model, size)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = model(**batch).loss
        loss.backward()

    return model, step


@pytest.mark.long
@on_cpu
@pytest.mark.parametrize("of", STEPS)
def test_a_steps_peak_is_at_most_this_part_of_stocks(of):
    family, has_adapters, is_autocast, limit = STEPS[of]
    size, peaks = HALF if has_adapters or (family, is_autocast) == ("llama", True) else LAYERS, {}
    for patched in (False, True):
        model, step = made(family, has_adapters, is_autocast, size, patched)
        model.config.use_cache = "a cache" in of  # which the caller asks for
        found = count_peak(step)
        assert found.end == sum(p.nbytes for p in model.parameters() if p.requires_grad)
        peaks[patched] = found.peak
    assert peaks[True] <= limit * peaks[False]


@on_cpu
@pytest.mark.parametrize(("of", "patched"), halved(STEPS, [True, False]))
def test_the_count_agrees_with_the_allocator(of, patched):
    size = Size(hidden=128, heads=4, layers=2, batch=16, seq=64)
    model, step = made(*STEPS[of][:3], size, patched)
    peak = count_peak(step).peak
    model.zero_grad()
    assert peak == pytest.approx(allocated(step), rel=0.01)  # of which .5% are the states of LoRA's dropouts
