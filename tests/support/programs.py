"""Random programs over small tensors and the modules of one graph, drawn from a seed: :func:`draw`."""

import random
import warnings

import torch

from support.helpers import autocasting
from support.program_graph import Backward, Program, Step, graph_of
from support.program_ops import (
    ACTIVATIONS,
    ATTRIBUTES,
    CASTS,
    CHECKPOINTS,
    DRAWS,
    ELEMENTWISE,
    ESCAPES,
    HAS_LINEAR,
    HIDDEN_WRITES,
    MASK_WRITES,
    MASKS,
    MAY_WRITE,
    MODULES,
    OF_MASK,
    OF_MASKS,
    OF_SCORES,
    OF_TWO,
    PARAMETERS,
    SCRIBBLES,
    TAKES_TWO,
    VIEWS,
    WIDTH,
    WRITES,
)

#: Kind of step -> functions, how often, and what a program needs for it.
KINDS = {
    "modules": (MODULES, 10, ""),
    "elementwise": (ELEMENTWISE, 2, ""),
    "of two": (OF_TWO, 4, ""),
    "views": (VIEWS, 3, ""),
    "casts": (CASTS, 1, ""),
    "activations": (ACTIVATIONS, 1, ""),
    "more activations": (ACTIVATIONS, 5, "attributes"),
    "escapes": (ESCAPES, 3, "escapes"),
    "scribbles": (SCRIBBLES, 3, "scribbles"),
    "of mask": (OF_MASK, 3, "masks"),
    "of scores": (OF_SCORES, 3, "masks"),
    "of masks": (OF_MASKS, 2, "masks"),
}
#: What a program may have, and how often.
FEATURES = {
    "writes": 0.5,
    "attributes": 0.25,
    "escapes": 0.2,
    "scribbles": 0.25,
    "masks": 0.35,
    "faults": 0.15,
    "contexts": 0.3,
}


class Drawing:
    """A program runs while it is drawn, so that its shapes and dtypes fit."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.dtype = rng.choices((torch.float32, torch.bfloat16), (3, 1))[0]
        self.autocast = torch.bfloat16 if self.dtype == torch.float32 and rng.random() < 0.3 else None
        self.has = {feature for feature, often in FEATURES.items() if rng.random() < often}
        self.kinds = {name: kind for name, kind in KINDS.items() if not kind[2] or kind[2] in self.has}
        self.graph = graph_of(self.dtype)
        shape = rng.choice([(2, 3, WIDTH), (4, WIDTH), (1, WIDTH), (2, 2, 2, WIDTH), (0, WIDTH)])
        self.inputs = {f"x{i}": (shape, i == 0 or rng.random() < 0.5) for i in range(rng.randint(1, 3))}
        rows = torch.Size(shape).numel() // WIDTH
        masks = {"e0": shape, "m0": (1, 1, rows, rows)} if "masks" in self.has else {}
        self.masks = {name: (shape, rng.choice([*MASKS])) for name, shape in masks.items()}
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
        tensor = self.graph.lookup(name, self.tensors)
        return tensor.untyped_storage()._cdata

    def try_step(self, step):
        try:
            with torch.no_grad(), warnings.catch_warnings(), autocasting(torch.device("cpu"), self.autocast):
                warnings.simplefilter("ignore")
                self.graph.do(step, self.tensors)
        except (RuntimeError, IndexError):
            return []
        return [step]

    def args_of(self, op, first):
        if op in OF_MASK or op in OF_SCORES:
            mask = self.pick("e" if op in OF_MASK else "m")
            return (first, mask) if op in OF_MASK else (first, self.second_of(first), mask)
        return (first, self.second_of(first)) if op in TAKES_TWO else (first,)

    def second_of(self, first):
        alike = [n for n in self.names() if self.tensors[n].shape == self.graph.lookup(first, self.tensors).shape]
        return self.rng.choice(alike or self.names())

    def pure_op(self):
        kind = self.rng.choices([*self.kinds], [often for _, often, _ in self.kinds.values()])[0]
        op = self.rng.choice([*self.kinds[kind][0]])
        # Under autocast stock casts a weight once for two calls, and adds gradients in bf16 (README, "What is exact").
        return self.pure_op() if self.autocast and op in HAS_LINEAR & self.used else op

    def how(self):
        how = self.rng.choices(("", "no_grad", "checkpoint", "context"), (20, 1, 3, 2 * ("contexts" in self.has)))[0]
        if how == "checkpoint":
            return self.rng.choice(CHECKPOINTS if "contexts" in self.has else CHECKPOINTS[:3])
        if how != "context":
            return how
        # Saving "on the CPU" copies nothing there: what is written to is spoiled in stock, too.
        hows = ["copies", *["offload"] * (not self.has & {"writes", "scribbles"})]
        return self.rng.choice(hows + ["no_autocast" if self.autocast else "autocast"] * (self.dtype == torch.float32))

    def chain_of(self, how):
        ops = [self.pure_op() for _ in range(self.rng.randint(1, 4) if how in CHECKPOINTS else 1)]
        takes_more = {*TAKES_TWO, *OF_MASK, *OF_SCORES}
        ops = [*dict.fromkeys(op for op in ops if op == ops[0] or op not in takes_more)]
        return ops[:1] if ops[0] in OF_MASKS else [op for op in ops if op not in OF_MASKS]

    def pure(self):
        how = self.how()
        ops = self.chain_of(how)
        first = self.pick("em") if ops[0] in OF_MASKS else self.pick()
        if ops[0] in ESCAPES and self.written in self.tensors:
            first = self.written
        args = self.args_of(ops[0], first)
        # Under any saved-tensor hook, checkpoint gets such a view back as a leaf that wants a gradient (PyTorch's bug).
        if how in CHECKPOINTS and self.views_without_grad & {*args}:
            how = ""
        if not self.is_allowed(ops, args, how):
            return []
        self.count += 1
        out = f"{first[0] if ops[0] in OF_MASKS else 't'}{self.count}"
        steps = self.try_step(Step(" > ".join(ops), args, out, how))
        self.used |= {op for op in ops if steps}
        if (ops[0] in VIEWS | CASTS) and (
            how == "no_grad" or {*ops} & {*ESCAPES} or args[0] in self.views_without_grad
        ):
            self.views_without_grad.add(out)
        if steps and {*ops} & {*ESCAPES}:
            self.escaped.add(self.place(out))
        return steps

    def is_allowed(self, ops, args, how):
        """Whether stock could give gradients of it: no leaf, and no storage with a ``.data``, is written to."""
        if how == "autocast" and self.given & {*args}:  # a leaf is cast once for all products
            return False
        if {*ops} & {*SCRIBBLES} or any(self.graph.get_submodule(op).inplace for op in {*ops} & MAY_WRITE):
            places = {self.place(name) for name in args}
            if self.given & {*args} or self.escaped & places or {*ops} & {*ESCAPES}:
                return False
            self.spoiled |= places
        return not {*ops} & {*ESCAPES} or self.place(args[0]) not in self.spoiled

    def write(self):
        if self.masks and self.rng.random() < 0.3:
            return self.try_step(Step(self.rng.choice([*MASK_WRITES]), (self.pick("em"),)))
        op = self.rng.choice(list(WRITES))
        if self.rng.random() < 0.1:
            return self.try_step(Step(op, self.args_of(op, self.rng.choice(PARAMETERS)), how="no_grad"))
        first = self.pick()
        if self.place(first) in self.escaped:
            return []
        hows = ("no_grad", "detached", *[""] * (first not in self.inputs))  # stock refuses a leaf
        self.written = first
        return self.try_step(Step(op, self.args_of(op, first), how=self.rng.choice(hows)))

    def set_attribute(self):
        path = self.rng.choice([p for p in ATTRIBUTES if "writes" in self.has or not p.endswith("inplace")])
        return self.try_step(Step("set", (path, repr(self.rng.choice(ATTRIBUTES[path])))))

    def delete(self, spare):
        names = [name for name in self.names() if name not in spare]
        return self.try_step(Step("del", tuple(self.rng.sample(names, min(len(names), 2)))))

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
        steps = [Step("del", gone), *[Step("optimizer", ())] * (self.rng.random() < 0.5)]
        steps = [done for step in steps for done in self.try_step(step)]
        if self.masks:
            steps += self.try_step(Step(self.rng.choice([*HIDDEN_WRITES]), (self.rng.choice([*self.masks]),)))
        self.spoiled, self.escaped = set(), set()
        return "outside", steps

    def backwards(self, outputs):
        rng = self.rng
        wanted = tuple(rng.sample([*self.names(), *PARAMETERS], rng.randint(1, 3)))
        every = tuple(self.inputs) + PARAMETERS
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
        events.append(("outside", self.try_step(Step("del", dead))))
        backwards = self.backwards(outputs)
        needed = {*self.given, *outputs, *(name for b in backwards for name in (*b.wanted, b.fails))}
        for backward in backwards:
            events += [self.outside(needed), backward]
        return events


def draw(seed):
    d = Drawing(seed)
    first = []
    if d.autocast:  # a leaf that wants a gradient is cast once for all its linears, as a weight is
        first = [Step("half_of", (name,), name) for name, (_, wants) in d.inputs.items() if wants]
    (where, steps), *events = d.training_step()
    events = [(where, first + steps), *events]
    if d.rng.random() < (0.5 if d.masks else 0.1) and not d.autocast:
        events += [d.between_steps(), *d.training_step()]
    dropout = d.rng.choice(("seed", "mask"))
    around = d.rng.choices(("", "copies", "offload"), (18, 2, d.has.isdisjoint({"writes", "scribbles"})))[0]
    p = Program(seed, d.autocast, d.dtype, dropout, around, False, d.inputs, d.masks, events)
    draws = any(DRAWS & {*step.op.split(" > ")} for step in p.steps)
    return p._replace(threads=not draws and d.rng.random() < 0.1)
