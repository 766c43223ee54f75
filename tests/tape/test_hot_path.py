"""What a step that the tape has learned costs its host, in counts that no machine changes: a layer, beyond stock's."""

import sys
from collections import Counter

import pytest
import torch

from hf_memsave import patch
from support.lora import adapted
from support.tapes import COUNTED, is_counted
from support.zoo import Size, batch_for, build

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA's dropout is another function")

#: At most so many calls of Python functions in forward and in backward, and calls recorded, tensors packed, contents
#: that are to be recomputed, and that were.
LIMITS = {
    "bert": (435, 63, 5, 28, 3, 3),
    "gpt2": (766, 124, 14, 27, 12, 12),
    "t5-encoder": (623, 80, 14, 31, 4, 4),
    "llama": (629, 107, 26, 38, 6, 6),
    "llama with LoRA": (788, 268, 26, 43, 6, 6),
}
#: Forwards after which nothing more is learned.
LEARNED = 4


def counts_of_step(name, layers, is_patched, monkeypatch):
    size = Size(hidden=32, heads=4, layers=layers, batch=1, seq=8)
    family, _, is_adapted = name.partition(" with ")
    model = adapted(family, "fp32", 0.05, size) if is_adapted else build(family, size, dropout=0.0)
    batch = batch_for(model, size)
    if is_patched:
        patch(model)
    for _ in range(LEARNED):
        model(**batch).loss.backward()
    found, part = Counter(), "forward"

    def profile(frame, event, _):
        found[part] += event == "call" and frame.f_globals["__name__"] != "typing"  # PyTorch 2.15 calls it

    sys.setprofile(profile)
    try:
        loss = model(**batch).loss
        part = "backward"
        loss.backward()
    finally:
        sys.setprofile(None)
    with monkeypatch.context() as patched:
        for owner, method in COUNTED:
            patched.setattr(owner, method, counted(getattr(owner, method), method, found))
        model(**batch).loss.backward()
    return found


def counted(right, name, found):
    def count(*args, **kwargs):
        found[name] += is_counted(name, args[0])
        return right(*args, **kwargs)

    return count


@pytest.mark.parametrize("name", LIMITS)
def test_a_learned_step_takes_no_more_calls_a_layer(name, monkeypatch):
    found = Counter()
    for layers, sign in ((6, 1), (4, -1)):
        for is_patched in (True, False):
            counts = counts_of_step(name, layers, is_patched, monkeypatch)
            for key, n in counts.items():
                found[key] += n * sign * (1 if is_patched else -1)
    of_layer = tuple(found[key] / 2 for key in ("forward", "backward", *(method for _, method in COUNTED)))
    assert all(n > 0 for n in of_layer)
    assert all(n <= most for n, most in zip(of_layer, LIMITS[name], strict=True)), f"{of_layer}, of {LIMITS[name]}"
