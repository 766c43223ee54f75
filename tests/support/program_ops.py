"""What the steps of a random program call, and the one graph of modules that runs them."""

import ast
import contextlib
import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.activations import GELUActivation, NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import hf_memsave

WIDTH = 8

MODULES = ("ln", "rms", "gelu", "new_gelu", "silu", "drop", "linear0", "linear1", "linear2", "mlp", "layer", "lora")
HAS_LINEAR = {"linear0", "linear1", "linear2", "mlp", "layer", "lora"}
PARAMETERS = ("ln.weight", "rms.weight", "linear0.weight", "linear1.bias", "mlp.down_proj.weight")

#: Modules whose attributes a program sets -> those, and what they may be; the first is what they are before it.
ATTRIBUTES = {
    "leaky.negative_slope": (0.01, 0.3, 1.5), "hardtanh.max_val": (1.0, 0.2, 2.0), "hardtanh.min_val": (-1.0, -0.3),
    "threshold.threshold": (0.1, 0.6), "threshold.value": (0.5, -2.0), "act.approximate": ("none", "tanh"),
    "elu.alpha": (1.0, 0.3), "drop.p": (0.3, 0.6), "silu.inplace": (False, True), "leaky.inplace": (False, True),
    "drop.inplace": (False, True),
}  # fmt: skip
ACTIVATIONS = ("leaky", "hardtanh", "threshold", "act", "elu")
MAY_WRITE = {"silu", "leaky", "drop"}
DRAWS = {"drop", "layer", "dropout_"}


class Scribble(torch.autograd.Function):
    """The square; its backward writes the gradient into what it kept, as buffers are reused."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(dy).clone()


class KeepsBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        out = x * y
        ctx.save_for_backward(x, y, out)
        return out

    @staticmethod
    def backward(ctx, dz):
        x, y, out = ctx.saved_tensors
        return dz * y + 0 * out, dz * x


def hooked(x):
    y = x.clone()
    if y.requires_grad:
        y.register_hook(lambda g: None if g is None else g * 0.5)
    return y


def sdpa(x, y, mask):
    q, k = (t.reshape(1, 1, -1, WIDTH) for t in (x, y))
    return F.scaled_dot_product_attention(q, k, k * 0.5, mask).view(x.shape)


ELEMENTWISE = {
    "tanh": torch.tanh, "sin": torch.sin, "square": torch.square, "softmax": lambda x: torch.softmax(x, -1),
    "relu": torch.relu, "half_of": lambda x: x * 0.5, "clone": torch.clone, "pool": lambda x: F.max_pool1d(x, 3, 1, 1),
    "hooked": hooked,
}  # fmt: skip
OF_TWO = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "keeps_both": KeepsBoth.apply,
    "matmul": lambda x, y: x @ (y if x.shape[-1] == y.shape[-2] else y.mT),
}  # fmt: skip
VIEWS = {
    "transpose": lambda x: x.transpose(0, -1), "tail": lambda x: x[..., 1:], "even": lambda x: x[..., ::2],
    "chunk": lambda x: x.chunk(2, -1)[1], "rows": lambda x: x[1:], "expand": lambda x: x[:1].expand(2, *x.shape[1:]),
    "flat": lambda x: x.view(-1, x.shape[-1]), "detach": torch.detach,
}  # fmt: skip
ESCAPES = {"data": lambda x: x.data}
CASTS = {
    "bf16": lambda x: x.to(torch.bfloat16),
    "fp32": lambda x: x.to(torch.float32),
    "pad": lambda x: F.pad(x, (0, WIDTH - x.shape[-1])),  # back to what the modules take
}
#: Of tensors, and a mask of the first one's shape ("e") or of SDPA's scores ("m").
OF_MASK = {
    "fill": lambda x, mask: x.masked_fill(mask, 0.5),
    "where": lambda x, mask: torch.where(mask, x, x * 0.25),
    "times": lambda x, mask: x * mask,
}
OF_SCORES = {"sdpa": sdpa}


def of_a_buffer(flags, first, true=1):
    """Part of a buffer of bytes, at its start or end, the rest of which is neither 0 nor 1."""
    rest = torch.arange(2, 2 + flags.numel() // 2, dtype=torch.uint8)
    parts = [flags.to(torch.uint8).view(-1) * true, rest]
    buffer = torch.cat(parts if first else parts[::-1]).view(torch.bool)
    return buffer[slice(flags.numel()) if first else slice(len(rest), None)].view(flags.shape)


#: How a mask lies in memory; of bytes, each is 0 or 255.
MASKS = {
    "as_they_are": lambda flags: flags,
    "of_bytes": lambda flags: (flags.to(torch.uint8) * 255).view(torch.bool),
    "part_of_a_buffer": lambda flags: of_a_buffer(flags, first=True),
    "end_of_a_buffer": lambda flags: of_a_buffer(flags, first=False, true=2),
}
OF_MASKS = MASKS | {"not": torch.logical_not, "same": torch.clone, "any": lambda m: m | m.flip(-1)}
SCRIBBLES = {"scribble": Scribble.apply}
PURE = ELEMENTWISE | OF_TWO | VIEWS | ESCAPES | CASTS | OF_MASK | OF_SCORES | OF_MASKS | SCRIBBLES
WRITES = {
    "add_": lambda x: x.add_(1), "mul_": lambda x: x.mul_(1.5), "zero_": torch.zero_,
    "dropout_": lambda x: F.dropout(x, 0.5, training=True, inplace=True), "add_from_": lambda x, y: x.add_(y),
    "copy_part_": lambda x, y: x[..., :2].copy_(y[..., -2:]),
}  # fmt: skip
MASK_WRITES = {"not_": torch.Tensor.logical_not_, "flip_": lambda m: m[..., ::2].logical_not_()}
#: Which no version tells of: they come between steps of training alone.
HIDDEN_WRITES = {
    "data_not_": lambda m: m.data.logical_not_(),
    "numpy_not_": lambda m: np.logical_not(m.numpy(), out=m.numpy()),
    "numpy_part_": lambda m: m.numpy()[..., ::2].fill(True),
}
ALL_WRITES = WRITES | MASK_WRITES | HIDDEN_WRITES
TAKES_TWO = {*OF_TWO, "add_from_", "copy_part_"}


def cloned(tensor):
    """Its storage again, seen in the same way: no write reaches it."""
    storage = tensor.detach().untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def offload():
    """``save_on_cpu``; on the CPU it holds the very tensor, and a result that it was asked to keep never dies."""
    hooks = save_on_cpu()
    return saved_tensors_hooks(lambda tensor: hooks.pack_hook(tensor.detach()), hooks.unpack_hook)


#: What a step's ``how`` may put around it.
CONTEXTS = {
    "no_grad": torch.no_grad, "offload": offload, "copies": lambda: saved_tensors_hooks(cloned, cloned),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_autocast": lambda: torch.autocast("cpu", enabled=False),
}  # fmt: skip
CHECKPOINTS = (
    "checkpoint", "checkpoint", "reentrant", "checkpoint+checkpoint", "checkpoint+reentrant", "reentrant+checkpoint",
)  # fmt: skip


class Fault(Exception):
    """Stands for any error of the user's."""


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
        if step.op == "raise":
            raise Fault
        if step.op == "optimizer":
            for p in self.parameters():
                if p.grad is not None:
                    p.data.add_(p.grad.nan_to_num(0, 0, 0).clamp(-1, 1), alpha=-0.01)
        elif step.op == "set":
            self.set_attribute(step.args[0], ast.literal_eval(step.args[1]))
        elif step.op == "del":  # and the freed memory is taken
            gone = [tensors.pop(name) for name in step.args]
            shapes = [(t.shape, t.dtype, True if t.dtype == torch.bool else torch.nan) for t in gone]
            gone.clear()
            tensors["junk"] = [torch.full(shape, value, dtype=dtype) for shape, dtype, value in shapes]
        else:
            args = [self.lookup(name, tensors) for name in step.args]
            args[0] = args[0].detach() if step.how == "detached" else args[0]
            with CONTEXTS.get(step.how, contextlib.nullcontext)():
                kinds = step.how.split("+") if step.how in CHECKPOINTS else []
                result = self.chain(kinds, step.op.split(" > "), *args)
            if step.out:
                tensors[step.out] = result

    def set_attribute(self, path, value):
        name, attribute = path.split(".")
        setattr(self.get_submodule(name), attribute, value)

    def chain(self, kinds, ops, *args):
        """The checkpoints of these kinds are one in the other; inner ones cover the last of ``ops``."""
        if not kinds:
            for op in ops:
                args = ((PURE.get(op) or ALL_WRITES.get(op) or getattr(self, op))(*args),)
            return args[0]
        half = len(ops) // 2 if kinds[1:] else len(ops)

        def run(*args):
            return self.chain(kinds[1:], ops[half:], *((self.chain([], ops[:half], *args),) if half else args))

        return checkpoint(run, *args, use_reentrant=kinds[0] == "reentrant")

    def lookup(self, name, tensors):
        return self.get_parameter(name) if "." in name else tensors[name]


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
        graph.set_attribute(path, value)
    with torch.no_grad():
        for parameter, weight in zip(graph.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return graph
