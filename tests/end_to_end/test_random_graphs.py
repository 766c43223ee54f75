"""Random programs of patched and stock modules, masks, views, writes, errors and backwards: patched against stock.

What may differ is said in :func:`check`. To look at a failure again: ``python scripts/fuzz.py --seeds N:N+1``.
"""

import pytest

from hf_memsave.tape.handles import Node
from support.differential import check
from support.helpers import EARLIER, nodes
from support.programs import draw

BATCHES, BATCH = 20, 100

pytestmark = pytest.mark.long


@pytest.fixture
def made(monkeypatch):
    """Grows by one for each tensor that is to be remade instead of kept."""
    found = []
    init = Node.__init__

    def counted(self, *args):
        found.append(None)
        init(self, *args)

    monkeypatch.setattr(Node, "__init__", counted)
    return found


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_graphs_are_as_in_stock(batch, made):
    EARLIER.update(nodes())  # of other tests: save_on_cpu without a backward, on CPU, never lets go of a graph
    outcomes, with_nodes = [], 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        made.clear()
        outcomes.append(check(draw(seed)))
        with_nodes += bool(made)
    assert with_nodes > 0.75 * BATCH, "few programs remade a tensor: the test tests little"
    assert outcomes.count("same") > 0.55 * BATCH, "few programs run in stock"
    assert outcomes.count("raised") < 0.05 * BATCH, "we raise where stock does not, in more than few programs"
    assert not nodes(), "a node outlived its graph"
