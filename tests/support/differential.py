"""Runs random programs patched and stock, compares them to the bit, and shrinks what differs."""

import contextlib
import operator
import sys
import threading
import warnings

import torch

from hf_memsave import KeptTensorChangedError
from hf_memsave.patching import taped
from hf_memsave.tape import codecs
from hf_memsave.tape.price import Decisions
from support.helpers import assert_same_bits, autocasting, nodes
from support.program_graph import Backward, Fault, graph_of
from support.program_ops import CONTEXTS, MASKS, copies

#: Times that a tape sees a program until it no longer records what is never asked for.
LESSONS = 4


class Run:
    """What a program gives on one graph: tensors by label, in order, and the error that ended it."""

    def __init__(self, program, graph, around=None):
        self.program, self.graph = program, graph
        self.around = around or CONTEXTS.get(program.around, contextlib.nullcontext)
        self.results = []
        self.error = None
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
        wanted = [(n, t) for n in event.wanted if (t := self.graph.lookup(n, self.tensors)).requires_grad]
        if not outputs or (event.wanted and not wanted):
            return
        seeds = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape) for t in outputs]
        if event.fails and (at := self.tensors[event.fails]).requires_grad and not at._is_view():
            self.fail(outputs, seeds, at)  # a hook on a view that was written to may crash PyTorch
        if not event.wanted:
            torch.autograd.backward(outputs, seeds, retain_graph=event.retain)
            self.note_gradients()
            return
        names, wanted = zip(*wanted, strict=True)
        options = dict(retain_graph=event.retain or event.twice, create_graph=event.twice, allow_unused=True)
        grads = torch.autograd.grad(outputs, wanted, seeds, **options)
        self.note(dict(zip(names, grads, strict=True)))
        if event.twice and (of_grads := [g for g in grads if g is not None and g.requires_grad]):
            ones = [torch.ones_like(g) for g in of_grads]
            grads = torch.autograd.grad(of_grads, wanted, ones, allow_unused=True)
            self.note({f"{name}, twice": grad for name, grad in zip(names, grads, strict=True)})

    def fail(self, outputs, seeds, tensor):
        """A backward that meets an error on its way."""

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
        """Also the generator's state, which a dropout must leave as stock does."""
        found = {f"event {self.at}: {n}": None if t is None else noted(t) for n, t in tensors.items()}
        self.results += [*found.items(), (f"event {self.at}: generator", torch.get_rng_state())]


def noted(tensor):
    """A copy as it is now; of booleans, whether they are true."""
    return tensor.detach().clone() if tensor.dtype != torch.bool else tensor.to(torch.float32)


def same(ours, expected):
    """Equal as far as ours got; an error of ours is one of ours, or the expected one."""
    for (label, mine), (label_there, stock) in zip(ours.results, expected.results, strict=False):
        assert label == label_there
        assert_same_bits(mine, stock, label)
    if ours.error is None:
        assert len(ours.results) == len(expected.results)


@contextlib.contextmanager
def small_codes():
    """Booleans become bits however few they are; and threads take turns often."""
    before, interval = codecs.SMALLEST, sys.getswitchinterval()
    codecs.SMALLEST = 1
    sys.setswitchinterval(1e-4)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        codecs.SMALLEST = before
        sys.setswitchinterval(interval)


def taught(program):
    """A patched graph whose tapes have seen the program before, as far as they decide by what they have seen."""
    decided = {}
    for _ in range(LESSONS):
        graph = graph_of(program.dtype, program.dropout, 0)
        for name, module in graph.named_modules():
            taped._decided[module] = decided.setdefault(name, Decisions())
        yield graph


def runs_of(program, is_taught=False):
    """On a patched graph that has learned nothing of earlier programs, if not taught; or on two at once, in threads."""
    if is_taught and not program.threads:
        *_, last = [Run(program, graph) for graph in taught(program)]
        return [last]
    taped._decided.clear()
    graphs = [graph_of(program.dtype, program.dropout, number) for number in range(1 + program.threads)]
    if not program.threads:
        return [Run(program, graphs[0])]
    found, barrier = [], threading.Barrier(2)

    def run(graph):
        barrier.wait()
        found.append(Run(program, graph))
        torch.ones(
            (), requires_grad=True
        ).square().backward()  # the engine lets go of what an error left, on this thread

    threads = [threading.Thread(target=run, args=(graph,)) for graph in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2, "a thread ended with an error that is no RuntimeError"
    return found


def tells_of_a_write(error):
    """Ours; or PyTorch's own, of what a backward that is differentiated kept, and another one wrote to."""
    return isinstance(error, KeptTensorChangedError) or "modified by an inplace operation" in str(error)


def compare(program, ours, expected):
    if expected.error is None:
        same(ours, expected)
        if ours.error is not None:
            assert program.writes and tells_of_a_write(ours.error), repr(ours.error)
        return "same" if ours.error is None else "raised"
    if ours.error is None:
        expected = Run(program, graph_of(program.dtype), copies)
        assert expected.error is None, f"stock raises: {expected.error}"
    same(ours, expected)
    return "stock raised"


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


def differs(program):
    """Whether it runs in stock, and something else comes out of it patched."""
    try:
        check(program)
    except AssertionError:
        return True
    except Exception:  # such as a name that no step gives any more
        return False
    return False


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


def renamed(program, old, new):
    """Its events, where what took the tensor ``old`` takes ``new``."""

    def of(names):
        return tuple(dict.fromkeys(new if name == old else name for name in names))

    def args(step):
        return step._replace(args=tuple(new if name == old else name for name in step.args))

    return [
        e._replace(outputs=of(e.outputs), wanted=of(e.wanted)) if isinstance(e, Backward)
        else (e[0], [args(step) for step in e[1]])
        for e in program.events
    ]  # fmt: skip


def smaller(program):
    """Programs with a little less in them."""
    plain = {"autocast": None, "around": "", "threads": False, "dtype": torch.float32}
    for name, value in plain.items():
        if getattr(program, name) != value:
            yield program._replace(**{name: value})
    for i, event in enumerate(program.events):
        before, after = program.events[:i], program.events[i + 1 :]
        if isinstance(event, Backward):
            kept = [event._replace(outputs=(name,)) for name in event.outputs if len(event.outputs) > 1]
            kept += [event._replace(fails="")] * bool(event.fails) + [event._replace(retain=False)] * event.retain
            yield from (program._replace(events=[*before, *e, *after]) for e in ([], *[[k] for k in kept]))
            continue
        where, steps = event
        if not steps or where == "fails":
            yield program._replace(events=[*before, *after])
        for j, step in enumerate(steps):
            rest = program._replace(events=[*before, (where, [*steps[:j], *steps[j + 1 :]]), *after])
            yield rest
            if step.out and step.args:
                yield rest._replace(events=renamed(rest, step.out, step.args[0]))
            ops = step.op.split(" > ")
            fewer = [step._replace(how="")] * bool(step.how)
            fewer += [step._replace(op=" > ".join(ops[:k] + ops[k + 1 :])) for k in range(len(ops)) if len(ops) > 1]
            if step.op == "del":
                fewer += [step._replace(args=step.args[:k] + step.args[k + 1 :]) for k in range(len(step.args))]
            for one in fewer:
                yield program._replace(events=[*before, (where, [*steps[:j], one, *steps[j + 1 :]]), *after])


def shrunk(program, most=3000):
    """A small program that still differs, found by leaving out whatever can be."""
    for _ in range(most):
        found = next((p for p in smaller(program) if differs(p)), None)
        if found is None:
            break
        program = found
    return program
