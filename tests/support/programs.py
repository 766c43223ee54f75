"""Random programs over small tensors and the modules of one graph, drawn from a seed, for ``test_random_graphs``."""

import contextlib
import functools
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.activations import GELUActivation, NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import hf_memsave
from support.helpers import autocasting

WIDTH = 8

# The language: a program is a list of events (forwards, steps outside of the model, backwards), a forward of steps.

MODULES = ("ln", "rms", "gelu", "new_gelu", "silu", "drop", "linear0", "linear1", "linear2", "mlp", "layer")
HAS_LINEAR = {"linear0", "linear1", "linear2", "mlp", "layer"}
PARAMETERS = ("ln.weight", "rms.weight", "linear0.weight", "linear1.bias", "mlp.down_proj.weight")
ELEMENTWISE = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "square": torch.square,
    "softmax": lambda x: torch.softmax(x, -1),
    "relu": torch.relu,
    "half_of": lambda x: x * 0.5,
    "clone": torch.clone,
}
OF_TWO = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "matmul": lambda x, y: x @ (y if x.shape[-1] == y.shape[-2] else y.mT),
}
VIEWS = {
    "transpose": lambda x: x.transpose(0, -1),
    "tail": lambda x: x[..., 1:],
    "even": lambda x: x[..., ::2],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "rows": lambda x: x[1:],
    "expand": lambda x: x[:1].expand(2, *x.shape[1:]),
    "flat": lambda x: x.view(-1, x.shape[-1]),
    "detach": torch.detach,
}
CASTS = {
    "bf16": lambda x: x.to(torch.bfloat16),
    "fp32": lambda x: x.to(torch.float32),
    "pad": lambda x: F.pad(x, (0, WIDTH - x.shape[-1])),  # back to what the modules take
}
PURE = ELEMENTWISE | OF_TWO | VIEWS | CASTS
WRITES = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(1.5),
    "zero_": torch.zero_,
    "dropout_": lambda x: F.dropout(x, 0.5, training=True, inplace=True),
    "add_from_": lambda x, y: x.add_(y),
    "copy_part_": lambda x, y: x[..., :2].copy_(y[..., -2:]),
}
TAKES_TWO = {*OF_TWO, "add_from_", "copy_part_"}


class Step(NamedTuple):
    """``out = op(*args)``; ``op`` may be a chain, "ln > gelu"; ``how`` is "", no_grad, checkpoint or detached."""

    op: str
    args: tuple[str, ...]
    out: str = ""
    how: str = ""

    def __str__(self):
        return f"    {self.out or '_'} = {self.how}{' ' * bool(self.how)}{self.op}({', '.join(self.args)})"


class Backward(NamedTuple):
    """``autograd.grad`` of ``outputs`` for ``wanted``, ``backward`` if that is empty; ``twice`` differentiates it."""

    outputs: tuple[str, ...]
    wanted: tuple[str, ...] = ()
    retain: bool = False
    twice: bool = False


class Program(NamedTuple):
    seed: int
    autocast: torch.dtype | None
    dtype: torch.dtype
    dropout: str
    copies: bool  # a hook outside copies whatever is kept
    inputs: dict[str, tuple[tuple[int, ...], bool]]  # shape, and whether it wants a gradient
    events: list  # "forward" and its steps, "outside" and its steps, or a Backward

    @property
    def writes(self):
        return any(s.op in WRITES for e in self.events if not isinstance(e, Backward) for s in e[1])

    def __str__(self):
        lines = [f"{name}={value}" for name, value in self._asdict().items() if name != "events"]
        for event in self.events:
            lines += [f"  {event}"] if isinstance(event, Backward) else [f"  {event[0]}", *map(str, event[1])]
        return "\n".join(lines)


class Layer(GradientCheckpointingLayer):
    """Gets a tape of its own, which counts where it is checkpointed."""

    def __init__(self, config):
        super().__init__()
        self.norm, self.mlp, self.drop = LlamaRMSNorm(WIDTH), LlamaMLP(config), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.mlp(self.norm(x)))


class Graph(nn.Module):
    """Its forward runs the steps of a program on named tensors."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(hidden_size=WIDTH, intermediate_size=12, num_attention_heads=2)
        self.ln, self.rms = nn.LayerNorm(WIDTH), LlamaRMSNorm(WIDTH)
        self.gelu, self.new_gelu, self.silu = GELUActivation(), NewGELUActivation(), nn.SiLU()
        self.drop = nn.Dropout(0.3)
        self.linear0, self.linear1, self.linear2 = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mlp, self.layer = LlamaMLP(config), Layer(config)

    def forward(self, steps, tensors):
        for step in steps:
            self.do(step, tensors)

    def do(self, step, tensors):
        if step.op == "del":  # and take the freed memory
            shapes = [(tensors[name].shape, tensors.pop(name).dtype) for name in step.args]
            tensors["junk"] = [torch.full(shape, torch.nan, dtype=dtype) for shape, dtype in shapes]
            return
        args = [self.lookup(name, tensors) for name in step.args]
        if step.how == "detached":
            args[0] = args[0].detach()
        run = functools.partial(self.chain, step.op.split(" > "))
        if step.how == "checkpoint":
            result = checkpoint(run, *args, use_reentrant=False)
        else:
            with torch.no_grad() if step.how == "no_grad" else contextlib.nullcontext():
                result = run(*args)
        if step.out:
            tensors[step.out] = result

    def chain(self, ops, *args):
        for op in ops:
            fn = PURE.get(op) or WRITES.get(op) or getattr(self, op)
            args = (fn(*args),)
        return args[0]

    def lookup(self, name, tensors):
        return self.get_parameter(name) if "." in name else tensors[name]


@functools.cache
def built(dtype, dropout):
    torch.manual_seed(0)
    graph = Graph().to(dtype)
    if dropout != "stock":
        hf_memsave.patch(graph, {"dropout": dropout})
    return graph, [p.detach().clone() for p in graph.parameters()]


def graph_of(dtype, dropout="stock"):
    """The one graph of its kind, with the weights of before any program."""
    graph, weights = built(dtype, dropout)
    graph.zero_grad()
    with torch.no_grad():
        for parameter, weight in zip(graph.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return graph


# Drawing a program. It runs while it is drawn, so that its shapes and dtypes fit.


class Drawing:
    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.dtype = rng.choices((torch.float32, torch.bfloat16), (3, 1))[0]
        self.autocast = torch.bfloat16 if self.dtype == torch.float32 and rng.random() < 0.3 else None
        self.writes = rng.random() < 0.5
        self.graph = graph_of(self.dtype)
        shape = rng.choice([(2, 3, WIDTH), (4, WIDTH), (1, WIDTH), (2, 2, 2, WIDTH), (0, WIDTH)])
        self.inputs = {f"x{i}": (shape, i == 0 or rng.random() < 0.5) for i in range(rng.randint(1, 3))}
        self.tensors = {name: torch.zeros(shape, dtype=self.dtype) for name in self.inputs}
        self.count, self.used, self.views_without_grad = 0, set(), set()

    def names(self):
        return [name for name in self.tensors if name != "junk"]

    def pick(self):
        names = self.names()
        return self.rng.choice(names[-4:] if self.rng.random() < 0.7 else names)

    def try_step(self, step):
        try:
            with torch.no_grad(), autocasting(torch.device("cpu"), self.autocast):
                self.graph.do(step, self.tensors)
        except (RuntimeError, IndexError):
            return []
        return [step]

    def args_of(self, op, first):
        if op not in TAKES_TWO:
            return (first,)
        alike = [n for n in self.names() if self.tensors[n].shape == self.graph.lookup(first, self.tensors).shape]
        return first, self.rng.choice(alike or self.names())

    def pure_op(self):
        kind = self.rng.choices((MODULES, ELEMENTWISE, OF_TWO, VIEWS, CASTS), (10, 2, 4, 3, 1))[0]
        op = self.rng.choice(list(kind))
        # Under autocast stock casts a weight once for two calls, and adds gradients in bf16 (README, "What is exact").
        return self.pure_op() if self.autocast and op in HAS_LINEAR & self.used else op

    def pure(self):
        how = self.rng.choices(("", "no_grad", "checkpoint"), (20, 1, 3))[0]
        ops = [self.pure_op() for _ in range(self.rng.randint(1, 4) if how == "checkpoint" else 1)]
        ops = [*dict.fromkeys(op for op in ops if op == ops[0] or op not in TAKES_TWO)]
        self.count += 1
        args = self.args_of(ops[0], self.pick())
        # Under any saved-tensor hook, checkpoint gets such a view back as a leaf that wants a gradient (PyTorch's bug).
        if how == "checkpoint" and self.views_without_grad & {*args}:
            how = ""
        steps = self.try_step(Step(" > ".join(ops), args, out := f"t{self.count}", how))
        self.used |= {op for op in ops if steps}
        if (ops[0] in VIEWS | CASTS) and (how == "no_grad" or args[0] in self.views_without_grad):
            self.views_without_grad.add(out)
        return steps

    def write(self):
        op = self.rng.choice(list(WRITES))
        if self.rng.random() < 0.1:
            return self.try_step(Step(op, self.args_of(op, self.rng.choice(PARAMETERS)), how="no_grad"))
        first = self.pick()
        hows = ("no_grad", "detached", *[""] * (first not in self.inputs))  # stock refuses a leaf
        return self.try_step(Step(op, self.args_of(op, first), how=self.rng.choice(hows)))

    def delete(self, spare):
        names = [name for name in self.names() if name not in spare]
        return self.try_step(Step("del", tuple(self.rng.sample(names, min(len(names), 2)))))

    def forward(self):
        self.used = set()  # the modules of this forward
        steps, size = [], self.rng.randint(6, 16)
        while len(steps) < size:
            r = self.rng.random()
            if r < 0.12 and self.writes:
                steps += self.write()
            elif r < 0.2 and len(self.names()) > len(self.inputs) + 3:
                steps += self.delete(spare=self.inputs)
            else:
                steps += self.pure()
        return "forward", steps

    def outside(self, spare):
        steps = self.write() if self.writes and self.rng.random() < 0.6 else []
        return "outside", steps + (self.delete(spare) if self.rng.random() < 0.5 else [])

    def backwards(self, outputs):
        rng = self.rng
        wanted = tuple(rng.sample([*self.names(), *PARAMETERS], rng.randint(1, 3)))
        every = tuple(self.inputs) + PARAMETERS
        return rng.choice([
            [Backward(outputs)],
            [Backward(outputs, retain=True), Backward(outputs)],
            [Backward(outputs[:1], retain=rng.random() < 0.8), Backward(outputs[1:])],
            [Backward(outputs, wanted, retain=True), Backward(outputs)],
            [Backward(outputs, wanted)],
            [Backward(outputs, every, twice=True)],
        ])  # fmt: skip


def draw(seed):
    d = Drawing(seed)
    first = []
    if d.autocast:  # a leaf that wants a gradient is cast once for all its linears, as a weight is
        first = [Step("half_of", (name,), name) for name, (_, wants) in d.inputs.items() if wants]
    _, steps = d.forward()
    events = [("forward", first + steps)]
    if d.rng.random() < 0.25:
        events += [d.outside(d.inputs), d.forward()]
    outputs = tuple(d.names()[-3:])
    live = {*outputs, *d.inputs, *d.rng.sample(d.names(), min(len(d.names()), 2))}
    events.append(("outside", d.try_step(Step("del", tuple(n for n in d.names() if n not in live)))))
    backwards = d.backwards(outputs)
    needed = {*d.inputs, *outputs, *(name for b in backwards for name in b.wanted)}
    for backward in backwards:
        events += [d.outside(needed), backward]
    how = d.rng.choice(("seed", "mask"))
    return Program(seed, d.autocast, d.dtype, how, d.rng.random() < 0.1, d.inputs, events)
