"""``cast``: a conversion with stock's bits and stock's autograd nodes, whose copy is not kept."""

import pytest
import torch

from hf_memsave.ops.cast import autocast_fp32, autocast_low, cast, cast_reference, is_autocast, kept_bytes
from hf_memsave.tape import Tape
from support.helpers import (
    DTYPES,
    LAYOUTS,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_same_result,
    autocasting,
    kept,
    only_on_cpu,
    random,
    run,
)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("to", DTYPES, ids=lambda dtype: f"to-{dtype}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_is_exact(device, dtype, to, wanted):
    x = random(3, 8, dtype=dtype, device=device)
    assert_exact(lambda x: cast(x, to), lambda x: cast_reference(x, to), [x], wanted=[wanted])


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 0, 4), (2, 1, 7)], ids=str)
def test_cast_is_exact_for_odd_shapes(device, shape):
    x = random(*shape, device=device)
    assert_exact(lambda x: cast(x, torch.bfloat16), lambda x: cast_reference(x, torch.bfloat16), [x])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cast_is_exact_for_views(device, layout):
    view = LAYOUTS[layout]
    x = random(4, 5, 8, device=device)
    assert_exact(lambda x: cast(view(x), torch.bfloat16), lambda x: cast_reference(view(x), torch.bfloat16), [x])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_to_its_own_dtype_is_the_tensor_itself(device, dtype):
    x = random(3, dtype=dtype, device=device)
    with Tape():
        assert cast(x, dtype) is x


def test_casts_of_one_tensor_add_their_gradients_in_its_dtype(device):
    only_on_cpu(device)
    weights = [random(64, dtype=torch.bfloat16, device=device, seed=s) for s in range(3)]

    def consumers(convert):
        return lambda x: sum(convert(x, torch.bfloat16) * w for w in weights)

    assert_exact(consumers(cast), consumers(cast_reference), [random(64, device=device)])


def test_a_cast_and_back_is_exact(device):
    x = random(3, 8, device=device)
    assert_exact(
        lambda x: cast(cast(x, torch.bfloat16), torch.float32), lambda x: x.to(torch.bfloat16).to(torch.float32), [x]
    )


def test_cast_has_the_right_gradients(device):
    # There and back through complex128: finite differences need more than float32, and a conversion that is one.
    x = random(2, 3, dtype=torch.float64, device=device)
    assert_gradients_are_right(lambda x: cast(x, torch.complex128).real, x)


def test_cast_runs_backward_twice(device):
    assert_backward_twice(lambda x: cast(x, torch.bfloat16), random(3, 8, device=device))


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_cast_keeps_what_it_claims(device, to):
    x = random(3, 5, 8, device=device)
    claim = kept_bytes(tuple(x.shape), to.itemsize)
    input_itself = x.nbytes  # kept for another reason, by the sigmoid that makes it
    stock = kept(lambda x: cast_reference(x, to), x, tape=False, producer=torch.sigmoid)
    assert stock == input_itself + claim.eager
    assert kept(lambda x: cast(x, to), x, tape=True, producer=torch.sigmoid) == input_itself + claim.here


def test_cast_is_stock_without_a_tape(device):
    x = random(3, 8, device=device)
    ours, stock = (lambda x: cast(x, torch.bfloat16)), (lambda x: cast_reference(x, torch.bfloat16))
    assert_same_result(run(ours, [x]), run(stock, [x]))
    assert kept(ours, x, tape=False) == kept(stock, x, tape=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_low_is_what_a_product_gets(device, dtype):
    with autocasting(device, dtype):
        assert autocast_low(random(3, device=device)).dtype == dtype


def test_autocast_low_leaves_float64_alone(device):
    x = random(3, dtype=torch.float64, device=device)
    with autocasting(device, torch.bfloat16):
        assert autocast_low(x) is x
        assert torch.mm(x[None], x[:, None]).dtype == torch.float64, "autocast itself does not"


def test_autocast_low_leaves_integers_alone(device):
    x = torch.arange(3, device=device)
    with autocasting(device, torch.bfloat16):
        assert autocast_low(x) is x


def test_autocast_low_is_the_tensor_itself_without_autocast(device):
    x = random(3, device=device)
    assert autocast_low(x) is x


def test_autocast_low_is_the_tensor_itself_where_autocast_is_switched_off(device):
    x = random(3, device=device)
    with autocasting(device, torch.bfloat16), torch.autocast(device.type, enabled=False):
        assert autocast_low(x) is x


def test_autocast_fp32_widens_as_pow_does(device):
    x = random(3, dtype=torch.bfloat16, device=device)
    with autocasting(device, torch.bfloat16):
        assert autocast_fp32(x).dtype == x.pow(2).dtype


def test_is_autocast_looks_at_the_device_of_the_tensor(device):
    other = "cpu" if device.type == "cuda" else "cuda"
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert is_autocast(random(1, device=device))
        assert not torch.is_autocast_enabled(other)
        assert not is_autocast(torch.empty(1, device="meta"))
