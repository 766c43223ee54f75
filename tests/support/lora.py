"""Models with LoRA adapters, on stock and on quantized bases, and their training."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

from support import steps as training
from support.steps import patched_copy
from support.zoo import Size, batch_for, build

SIZE = Size(hidden=64, heads=4, batch=2, seq=32)
RANK = 8
#: base dtype, adapters cast to fp32 (PEFT's default), bf16 autocast
MODES = {
    "bf16, fp32 adapters": (torch.bfloat16, True, False), "bf16": (torch.bfloat16, False, False),
    "fp32": (torch.float32, True, False), "autocast": (torch.float32, True, True),
}  # fmt: skip


def adapted(family, mode="bf16, fp32 adapters", dropout=0.05, size=SIZE, **options):
    peft = pytest.importorskip("peft")
    dtype, in_fp32, _ = MODES[mode]
    options = dict(r=RANK, lora_alpha=16, target_modules="all-linear", lora_dropout=dropout) | options
    config = peft.LoraConfig(init_lora_weights=False, **options)
    torch.manual_seed(0)
    return peft.get_peft_model(build(family, size, dtype), config, autocast_adapter_dtype=in_fp32).train()


def pair(stock):
    ours = patched_copy(stock)
    return stock, ours


def autocast(mode, device="cpu"):
    return torch.autocast(device, torch.bfloat16, enabled=MODES[mode][2])


def assert_trains_like(ours, stock, mode="bf16, fp32 adapters", steps=20):
    training.assert_trains_like(ours, stock, SIZE, steps, is_autocast=MODES[mode][2])


def rank_terms(targets, mode, size):
    """Bytes of lora_A's outputs, and of the generator states of its dropouts, in one layer with so many targets."""
    dtype, in_fp32, is_autocast = MODES[mode]
    itemsize = 2 if is_autocast or (dtype == torch.bfloat16 and not in_fp32) else 4
    return targets * (size.batch * size.seq * RANK * itemsize + 5056)


def outputs(model):
    torch.manual_seed(1)
    with torch.no_grad():
        return model(**batch_for(model, SIZE)).logits


def quantized(folder, bits, prepared=True, family="llama", **options):
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    asked = BitsAndBytesConfig(load_in_4bit=True, **nf4) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    auto = AutoModelForSequenceClassification if family == "bert" else AutoModelForCausalLM
    model = auto.from_pretrained(folder, quantization_config=asked, dtype=torch.bfloat16)
    if prepared:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(0)
    options = dict(r=RANK, lora_alpha=16, lora_dropout=0.05, init_lora_weights=False) | options
    return peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", **options)).train()
