"""The seven rules at the top of ``hf_memsave/tape/tape.py``, each by an example of at most eight lines."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.tape import Tape, table_without
from hf_memsave.tape.calls import Calls
from hf_memsave.tape.content import MARK, Content, KeptView, Ticket
from hf_memsave.tape.decide import cost
from hf_memsave.tape.frame import Frame
from hf_memsave.tape.handles import Handle
from hf_memsave.tape.private import no_modes

FRAME = Frame(table_without())


@pytest.fixture
def x():
    return torch.randn(8, 8, requires_grad=True)


@pytest.fixture
def w():
    return nn.Parameter(torch.randn(8, 8))


def test_rule_1_a_ticket_gives_the_bits_that_were_packed_or_raises(x, w):
    with Tape(FRAME):
        y = F.gelu(x) @ w  # of GELU's output and input, the input alone is kept
    assert torch.equal(*(torch.autograd.grad(z.sum(), w, retain_graph=True)[0] for z in (y, F.gelu(x) @ w)))
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_rule_2_a_content_belongs_to_one_hook_context(x, w):
    with Tape(FRAME) as model:
        y = F.gelu(x)
        with torch.autograd.graph.save_on_cpu(), Tape(FRAME) as block:
            assert block.call_that_made(y) is None  # so that it would keep y itself
        assert model.call_that_made(y).func is F.gelu


def test_rule_3_a_call_outlives_its_block_by_one_if_that_returns_its_result(x):
    with Tape(FRAME) as tape:
        y, z = F.gelu(x), F.silu(x)
        tape.end_block(y)
        assert tape.call_that_made(y) is not None and tape.call_that_made(z) is None
        tape.end_block()
        assert tape.call_that_made(y) is None


def test_rule_4_links_are_strong_while_a_content_is_nowhere_or_newly_recomputed(x, w):
    with Tape(FRAME) as tape:
        y = F.gelu(x)
        assert type(getattr(y.untyped_storage(), MARK)) is Content
        z = y @ w
        assert type(getattr(y.untyped_storage(), MARK)) is Content
        tape.end_block(z)
        tape.end_block(z)
        assert type(getattr(y.untyped_storage(), MARK)) is weakref.ref


def test_rule_5_nothing_on_the_tape_refers_to_the_tape_or_has_a_graph(x):
    with Tape(FRAME) as tape:
        held = [tape.pack(F.gelu(F.silu(x)))]
    for one in held:  # which grows
        held += [of for of in gc.get_referents(one) if isinstance(of, (Handle, Tensor, Tape, list, tuple, dict))]
    assert {Ticket, KeptView, Content} < set(map(type, held)) and not any(one is tape for one in held)
    assert all(one.is_leaf for one in held if isinstance(one, Tensor))


def test_rule_6_earlier_forwards_decide_which_calls_are_recorded_and_no_bit(x, w):
    seen, gradients, recorded = {}, [], []
    for _ in range(3):
        with Tape(FRAME, calls=Calls(seen)) as tape:
            y, calls = F.gelu(x.sigmoid().sin()) @ w, tape.calls
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
        recorded.append(len(calls.made))
    assert all(torch.equal(gradients[0], other) for other in gradients) and recorded == [3, 3, 2]


def test_rule_7_where_a_parameters_bytes_are_decides_nothing(w):
    with Tape(FRAME) as tape:
        y = w.double()
        before = cost(tape, y)
        with no_modes():
            w.data = w.data.clone()  # as an optimizer or ``.to()`` may
        assert cost(tape, y) == before == 0
