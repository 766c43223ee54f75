"""What the tape costs its host, in counts that no machine changes: what it does for two layers of a model."""

import contextlib
from collections import Counter

import pytest
import torch

from hf_memsave import patch
from support.families import Size, batch_for, build
from support.tapes import COUNTED, is_counted

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA's dropout is another function")

#: At most so many records, tensors packed, nodes settled at once and nodes run, in fp32 and under bf16 autocast. Nodes
#: of the sweep at a block's end are among those run.
LIMITS = {
    "bert": ((18, 60, 10, 10), (50, 60, 34, 30)),
    "gpt2": ((36, 58, 28, 28), (56, 58, 44, 44)),
    "t5-decoder": ((72, 110, 22, 22), (112, 110, 66, 61)),  # of 229 in 6 layers
    "t5-gated-encoder": ((56, 82, 34, 34), (86, 82, 66, 60)),
    "llama": ((52, 76, 12, 12), (82, 76, 40, 34)),
    "phi": ((60, 64, 24, 24), (98, 64, 46, 40)),
    "phi3": ((66, 68, 18, 18), (84, 68, 34, 34)),
    "opt": ((24, 60, 8, 8), (56, 60, 31, 27)),
    "qwen3": ((72, 100, 42, 42), (110, 100, 82, 76)),
    "gemma": ((56, 76, 12, 16), (86, 76, 40, 38)),
}


@pytest.fixture
def counts(monkeypatch):
    found = Counter()

    def counted(owner, name):
        right = getattr(owner, name)

        def count(*args, **kwargs):
            found[name] += is_counted(name, args[0])
            return right(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    for owner, name in COUNTED:
        counted(owner, name)
    return found


def of_step(counts, family, layers, autocast):
    size = Size(hidden=64, heads=4, layers=layers, batch=2, seq=32)
    model = build(family, size)
    patch(model)
    counts.clear()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = model(**batch_for(model, size)).loss
    loss.backward()
    return Counter(counts)


@pytest.mark.long
@pytest.mark.parametrize("family", LIMITS)
def test_two_layers_take_no_more_steps_of_the_tape(family, counts):
    for autocast, limit in enumerate(LIMITS[family]):
        of_4, of_6 = (of_step(counts, family, layers, autocast) for layers in (4, 6))
        found = tuple(of_6[name] - of_4[name] for _, name in COUNTED)
        assert all(n > 0 for n in found)
        assert all(n <= most for n, most in zip(found, limit, strict=True)), f"{found}, expected at most {limit}"
