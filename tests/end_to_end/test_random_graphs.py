"""Random programs of patched and stock modules, masks, views, writes, errors and backwards: patched against stock.

What may differ is said in :func:`check`. To look at a failure again: ``python scripts/fuzz.py --seeds N:N+1``.
"""

import pytest

from hf_memsave.tape import calls, content
from hf_memsave.tape.content import Content
from support.differential import check
from support.helpers import halved, nodes
from support.programs import draw

BATCHES, BATCH = 8, 100
#: Of 4,000 other programs (seeds from 100,000 on): those that remade a tensor, ran in stock, and raised in ours alone.
REMADE, RAN, RAISED = 0.877, 0.689, 0.008

pytestmark = pytest.mark.long


def spread(share):
    """Three standard deviations of the count in a batch."""
    return 3 * (BATCH * share * (1 - share)) ** 0.5


@pytest.mark.parametrize(("batch",), halved(range(BATCHES)))
def test_random_graphs_are_as_in_stock(batch, monkeypatch):
    made, outcomes, with_nodes, become = [], [], 0, Content.become

    def counted(self, make, *args, **kwargs):
        if getattr(make, "func", make) not in (content._fetched, content.same):  # kept by a hook, or handed on
            made.append(None)
        return become(self, make, *args, **kwargs)

    monkeypatch.setattr(Content, "become", counted)
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        made.clear()
        outcomes.append(check(draw(seed)))
        with_nodes += bool(made)
    assert with_nodes > BATCH * REMADE - spread(REMADE), "few programs remade a tensor: the test tests little"
    assert outcomes.count("same") > BATCH * RAN - spread(RAN), "few programs run in stock"
    assert outcomes.count("raised") < BATCH * RAISED + spread(RAISED), "we raise where stock does not, too often"
    assert not nodes(), "a node outlived its graph"


@pytest.mark.parametrize(("batch",), halved(range(BATCHES // 2)))
def test_random_graphs_seen_before_are_as_in_stock(batch, monkeypatch):
    unused, end = 0, calls.Calls.end

    def counted(of_forward):
        nonlocal unused
        end(of_forward)
        unused += list(of_forward.known.values()).count(calls.UNUSED)

    monkeypatch.setattr(calls.Calls, "end", counted)
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        check(draw(seed), is_taught=True)
    assert unused > 5 * BATCH, "few calls were left unrecorded: the test tests little"
