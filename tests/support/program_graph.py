"""The events of a random program, and the one graph of modules that runs its steps."""

import ast
import functools
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.activations import GELUActivation, NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import hf_memsave
from support.program_ops import ALL_WRITES, ATTRIBUTES, CHECKPOINTS, CONTEXTS, PURE, SCRIBBLES, WIDTH


class Fault(Exception):
    """Stands for any error of the user's."""


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
        ops = {op for s in self.steps for op in s.op.split(" > ")}
        return bool(ops & {*ALL_WRITES, *SCRIBBLES}) or any(s.op == "set" and "True" in s.args for s in self.steps)

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
        self.leaky, self.hardtanh, self.threshold = nn.LeakyReLU(), nn.Hardtanh(), nn.Threshold(0.1, 0.5)
        self.act, self.elu, self.drop = nn.GELU(), nn.ELU(), nn.Dropout(0.3)
        self.linear0, self.linear1, self.linear2 = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mlp, self.layer = LlamaMLP(config), Layer(config)
        self.lora = nn.Sequential(nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False))

    def forward(self, steps, tensors):
        for step in steps:
            self.do(step, tensors)

    def do(self, step, tensors):
        if step.op in OTHERS:
            OTHERS[step.op](self, tensors, *step.args)
            return
        args = [self.lookup(name, tensors) for name in step.args]
        if step.how == "detached":
            args[0] = args[0].detach()
        ops = step.op.split(" > ")
        if step.how in CONTEXTS:
            with CONTEXTS[step.how]():
                result = self.chain(ops, *args)
        else:
            kinds = step.how.split("+") if step.how in CHECKPOINTS else []
            result = self.within(kinds, ops, *args)
        if step.out:
            tensors[step.out] = result

    def within(self, kinds, ops, *args):
        """The inner checkpoints cover the last of ``ops``."""
        if not kinds:
            return self.chain(ops, *args)
        half = len(ops) // 2 if kinds[1:] else len(ops)

        def run(*args):
            return self.within(kinds[1:], ops[half:], *((self.chain(ops[:half], *args),) if half else args))

        return checkpoint(run, *args, use_reentrant=kinds[0] == "reentrant")

    def chain(self, ops, *args):
        for op in ops:
            fn = PURE.get(op) or ALL_WRITES.get(op) or getattr(self, op)
            args = (fn(*args),)
        return args[0]

    def lookup(self, name, tensors):
        return self.get_parameter(name) if "." in name else tensors[name]


def delete(graph, tensors, *names):
    """And take the freed memory."""
    shapes = [(tensors[name].shape, tensors.pop(name).dtype) for name in names]
    junk = {torch.bool: True}
    tensors["junk"] = [torch.full(shape, junk.get(dtype, torch.nan), dtype=dtype) for shape, dtype in shapes]


def set_attribute(graph, tensors, path, value):
    name, attribute = path.split(".")
    setattr(graph.get_submodule(name), attribute, ast.literal_eval(value))


def step_optimizer(graph, tensors):
    for parameter in graph.parameters():
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad.nan_to_num(0, 0, 0).clamp(-1, 1), alpha=-0.01)


def fail(graph, tensors):
    raise Fault


#: Steps that give no tensor.
OTHERS = {"del": delete, "set": set_attribute, "optimizer": step_optimizer, "raise": fail}


@functools.cache
def built(dtype, dropout, number):
    torch.manual_seed(0)
    graph = Graph().to(dtype)
    if dropout != "stock":
        hf_memsave.patch(graph, {"dropout": dropout})
    return graph, [p.detach().clone() for p in graph.parameters()]


def graph_of(dtype, dropout="stock", number=0):
    """The one graph of its kind and number, with the weights and attributes of before any program."""
    graph, weights = built(dtype, dropout, number)
    graph.zero_grad()
    for path, (value, *_) in ATTRIBUTES.items():
        set_attribute(graph, {}, path, repr(value))
    with torch.no_grad():
        for parameter, weight in zip(graph.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return graph
