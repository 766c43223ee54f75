"""Sampled lora_A on a base quantized to NF4."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch
from support.families import Size, batch_for, build
from support.helpers import only_on_cpu
from support.steps import step

SIZE = Size(hidden=64, heads=4, layers=2, batch=4, seq=64)
DRAWS = 40
SAMPLED = WTACRS(budget=0.3, targets=("lora_A",))
TARGETS = 7 * SIZE.layers


@pytest.fixture
def model(device, tmp_path):
    pytest.importorskip("bitsandbytes")
    only_on_cpu(device)
    build("llama", SIZE, torch.bfloat16).save_pretrained(tmp_path)
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked, dtype=torch.bfloat16)
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()


@pytest.mark.long
def test_lora_on_an_nf4_base_is_sampled_unbiased_and_keeps_what_exact_keeps(model):
    batch = batch_for(model, SIZE)
    patch(model)
    exact, kept = step(model, batch), measure_kept(model, batch).total
    report = patch(model, MemSaveConfig(linear=SAMPLED), replace=True)
    sampled = [site.name for site in report.patched if site.op == "wta_crs"]
    assert len(sampled) == TARGETS and all(".lora_A." in name for name in sampled)
    draws = [step(model, batch) for _ in range(DRAWS)]
    for name, expected in exact.items():
        if "lora_A" not in name:
            assert all(torch.equal(draw[name], expected) for draw in draws), name
    noisy = [name for name in exact if "lora_A" in name]
    of = [torch.cat([draw[name].flatten() for name in noisy]).double() for draw in draws]
    truth = torch.cat([exact[name].flatten() for name in noisy]).double()
    spread = torch.stack(of).var(0).sum().div(DRAWS).sqrt()
    assert 0 < (torch.stack(of).mean(0) - truth).norm() < 2 * spread
    drawn = round(SAMPLED.budget * SIZE.batch * SIZE.seq)
    assert measure_kept(model, batch).total <= kept + TARGETS * 8 * drawn + 2 * SIZE.batch * SIZE.seq  # and two masks
