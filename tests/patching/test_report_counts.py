"""What a report says of the first step is what an independent count finds: kept here, and kept by stock."""

import contextlib
import functools
import logging
import math
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import ViTConfig, ViTForImageClassification

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.config.sizes import gib
from hf_memsave.ops.loss import chunked_loss
from support.helpers import on_cpu_alone, thinned
from support.zoo import Size, batch_for, build

on_cpu = on_cpu_alone("this count of bytes")
SIZE = Size(hidden=64, heads=4, layers=2, batch=2, seq=128)
SETTINGS = {
    "exact": {}, **{rung: {"checkpoint": rung} for rung in ("o_proj", "qkv", "up", "gate", "block")},
    "offload": {"offload": True}, "offload and gate": {"offload": True, "checkpoint": "gate"},
    "int8": {"storage": "int8"}, "int4": {"storage": "int4"},
    "int8 and gate": {"storage": "int8", "checkpoint": "gate"},
    "invert": {"activation": "invert"}, "precision_bit": {"activation": "precision_bit"},
    "few_bit": {"activation": "few_bit"}, "output": {"norm": "output"},
    "mask": {"dropout": "mask"}, "dropout of stock": {"dropout": "stock"},
    "sampled": {"linear": WTACRS()}, "stock": dict.fromkeys(("norm", "activation", "dropout", "attention"), "stock"),
    "offloaded codes": {"offload": True, "storage": "int8"},
    "few bits in blocks that run again": {"checkpoint": "block", "activation": "few_bit"},
    **{preset: preset for preset in ("tempo", "invact", "selective", "few-bit", "wta-crs", "lora-wta-crs", "max")},
}  # fmt: skip
#: Tried with BERT and with LoRA on LLaMA each time; the others with ``-m matrix``.
OFTEN = {"exact", "gate", "block", "offload", "int8", "int8 and gate", "sampled", "tempo"}
ADAPTERS = {"full": None, "lora": {}, "dora": {"use_dora": True, "target_modules": "all-linear", "lora_dropout": 0.1}}


def cases():
    for family in ("bert", "llama", "t5-encoder"):
        for adapter in ADAPTERS:
            for name in SETTINGS:
                if (family, adapter) == ("bert", "dora") and "offload" in name:
                    continue  # one storage of 64 KiB stays beside its copy, and is told once: 2.2% of what stock keeps
                of_lora = (family, adapter) == ("llama", "lora") or (adapter == "dora" and name == "int8 and gate")
                often = name in OFTEN and ((family, adapter) == ("bert", "full") or of_lora)
                marks = [] if often and family != "t5-encoder" else [pytest.mark.matrix]
                yield pytest.param(family, adapter, name, id=f"{family}-{adapter}-{name}", marks=marks)


def make(family, adapter):
    model, options = build(family, SIZE), ADAPTERS[adapter]
    return model if options is None else get_peft_model(model, LoraConfig(**options)).train()


def config_of(name):
    value = SETTINGS[name]
    return value if isinstance(value, str) else MemSaveConfig(**value)


def counted(model, config, batch, context=contextlib.nullcontext):
    """The report of a patched model, after what stock keeps and what it keeps itself were measured."""
    with context():
        stock = measure_kept(model, batch).total
        report = patch(model, config)
        kept = measure_kept(model, batch).total
        model(**batch)
        # As they were.
        assert torch.is_autocast_cache_enabled() and not logging.getLogger("torch._subclasses.fake_tensor").disabled
        return stock, kept, report.step


def check(stock, kept, step):
    assert step.nbytes_kept + step.nbytes_offloaded == pytest.approx(kept, rel=0.02)
    assert step.nbytes_stock == pytest.approx(stock, rel=0.02)
    assert step.nbytes_avoided == max(0, step.nbytes_stock - step.nbytes_kept - step.nbytes_offloaded)


@pytest.mark.parametrize(("family", "adapter", "name"), list(cases()))
def test_kept_and_avoided_are_what_stock_keeps(family, adapter, name):
    model = make(family, adapter)
    check(*counted(model, config_of(name), batch_for(model, SIZE)))


@pytest.mark.parametrize(
    ("family", "name"), [("bert", "exact"), ("bert", "gate"), ("bert", "sampled"), ("t5-encoder", "exact")]
)
def test_under_autocast_too(family, name):
    model = make(family, "full")
    check(*counted(model, config_of(name), batch_for(model, SIZE), lambda: torch.autocast("cpu", torch.bfloat16)))


@pytest.mark.parametrize(
    ("family", "adapter", "is_reentrant", "name"),
    thinned(4, ["llama", "gpt2"], ["full", "lora"], [False, True], ["exact", "gate", "int8 and gate", "sampled"]),
)  # fmt: skip
def test_stock_is_the_model_with_its_own_gradient_checkpointing(family, adapter, is_reentrant, name):
    model = make(family, adapter)
    enable_checkpointing(model, use_reentrant=is_reentrant)
    if adapter == "lora":
        model.enable_input_require_grads()  # of which the graph keeps the output of the embeddings
    stock, kept, step = counted(model, config_of(name), batch_for(model, SIZE))
    check(stock, kept, step)
    assert step.nbytes_avoided < 0.2 * stock or "int8" in name


@pytest.mark.parametrize("by", ["PyTorch", "TRL"])
def test_what_selective_checkpointing_keeps_by_itself_is_counted(by):
    model = make("llama", "full")
    if by == "TRL":
        pytest.importorskip("trl.models").enable_selective_activation_checkpointing(model)
        enable_checkpointing(model)
    else:
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        enable_checkpointing(model, context_fn=contexts)
    batch = batch_for(model, SIZE)
    stock, kept, step = counted(model, True, batch)
    check(stock, kept, step)
    assert step.by_kind("kept")["selective checkpointing"] > 0.1 * kept


def test_a_share_of_stock_that_is_not_counted_is_no_zero(said):
    """As under a forward hook on what is replaced, which would see tensors without bytes."""
    model = make("bert", "full")
    report = patch(model, MemSaveConfig(activation="few_bit"))
    for module in model.modules():
        if type(module).__name__ == "GELUActivation":
            module.register_forward_hook(lambda *_: None)
    model(**batch_for(model, SIZE)).loss.backward()
    assert math.isnan(report.step.freed_fraction) and report.step.nbytes_kept > 0 and said("few_bit frees") == []
    text = f"the first step keeps {gib(report.step.nbytes_kept)} for backward; what stock would keep is not counted: "
    assert text + "stock's GELUActivation could not run beside it" in str(report)
    assert "%" not in report._step()[0] + repr(report) and "frees nothing" not in report._step()[0]


@pytest.mark.parametrize("hidden", [8, 64])
@pytest.mark.parametrize("name", ["exact", "gate", "block", "offload", "few_bit", "stock"])
@pytest.mark.parametrize("trained", ["all", "a head", "none"])
def test_nothing_rounds_to_a_figure_of_zero(name, hidden, trained, caplog):
    size = Size(hidden=hidden, heads=2, layers=2, batch=1, seq=2)
    model = build("bert", size).requires_grad_(trained == "all")
    model.classifier.requires_grad_(trained != "none")
    with caplog.at_level(logging.INFO, "hf_memsave"):
        report = patch(model, config_of(name))
        model(**batch_for(model, size))
    for text in (caplog.text, str(report), repr(report), report._repr_html_()):
        assert re.findall(r"-\d|(?<![\d.])0(?:\.0+)?(?: [KMG]iB| bytes|%)", text) == []
    assert report.step.is_counted


@pytest.mark.parametrize("name", ["exact", "offload"])
def test_what_the_caller_owns_is_not_kept(name):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=64, patch_size=16)).train()
    batch = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 1])}
    stock, kept, step = counted(model, config_of(name), batch)
    assert stock < batch["pixel_values"].nbytes
    check(stock, kept, step)
    model = make("llama", "full")
    embeds = model.get_input_embeddings()(torch.randint(0, 100, (2, 128)))  # with a graph of the caller's own
    check(*counted(model, config_of(name), {"inputs_embeds": embeds, "labels": torch.randint(0, 100, (2, 128))}))


def test_a_branch_that_the_forward_leaves_counts_for_nothing(device):
    class Left(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            h = self.f(x)
            self.g(torch.sin(h)).exp()
            return {"loss": self.g(h).square().sum()}

    check(*counted(Left().to(device), True, {"x": torch.randn(256, 64, device=device)}))


@pytest.mark.parametrize("name", ["exact", "block"])
def test_blocks_without_a_gradient_keep_nothing(name, said):
    model = make("bert", "full").requires_grad_(False)
    model.classifier.requires_grad_(True)
    stock, kept, step = counted(model, config_of(name), batch_for(model, SIZE))
    check(stock, kept, step)
    assert step.nbytes_avoided == 0 and "freed nothing of what stock keeps" in said("stay, most of it")[0]


def test_more_than_stock_is_said_in_words_and_never_as_a_negative_figure(said):
    size = Size(hidden=8, heads=2, layers=2, batch=1, seq=2)  # of a block, a checkpoint keeps a generator's state
    model = build("llama", size)
    report = patch(model, MemSaveConfig(checkpoint="block"))
    model(**batch_for(model, size)).loss.backward()
    assert report.step.nbytes_kept > report.step.nbytes_stock
    text = f"{gib(report.step.nbytes_kept - report.step.nbytes_stock)} more than stock"
    assert f"keeps {text}" in said("stay, most of it")[0] and text in str(report)
    assert "-" not in report._step()[0] + said("stay, most of it")[0]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_logits_that_are_not_computed_are_avoided(lora, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**20)
    model = build("llama", Size(layers=1), intermediate_size=48, num_key_value_heads=4, vocab_size=4000)
    model = get_peft_model(model, LoraConfig()).train() if lora else model
    x = torch.randint(0, 4000, (2, 100))
    stock, kept, step = counted(model, True, {"input_ids": x, "labels": x, "use_cache": False})
    check(stock, kept, step)
    assert step.is_loss_chunked and step.by_kind("avoided")["loss"] > 0.9 * step.nbytes_avoided > 0.6 * stock


@pytest.mark.parametrize(("name", "field"), [("gate", 'checkpoint="gate"'), ("offload", "offload=True")])
def test_a_setting_that_frees_nothing_says_so_once(name, field, said):
    model = build("bert", Size(hidden=8, heads=2, batch=1, seq=2)).requires_grad_(False)
    model.classifier.requires_grad_(True)
    patch(model, config_of(name))
    for _ in range(3):
        model(**batch_for(model, Size(batch=1, seq=2))).loss.backward()
    (message,) = said("frees nothing")
    assert message.startswith(f"hf_memsave: {field} frees nothing here") and "Leave it out" in message
