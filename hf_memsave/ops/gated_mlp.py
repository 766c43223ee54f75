r"""``gated_mlp``: the MLP of LLaMA (SwiGLU, GEGLU) and Phi-3, whose gate and up projections may be one linear.

Forward (σ is the module's own activation)::

    y = down(σ(gate(x)) * up(x))

Kept for backward, each ``[*, F]`` in the input's dtype::

    eager    gate, σ(gate), up, and the product again in the down projection
    here     gate, up                                  (σ(gate) and the product are promised)

Exact: stock's own operations in stock's order. Any activation is fine; one that is not patched itself keeps what it
kept. Source: Shazeer (2020), arXiv:2002.05202.
"""

import torch
from torch import Tensor, nn

from hf_memsave.ops.op import Binding, KeptBytes, Op, children_are_modules
from hf_memsave.tape import promised


def kept_bytes(shape: tuple[int, ...], itemsize: int) -> KeptBytes:
    """The products of two ``shape`` tensors, its activation and the linear after it."""
    n = torch.Size(shape).numel() * itemsize
    return KeptBytes(4 * n, 2 * n)


def _gated_mlp(module: nn.Module, binding: Binding, x: Tensor) -> Tensor:
    gate = binding.child(module, "act")(binding.child(module, "gate")(x))
    return binding.child(module, "down")(promised(torch.mul, gate, binding.child(module, "up")(x)))


def _chunked_gated_mlp(module: nn.Module, binding: Binding, x: Tensor) -> Tensor:
    gate, up = binding.child(module, "gate_up")(x).chunk(2, dim=-1)
    return binding.child(module, "down")(promised(torch.mul, up, binding.child(module, "act")(gate)))


_GATED = """
def forward(self, x):
    return self.down(self.act(self.gate(x)) * self.up(x))
"""
_CHUNKED = """
def forward(self, x):
    up = self.gate_up(x)
    gate, up = up.chunk(2, dim=-1)
    up = up * self.act(gate)
    return self.down(up)
"""

GATED_MLP = Op(
    "gated_mlp", "activation", _gated_mlp, children_are_modules("gate", "up", "down", "act"), expressions=(_GATED,)
)
CHUNKED_GATED_MLP = Op(
    "chunked_gated_mlp",
    "activation",
    _chunked_gated_mlp,
    children_are_modules("gate_up", "down", "act"),
    expressions=(_CHUNKED,),
)
