"""The kind of op that made a tensor, for tables and in people's words: by the module that ran, and by the op."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from hf_memsave.tape.private import modules_that_run, next_number, sequence_number

#: Kinds of op, in the order tables and pictures show them.
KINDS_OF_OPS = tuple("linear attention norm activation dropout cast residual embedding loss other".split())
_BY_OP = {
    "linear": {"addmm", "mm", "bmm", "linear", "convolution", "baddbmm"},
    "norm": {"nativelayernorm", "nativegroupnorm", "nativebatchnorm", "fusedrmsnorm", "rsqrt"},
    "activation": {"gelu", "silu", "relu", "tanh", "sigmoid", "erf", "leakyrelu", "hardtanh", "mish"},
    "dropout": {"nativedropout", "bernoulli"},
    "cast": {"tocopy"},
    "residual": {"add"},
    "embedding": {"embedding"},
    "loss": {"logsoftmax", "nlllossforward", "nllloss2dforward", "mseloss", "binarycrossentropywithlogits"},
}
_KIND_OF_OP = {op: kind for kind, ops in _BY_OP.items() for op in ops}
_BY_CLASS = {
    "norm": ("norm",), "dropout": ("dropout",),
    "activation": ("gelu", "silu", "relu", "activation", "mlp", "gatedact"),
}  # fmt: skip
#: Autograd's names of ops that make no storage.
VIEWS = frozenset(
    "view unsafeview t transpose permute expand reshapealias slice select split splitwithsizes chunk unsqueeze squeeze "
    "alias asstrided unbind detach narrow".split()
)


def kind_of_op(stack: Sequence[nn.Module], op: str) -> str:
    """Return the kind by the class of the innermost (last) module where that says it, else by the op's name."""
    name, op = type(stack[-1]).__name__.lower() if stack else "", op.lower().replace("_", "")
    own = next((kind for kind, words in _BY_CLASS.items() if any(w in name for w in words)), None)
    of_op = "attention" if "attention" in op else _KIND_OF_OP.get(op)
    if own == "activation" and of_op in ("linear", "dropout", "cast"):
        return of_op
    return own or of_op or ("attention" if "attention" in name or name.endswith("attn") else "other")


#: Kind -> what people call it: the kinds above, and more that :class:`Makers` tells apart.
WORDS = {
    "norm": "norms", "activation": "activations", "mask of a dropout": "dropout masks", "dropout": "dropouts",
    "adapter": "adapters' inputs", "mask": "attention masks", "attention": "attention", "loss": "loss",
    "residual": "residual sums", "linear": "linear layers", "embedding": "embeddings", "cast": "casts",
    "state": "states of generators", "other": "other",
}  # fmt: skip
#: Kinds of a tensor's maker that tell less than the op that asked to keep the tensor.
_VAGUE = ("linear", "cast", "other")
#: Kind of the states of generators, which a checkpoint keeps to draw again.
STATE = WORDS["state"]


class _Place(NamedTuple):
    """A point in a forward: the modules that run, innermost first, and the functions within the innermost."""

    modules: list[nn.Module]
    functions: list[str]

    def kind(self, op: str) -> str:
        """Return the kind of a tensor that ``op`` makes here."""
        if any("loss" in name or "cross_entropy" in name for name in (op, *self.functions)):
            return "loss"
        for i, module in enumerate(self.modules):
            if hasattr(type(module), "_active_adapter"):  # a layer of PEFT's, around one of the model's
                if not i or self.modules[i - 1] is not module._modules.get("base_layer"):
                    return "linear" if op == "add" else "adapter"  # to the output of the model's own
                break
        return "dropout" if "dropout" in self.functions else kind_of_op(self.modules[:1], op)


class Makers:
    """Find the kind of op that made a tensor of one forward, in people's words.

    Nodes of autograd are numbered in order: the module that made a node is the one that ran as autograd was last asked
    to keep something before the next node was made.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[int, _Place]] = []

    def see(self) -> None:
        """Note which modules run now, as autograd asks to keep a tensor."""
        self._seen.append((next_number(), _Place(*modules_that_run())))

    def here(self, name: str) -> str:
        """Return the kind of the function ``name``, which is called now."""
        return WORDS[_Place(*modules_that_run()).kind(name)]

    def of(self, tensor: Tensor) -> str:
        """Return the kind of the op that made ``tensor``, which is kept now."""
        node = tensor.grad_fn
        if node is None:
            here = _Place(*modules_that_run())
            kind = here.kind("")
            if kind == "dropout" or (kind == "attention" and any("attention" in name for name in here.functions)):
                kind = "mask of a dropout" if kind == "dropout" else "mask"
            own = [p for module in here.modules[:1] for p in module.parameters(recurse=False)]
            is_cast = kind == "other" and any(p.dtype != tensor.dtype for p in own)
            return WORDS["cast" if is_cast else kind]
        while _name(node) in VIEWS and node.next_functions and (before := node.next_functions[0][0]) is not None:
            node = before
        at = bisect(self._seen, sequence_number(node) + 1, key=lambda seen: seen[0])
        kind = self._seen[at - 1][1].kind(_name(node)) if at else "other"
        if kind in _VAGUE and (kept_for := _Place(*modules_that_run()).kind("")) not in _VAGUE:
            kind = kept_for
        return WORDS[kind]


def _name(node: Any) -> str:
    """Return the name of an autograd node's op, in lower case."""
    return str(node.name()).removesuffix("Backward0").lower()
