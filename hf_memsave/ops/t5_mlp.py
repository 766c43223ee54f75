r"""``t5_mlp``: T5's feed-forward, plain (v1.0) and gated (v1.1), with its dropout and its cast before ``wo``.

Forward::

    y = wo(cast(dropout(σ(wi(x)))))                        v1.0
    y = wo(cast(dropout(σ(wi_0(x)) * wi_1(x))))            v1.1

The cast is to ``wo``'s dtype: T5 keeps ``wo`` in fp32 in fp16 models, and autocast hands it a half.

Kept for backward, each ``[*, F]``::

    eager    wi's output (v1.1: both, and σ), the dropout's noise, the dropped product, its cast
    here     σ's output, or wi's (v1.1: both inputs of the gate)

Exact: stock's own operations in stock's order. Source: Raffel et al. (2020), arXiv:1910.10683.
"""

import torch
from torch import Tensor, nn

from hf_memsave.ops.cast import cast
from hf_memsave.ops.op import Binding, Op, children_are_modules
from hf_memsave.tape import promised


def _dense(module: nn.Module, binding: Binding, hidden_states: Tensor) -> Tensor:
    return _out(module, module.act(module.wi(hidden_states)))


def _gated(module: nn.Module, binding: Binding, hidden_states: Tensor) -> Tensor:
    gate = module.act(module.wi_0(hidden_states))
    return _out(module, promised(torch.mul, gate, module.wi_1(hidden_states)))


def _out(module: nn.Module, h: Tensor) -> Tensor:
    h = module.dropout(h)
    weight = module.wo.weight  # stock asks for its dtype too; a quantized one stays as it is
    if isinstance(weight, Tensor) and weight.dtype != torch.int8:
        h = cast(h, weight.dtype)
    return module.wo(h)


_TAIL = """
    h = self.dropout(h)
    if (
        isinstance(self.wo.weight, torch.Tensor)
        and h.dtype != self.wo.weight.dtype
        and self.wo.weight.dtype != torch.int8
    ):
        h = h.to(self.wo.weight.dtype)
    h = self.wo(h)
    return h
"""
_DENSE = f"""
def forward(self, h):
    h = self.wi(h)
    h = self.act(h){_TAIL}"""
_GATED = f"""
def forward(self, h):
    gate = self.act(self.wi_0(h))
    up = self.wi_1(h)
    h = gate * up{_TAIL}"""

T5_MLP = Op("t5_mlp", "activation", _dense, children_are_modules("wi", "wo", "act", "dropout"), expressions=(_DENSE,))
T5_GATED_MLP = Op(
    "t5_gated_mlp",
    "activation",
    _gated,
    children_are_modules("wi_0", "wi_1", "wo", "act", "dropout"),
    expressions=(_GATED,),
)
