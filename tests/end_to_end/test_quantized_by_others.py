"""Linears that torchao, optimum-quanto, HQQ and bitsandbytes quantize: they run again, or are refused by name."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.ao.nn.qat import Linear as QATLinear
from torch.ao.quantization import get_default_qat_qconfig

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.errors import PatchError
from support.steps import assert_same, step
from support.zoo import Size, batch_for, build

SIZE = Size(hidden=64)
pytestmark = pytest.mark.filterwarnings("ignore")


def in_blocks(module, name):
    return isinstance(module, nn.Linear) and "lm_head" not in name


def with_lora(model):
    lora = LoraConfig(target_modules=["q_proj", "up_proj"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(model.requires_grad_(False), lora)


def replaced(model, make):
    for name, module in list(model.model.named_modules()):
        if type(module) is nn.Linear:
            model.model.set_submodule(name, make(module))
    return model


def torchao_training(model):
    training = pytest.importorskip("torchao.prototype.quantized_training")
    quantize_ = pytest.importorskip("torchao.quantization").quantize_
    quantize_(model, training.int8_weight_only_quantized_training(), filter_fn=in_blocks)
    return model


def torchao_weights(model):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), filter_fn=in_blocks)
    return with_lora(model)


def quanto(model):
    library = pytest.importorskip("optimum.quanto")
    library.quantize(model.model, weights=library.qint8)
    library.freeze(model.model)
    return with_lora(model)


def hqq(model):
    library = pytest.importorskip("hqq.core.quantize")
    options = dict(compute_dtype=torch.bfloat16, device="cpu")
    config = library.BaseQuantizeConfig(nbits=4, group_size=64)
    return with_lora(replaced(model, lambda linear: library.HQQLinear(linear, config, **options)))


def qat(model):
    def make(linear):
        linear.qconfig = get_default_qat_qconfig("onednn")
        return QATLinear.from_float(linear)

    return replaced(model.float(), make)


def eight_bits(model):
    library = pytest.importorskip("bitsandbytes.nn")
    return replaced(model, lambda linear: library.Linear8bitLt(linear.in_features, linear.out_features, False))


def made(make, dtype=torch.bfloat16):
    model = make(build("llama", SIZE, dtype))
    return model, batch_for(model, SIZE)


@pytest.mark.parametrize("make", [torchao_training, torchao_weights, quanto, hqq])
def test_they_run_again_to_the_bit(make):
    model, batch = made(make)
    stock, kept = step(model, batch), {}
    for name, fields in {"floor": {}, "gate": {"checkpoint": "gate"}, "offload": {"offload": True}}.items():
        patch(model, fields, replace=True)
        for _ in range(2):
            assert_same(step(model, batch), stock)
        kept[name] = measure_kept(model, batch).total
    assert kept["gate"] < 0.85 * kept["floor"]


def test_under_autocast_their_own_function_is_asked_before_any_conversion():
    model, batch = made(torchao_weights, torch.float32)
    stock = step(model, batch, low=torch.bfloat16)
    for checkpoint in (None, "gate"):
        patch(model, MemSaveConfig(checkpoint=checkpoint), replace=True)
        assert_same(step(model, batch, low=torch.bfloat16), stock)


def test_torchaos_training_runs_under_every_outer_hook():
    """Their weights have no ``expand``: nothing is called on a weight that only has to be kept."""
    model, batch = made(torchao_training)
    stock = step(model, batch)
    patch(model)
    for is_reentrant in (False, True):
        enable_checkpointing(model, use_reentrant=is_reentrant)
        assert_same(step(model, batch), stock)
    model.activation_checkpointing_disable()
    with torch.autograd.graph.save_on_cpu():
        assert_same(step(model, batch), stock)


@pytest.mark.parametrize("make", [qat, eight_bits])
def test_what_may_not_run_twice_is_refused_by_name_and_class(make):
    model, _ = made(make)
    cls = type(model.model.layers[0].self_attn.q_proj).__name__
    with pytest.raises(PatchError, match=rf"layers\.0\.self_attn\.q_proj \({cls}\): .*Use checkpoint='block'"):
        patch(model, MemSaveConfig(checkpoint="gate"))
