"""Every kernel against PyTorch and float64; spoilt by 1%, outside of its tensors, twice."""

import pytest
import torch

from cases import CASES
from cases.case import DEVICE, Case, maker, no_worse, widen
from interpreter import only_interpreted, round_to_nearest, watching

round_to_nearest()
SHAPES = [(3, 32), (5, 37)]
EVERY = [(case, dtype, shape) for case in CASES for dtype in case.dtypes for shape in SHAPES]


def check(case: Case, args: tuple, has_sums: bool = True) -> None:
    results = case.ours(*args), case.eager(torch.float32, *args), case.eager(torch.float64, *widen(args))
    for number, (ours, eager, exact) in enumerate(zip(*results, strict=True)):
        assert ours.dtype == eager.dtype
        if has_sums or exact.numel() > 1:
            no_worse(f"result {number}", ours, eager, exact, case.roundings)


@pytest.mark.parametrize(("case", "dtype", "shape"), EVERY, ids=str)
def test_no_worse_than_eager(case, dtype, shape):
    check(case, case.inputs(maker(dtype), *shape))


#: With sums over rows that no program holds at once.
LONG = [case for case in CASES if any("norm_b" in name or "cross" in name for name in case.bytes_per_element)]


@pytest.mark.parametrize("case", LONG, ids=str)
def test_parts_of_a_row_are_those_of_the_whole(case):
    check(case, case.inputs(maker(case.dtypes[0]), 5, 8203))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA: the interpreter would take hours")
@pytest.mark.parametrize("case", [case for case in CASES if case.bytes_per_element], ids=str)
def test_programs_that_take_several_tiles(case):
    """Some 8,000 tiles for at most 2,112 programs. A loss is PyTorch's own sum of the rows: one number tells little."""
    check(case, case.inputs(maker(case.dtypes[-1]), 2**17 + 5, 72), has_sums=False)


@only_interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_error_of_1_percent_in_any_store_is_caught(case):
    args = case.inputs(maker(case.dtypes[0]), *SHAPES[1])
    with watching() as watch:
        case.ours(*args)
    stores = {(one.kernel, name) for one in watch.launches for name, n in one.written.items() if n}
    assert stores
    for store in sorted(stores):
        with watching(spoil=store), pytest.raises(AssertionError):
            check(case, args)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_twice(case):
    args = case.inputs(maker(case.dtypes[0]), *SHAPES[1])
    for first, second in zip(case.ours(*args), case.ours(*args), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_rows(case):
    args = case.inputs(maker(torch.float32), 0, 8)
    for ours, eager in zip(case.ours(*args), case.eager(torch.float32, *args), strict=True):
        torch.testing.assert_close(ours, eager, equal_nan=True)  # the mean of no losses is NaN


@only_interpreted
@pytest.mark.parametrize("case", [case for case in CASES if case.bytes_per_element], ids=str)
def test_moves_no_more_bytes_than_it_must(case):
    rows, columns = 8, 64
    args = case.inputs(maker(torch.bfloat16), rows, columns)
    with watching() as watch:
        case.ours(*args)
    moved: dict[str, float] = {}
    for one in watch.launches:
        moved[one.kernel] = max(moved.get(one.kernel, 0), one.bytes_of_matrices(rows * columns) / (rows * columns))
    assert moved == pytest.approx(case.bytes_per_element, abs=2 / columns)  # one element a row is not a pass


def strided(t):
    """The same values, every other element of a larger tensor."""
    if not isinstance(t, torch.Tensor) or not t.dim():
        return t
    large = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1]))
    large[..., ::2] = t
    return large[..., ::2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_strides_do_not_matter(case):
    args = case.inputs(maker(case.dtypes[0]), *SHAPES[1])
    for ours, expected in zip(case.ours(*map(strided, args)), case.ours(*args), strict=True):
        assert torch.equal(ours, expected)
