"""The stand-in for a CUDA device: does as CUDA does, and the library keeps there what it keeps on CPU."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

from hf_memsave import patch
from hf_memsave.count.kept import measure_kept
from hf_memsave.device import STAND_IN
from hf_memsave.errors import MeasureError
from hf_memsave.measure import fake_device as module
from hf_memsave.measure.fake_device import STATE_BYTES, fake_device, to_fake
from hf_memsave.measure.inputs import forward_of
from hf_memsave.measure.kernels import attention, chosen
from hf_memsave.tape import attention as tape_attention
from support.fake import ATTENTION, DATA_ERRORS, Counted, NoTransfers, kept_on_fake, on_fake, u_on_fake
from support.helpers import MATRIX, halved, on_stand_in
from support.zoo import FAMILIES, FLOOR, MORE, QUOTED, build

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")

#: LoRA as PEFT has it by default; a dropout keeps 16 bytes.
LORA = {"bert": 10.5, "gpt2": 10.4, "llama": 11.1, "phi": 9.6, "phi3": 10.9}
#: Stock: a byte an element for each of BERT's two dropouts, where CPU keeps two; norms of LLaMA in fp32.
STOCK = {"bert": 17.06, "llama": 22.05}
ALWAYS = ("bert", "llama", "phi3", "t5-decoder")
#: Every family with one kernel, and each of some with all and under autocast.
EVERY = [
    pytest.param(family, kernel, marks=() if i % 3 == j or family in ALWAYS else MATRIX)
    for i, family in enumerate(FAMILIES + MORE)
    for j, kernel in enumerate((*ATTENTION, "autocast"))
]


@pytest.mark.parametrize(("family", "kernel"), EVERY)
def test_a_layer_keeps_its_floor(family, kernel):
    if kernel == "autocast":
        assert u_on_fake(family, "autocast") <= 1.03 * (FLOOR[family] + 0.5)
    else:
        assert FLOOR[family] <= u_on_fake(family, attention=kernel) <= 1.03 * FLOOR[family]


@pytest.mark.parametrize("family", LORA)
def test_a_layer_with_lora_keeps_the_floor_and_stock_what_cuda_keeps(family):
    assert u_on_fake(family, lora=True) <= LORA[family]
    assert family not in STOCK or u_on_fake(family, config=None) == pytest.approx(STOCK[family], abs=0.01)


PRESETS = ["exact", "invact", "few-bit", "tempo", {"norm": "output"}]


@pytest.mark.parametrize(("family", "preset"), halved(["bert", "gpt2", "llama", "t5-decoder", "phi3"], PRESETS))
def test_a_step_makes_the_host_wait_for_nothing(family, preset):
    with on_fake(lambda: build(family, QUOTED, torch.bfloat16)) as (model, batch):
        patch(model, preset)
        forward = forward_of(model, None)
        with NoTransfers(only_to_host=preset == "few-bit"):  # its tables are copied there, on CUDA once
            forward(**batch).loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def of_two_layers(family, kernel, seq):
    """Bytes that two layers more keep, with a mask and without."""
    kept = [[kept_on_fake(family, n, attention=kernel, seq=seq, padded=p) for n in (4, 6)] for p in (True, False)]
    return [more - few for few, more in kept]


@pytest.mark.long
@pytest.mark.parametrize(("family", "kernel"), halved(["llama", "t5-encoder", "bert"], ["efficient", "cudnn"]))
def test_a_mask_with_odd_rows_is_laid_out_once(family, kernel, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12"))  # before, cuDNN's kernel keeps those of its own
    padded, without = of_two_layers(family, kernel, 130)
    assert padded == pytest.approx(without, rel=1e-3)


@pytest.mark.parametrize(
    ("kernel", "version", "masks"), [("cudnn", "2.11", 1), ("cudnn", "2.12", 0), ("efficient", "2.11", 0)]
)
def test_boolean_masks_are_left_to_stock_where_cudnn_is_given_a_finite_number(monkeypatch, kernel, version, masks):
    """Its rows that may see nothing are not zero there, as with -inf: each layer makes and keeps a mask of its own."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    of_one = QUOTED.batch * 128 * 128 * 2
    padded, without = of_two_layers("bert", kernel, 128)
    assert padded - without == pytest.approx(2 * masks * of_one, abs=of_one / 100)
    monkeypatch.setattr(tape_attention, "mask_multiple", lambda mask: 1)  # where kernels lay them out themselves
    if kernel == "efficient":
        padded, without = of_two_layers("bert", kernel, 130)
        assert padded - without == pytest.approx(2 * QUOTED.batch * 130 * 136 * 2, rel=0.01)


@pytest.mark.parametrize("length", [128, 130])
@pytest.mark.parametrize("kind", [torch.bool, torch.bfloat16])
def test_the_efficient_kernel_takes_the_masks_of_the_tape_as_they_are(kind, length):
    with fake_device("efficient") as device:
        mask = torch.ones(2, 1, length, length, dtype=kind, device=device)
        laid = tape_attention.float_mask(mask, torch.bfloat16) if kind == torch.bool else tape_attention.laid_out(mask)
        assert laid.shape == mask.shape
        assert laid.dtype == torch.bfloat16
        assert laid.stride() == (length * 136, length * 136, 136, 1) if length == 130 else laid.is_contiguous()


@pytest.mark.parametrize("ask", [torch.Tensor.item, bool, float, torch.nonzero, lambda x: x[x > 0]])
def test_what_asks_for_a_number_raises(ask):
    with fake_device() as device, pytest.raises(DATA_ERRORS):
        ask(torch.ones((), device=device) if ask is not torch.nonzero else torch.ones(3, device=device))
    with fake_device() as device, NoTransfers(), pytest.raises(AssertionError, match="copies between"):
        torch.ones(3, device=device).cpu()


#: Calls with ``x``, ``[4, 4]`` in fp32, by the dtype of what they give under autocast to bf16.
CASTS = {
    torch.bfloat16: [
        lambda x: F.linear(x, x), lambda x: x @ x.mT, lambda x: F.gelu(x.bfloat16()), lambda x: x.bfloat16().mean(),
    ],
    torch.float32: [
        lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x.bfloat16().softmax(-1), lambda x: x.bfloat16().pow(2),
        lambda x: x.bfloat16().sum(), lambda x: x.bfloat16().norm(), lambda x: torch.ops.aten.norm(x.bfloat16()),
        lambda x: torch.ops.aten.norm(x.bfloat16(), 2, [0]), lambda x: torch.addcmul(x, x.bfloat16(), x),
        lambda x: F.interpolate(x.bfloat16().view(1, 4, 4), scale_factor=2),
        lambda x: F.interpolate(x.bfloat16().view(1, 1, 4, 4), scale_factor=2, mode="bicubic"),
        lambda x: torch.grid_sampler(x.view(1, 2, 2, 2, 2).bfloat16(), x.new_ones(1, 2, 2, 1, 3), 0, 0, False),
        lambda x: F.huber_loss(x.bfloat16(), x.bfloat16()), lambda x: torch.cat((x, x.bfloat16())),
    ],
    torch.float64: [lambda x: x.double() @ x.double().mT],
}  # fmt: skip


@pytest.mark.parametrize(("call", "dtype"), [(call, dtype) for dtype, calls in CASTS.items() for call in calls])
def test_autocast_does_as_cudas(call, dtype):
    with fake_device() as device, torch.autocast(device.type, torch.bfloat16):
        assert call(torch.ones(4, 4, device=device)).dtype == dtype
    with contextlib.ExitStack() as undo:  # PyTorch's own, of tensors that say that they are on a GPU
        undo.callback(torch.set_autocast_enabled, "cuda", torch.is_autocast_enabled("cuda"))
        undo.callback(torch.set_autocast_dtype, "cuda", torch.get_autocast_dtype("cuda"))
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        with FakeTensorMode(), torch.no_grad():
            assert call(torch.empty(4, 4, device="cuda")).dtype == dtype


def test_autocast_converts_a_weight_once():
    with fake_device() as device, torch.autocast(device.type, torch.bfloat16):
        layer = to_fake(nn.Linear(64, 64, bias=False), device)
        x = torch.ones(2, 64, device=device, requires_grad=True)
        kept = measure_kept(layer, x, lambda x: layer(layer(x)))
        assert sum(s.nbytes for s in kept.storages if s.op == "_to_copy" and s.nbytes > 4096) == 64 * 64 * 2


def test_backward_draws_no_dropout_again_twice_and_a_seed_is_kept_and_no_mask():
    with on_fake(lambda: build("bert", QUOTED, torch.bfloat16)) as (model, batch):
        patch(model)
        with Counted() as forward:
            loss = model(**batch).loss
        with Counted() as backward:
            loss.backward()
        assert 0 < backward["native_dropout"] <= forward["native_dropout"]
        kept = [s for s in measure_kept(model, batch).storages if s.kind == "dropout"]
        assert {s.nbytes for s in kept if s.nbytes < 4096} <= {STATE_BYTES}
        assert not [s for s in kept if s.op == "bitwise_or_"]


@pytest.mark.parametrize(("dtype", "width", "mask", "grouped", "expected"), [
    (torch.bfloat16, 64, None, False, "flash"), (torch.bfloat16, 64, torch.ones(8, 8) > 0, False, "efficient"),
    (torch.float32, 64, None, False, "efficient"), (torch.float32, 64, None, True, "math"),
    (torch.bfloat16, 64, None, True, "flash"), (torch.bfloat16, 512, None, False, "efficient"),
])  # fmt: skip
def test_the_kernel_is_the_one_that_can(dtype, width, mask, grouped, expected):
    with fake_device() as device:
        q = torch.ones(2, 4, 8, width, dtype=dtype, device=device, requires_grad=True)
        k = q[:, :2] if grouped else q
        mask = None if mask is None else mask.to(device)
        assert chosen(q, k, k, mask, grouped) == expected
        out = attention(q, k, k, mask, enable_gqa=grouped)
        out.sum().backward()
        assert out.shape == q.grad.shape == q.shape


@pytest.mark.parametrize("kernel", ATTENTION)
@pytest.mark.parametrize("width", [20, 64])
def test_attention_keeps_q_k_v_o_and_a_number_a_row(kernel, width):
    with fake_device(kernel) as device:
        x = torch.ones(2, 4, 128, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        forward = lambda x: F.scaled_dot_product_attention(x * 1, x * 1, x * 1).sum()  # noqa: E731
        total = measure_kept(nn.Identity(), x, forward).total
    padded = 24 if width == 20 and kernel != "efficient" else width  # cuDNN cannot, and flash pads
    of_one, numbers = 2 * 4 * 128 * padded * 2, 2 * 4 * 128 * 4
    assert 0 <= total - 4 * of_one - numbers <= 64


@on_stand_in
@pytest.mark.long
def test_it_works_where_a_backward_ran_before():
    code = """
import torch
torch.ones(2, requires_grad=True).sum().backward()
from hf_memsave.measure.fake_device import fake_device
with fake_device() as device:
    x = torch.ones(2, device=device, requires_grad=True)
    x.square().sum().backward()
    assert x.grad.shape == (2,)
x = torch.ones(2, requires_grad=True)
x.square().sum().backward()
assert x.grad.tolist() == [2, 2]
assert not torch.accelerator.is_available()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(module.__file__).parents[2])


def test_a_constant_can_be_made_there_and_what_is_shared_stays_shared():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with fake_device() as device:
        for value in (1.0, [1.0], []):
            assert torch.tensor(value, device=device).device.type == STAND_IN
        assert (torch.tensor([1], device=device).view(1, 1) + 1).shape == (1, 1)
        to_fake(model, device)
        assert model[0].weight is model[1].weight
        assert model[0].weight.device.type == STAND_IN


#: What is not as it must be -> where that is told, what it tells, and the message.
WRONG = {
    "a torch without it": (torch._C, "_acc", None, "needs PyTorch 2.10 or later, got .* pip install -U torch"),
    "GPUs": (torch.cuda, "is_available", lambda: True, "a process without GPUs.* CUDA_VISIBLE_DEVICES="),
    "a place that is taken": (torch._C, "_get_privateuse1_backend_name", lambda: "npu", "'npu' has taken"),
}


@pytest.mark.parametrize(("owner", "name", "value", "message"), WRONG.values(), ids=WRONG)
def test_where_it_cannot_be_is_told(owner, name, value, message, monkeypatch):
    with pytest.raises(MeasureError, match="expected one of flash, efficient, cudnn, got 'fast'"), fake_device("fast"):
        pass
    with fake_device():
        pass  # where it can be
    monkeypatch.setattr(module, "_register", module._register.__wrapped__)
    monkeypatch.setattr(owner, name, value, raising=False)
    with pytest.raises(MeasureError, match=message), fake_device():
        pass
