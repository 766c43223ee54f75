"""Cases for each function of the package."""

from . import activation, approximate, cross_entropy, dropout_norm, gated, lora, output_norm, rms_norm, rotary
from .case import Case

CASES: tuple[Case, ...] = (
    *rms_norm.CASES, *gated.CASES, *dropout_norm.CASES, *lora.CASES, *rotary.CASES, *activation.CASES,
    *cross_entropy.CASES, *approximate.CASES, *output_norm.CASES,
)  # fmt: skip
