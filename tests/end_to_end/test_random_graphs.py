"""Random programs of patched and stock modules, views, writes in place and backwards: patched against stock.

What may differ is said in :func:`check`. To look at a failure again: ``check(draw(seed))``.
"""

import contextlib

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave import KeptTensorChangedError
from hf_memsave.tape.handles import Node
from support.helpers import EARLIER, assert_same_bits, autocasting, nodes
from support.programs import Backward, draw, graph_of

BATCHES, BATCH = 20, 100

pytestmark = pytest.mark.long


class Run:
    """What a program gives on one graph: tensors by label, in order, and the error that ended it."""

    def __init__(self, program, graph, around=contextlib.nullcontext):
        self.program, self.graph, self.around = program, graph, around
        self.results = []
        self.error = None
        generator = torch.Generator().manual_seed(program.seed)
        self.leaves = {
            name: torch.randn(shape, generator=generator).to(program.dtype).requires_grad_(wants)
            for name, (shape, wants) in program.inputs.items()
        }
        self.tensors = dict(self.leaves)
        torch.default_generator.manual_seed(program.seed)  # manual_seed asks for every other device: slow
        try:
            for self.at, event in enumerate(program.events):
                self.backward(event) if isinstance(event, Backward) else self.steps(*event)
        except RuntimeError as error:
            self.error = error.with_traceback(None)
        self.tensors, self.leaves = {}, {}

    def steps(self, where, steps):
        if where == "outside":
            for step in steps:
                self.graph.do(step, self.tensors)
            return
        with self.around(), autocasting(torch.device("cpu"), self.program.autocast):
            self.graph(steps, self.tensors)
        self.note({name: t for name, t in self.tensors.items() if name != "junk"})

    def backward(self, event):
        outputs = [t for name in event.outputs if (t := self.tensors[name]).requires_grad]
        wanted = [(n, t) for n in event.wanted if (t := self.graph.lookup(n, self.tensors)).requires_grad]
        if not outputs or (event.wanted and not wanted):
            return
        seeds = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape) for t in outputs]
        if not event.wanted:
            torch.autograd.backward(outputs, seeds, retain_graph=event.retain)
            self.note({n: t.grad for n, t in (*self.leaves.items(), *self.graph.named_parameters()) if t.is_leaf})
            return
        names, wanted = zip(*wanted, strict=True)
        options = dict(retain_graph=event.retain or event.twice, create_graph=event.twice, allow_unused=True)
        grads = torch.autograd.grad(outputs, wanted, seeds, **options)
        self.note(dict(zip(names, grads, strict=True)))
        if event.twice and (of_grads := [g for g in grads if g is not None and g.requires_grad]):
            ones = [torch.ones_like(g) for g in of_grads]
            grads = torch.autograd.grad(of_grads, wanted, ones, allow_unused=True)
            self.note({f"{name}, twice": grad for name, grad in zip(names, grads, strict=True)})

    def note(self, tensors):
        """Also the generator's state, which a dropout must leave as stock does."""
        found = {f"event {self.at}: {n}": None if t is None else t.detach().clone() for n, t in tensors.items()}
        self.results += [*found.items(), (f"event {self.at}: generator", torch.get_rng_state())]


def copied(tensor):
    """Its storage again, seen in the same way: no write reaches it."""
    storage = tensor.detach().untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def copies():
    return saved_tensors_hooks(copied, lambda kept: kept)


def same(ours, expected):
    """Equal as far as ours got; an error of ours is one of ours, or the expected one."""
    for (label, mine), (label_there, stock) in zip(ours.results, expected.results, strict=False):
        assert label == label_there
        assert_same_bits(mine, stock, label)
    if ours.error is None:
        assert len(ours.results) == len(expected.results)


def check(program):
    """Run ``program`` on a stock and a patched graph; returns "same", "raised" or "stock raised".

    Where stock succeeds, ours gives its bits, or raises :class:`KeptTensorChangedError` if the program writes in place.
    Where stock raises, ours raises too, or gives what stock would have given had it kept copies.
    """
    around = copies if program.copies else contextlib.nullcontext
    expected = Run(program, graph_of(program.dtype), around)
    ours = Run(program, graph_of(program.dtype, program.dropout), around)
    try:
        if expected.error is None:
            same(ours, expected)
            if ours.error is not None:
                assert program.writes and isinstance(ours.error, KeptTensorChangedError), repr(ours.error)
            return "same" if ours.error is None else "raised"
        if ours.error is None:
            expected = Run(program, graph_of(program.dtype), copies)
            assert expected.error is None, f"stock raises: {expected.error}"
        same(ours, expected)
    except AssertionError as error:
        raise AssertionError(f"{error}\nin the program\n{program}") from None
    return "stock raised"


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
    assert with_nodes > 0.8 * BATCH, "few programs remade a tensor: the test tests little"
    assert outcomes.count("same") > 0.7 * BATCH, "few programs run in stock"
    assert outcomes.count("raised") < 0.05 * BATCH, "we raise where stock does not, in more than few programs"
    assert not nodes(), "a node outlived its graph"
