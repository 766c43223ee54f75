"""One call for each kernel and each way it is compiled, on empty tensors of a real model's shapes, in bfloat16."""

from collections.abc import Callable
from typing import Any

import torch

import memsave_kernels as k

LOW, WIDE = torch.bfloat16, torch.float32


def _empty(*shape: int, dtype: torch.dtype = LOW) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


X = _empty(2048, 4096)  # Llama-3-8B's hidden states
H, H_WIDE = _empty(2048, 1024), _empty(2048, 1024, dtype=WIDE)  # BERT-Large's
L, L_WIDE = _empty(2048, 16384), _empty(2048, 16384, dtype=WIDE)  # the longest rows of a norm without stack
W, V, V_WIDE = _empty(4096), _empty(1024), _empty(1024, dtype=WIDE)
U, U_WIDE = _empty(16384), _empty(16384, dtype=WIDE)
HEAD = _empty(128)
ROWS = _empty(2048, dtype=WIDE)
GATE, PACKED = _empty(2048, 14336), _empty(2048, 16384)
BYTES = _empty(32768, 256, dtype=torch.uint8)
Q, COS = _empty(1, 2048, 32, 128).transpose(1, 2), _empty(1, 2048, 128)
HALF_COS = _empty(1, 2048, 32)
LOGITS, LABELS, ONE = _empty(64, 128256), torch.zeros(64, dtype=torch.int64), torch.ones(())
ODD = _empty(64, 50257)
FLAGS, BITS = _empty(2048, 1024, dtype=torch.bool), _empty(262144, dtype=torch.uint8)
TABLE = _empty(32, dtype=WIDE)
FIT = k.InverseFit(-0.75, (-0.17, 5e-9), 4.0, tuple(map(float, range(7))), tuple(map(float, range(10))))


def _norm_backward(h: torch.Tensor, v: torch.Tensor, residual: torch.dtype, **rest: Any) -> Any:
    return k.dropout_norm_backward(h, h, v, v, ROWS, ROWS, 0.1, 1, LOW, residual, **rest)


LAUNCHES: dict[str, Callable[[], Any]] = {
    "rms_norm_forward": lambda: k.rms_norm_forward(X, W, 1e-6),
    "rms_norm_again": lambda: k.rms_norm_again(X, W, ROWS),
    "rms_norm_backward": lambda: k.rms_norm_backward(X, X, W, ROWS, has_dw=False),
    "rms_norm_backward_again": lambda: k.rms_norm_backward(X, X, W, ROWS, has_dw=False, again=True),
    "rms_norm_backward_weight": lambda: k.rms_norm_backward(X, X, W, ROWS, again=True),
    "rms_norm_backward_narrow": lambda: k.rms_norm_backward(H, H, V, ROWS, again=True),
    "rms_norm_backward_long": lambda: k.rms_norm_backward(L, L, U, ROWS, again=True),
    "rms_norm_head": lambda: k.rms_norm_forward(X.view(-1, 128), HEAD, 1e-6, "gemma"),
    "gated_silu": lambda: k.gated_forward(GATE, GATE),
    "gated_silu_backward": lambda: k.gated_backward(GATE, GATE, GATE, again=True),
    "gated_gelu_backward": lambda: k.gated_backward(GATE, GATE, GATE, "gelu", again=True),
    "gated_packed_backward": lambda: k.gated_backward(PACKED[:, :8192], PACKED, None, again=True),
    "dropout_norm": lambda: k.dropout_norm_forward(H, H, V, V, p=0.1, seed=1),
    "dropout_norm_autocast": lambda: k.dropout_norm_forward(H, H_WIDE, V_WIDE, V_WIDE, p=0.1, seed=1, low=LOW),
    "dropout_norm_backward": lambda: _norm_backward(H, V, LOW, out=LOW),
    "dropout_norm_backward_autocast": lambda: _norm_backward(H_WIDE, V_WIDE, WIDE, dlow=H, dh=H_WIDE, low=LOW),
    "dropout_sum": lambda: k.dropout_sum(H, H, 0.1, 1),
    "dropout_sum_autocast": lambda: k.dropout_sum(H, H_WIDE, 0.1, 1, (V_WIDE, V_WIDE, ROWS, ROWS)),
    "dropout_norm_long": lambda: k.dropout_norm_forward(L, L_WIDE, U_WIDE, U_WIDE, p=0.1, seed=1, low=LOW),
    "dropout_norm_backward_long": lambda: _norm_backward(L_WIDE, U_WIDE, WIDE, dlow=L, dh=L_WIDE, low=LOW),
    "layer_norm": lambda: k.dropout_norm_forward(H, None, V, V),
    "lora_input": lambda: k.lora_input_forward(X, 0.05, 1),
    "lora_input_wide": lambda: k.lora_input_forward(X, 0.05, 1, WIDE),
    "lora_input_backward": lambda: k.lora_input_backward(X, 0.05, 1, LOW, X),
    "lora_output": lambda: k.lora_output(X, X, 2.0),
    "rotary": lambda: k.rotary_forward(Q, COS, COS),
    "rotary_backward": lambda: k.rotary_backward(Q, COS, COS),
    "rotary_part": lambda: k.rotary_forward(Q, HALF_COS, HALF_COS),
    "gelu": lambda: k.activation_forward(H),
    "gelu_backward": lambda: k.activation_backward(H, H, has_db=True, again=True),
    "gelu_tanh_backward": lambda: k.activation_backward(H, H, "gelu_tanh", again=True),
    "cross_entropy": lambda: k.cross_entropy_forward_(LOGITS, LABELS, ONE),
    "cross_entropy_odd": lambda: k.cross_entropy_forward_(ODD, LABELS, ONE),
    "cross_entropy_few": lambda: k.cross_entropy_forward_(LOGITS[:3], LABELS, ONE),
    "pack_bits": lambda: k.pack_bits(FLAGS),
    "unpack_bits": lambda: k.unpack_bits(BITS, FLAGS.numel()),
    "inverted": lambda: k.inverted_forward(H, "gelu", -0.75),
    "inverted_backward": lambda: k.inverted_backward(H, H, BITS, FIT),
    "precision_bit": lambda: k.inverted_forward(H, "gelu", -0.75, in_y=True),
    "precision_bit_backward": lambda: k.inverted_backward(H, H, None, FIT),
    "few_bit": lambda: k.few_bit_forward(H, TABLE[:15], "gelu"),
    "few_bit_backward": lambda: k.few_bit_backward(H, BYTES, TABLE),
    "few_bit_codes": lambda: k.few_bit_codes(H, TABLE[:15]),
    "output_norm": lambda: k.output_norm_forward(H, V, V),
    "output_norm_again": lambda: k.output_norm_again(H, V, V),
    "output_norm_backward": lambda: k.output_norm_backward(H, H, V, V, ROWS, True),
    "output_norm_long": lambda: k.output_norm_forward(L, U, U),
    "output_norm_backward_long": lambda: k.output_norm_backward(L, L, U, U, ROWS, True),
    "output_norm_backward_rms": lambda: k.output_norm_backward(X, X, W, None, ROWS, False),
    "encode_int8": lambda: k.encode(X, "int8", 1),
    "encode_int4": lambda: k.encode(X, "int4", 1),
    "decode_int8": lambda: k.decode(BYTES, _empty(32768, 2, dtype=WIDE), "int8", X.numel(), LOW),
    "decode_int4": lambda: k.decode(BYTES, _empty(131072, 2), "int4", X.numel(), LOW),
    "gather_rows": lambda: k.gather_rows(X, LABELS.int(), ROWS),
    "row_norms": lambda: k.row_norms(X),
    "probabilities": lambda: k.probabilities(ROWS.view(1, -1), ROWS.view(1, -1)),
    "draw": lambda: k.draw(_empty(1, 4096, dtype=torch.float64), 1024, ROWS[:1024].view(1, -1)),
    "scale": lambda: k.cross_entropy_scale_(LOGITS, ONE),
}

#: Each call, and its further launches as "call-1".
NAMES = sorted([*LAUNCHES, "draw-1"])
