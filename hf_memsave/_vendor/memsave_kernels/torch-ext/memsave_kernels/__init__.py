"""Triton kernels for fine-tuning with little activation memory: see the README."""

from . import layers
from ._activations import ACTIVATIONS
from ._define import NAMESPACE
from ._dropout import draw_seed
from .activation import activate, activation_backward, activation_forward
from .bits import pack_bits, unpack_bits
from .codec import FORMATS, decode, encode
from .cross_entropy import cross_entropy_, cross_entropy_forward_, cross_entropy_scale_, linear_cross_entropy
from .draw import draw, probabilities
from .dropout_norm import dropout_norm, dropout_norm_backward, dropout_norm_forward, layer_norm_again
from .dropout_sum import dropout_sum
from .few_bit import few_bit_backward, few_bit_codes, few_bit_forward
from .gated import gated, gated_backward, gated_forward
from .inverted import InverseFit, inverted_backward, inverted_forward
from .lora import (
    lora_input,
    lora_input_backward,
    lora_input_forward,
    lora_output,
    lora_output_backward,
    lora_output_forward,
)
from .output_norm import output_norm_again, output_norm_backward, output_norm_forward
from .rms_norm import rms_norm, rms_norm_again, rms_norm_backward, rms_norm_forward
from .rotary import rotary, rotary_backward, rotary_forward
from .rows import gather_rows, row_norms

__version__ = "0.6.0"
__all__ = [
    "ACTIVATIONS", "NAMESPACE",
    "FORMATS", "decode", "encode",
    "activate", "activation_backward", "activation_forward",
    "cross_entropy_", "cross_entropy_forward_", "cross_entropy_scale_", "linear_cross_entropy",
    "draw", "probabilities",
    "draw_seed",
    "dropout_norm", "dropout_norm_backward", "dropout_norm_forward", "dropout_sum", "layer_norm_again",
    "few_bit_backward", "few_bit_codes", "few_bit_forward",
    "gated", "gated_backward", "gated_forward",
    "InverseFit", "inverted_backward", "inverted_forward",
    "layers",
    "lora_input", "lora_input_backward", "lora_input_forward",
    "lora_output", "lora_output_backward", "lora_output_forward",
    "gather_rows", "row_norms",
    "output_norm_again", "output_norm_backward", "output_norm_forward",
    "pack_bits", "unpack_bits",
    "rms_norm", "rms_norm_again", "rms_norm_backward", "rms_norm_forward",
    "rotary", "rotary_backward", "rotary_forward",
]  # fmt: skip
