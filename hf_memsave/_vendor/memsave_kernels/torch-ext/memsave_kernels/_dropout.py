"""Dropout whose mask is a function of a seed, the row and the column: drawn again instead of being kept.

One call of Philox gives the masks of eight elements of a row, 16 bits each. An element is dropped with probability
t / 65536, t = round(65536 p), and what stays is multiplied by 65536 / (65536 - t): unbiased, whatever p is.
Source: Salmon et al. (2011), doi:10.1145/2063384.2063405.
"""

import torch
import triton
import triton.language as tl

from ._launch import Long

_STEPS = 65536


@triton.jit
def dropped_out(x, seed, threshold, row, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Dropout of a float32 tile ``[ROWS, COLUMNS]``, of rows ``[ROWS, 1]``, from column ``first``, a multiple of 8."""
    quad = first // 4 + tl.arange(0, COLUMNS // 4)[None, :] + tl.zeros([ROWS, 1], dtype=tl.int32)
    a, b, c, d = tl.philox(seed, quad // 2, row.to(tl.int32), 0, 0)  # once for threads that hold both quads
    words = tl.join(tl.where(quad % 2 == 0, a, b), tl.where(quad % 2 == 0, c, d))
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [ROWS, COLUMNS]).to(tl.int32)
    threshold = threshold.to(tl.int32)
    scale = tl.div_rn(65536.0, (65536 - threshold).to(tl.float32))  # `/` may be an ulp off
    return tl.where(halves >= threshold, x * scale, 0.0)


@triton.jit
def uniform(seed, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Numbers in [0, 1), in steps of 2⁻²⁴, for rows ``[ROWS, 1]``: one call of Philox for four."""
    group = tl.arange(0, COLUMNS // 4)[None, :] + tl.zeros([ROWS, 1], dtype=tl.int32)
    a, b, c, d = tl.philox(seed, group, row.to(tl.int32), 1, 0)
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [ROWS, COLUMNS])
    return (words >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216)


def drop_args(p: float, seed: int) -> tuple[Long, Long]:
    """What a kernel needs to know of the mask.

    Returns:
        The seed and the threshold.

    Raises:
        ValueError: p is no probability.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"expected a dropout probability between 0 and 1, got {p}")
    return Long(seed), Long(round(p * _STEPS))


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> int:
    """A seed from the device's random generator, which moves on; without a launch and without waiting for the device.

    The same generator state gives the same seed, so gradient checkpointing, which restores it, gets the same mask.

    Args:
        device: Where the kernel will run.
        generator: Of that device; its default one, if None.

    Returns:
        A number below 2^63.
    """
    if device.type != "cuda":
        return int(torch.randint(2**63 - 1, (), generator=generator))
    if generator is None:
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return (generator.initial_seed() * 0x9E3779B97F4A7C15 + offset) % 2**63
