"""Ways to train: whatever is done around a forward and a backward, a patched model gives what stock gives."""

import copy
import pickle

import pytest

from hf_memsave import patch
from hf_memsave.patching.swap import _CLASSES
from hf_memsave.tape.content import Content
from support.modes import FAMILIES, MODES, WITHOUT_GRADIENTS, batch_of, make
from support.steps import assert_same, step

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")


@pytest.mark.parametrize("mode", MODES | WITHOUT_GRADIENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_stock(family, mode, device):
    stock = make(family, device)
    ours = copy.deepcopy(stock)
    patch(ours)
    run = (MODES | WITHOUT_GRADIENTS)[mode]
    expected = run(stock)
    assert_same(run(ours), expected)


def negative(tensor):
    return -tensor if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("mode", [m for m in MODES if "by hand" not in m and m != "eval mode"])
def test_a_wrong_recomputation_is_seen(mode, monkeypatch):
    """Each mode above does remake tensors in backward: other numbers than those of forward are caught."""
    right = Content._run
    monkeypatch.setattr(Content, "_run", lambda node: negative(right(node)))
    stock = make("bert")
    ours = copy.deepcopy(stock)
    patch(ours)
    expected = MODES[mode](stock)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(MODES[mode](ours), expected)


def test_a_pickled_model_trains_in_a_process_that_has_never_patched_one(device):
    model = make("bert", device)
    expected = step(model, batch_of(model))
    patch(model)
    pickled = pickle.dumps(model)
    _CLASSES.clear()
    loaded = pickle.loads(pickled)
    assert type(loaded) is not type(model)
    assert_same(step(loaded, batch_of(loaded)), expected)
