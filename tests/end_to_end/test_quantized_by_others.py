"""Linears that torchao, optimum-quanto, HQQ and bitsandbytes quantize: they run again, or are refused by name."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.errors import PatchError
from support.families import Size, batch_for, build
from support.helpers import assert_same_bits

SIZE = Size(hidden=64)
pytestmark = pytest.mark.filterwarnings("ignore")


def in_blocks(module, name):
    return isinstance(module, nn.Linear) and "lm_head" not in name


def torchao_training(model):
    training = pytest.importorskip("torchao.prototype.quantized_training")
    from torchao.quantization import quantize_

    quantize_(model, training.int8_weight_only_quantized_training(), filter_fn=in_blocks)
    return model


def with_lora(model):
    model.requires_grad_(False)
    lora = LoraConfig(target_modules=["q_proj", "up_proj"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(model, lora)


def torchao_weights(model):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), filter_fn=in_blocks)
    return with_lora(model)


def quanto(model):
    library = pytest.importorskip("optimum.quanto")
    library.quantize(model.model, weights=library.qint8)
    library.freeze(model.model)
    return with_lora(model)


def replaced(model, make):
    for name, module in list(model.model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, child = name.rpartition(".")
            setattr(model.model.get_submodule(parent), child, make(module))
    return model


def hqq(model):
    library = pytest.importorskip("hqq.core.quantize")
    config = library.BaseQuantizeConfig(nbits=4, group_size=64)
    make = lambda linear: library.HQQLinear(linear, config, compute_dtype=torch.bfloat16, device="cpu")  # noqa: E731
    return with_lora(replaced(model, make))


def qat(model):
    from torch.ao.nn.qat import Linear
    from torch.ao.quantization import get_default_qat_qconfig

    def make(linear):
        linear.qconfig = get_default_qat_qconfig("onednn")
        return Linear.from_float(linear)

    return replaced(model.float(), make)


def eight_bits(model):
    library = pytest.importorskip("bitsandbytes.nn")
    make = lambda linear: library.Linear8bitLt(linear.in_features, linear.out_features, False)  # noqa: E731
    return replaced(model, make)


def step(model, batch, is_autocast=False):
    torch.manual_seed(0)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("make", [torchao_training, torchao_weights, quanto, hqq])
def test_they_run_again_to_the_bit(make):
    model = make(build("llama", SIZE, torch.bfloat16))
    batch = batch_for(model, SIZE)
    stock, kept = step(model, batch), {}
    for name, fields in {"floor": {}, "gate": {"checkpoint": "gate"}, "offload": {"offload": True}}.items():
        patch(model, fields, replace=True)
        for _ in range(2):
            for ours, theirs in zip(step(model, batch), stock, strict=True):
                assert_same_bits(ours, theirs)
        kept[name] = measure_kept(model, batch).total
    assert kept["gate"] < 0.85 * kept["floor"]


@pytest.mark.parametrize("checkpoint", [None, "gate"])
def test_under_autocast_their_own_function_is_asked_before_any_conversion(checkpoint):
    model = torchao_weights(build("llama", SIZE))
    batch = batch_for(model, SIZE)
    stock = step(model, batch, is_autocast=True)
    patch(model, MemSaveConfig(checkpoint=checkpoint))
    for ours, theirs in zip(step(model, batch, is_autocast=True), stock, strict=True):
        assert_same_bits(ours, theirs)


def test_torchaos_training_runs_under_every_outer_hook():
    """Their weights have no ``expand``: nothing is called on a weight that only has to be kept."""
    model = torchao_training(build("llama", SIZE, torch.bfloat16))
    batch = batch_for(model, SIZE)
    stock = step(model, batch)
    patch(model)
    for is_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        for ours, theirs in zip(step(model, batch), stock, strict=True):
            assert_same_bits(ours, theirs)
    model.gradient_checkpointing_disable()
    with torch.autograd.graph.save_on_cpu():
        ours = step(model, batch)
    for mine, theirs in zip(ours, stock, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("make", [qat, eight_bits])
def test_what_may_not_run_twice_is_refused_by_name_and_class(make):
    model = make(build("llama", SIZE, torch.bfloat16))
    cls = type(model.model.layers[0].self_attn.q_proj).__name__
    with pytest.raises(PatchError, match=rf"layers\.0\.self_attn\.q_proj \({cls}\): .*Use checkpoint='block'"):
        patch(model, MemSaveConfig(checkpoint="gate"))
