"""Random programs over small tensors and the modules of one graph, drawn from a seed: :func:`draw`."""

import random
import warnings
from typing import NamedTuple

import torch

from support import program_ops as ops
from support.helpers import autocasting
from support.program_ops import WIDTH, graph_of


class Step(NamedTuple):
    """``out = op(*args)``; ``op`` may be a chain, "ln > gelu"; ``how`` is "", detached, or what surrounds it."""

    op: str
    args: tuple[str, ...]
    out: str = ""
    how: str = ""

    def __str__(self):
        return f"    {self.out or '_'} = {self.how}{' ' * bool(self.how)}{self.op}({', '.join(self.args)})"


class Backward(NamedTuple):
    """``autograd.grad`` of ``outputs`` for ``wanted``, ``backward`` if that is empty; ``twice`` differentiates it.

    ``fails`` names the tensor whose gradient meets an error first; then it is tried again.
    """

    outputs: tuple[str, ...]
    wanted: tuple[str, ...] = ()
    retain: bool = False
    twice: bool = False
    fails: str = ""


class Program(NamedTuple):
    seed: int
    autocast: torch.dtype | None
    dtype: torch.dtype
    dropout: str
    around: str  # what lies outside of the model's forward, or ""
    threads: bool  # it runs twice at once
    inputs: dict[str, tuple[tuple[int, ...], bool]]  # shape, and whether it wants a gradient
    masks: dict[str, tuple[tuple[int, ...], str]]  # shape, and how it lies in memory
    events: list  # "forward", "fails" or "outside" and its steps, or a Backward

    @property
    def steps(self):
        return [s for e in self.events if not isinstance(e, Backward) for s in e[1]]

    @property
    def writes(self):
        called = {op for s in self.steps for op in s.op.split(" > ")}
        return bool(called & {*ops.ALL_WRITES, *ops.SCRIBBLES}) or any(
            s.op == "set" and "True" in s.args for s in self.steps
        )

    def __str__(self):
        lines = [f"{name}={value}" for name, value in self._asdict().items() if name != "events"]
        for event in self.events:
            lines += [f"  {event}"] if isinstance(event, Backward) else [f"  {event[0]}", *map(str, event[1])]
        return "\n".join(lines)


#: Functions, how often, and what a program needs for them.
KINDS = (
    (ops.MODULES, 10, ""), (ops.ELEMENTWISE, 2, ""), (ops.OF_TWO, 4, ""), (ops.VIEWS, 3, ""), (ops.CASTS, 1, ""),
    (ops.ACTIVATIONS, 1, ""), (ops.ACTIVATIONS, 5, "attributes"), (ops.ESCAPES, 3, "escapes"),
    (ops.SCRIBBLES, 3, "scribbles"), (ops.OF_MASK, 3, "masks"), (ops.OF_SCORES, 3, "masks"), (ops.OF_MASKS, 2, "masks"),
)  # fmt: skip
#: What a program may have, and how often.
FEATURES = dict(writes=0.5, attributes=0.25, escapes=0.2, scribbles=0.25, masks=0.35, faults=0.15, contexts=0.3)


class Drawing:
    """A program runs while it is drawn, so that its shapes and dtypes fit."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.dtype = rng.choices((torch.float32, torch.bfloat16), (3, 1))[0]
        self.autocast = torch.bfloat16 if self.dtype == torch.float32 and rng.random() < 0.3 else None
        self.has = {feature for feature, often in FEATURES.items() if rng.random() < often}
        self.kinds = [kind for kind in KINDS if not kind[2] or kind[2] in self.has]
        self.graph = graph_of(self.dtype)
        shape = rng.choice([(2, 3, WIDTH), (4, WIDTH), (1, WIDTH), (2, 2, 2, WIDTH), (0, WIDTH)])
        self.inputs = {f"x{i}": (shape, i == 0 or rng.random() < 0.5) for i in range(rng.randint(1, 3))}
        rows = torch.Size(shape).numel() // WIDTH
        masks = {"e0": shape, "m0": (1, 1, rows, rows)} if "masks" in self.has else {}
        self.masks = {name: (shape, rng.choice([*ops.MASKS])) for name, shape in masks.items()}
        self.tensors = {name: torch.zeros(shape, dtype=self.dtype) for name in self.inputs}
        self.tensors |= {name: torch.ones(shape, dtype=torch.bool) for name, (shape, _) in self.masks.items()}
        self.given = {*self.tensors}
        self.count, self.written = 0, ""
        self.used, self.views_without_grad = set(), set()
        self.spoiled, self.escaped = set(), set()  # storages that backward writes to, and those of which is a .data

    def names(self, masks=""):
        """Of activations, or of masks of one kind."""
        return [n for n in self.tensors if n != "junk" and (n[0] in masks if masks else n[0] not in "em")]

    def pick(self, masks=""):
        names = self.names(masks)
        return self.rng.choice(names[-4:] if self.rng.random() < 0.7 else names)

    def place(self, name):
        return self.graph.lookup(name, self.tensors).untyped_storage()._cdata

    def try_step(self, *step, **options):
        step = Step(*step, **options)
        try:
            with torch.no_grad(), warnings.catch_warnings(), autocasting(torch.device("cpu"), self.autocast):
                warnings.simplefilter("ignore")
                self.graph.do(step, self.tensors)
        except (RuntimeError, IndexError):
            return []
        return [step]

    def args_of(self, op, first):
        if op in ops.OF_MASK:
            return first, self.pick("e")
        if op in ops.OF_SCORES:
            mask = self.pick("m")
            return first, self.second_of(first), mask
        return (first, self.second_of(first)) if op in ops.TAKES_TWO else (first,)

    def second_of(self, first):
        alike = [n for n in self.names() if self.tensors[n].shape == self.graph.lookup(first, self.tensors).shape]
        return self.rng.choice(alike or self.names())

    def pure_op(self):
        functions, *_ = self.rng.choices(self.kinds, [often for _, often, _ in self.kinds])[0]
        op = self.rng.choice([*functions])
        # Under autocast stock casts a weight once for two calls, and adds gradients in bf16 (README, "What is exact").
        return self.pure_op() if self.autocast and op in ops.HAS_LINEAR & self.used else op

    def how(self):
        how = self.rng.choices(("", "no_grad", "checkpoint", "context"), (20, 1, 3, 2 * ("contexts" in self.has)))[0]
        if how == "checkpoint":
            return self.rng.choice(ops.CHECKPOINTS if "contexts" in self.has else ops.CHECKPOINTS[:3])
        if how != "context":
            return how
        # Saving "on the CPU" copies nothing there: what is written to is spoiled in stock, too.
        hows = ["copies", *["offload"] * (not self.has & {"writes", "scribbles"})]
        return self.rng.choice(hows + ["no_autocast" if self.autocast else "autocast"] * (self.dtype == torch.float32))

    def chain_of(self, how):
        chain = [self.pure_op() for _ in range(self.rng.randint(1, 4) if how in ops.CHECKPOINTS else 1)]
        takes_more = {*ops.TAKES_TWO, *ops.OF_MASK, *ops.OF_SCORES}
        chain = [*dict.fromkeys(op for op in chain if op == chain[0] or op not in takes_more)]
        return chain[:1] if chain[0] in ops.OF_MASKS else [op for op in chain if op not in ops.OF_MASKS]

    def pure(self):
        how = self.how()
        chain = self.chain_of(how)
        is_mask, escapes = chain[0] in ops.OF_MASKS, {*chain} & {*ops.ESCAPES}
        first = self.pick("em" if is_mask else "")
        if chain[0] in ops.ESCAPES and self.written in self.tensors:
            first = self.written
        args = self.args_of(chain[0], first)
        # Under any saved-tensor hook, checkpoint gets such a view back as a leaf that wants a gradient (PyTorch's bug).
        if how in ops.CHECKPOINTS and self.views_without_grad & {*args}:
            how = ""
        if not self.is_allowed(chain, args, how):
            return []
        self.count += 1
        out = f"{first[0] if is_mask else 't'}{self.count}"
        steps = self.try_step(" > ".join(chain), args, out, how)
        self.used |= {*chain} if steps else set()
        has_no_grad = how == "no_grad" or escapes or args[0] in self.views_without_grad
        if chain[0] in ops.VIEWS | ops.CASTS and has_no_grad:
            self.views_without_grad.add(out)
        if steps and escapes:
            self.escaped.add(self.place(out))
        return steps

    def is_allowed(self, chain, args, how):
        """Whether stock could give gradients of it: no leaf, and no storage with a ``.data``, is written to."""
        if how == "autocast" and self.given & {*args}:  # a leaf is cast once for all products
            return False
        escapes = {*chain} & {*ops.ESCAPES}
        if {*chain} & {*ops.SCRIBBLES} or any(self.graph.get_submodule(op).inplace for op in {*chain} & ops.MAY_WRITE):
            places = {self.place(name) for name in args}
            if self.given & {*args} or self.escaped & places or escapes:
                return False
            self.spoiled |= places
        return not escapes or self.place(args[0]) not in self.spoiled

    def write(self):
        if self.masks and self.rng.random() < 0.3:
            return self.try_step(self.rng.choice([*ops.MASK_WRITES]), (self.pick("em"),))
        op = self.rng.choice(list(ops.WRITES))
        if self.rng.random() < 0.1:
            return self.try_step(op, self.args_of(op, self.rng.choice(ops.PARAMETERS)), how="no_grad")
        first = self.pick()
        if self.place(first) in self.escaped:
            return []
        hows = ("no_grad", "detached", *[""] * (first not in self.inputs))  # stock refuses a leaf
        self.written = first
        return self.try_step(op, self.args_of(op, first), how=self.rng.choice(hows))

    def set_attribute(self):
        path = self.rng.choice([p for p in ops.ATTRIBUTES if "writes" in self.has or not p.endswith("inplace")])
        return self.try_step("set", (path, repr(self.rng.choice(ops.ATTRIBUTES[path]))))

    def delete(self, spare):
        names = [name for name in self.names() if name not in spare]
        return self.try_step("del", tuple(self.rng.sample(names, min(len(names), 2))))

    def forward(self):
        self.used = set()  # the modules of this forward
        steps, size = [], self.rng.randint(6, 16)
        while len(steps) < size:
            r = self.rng.random()
            if r < 0.12 and "writes" in self.has:
                steps += self.write()
            elif r < 0.2 and len(self.names()) > len(self.inputs) + 3:
                steps += self.delete(spare=self.inputs)
            elif r < 0.25 and "attributes" in self.has:
                steps += self.set_attribute()
            else:
                steps += self.pure()
        if "faults" not in self.has or self.rng.random() < 0.5:
            return [("forward", steps)]
        at = self.rng.randrange(size)
        return [("fails", [*steps[:at], Step("raise", ())]), ("forward", steps[at:])]

    def outside(self, spare):
        steps = self.write() if "writes" in self.has and self.rng.random() < 0.6 else []
        steps += self.set_attribute() if "attributes" in self.has and self.rng.random() < 0.7 else []
        return "outside", steps + (self.delete(spare) if self.rng.random() < 0.5 else [])

    def between_steps(self):
        """The graph of one step of training is gone, and the next one begins: now what no version tells may happen."""
        gone = tuple(name for name in self.tensors if name not in self.given and name != "junk")
        is_optimized = self.rng.random() < 0.5
        steps = self.try_step("del", gone) + (self.try_step("optimizer", ()) if is_optimized else [])
        if self.masks:
            steps += self.try_step(self.rng.choice([*ops.HIDDEN_WRITES]), (self.rng.choice([*self.masks]),))
        self.spoiled, self.escaped = set(), set()
        return "outside", steps

    def backwards(self, outputs):
        rng = self.rng
        wanted = tuple(rng.sample([*self.names(), *ops.PARAMETERS], rng.randint(1, 3)))
        every = tuple(self.inputs) + ops.PARAMETERS
        fails = rng.choice(self.names()) if "faults" in self.has and rng.random() < 0.6 else ""
        return rng.choice([
            [Backward(outputs, fails=fails)],
            [Backward(outputs, retain=True, fails=fails), Backward(outputs)],
            [Backward(outputs[:1], retain=rng.random() < 0.8), Backward(outputs[1:], fails=fails)],
            [Backward(outputs, wanted, retain=True), Backward(outputs)],
            [Backward(outputs, wanted)],
            [Backward(outputs, every, twice=True)],
        ])  # fmt: skip

    def training_step(self):
        """Forwards, and the backwards of what they give."""
        events = self.forward()
        if self.rng.random() < 0.25:
            events += [self.outside(self.inputs), *self.forward()]
        outputs = tuple(self.names()[-3:])
        live = {*outputs, *self.given, *self.rng.sample(self.names(), min(len(self.names()), 2))}
        dead = tuple(n for n in self.tensors if n not in live and n != "junk")
        events.append(("outside", self.try_step("del", dead)))
        backwards = self.backwards(outputs)
        needed = {*self.given, *outputs, *(name for b in backwards for name in (*b.wanted, b.fails))}
        for backward in backwards:
            events += [self.outside(needed), backward]
        return events


def draw(seed):
    d = Drawing(seed)
    # Under autocast a leaf that wants a gradient is cast once for all its linears, as a weight is.
    first = [Step("half_of", (name,), name) for name, (_, wants) in d.inputs.items() if wants and d.autocast]
    (where, steps), *events = d.training_step()
    events = [(where, first + steps), *events]
    if d.rng.random() < (0.5 if d.masks else 0.1) and not d.autocast:
        events += [d.between_steps(), *d.training_step()]
    dropout = d.rng.choice(("seed", "mask"))
    around = d.rng.choices(("", "copies", "offload"), (18, 2, d.has.isdisjoint({"writes", "scribbles"})))[0]
    p = Program(seed, d.autocast, d.dtype, dropout, around, False, d.inputs, d.masks, events)
    draws = any(ops.DRAWS & {*step.op.split(" > ")} for step in p.steps)
    return p._replace(threads=not draws and d.rng.random() < 0.1)
