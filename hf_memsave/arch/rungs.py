"""Which linears of a repeated block each rung below the floor runs again, by their paths in it."""

from __future__ import annotations

import re

#: Rung -> the linears that it adds to those of the rungs before it: what it need not keep is their output.
RUNGS = {
    "o_proj": r"o_proj|out_proj|out_lin|attn\.(c_proj|Wo|proj)|attention\.(output\.|out_)?(dense|proj)|"
    r"self_attn\.(dense|proj)|self_attention\.dense|(Self|EncDec)Attention\.o",
    "qkv": r"[qkv]_proj|[qkv]_lin|query|key|value|query_key_value|qkv_proj|c_attn|Wqkv|qkv|[Aa]ttention\.[qkv]",
    "up": r"up_proj|intermediate\.dense|c_fc|fc1|lin1|dense_h_to_4h|wi(_1)?|mlp\.Wi",
    "gate": r"gate_proj|gate_up_proj|wi_0",
}
_PATTERNS = {rung: re.compile(rf"(?:.*\.)?(?:{names})") for rung, names in RUNGS.items()}


def is_run_again(path: str, last: str) -> bool:
    """Whether the linear at ``path``, which adapters may wrap, runs again where ``last`` is the last rung taken."""
    path = path.removesuffix(".base_layer")
    taken = list(RUNGS)[: list(RUNGS).index(last) + 1]
    return any(_PATTERNS[rung].fullmatch(path) for rung in taken)
