"""Runs random programs patched and stock, compares them to the bit, and shrinks what differs."""

import contextlib
import operator
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch

from hf_memsave import KeptTensorChangedError
from hf_memsave.patching import taped
from hf_memsave.tape import codecs
from support.helpers import assert_same_bits, autocasting, nodes
from support.program_ops import CONTEXTS, MASKS, Fault, graph_of
from support.programs import Backward
from support.threads import switching

#: Times that a tape sees a program until it no longer records what is never asked for.
LESSONS = 4


class Run:
    """What a program gives on one graph: tensors by label, in order, and the error that ended it."""

    def __init__(self, program, graph, around=None):
        self.program, self.graph = program, graph
        self.around = CONTEXTS.get(around or program.around, contextlib.nullcontext)
        self.results, self.error = [], None
        generator = torch.Generator().manual_seed(program.seed)
        self.leaves = {
            name: torch.randn(shape, generator=generator).to(program.dtype).requires_grad_(wants)
            for name, (shape, wants) in program.inputs.items()
        }
        self.tensors = dict(self.leaves)
        for name, (shape, kind) in program.masks.items():
            self.tensors[name] = MASKS[kind](torch.rand(shape, generator=generator) < 0.6)
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
        with self.around(), autocasting(torch.device("cpu"), self.program.autocast), contextlib.suppress(Fault):
            self.graph(steps, self.tensors)
        self.note({name: t for name, t in self.tensors.items() if name != "junk"})

    def backward(self, event):
        outputs = [t for name in event.outputs if (t := self.tensors[name]).requires_grad]
        wanted = {n: t for n in event.wanted if (t := self.graph.lookup(n, self.tensors)).requires_grad}
        if not outputs or (event.wanted and not wanted):
            return
        seeds = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape) for t in outputs]
        if event.fails and (at := self.tensors[event.fails]).requires_grad and not at._is_view():
            self.fail(outputs, seeds, at)  # a hook on a view that was written to may crash PyTorch
        if not event.wanted:
            torch.autograd.backward(outputs, seeds, retain_graph=event.retain)
            self.note_gradients()
            return
        options = dict(retain_graph=event.retain or event.twice, create_graph=event.twice, allow_unused=True)
        grads = torch.autograd.grad(outputs, [*wanted.values()], seeds, **options)
        self.note(dict(zip(wanted, grads, strict=True)))
        if event.twice and (of_grads := [g for g in grads if g is not None and g.requires_grad]):
            ones = [torch.ones_like(g) for g in of_grads]
            grads = torch.autograd.grad(of_grads, [*wanted.values()], ones, allow_unused=True)
            self.note({f"{name}, twice": grad for name, grad in zip(wanted, grads, strict=True)})

    def fail(self, outputs, seeds, tensor):
        def refuse(gradient):
            raise Fault

        handle = tensor.register_hook(refuse)
        with contextlib.suppress(Fault):
            torch.autograd.backward(outputs, seeds, retain_graph=True)
        handle.remove()
        self.note_gradients()

    def note_gradients(self):
        self.note({n: t.grad for n, t in (*self.leaves.items(), *self.graph.named_parameters()) if t.is_leaf})

    def note(self, tensors):
        """Copies as they are now (of booleans, whether they are true), and the generator's state, as stock's."""
        for name, t in tensors.items():
            noted = t if t is None else t.to(torch.float32) if t.dtype == torch.bool else t.detach().clone()
            self.results.append((f"event {self.at}: {name}", noted))
        self.results.append((f"event {self.at}: generator", torch.get_rng_state()))


@contextlib.contextmanager
def small_codes():
    """Booleans become bits however few they are; and threads take turns often."""
    with mock.patch.object(codecs, "SMALLEST", 1), switching(1e-4), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run_taught(program):
    """On a patched graph whose tapes have seen the program before, as far as they decide by what they have seen."""
    seen = {}
    for _ in range(LESSONS):
        graph = graph_of(program.dtype, program.dropout)
        for name, module in graph.named_modules():
            taped.CALLS[module] = seen.setdefault(name, {})
        run = Run(program, graph)
    return run


def runs_of(program, is_taught=False):
    """On a patched graph that has learned nothing of earlier programs, if not taught; or on two at once, in threads."""
    if is_taught and not program.threads:
        return [run_taught(program)]
    taped.CALLS.clear()
    graphs = [graph_of(program.dtype, program.dropout, number) for number in range(1 + program.threads)]
    if not program.threads:
        return [Run(program, graphs[0])]
    barrier = threading.Barrier(2)

    def run(graph):
        barrier.wait()
        found = Run(program, graph)
        # The engine lets go of what an error left, on this thread.
        torch.ones((), requires_grad=True).square().backward()
        return found

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, graphs))


def compare(program, ours, expected):
    """Equal as far as ours got; an error of ours is one that tells of a write, or comes where stock has one too."""
    is_stocks = expected.error is not None
    if is_stocks and ours.error is None:
        expected = Run(program, graph_of(program.dtype), "copies")
        assert expected.error is None, f"stock raises: {expected.error}"
    for (label, mine), (label_there, stock) in zip(ours.results, expected.results, strict=False):
        assert label == label_there
        assert_same_bits(mine, stock, label)
    if ours.error is None:
        assert len(ours.results) == len(expected.results)
    elif not is_stocks:  # ours, or PyTorch's of what a backward that is differentiated kept, and another one wrote to
        is_of_a_write = isinstance(ours.error, KeptTensorChangedError) or "modified by an inplace" in str(ours.error)
        assert program.writes and is_of_a_write, repr(ours.error)
    return "stock raised" if is_stocks else "same" if ours.error is None else "raised"


def check(program, is_taught=False):
    """Run ``program`` on a stock and a patched graph; returns "same", "raised" or "stock raised".

    Where stock succeeds, ours gives its bits, or raises :class:`KeptTensorChangedError` if the program writes in place.
    Where stock raises, ours raises too, or gives what stock would have given had it kept copies.
    """
    with small_codes():
        expected = Run(program, graph_of(program.dtype))
        try:
            outcomes = {compare(program, ours, expected) for ours in runs_of(program, is_taught)}
        except AssertionError as error:
            raise AssertionError(f"{error}\nin the program\n{program}") from None
    return max(outcomes)


class _Kept:
    """A tensor that stock keeps, in what Python can count."""

    alive = 0

    def __init__(self, tensor):
        self.tensor = tensor
        _Kept.alive += 1

    def __del__(self):
        _Kept.alive -= 1


def outlives_in_stock(program):
    """Whether stock's own graph holds itself for ever: a tensor without gradient is kept, and then written to."""
    before = _Kept.alive
    with torch.autograd.graph.saved_tensors_hooks(_Kept, operator.attrgetter("tensor")):
        Run(program, graph_of(program.dtype))
    nodes()
    return _Kept.alive > before


def differs(program):
    try:
        check(program)
    except AssertionError:
        return True
    except Exception:  # such as a name that no step gives any more
        return False
    return False


def smaller(program):
    """Programs with a little less in them: without an event or a step, or with a copy where a function was."""
    for name, value in {"autocast": None, "around": "", "threads": False, "dtype": torch.float32}.items():
        if getattr(program, name) != value:
            yield program._replace(**{name: value})
    for i, event in enumerate(program.events):
        before, after = program.events[:i], program.events[i + 1 :]
        yield program._replace(events=before + after)
        where, steps = ("", []) if isinstance(event, Backward) else event
        for j, step in enumerate(steps):
            ops = step.op.split(" > ")
            fewer = [step._replace(op=" > ".join(ops[:k] + ops[k + 1 :])) for k in range(len(ops)) if ops[1:]]
            fewer += [step._replace(op="clone", args=step.args[:1])] * (bool(step.out) and step.op != "clone")
            fewer += [step._replace(how="")] * bool(step.how)
            for instead in ([], *[[one] for one in fewer]):
                yield program._replace(events=[*before, (where, [*steps[:j], *instead, *steps[j + 1 :]]), *after])


def shrunk(program, most=3000):
    """A small program that still differs, found by leaving out whatever can be."""
    for _ in range(most):
        found = next((p for p in smaller(program) if differs(p)), None)
        if found is None:
            break
        program = found
    return program
