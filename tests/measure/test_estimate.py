"""The estimate: few layers tell of many, and a real step on the CPU keeps and peaks as it says."""

import itertools

import pytest
import torch
from transformers import LlamaConfig

import hf_memsave
from hf_memsave import MemSaveConfig, MemSaveError
from hf_memsave.config import presets
from hf_memsave.errors import MeasureError
from hf_memsave.measure import estimate as module
from hf_memsave.measure.estimate import CONTEXT, WORKSPACES, estimate
from hf_memsave.measure.extrapolate import depths_of, extrapolated, trace_at_full_depth
from hf_memsave.measure.fit import search
from hf_memsave.measure.inputs import make_batch
from hf_memsave.measure.layers import depth_fields
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.models import choose_head
from hf_memsave.measure.optimizers import OPTIMIZERS
from hf_memsave.measure.training import Training, build, trace_at
from support.estimated import configs, count_step
from support.helpers import MATRIX, halved, on_stand_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    on_stand_in,
]

CONFIGS = configs()
ADAPTERS = {"full": None, "LoRA": Lora(dropout=0.05), "LoRA bf16": Lora(dtype="model")}
SETTINGS = {"stock": None, **{name: MemSaveConfig.preset(name) for name in presets() if name != "selective"}}
BATCH, TOKENS = 4, 128


def training(**fields):
    return Training(batch_size=BATCH, seq_len=TOKENS, **fields)


def predicted(config, depth, training, memsave):
    """Trace and kept bytes at a depth, from steps of few layers."""
    depths = depths_of(config, depth, training, memsave)
    one, *more = (trace_at(config, d, training, memsave) for d in depths.run)
    kept = extrapolated(one.by_kind, [other.by_kind for other in more], depths.times)
    return trace_at_full_depth(one.trace, [other.trace for other in more], depths.times), sum(kept.values())


def depth_of(config, layers):
    return dict.fromkeys(depth_fields(config), layers)


MANY = [
    ("llama", "LoRA bf16", "stock"), ("t5", "full", "stock"),
    ("llama", "LoRA", "exact"), ("bert", "full", "exact"), ("gpt2", "LoRA bf16", "tempo"),
]  # fmt: skip
MORE = [(family, adapters, setting) for family in CONFIGS for adapters in ADAPTERS for setting in SETTINGS]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "adapters", "setting"),
    [*MANY, *(pytest.param(*one, marks=MATRIX) for one in MORE if one not in MANY)],
)
def test_few_layers_tell_of_many(family, adapters, setting):
    config, memsave = CONFIGS[family], SETTINGS[setting]
    of = training(lora=ADAPTERS[adapters])
    depth = depth_of(config, 8 if memsave else 6)
    trace, kept = predicted(config, depth, of, memsave)
    true = trace_at(config, depth, of, memsave)
    assert kept == pytest.approx(sum(true.by_kind.values()), rel=0.01)
    assert trace.peak == pytest.approx(true.trace.peak, rel=0.001)
    assert (trace.parameters, trace.trained) == (true.trace.parameters, true.trace.trained)
    assert trace.states == pytest.approx(true.trace.states, rel=1e-3)


MODES = [
    {"autocast": torch.bfloat16, "dtype": torch.float32},
    {"padded": True},
    {"checkpointing": True},
    {"attention": "eager"},
    {"accumulation": 4},
]


@pytest.mark.long
@pytest.mark.parametrize(("memsave", "fields"), halved([MemSaveConfig(), None], MODES))
def test_few_layers_tell_of_many_in_every_mode(fields, memsave):
    config, of = CONFIGS["llama"], training(**fields)
    depth = depth_of(config, (11 if of.autocast else 8) if memsave else 6)
    trace, kept = predicted(config, depth, of, memsave)
    true = trace_at(config, depth, of, memsave)
    assert kept == pytest.approx(sum(true.by_kind.values()), rel=0.01)
    assert trace.peak == pytest.approx(true.trace.peak, rel=0.001)


def counted(config, depth, of, memsave):
    """Kept bytes, and the peak of forward and backward, counted in a real step on the CPU by the other two meters."""
    for field, layers in depth.items():
        config = type(config)(**{**config.to_dict(), field: layers})
    torch.manual_seed(0)
    kept, peak = count_step(build(config, of), config, of, memsave)
    return kept.total, peak


REAL = [(family, "full", "exact") for family in CONFIGS]
REAL += [("bert", "LoRA bf16", "exact"), ("llama", "LoRA", "exact"), ("gpt2", "LoRA", "stock")]
REAL += [("t5", "full", "tempo"), ("bert", "full", "wta-crs")]
MORE_REAL = itertools.product(CONFIGS, ADAPTERS, ("stock", "exact", "tempo", "wta-crs"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "adapters", "setting"),
    [*REAL, *(pytest.param(*one, marks=MATRIX) for one in MORE_REAL if one not in REAL)],
)
def test_a_real_step_keeps_and_peaks_as_predicted(family, adapters, setting):
    config, memsave = CONFIGS[family], SETTINGS[setting]
    of = training(lora=ADAPTERS[adapters], optimizer="sgd")
    depth = depth_of(config, 4)
    traced = trace_at(config, depth, of, memsave, on_cpu=True)
    trace, kept = traced.trace, sum(traced.by_kind.values())
    true_kept, true_peak = counted(config, depth, of, memsave)
    assert kept == pytest.approx(true_kept, rel=0.01)
    ids = sum(t.nbytes for t in make_batch(choose_head(config), config, BATCH, TOKENS).values())
    of_passes = max(m.live for place, m in trace.places.items() if place.phase != "optimizer")
    assert of_passes - trace.parameters - ids == pytest.approx(true_peak, rel=0.03)


@pytest.mark.parametrize(
    ("family", "checkpointing", "memsave"),  # attention's output lies otherwise in Phi
    halved(["llama", "gemma", "opt"], [False, True], [MemSaveConfig(), None]),
)
def test_the_stand_in_keeps_what_a_real_step_keeps(family, checkpointing, memsave):
    # Without dropout, in fp32 and with as many heads of k and v, the CPU's kernels keep what CUDA's do.
    config = CONFIGS[family]
    heads = {"num_key_value_heads": 4} if hasattr(config, "num_key_value_heads") else {}
    none = {"dropout": 0.0} if family == "opt" else {}
    config = type(config)(**{**config.to_dict(), **heads, **none})
    of = training(dtype=torch.float32, checkpointing=checkpointing, attention="efficient")
    depth = depth_of(config, 4)
    here = sum(trace_at(config, depth, of, memsave).by_kind.values())
    there = sum(trace_at(config, depth, of, memsave, on_cpu=True).by_kind.values())
    assert here == pytest.approx(there, rel=0.01)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_have_the_states_they_have(name):
    trained = 256 * 128
    parameter = torch.nn.Parameter(torch.ones(256, 128))
    optimizer = OPTIMIZERS[name]([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [t for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor) and t.dim()]
    each = {"adamw": 8, "adamw_fused": 8, "adamw_8bit": 2 + 2 * 4 / 256, "sgd": 0, "sgd_momentum": 4}
    expected = 4 * (256 + 128) if name == "adafactor" else each[name] * trained
    assert sum(t.nbytes for t in states) == expected


def test_a_foreach_optimizer_holds_the_parameters_once_more():
    fused, foreach = (
        trace_at(CONFIGS["llama"], depth_of(CONFIGS["llama"], 2), training(optimizer=name), None, keeps=False).trace
        for name in ("adamw_fused", "adamw")
    )
    highest = [max(m.live for p, m in t.places.items() if p.phase == "optimizer") for t in (fused, foreach)]
    assert highest[1] - highest[0] == pytest.approx(foreach.trained, rel=0.02)


@pytest.mark.long
def test_adapters_on_four_bits_keep_a_quarter_of_the_weights():
    config = CONFIGS["llama"]
    of = dict(batch_size=1, seq_len=8, memsave=False, lora=Lora(r=1), layers=3)
    half, quarter = (estimate(config, **of, quantized=q).stock.parameters for q in (None, "nf4"))
    weights = 3 * (2 * 128**2 + 2 * 128 * 64 + 3 * 128 * 352)
    others = 2 * 256 * 128
    assert half - quarter == pytest.approx(weights * (2 - 0.516) - others * 2, rel=0.05)


@pytest.mark.long
def test_sharding_divides_what_it_says():
    config = CONFIGS["llama"]
    whole, zero1, zero2, fsdp = (
        estimate(config, batch_size=1, seq_len=8, memsave=False, layers=8, devices=4, sharding=name).stock
        for name in ("ddp", "zero1", "zero2", "fsdp")
    )
    assert whole.states == pytest.approx(4 * zero1.states, rel=1e-3)
    assert whole.parameters == zero1.parameters == zero2.parameters == pytest.approx(4 * fsdp.parameters, rel=1e-3)
    assert whole.peak > zero1.peak > zero2.peak > fsdp.peak > whole.peak / 4
    assert estimate(config, batch_size=1, seq_len=8, memsave=False, layers=8, devices=1, sharding="fsdp").stock == whole


@pytest.mark.long
def test_the_result_is_readable_and_plain():
    result = estimate(CONFIGS["bert"], batch_size=2, seq_len=32, memory=2**30)
    text = str(result)
    assert "bert, 12 layers" in text
    assert "patched" in text
    assert "Fits in 1.00 GiB." in text
    assert result.patched.needed == result.patched.peak + CONTEXT + WORKSPACES
    plain = result.to_dict()
    assert plain["fits"] is True
    assert (
        sum(plain["stock"]["by_module"].values()) == plain["stock"]["kept"] == sum(plain["stock"]["by_kind"].values())
    )
    assert hf_memsave.estimate is estimate
    parts = [plain["stock"][name] for name in ("parameters", "gradients", "states", "activations")]
    assert sum(parts) == plain["stock"]["peak"]


@pytest.mark.long
def test_a_model_is_read_by_its_configuration():
    model = build(CONFIGS["gpt2"], training(dtype=torch.float32))
    mine = estimate(model, batch_size=1, seq_len=16, memsave=False)
    assert mine == estimate(CONFIGS["gpt2"], batch_size=1, seq_len=16, memsave=False, dtype=torch.float32)
    assert mine == estimate(CONFIGS["gpt2"], batch_size=1, seq_len=16, memsave=False, dtype="float32")


@pytest.mark.long
def test_eight_billion_take_seconds():
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=32, vocab_size=128256,
    )  # fmt: skip
    shares = []
    result = estimate(config, batch_size=1, seq_len=2048, progress=shares.append)
    assert result.numbers["parameters"] == 8_030_261_248
    assert result.stock.states == pytest.approx(2 * 2 * 8_030_261_248, rel=1e-3)
    assert shares[0] == 0
    assert shares[-1] == 1
    assert shares == sorted(shares)


BAD = {
    "no model": ("nosuch/config.json", {}, "no such file or folder"),
    "not a model": (3, {}, "expected a configuration or a model of Transformers"),
    "no batch": ("bert", {"batch_size": 0}, "batch_size: expected a whole number from 1, got 0"),
    "half a token": ("bert", {"seq_len": 0.5}, "seq_len: expected a whole number from 1, got 0.5"),
    "too long": ("bert", {"seq_len": 513}, "expected at most 512 tokens"),
    "a field that is none": ("bert", {"batchsize": 1}, "got batchsize"),
    "an optimizer": ("bert", {"optimizer": "adam"}, "optimizer: expected adamw or"),
    "an attention": ("bert", {"attention": "fast"}, "attention: expected flash or"),
    "a dtype": ("bert", {"dtype": torch.int8}, "dtype: expected torch.float32"),
    "no adapters": ("bert", {"quantized": "nf4"}, "lora: expected adapters"),
    "a sharding": ("bert", {"sharding": "zero9", "devices": 2}, "sharding: expected ddp or"),
    "a preset": ("bert", {"memsave": "magic"}, "unknown preset 'magic'"),
    "no text": ("resnet", {}, "has no field 'num_hidden_layers'"),
    "targets": ("bert", {"lora": Lora(targets="nothing")}, "LoRA: "),
}


@pytest.mark.parametrize(("model", "fields", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_told(model, fields, message):
    with pytest.raises(MemSaveError, match=message):
        estimate(model, **{"batch_size": 1, "seq_len": 8, **fields})


@pytest.mark.long
def test_where_there_are_gpus_it_runs_in_another_process(monkeypatch):
    of = dict(batch_size=1, seq_len=16, memsave=False, layers=3)
    here = estimate(CONFIGS["llama"], **of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "trace_at", None)
    assert estimate(CONFIGS["llama"], **of) == here


@pytest.mark.long
@pytest.mark.matrix
def test_the_other_process_passes_errors_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "trace_at", None)
    with pytest.raises(MeasureError, match="expected at most 1024 tokens"):
        estimate(CONFIGS["gpt2"], batch_size=1, seq_len=1025, memsave=False, layers=3)


def test_layers_that_are_not_alike_are_told():
    config, of = CONFIGS["llama"], training()
    one, two = (trace_at(config, depth_of(config, n), of, None, keeps=False).trace for n in (3, 4))
    odd = type(two)(**{**vars(two), "places": dict(itertools.islice(two.places.items(), 3))})
    with pytest.raises(MeasureError, match="are not alike"):
        trace_at_full_depth(one, [odd], [1])


@pytest.mark.parametrize("limit", [0, 1, 7, 8, 100, 999, 5000])
@pytest.mark.parametrize("start", [1, 8, 300])
def test_the_search_finds_the_largest(limit, start):
    asked = []

    def needed(number):
        asked.append(number)
        return 1000 + 10 * number + number // 3

    found = search(needed, needed(limit), start, 1000)
    assert found == min(limit, 1000)
    assert len(set(asked)) < 25
