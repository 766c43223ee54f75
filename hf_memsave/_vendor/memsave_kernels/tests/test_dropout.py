"""The mask: a function of seed, row and column, the same in every kernel, dropped as often as asked."""

import itertools

import pytest
import torch

import memsave_kernels as k
from cases.case import DEVICE
from memsave_kernels import _dropout

ROWS, COLUMNS = 64, 512


def mask(p, seed, rows=ROWS, columns=COLUMNS):
    return k.lora_input_forward(torch.ones(rows, columns, device=DEVICE), p, seed)


@pytest.mark.parametrize("p", [0.04, 0.5])
def test_drops_as_often_as_asked(p):
    found = mask(p, 7)
    t = round(p * 65536)
    assert set(found.unique().tolist()) == {0.0, torch.tensor(65536 / (65536 - t)).item()}
    n = found.numel()
    dropped = (found == 0).double()
    assert abs(dropped.mean() - p) < 5 * (p * (1 - p) / n) ** 0.5  # 5 standard deviations
    assert (dropped.mean(0) - p).abs().max() < 6 * (p * (1 - p) / ROWS) ** 0.5
    assert (dropped.mean(1) - p).abs().max() < 6 * (p * (1 - p) / COLUMNS) ** 0.5


def test_masks_are_unrelated():
    masks = [mask(0.5, seed).double() - 1 for seed in (1, 2, 1 + 2**32)]
    rolled = [masks[0].roll(1, 0), masks[0].roll(1, 1), masks[0].roll(8, 1)]
    for a, b in [*itertools.combinations(masks, 2), *((masks[0], other) for other in rolled)]:
        assert (a * b).mean().abs() < 5 / a.numel() ** 0.5


def test_the_same_in_every_kernel_and_for_every_width():
    x, w = torch.ones(8, 40, device=DEVICE), torch.ones(40, device=DEVICE)
    h = k.dropout_norm_forward(x, None, w, None, p=0.3, seed=5).h
    assert torch.equal(h, mask(0.3, 5, 8, 40))
    assert torch.equal(h[:, :24], mask(0.3, 5, 8, 24))


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wide", [torch.float32, None], ids=["autocast", "one dtype"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [40, 129])
def test_a_sum_again_has_its_bits(columns, dtype, wide, bias, p):
    torch.manual_seed(0)
    wide = wide or dtype
    x, first = torch.randn(2, 5, columns, device=DEVICE).to(dtype), torch.randn(5, columns, device=DEVICE).to(wide)
    w, b = torch.rand(columns, device=DEVICE).to(wide), torch.randn(columns, device=DEVICE).to(wide) if bias else None
    before = k.dropout_norm_forward(first, first, w, b, p=p, seed=3)
    after = k.dropout_norm_forward(x[0], before.y, w, b, p=p, seed=2**40)
    assert torch.equal(k.dropout_sum(x[0], before.y, p, 2**40), after.h)
    norm = w, b, before.mean, before.rstd
    assert torch.equal(k.dropout_sum(x[0], before.h, p, 2**40, norm), after.h)
    assert not torch.equal(k.dropout_sum(x[0], before.h, p, 2**40), after.h)


def test_all_and_nothing():
    assert torch.equal(mask(1.0, 1), torch.zeros(ROWS, COLUMNS, device=DEVICE))
    assert torch.equal(mask(0.0, 1), torch.ones(ROWS, COLUMNS, device=DEVICE))


def test_a_seed_follows_the_generator():
    state = torch.get_rng_state()
    first, second = (k.draw_seed(torch.device("cpu")) for _ in range(2))
    torch.set_rng_state(state)
    assert first != second and k.draw_seed(torch.device("cpu")) == first


class Generator:
    """One of CUDA's."""

    def __init__(self):
        self.offset = 0

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset % 4 == 0  # as CUDA's asks
        self.offset = offset

    def initial_seed(self):
        return 2**64 - 1


def test_a_seed_on_cuda_moves_its_generator_on(monkeypatch):
    generator = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    seeds = [_dropout.draw_seed(torch.device("cuda", 1)) for _ in range(3)]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**63 for seed in seeds)
    generator.set_offset(0)
    assert _dropout.draw_seed(torch.device("cuda", 1)) == seeds[0]
