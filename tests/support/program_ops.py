"""What the steps of a random program call: functions of tensors, what surrounds them, and masks."""

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

WIDTH = 8

MODULES = ("ln", "rms", "gelu", "new_gelu", "silu", "drop", "linear0", "linear1", "linear2", "mlp", "layer", "lora")
HAS_LINEAR = {"linear0", "linear1", "linear2", "mlp", "layer", "lora"}
PARAMETERS = ("ln.weight", "rms.weight", "linear0.weight", "linear1.bias", "mlp.down_proj.weight")

#: Modules whose attributes a program sets -> those, and what they may be; the first is what they are before it.
ATTRIBUTES = {
    "leaky.negative_slope": (0.01, 0.3, 1.5),
    "hardtanh.max_val": (1.0, 0.2, 2.0),
    "hardtanh.min_val": (-1.0, -0.3),
    "threshold.threshold": (0.1, 0.6),
    "threshold.value": (0.5, -2.0),
    "act.approximate": ("none", "tanh"),
    "elu.alpha": (1.0, 0.3),
    "drop.p": (0.3, 0.6),
    "silu.inplace": (False, True),
    "leaky.inplace": (False, True),
    "drop.inplace": (False, True),
}
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
    """A product that keeps what it is given and what it gives."""

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
    "tanh": torch.tanh,
    "sin": torch.sin,
    "square": torch.square,
    "softmax": lambda x: torch.softmax(x, -1),
    "relu": torch.relu,
    "half_of": lambda x: x * 0.5,
    "clone": torch.clone,
    "pool": lambda x: F.max_pool1d(x, 3, 1, 1),
    "hooked": hooked,
}
OF_TWO = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "keeps_both": KeepsBoth.apply,
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


def as_they_are(flags):
    return flags


def of_bytes(flags):
    """Each byte 0 or 255."""
    return (flags.to(torch.uint8) * 255).view(torch.bool)


def part_of_a_buffer(flags):
    """At the start of a buffer of bytes, the rest of which is neither 0 nor 1."""
    rest = torch.arange(2, 2 + flags.numel() // 2, dtype=torch.uint8)
    return torch.cat([flags.to(torch.uint8).view(-1), rest]).view(torch.bool)[: flags.numel()].view(flags.shape)


def end_of_a_buffer(flags):
    rest = torch.arange(2, 2 + flags.numel() // 2, dtype=torch.uint8)
    return torch.cat([rest, flags.to(torch.uint8).view(-1) * 2]).view(torch.bool)[rest.numel() :].view(flags.shape)


#: How a mask lies in memory.
MASKS = {f.__name__: f for f in (as_they_are, of_bytes, part_of_a_buffer, end_of_a_buffer)}
OF_MASKS = MASKS | {"not": torch.logical_not, "same": torch.clone, "any": lambda m: m | m.flip(-1)}
SCRIBBLES = {"scribble": Scribble.apply}
PURE = ELEMENTWISE | OF_TWO | VIEWS | ESCAPES | CASTS | OF_MASK | OF_SCORES | OF_MASKS | SCRIBBLES
WRITES = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(1.5),
    "zero_": torch.zero_,
    "dropout_": lambda x: F.dropout(x, 0.5, training=True, inplace=True),
    "add_from_": lambda x, y: x.add_(y),
    "copy_part_": lambda x, y: x[..., :2].copy_(y[..., -2:]),
}
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


def copies():
    return saved_tensors_hooks(cloned, cloned)


def offload():
    """``save_on_cpu``; on the CPU it holds the very tensor, and a result that it was asked to keep never dies."""
    hooks = save_on_cpu()
    return saved_tensors_hooks(lambda tensor: hooks.pack_hook(tensor.detach()), hooks.unpack_hook)


#: What a step's ``how`` may put around it.
CONTEXTS = {
    "no_grad": torch.no_grad,
    "offload": offload,
    "copies": copies,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_autocast": lambda: torch.autocast("cpu", enabled=False),
}
CHECKPOINTS = (
    "checkpoint", "checkpoint", "reentrant", "checkpoint+checkpoint", "checkpoint+reentrant", "reentrant+checkpoint",
)  # fmt: skip
