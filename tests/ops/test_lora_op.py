"""A LoRA layer as one node of autograd: stock's bits, what is kept, and where PEFT's own forward runs instead."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from hf_memsave import MemSaveConfig, measure_kept
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.ops import lora
from hf_memsave.patching.swap import set_class, stock_class
from support.helpers import DTYPES, only_on_cpu
from support.lora import SIZE, adapted
from support.pairs import pairwise
from support.steps import assert_same, gradients, patched_copy, step
from support.zoo import batch_for

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
ROWS, RANK, WIDE = 6, 4, 48


class Reads(nn.Module):
    """Three linears read one tensor, which a norm made, and a fourth what they gave."""

    def __init__(self, make):
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (make(WIDE, WIDE) for _ in NAMES)

    def forward(self, x):
        x = self.norm(x)
        return F.softplus(self.o_proj(self.q_proj(x) * self.k_proj(x).tanh() + self.v_proj(x)))


def conv(wide, out):
    return Conv1D(out, wide)


def without_bias(wide, out):
    return nn.Linear(wide, out, bias=False)


def nf4(wide, out):
    linears = pytest.importorskip("bitsandbytes.nn")
    return linears.Linear4bit(wide, out, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")


def int8(wide, out):
    return pytest.importorskip("bitsandbytes.nn").Linear8bitLt(wide, out, has_fp16_weights=False).to("cpu")


def reads(make=nn.Linear, dtype=torch.float32, p=0.3, wants="adapters", **options):
    torch.manual_seed(0)
    config = dict(r=RANK, lora_alpha=7, lora_dropout=p, target_modules=list(NAMES), init_lora_weights=False)
    config |= dict(fan_in_fan_out=make is conv, **options)
    base = Reads(make).to(dtype)
    base.is_loaded_in_4bit, base.is_loaded_in_8bit = make is nf4, make is int8  # by which PEFT chooses its layers
    model = get_peft_model(base, LoraConfig(**config)).train()
    for name, parameter in model.named_parameters():
        if wants in name and parameter.is_floating_point():
            parameter.requires_grad_("lora" not in name)  # else it is left out
    return model


def patched(model, **options):
    return patched_copy(model, MemSaveConfig(**options))


def rows(model, seed=1):
    x = torch.randn(2, ROWS, WIDE, generator=torch.Generator().manual_seed(seed))
    return x.to(model.base_model.norm.weight.dtype).requires_grad_()


def train(model, autocast=False, steps=2, meddle=lambda model: None):
    """Losses and gradients, x's among them; each backward runs twice."""
    torch.manual_seed(3)
    optimizer, found = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1), {}
    for number in range(steps):
        x = rows(model, number)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().mean()
        meddle(model)
        loss.backward(retain_graph=True)
        loss.backward()
        found |= {f"{number} loss": loss.detach(), f"{number} x": x.grad.clone()}
        found |= {f"{number} {name}": gradient for name, gradient in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {"random": torch.get_rng_state()}


@pytest.fixture
def ran(monkeypatch, device):
    """How each call of the op was computed."""
    only_on_cpu(device, "these bits")
    found, stock = [], lora._apply

    def apply(tape, call, *tensors):
        found.append(call)
        return stock(tape, call, *tensors)

    monkeypatch.setattr(lora, "_apply", apply)
    return found


@pytest.mark.parametrize(
    ("make", "dtype", "p", "wants", "autocast", "kept"),
    [*pairwise(
        [nn.Linear, without_bias, conv, nf4, int8], [torch.float32, torch.bfloat16], [0.0, 0.3],
        ["adapters", "lora_A", "lora_B", "base_layer.weight", "norm"], [False, True], ["seed", "mask"],
    ), *[(make, torch.bfloat16, 0.3, "adapters", False, "mask") for make in (nf4, int8)]],  # adapters in fp32
)  # fmt: skip
def test_lora_trains_with_stocks_bits(make, dtype, p, wants, autocast, kept, ran):
    stock = reads(make, dtype, p, wants, use_rslora=p == 0)
    assert_same(train(patched(stock, dropout=kept), autocast), train(stock, autocast))
    is_within = make in (nn.Linear, without_bias) and wants != "base_layer.weight"  # not beside the base's own node
    assert len(ran) == (0 if wants == "lora_A" else 2 * len(NAMES))  # of a frozen A, nothing of x is kept
    assert all((call.weight is not None) == is_within for call in ran)


@pytest.mark.parametrize("adapters", DTYPES, ids=str)
@pytest.mark.parametrize("base", DTYPES, ids=str)
def test_an_input_is_rounded_to_the_adapters_dtype_before_its_dropout(base, adapters, ran):
    stock = reads(dtype=base)
    for name, parameter in stock.named_parameters():
        parameter.data = parameter.to(adapters if "lora" in name else base)
    assert_same(train(patched(stock)), train(stock))
    assert len(ran) == 2 * len(NAMES)


def test_lora_keeps_its_small_product_and_a_bit_an_element(ran):
    model = patched(reads(), dropout="mask")
    stored = measure_kept(model, {"x": rows(model)}, lambda x: model(x).sum()).storages
    n = 2 * ROWS
    assert [s.nbytes for s in stored if s.op == "mm"] == [4 * n * RANK] * 4 and ran
    assert [s.nbytes for s in stored].count(n * WIDE // 8) == 4
    assert not {"mul", "bernoulli_"} & {s.op for s in stored}


def hooked(part):
    return lambda model: [
        getattr(m, part).default.register_forward_hook(lambda m, x, y: 2 * y)
        for m in model.modules() if hasattr(m, part)
    ]  # fmt: skip


class Mode(TorchFunctionMode):
    """It sees every function, and drops nothing out."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is F.dropout else func(*args, **(kwargs or {}))


def within_a_mode(model):
    """Of which a tape around it knows nothing."""
    stock = model.base_model.model.forward

    def forward(x):
        with Mode():
            return stock(x)

    model.base_model.model.forward = forward


STATES = {
    "DoRA": (dict(use_dora=True), None), "a bias": (dict(lora_bias=True), None),
    "disabled": ({}, lambda model: model.base_model.disable_adapter_layers()),
    "merged": ({}, lambda model: model.merge_adapter()),
    "two adapters": ({}, lambda model: (
        model.add_adapter("two", LoraConfig(r=2, target_modules=list(NAMES), init_lora_weights=False)),
        model.base_model.set_adapter(["default", "two"]),
    )),
    "A is hooked": ({}, hooked("lora_A")), "its dropout is hooked": ({}, hooked("lora_dropout")),
    "another dropout": ({}, lambda model: [
        m.lora_dropout.update({"default": nn.Hardtanh()}) for m in model.modules() if hasattr(m, "lora_dropout")
    ]),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_what_is_more_than_one_plain_adapter_is_left_to_peft(state, ran):
    options, change = STATES[state]
    torch.manual_seed(0)
    stock = reads(wants="norm", **options)
    ours = patched(stock)
    for model in (stock, ours) if change else ():
        torch.manual_seed(1)
        change(model)
    assert_same(train(ours), train(stock))
    assert ran == []


def test_hooks_of_all_modules_and_modes_see_peft(ran):
    seen = []
    with nn.modules.module.register_module_forward_hook(lambda m, x, y: seen.append(type(m))):
        assert_same(train(patched(reads())), train(reads()))
    assert seen.count(nn.Dropout) == 4 * len(NAMES)
    stock, ours = reads(), patched(reads())
    for model in (stock, ours):
        within_a_mode(model)
    assert_same(train(ours), train(stock))
    assert ran == []


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("make", [nn.Linear, conv])
def test_gradients_of_gradients_are_right(make, p, ran):
    stock, found = reads(make, torch.float64, p, "norm"), []
    for model in (stock, patched(stock)):
        torch.manual_seed(3)
        trained, x = [parameter for parameter in model.parameters() if parameter.requires_grad], rows(model)
        first = torch.autograd.grad(model(x).sum(), [x, *trained], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, *trained])
        found.append((first, second))
    for ours, theirs in zip(*found[::-1], strict=True):
        for mine, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)
    assert ran and all(g.abs().max() > 0 for g in found[0][1])


@pytest.mark.parametrize("name", ["lora_A.default.weight", "lora_B.default.weight", "base_layer.weight"])
def test_a_weight_that_is_written_to_is_told(name, ran):
    def write(model):
        with torch.no_grad():
            model.get_parameter(f"base_model.model.k_proj.{name}").mul_(2)

    for model, error in ((reads(), RuntimeError), (patched(reads()), KeptTensorChangedError)):
        with pytest.raises(error, match="modified by an inplace operation"):
            train(model, meddle=write)
    assert ran


def test_adapters_switched_before_backward_are_of_no_matter(ran):
    def switch(model):
        model.base_model.disable_adapter_layers()
        model.base_model.enable_adapter_layers()
        model.set_adapter("two" if model.active_adapter == "default" else "default")

    stock = reads()
    stock.add_adapter("two", LoraConfig(r=2, target_modules=list(NAMES), init_lora_weights=False))
    assert_same(train(patched(stock), meddle=switch), train(stock, meddle=switch))
    assert {call.a.shape[0] for call in ran} == {RANK, 2}


def test_a_fused_dropout_is_drawn_again(ran, monkeypatch):
    """As on CUDA, from the default generator's state."""
    stock = reads(dtype=torch.float64)
    expected = train(stock)
    monkeypatch.setattr(lora, "fuses_dropout", lambda x: True)
    found = train(patched(reads(dtype=torch.float64)))
    assert found.keys() == expected.keys() and ran
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("is_again", [True, False])
def test_checkpointed_blocks_have_stocks_bits(is_again, ran):
    stock = adapted("llama")
    enable_checkpointing(stock, use_reentrant=is_again)
    stock.enable_input_require_grads()
    ours = patched_copy(stock)
    for seed in range(2):
        assert_same(step(ours, batch_for(ours, SIZE), seed), step(stock, batch_for(stock, SIZE), seed))
    assert len(ran) == 2 * 7 * SIZE.layers * (1 if is_again else 2)


@pytest.mark.parametrize("rung", [None, "qkv", "gate"])
def test_at_no_rung_is_more_kept_than_for_pefts_forward(rung, ran):
    model = adapted("llama", size=SIZE)
    stock, kept = step(model, batch_for(model, SIZE)), []
    for is_one in (True, False):
        ours = patched_copy(model, MemSaveConfig(checkpoint=rung))
        for module in ours.modules() if not is_one else ():
            if hasattr(module, "lora_A"):
                set_class(module, stock_class(module))
        for _ in range(2):
            assert_same(step(ours, batch_for(ours, SIZE)), stock)
        kept.append(measure_kept(ours, batch_for(ours, SIZE)).total)
    assert kept[0] <= kept[1] and ran


def direct(change=lambda x: x, write=lambda x: None):
    """Of a model, a forward that hands its input to two linears, and writes to it between."""

    def meddle(model):
        def forward(x):
            x = change(x)
            out = model.base_model.q_proj(x)
            write(x)
            return F.softplus(out + model.base_model.k_proj(x))

        model.base_model.model.forward = forward

    return meddle


@pytest.mark.parametrize(("change", "write", "runs"), [
    (lambda x: x, lambda x: None, 0),  # autocast converts a leaf once for all who read it
    (lambda x: x * 2, lambda x: x.mul_(2), 2), (lambda x: x * 2, lambda x: x.data.mul_(2), 2),
    (lambda x: (x * 2)[:1, :4], lambda x: None, 0),  # whose products stock computes as batched ones
])  # fmt: skip
def test_what_stock_does_with_an_input_of_its_own(change, write, runs, ran):
    stock = reads()
    ours = patched(stock)
    for model in (stock, ours):
        direct(change, write)(model)
    assert_same(train(ours, autocast=True), train(stock, autocast=True))
    assert len(ran) == 2 * runs


def test_a_weight_that_is_given_other_bytes_is_the_old_one_in_backward(ran):
    def swap(model):
        for name in ("lora_A.default.weight", "lora_B.default.weight", "base_layer.weight"):
            parameter = model.get_parameter(f"base_model.model.k_proj.{name}")
            parameter.data = parameter.data * 2

    stock = reads(wants="norm")
    assert_same(train(patched(stock), meddle=swap), train(stock, meddle=swap))
    assert ran


def test_second_derivatives_after_a_weight_was_given_other_bytes_are_refused(ran):
    model = patched(reads(p=0.0, wants="norm"))
    x = rows(model)
    loss = model(x).sum()
    parameter = model.get_parameter("base_model.model.k_proj.lora_A.default.weight")
    parameter.data = parameter.data * 2
    with pytest.raises(KeptTensorChangedError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x, create_graph=True)
    assert ran


def test_a_mode_around_the_model_sees_peft(ran):
    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is F.linear else out

    stock, found = reads(p=0.0), []
    for model in (patched(stock), stock):
        with Doubles(), torch.device("cpu"):
            found.append(train(model))
    assert_same(*found)
    assert ran == []


def test_a_probability_that_is_a_tensor_draws_stocks_mask(ran):
    stock = reads()
    for module in stock.modules():
        if isinstance(module, nn.Dropout):
            module.p = torch.tensor(0.3)
    assert_same(train(patched(stock)), train(stock))
    assert ran
