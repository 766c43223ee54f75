"""What a run can be besides a model and a batch: the adapters' dtype, a loop that holds its output; and bad input."""

import json

import pytest
import torch
from transformers import LlamaConfig, MambaConfig, T5Config

import hf_memsave_cli
from hf_memsave import estimate
from hf_memsave.errors import MeasureError, MemSaveError
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.training import Training, build, trace_at
from support.helpers import on_stand_in

pytestmark = on_stand_in

CONFIG = LlamaConfig(
    hidden_size=128, intermediate_size=352, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=4,
    vocab_size=4096, pad_token_id=0,
)  # fmt: skip
BATCH, TOKENS = 2, 64


def training(**fields):
    return Training(batch_size=BATCH, seq_len=TOKENS, **fields)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("dtype", "base", "quantized", "expected"),
    [
        ("fp32", torch.bfloat16, None, torch.float32),
        ("model", torch.bfloat16, None, torch.bfloat16),
        ("model", torch.float32, None, torch.float32),
        ("model", torch.bfloat16, "nf4", torch.float32),
    ],
)
def test_adapters_have_the_dtype_that_was_asked_for(device, dtype, base, quantized, expected):
    with torch.device(device):
        model = build(CONFIG, training(lora=Lora(dtype=dtype), dtype=base, quantized=quantized))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {expected}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_a_class_keeps_in_fp32_is_not_in_4_bits(device):
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=1, vocab_size=99)
    with torch.device(device):
        model = build(config, training(lora=Lora(targets="q+v"), quantized="nf4"))
    mlp = model.encoder.block[0].layer[1].DenseReluDense
    assert type(mlp.wo) is torch.nn.Linear
    assert mlp.wo.weight.dtype == torch.float32
    assert mlp.wi.weight.dtype == torch.uint8


@pytest.mark.long
@pytest.mark.parametrize("memsave", [False, True])
def test_adapters_of_16_bits_keep_no_input_in_32(memsave):
    of = dict(batch_size=BATCH, seq_len=TOKENS, memsave=memsave, layers=3)
    by_kind = estimate(CONFIG, **of, lora=Lora(dtype="model", targets="q_proj+v_proj")).stock.by_kind
    wide = estimate(CONFIG, **of, lora=Lora(targets="q_proj+v_proj")).stock.by_kind
    of_both = 2 * 3 * BATCH * TOKENS * 128 * 4  # the inputs of q's and v's adapters, in fp32
    assert wide["cast"] - by_kind.get("cast", 0) == pytest.approx(of_both, rel=0.01)


def test_an_output_that_is_held_is_alive_in_backward():
    depth = {"num_hidden_layers": 3}
    free, held = (trace_at(CONFIG, depth, training(holds_output=h), None, keeps=False).trace for h in (False, True))
    logits = BATCH * TOKENS * 4096 * 2
    assert held.peak - free.peak >= logits
    assert held.peak - free.peak <= logits + 2 * 3 * BATCH * TOKENS * 128 * 2 + 4096  # and the cache of k and v
    real = [
        trace_at(CONFIG, depth, training(holds_output=h), None, keeps=False, on_cpu=True).trace for h in (False, True)
    ]
    assert real[1].peak - real[0].peak == pytest.approx(held.peak - free.peak, rel=0.02)


@pytest.mark.parametrize("quantized", [None, "nf4"])
def test_adapters_are_checkpointed_under_autocast(quantized):
    of = dict(lora=Lora(), quantized=quantized, autocast=torch.bfloat16)
    settings = [training(**of, checkpointing=c) for c in (False, True)]
    plain, checkpointed = (trace_at(CONFIG, {"num_hidden_layers": 3}, s, None, keeps=False).trace for s in settings)
    assert checkpointed.peak < plain.peak


@pytest.mark.long
def test_models_without_sdpa_are_built_as_they_are():
    config = MambaConfig(hidden_size=32, state_size=4, vocab_size=64, num_hidden_layers=4)
    result = estimate(config, batch_size=1, seq_len=8, memsave=False)
    assert result.stock.kept > 0


@pytest.mark.long
def test_dtypes_may_be_names():
    of = dict(batch_size=1, seq_len=16, memsave=False, layers=3)
    names, short, dtypes = (
        estimate(CONFIG, **of, dtype=a, autocast=b)
        for a, b in (("float32", "bfloat16"), ("fp32", "bf16"), (torch.float32, torch.bfloat16))
    )
    assert names == short == dtypes


def test_a_batch_of_any_size_takes_no_memory_here():
    result = estimate(CONFIG, batch_size=10**7, seq_len=TOKENS, memsave=False, memory=2**40, layers=3)
    assert result.fits is False
    assert result.stock.peak > 10**7 * TOKENS * 4096 * 4
    with pytest.raises(MeasureError, match="cannot be trained on 1000000000000000000 x 64"):
        estimate(CONFIG, batch_size=10**18, seq_len=TOKENS, memsave=False)


CONFIGS = {
    "contradicts itself": (
        {"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4},
        "is not a multiple of",
    ),
    "is of no known type": ({"model_type": "quux"}, "does not recognize this architecture"),
    "is no text model's": ({"model_type": "resnet"}, "has no field 'num_hidden_layers'"),
}


@pytest.mark.parametrize(("fields", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_cannot_be_used_is_told_in_one_line(fields, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert hf_memsave_cli.main(["estimate", str(tmp_path), "--seq-len", "16"]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"memory": "24"}, "memory: expected bytes, or a text such as '16GiB'"),
        ({"memory": 1.5}, "memory: expected bytes"),
        ({"layers": 0}, "layers: expected a whole number from 1, or None, got 0"),
        ({"layers": True}, "layers: expected a whole number from 1, or None, got True"),
        ({"lora": {"dtype": "fp23"}}, "lora: expected .*dtype fp32 or model, got .*fp23"),
        ({"lora": {"r": 0}}, "lora: expected r from 1, .*got r 0"),
        ({"typo": 1}, "a step: expected fields .*got typo"),
    ],
    ids=repr,
)
def test_what_is_asked_for_is_checked_first(asked, message):
    with pytest.raises(MemSaveError, match=message):
        estimate(CONFIG, batch_size=1, seq_len=8, **asked)


def test_memory_is_bytes_or_a_text():
    asked = dict(batch_size=1, seq_len=8, memsave=False, layers=2)
    assert estimate(CONFIG, memory="2MiB", **asked) == estimate(CONFIG, memory=2**21, **asked)
