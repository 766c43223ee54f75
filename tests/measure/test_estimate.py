"""The estimate: few layers tell of many, and a real step on the CPU keeps and peaks as it says."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

import hf_memsave
from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.config.config import presets
from hf_memsave.count.peak import count_peak
from hf_memsave.errors import MeasureError
from hf_memsave.measure import depth as module
from hf_memsave.measure.depth import Depths, trace_at_full_depth, trace_in_full
from hf_memsave.measure.estimate import estimate
from hf_memsave.measure.figures import CONTEXT, WORKSPACES, Place
from hf_memsave.measure.inputs import forward_of, make_batch
from hf_memsave.measure.largest import largest, search
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.models import depth_of, text_head
from hf_memsave.measure.training import OPTIMIZERS, Training, build, trace_at
from hf_memsave.ops.loss import chunked_loss
from support.helpers import MATRIX, halved, on_stand_in
from support.zoo import Size, config_of

pytestmark = [pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"), on_stand_in]
BATCH, TOKENS = 4, 128
SIZE = Size(hidden=128, layers=12, seq=TOKENS)
#: Without dropout in attention: CPU's kernels have none.
CONFIGS = {
    family.partition("-")[0]: config_of(family, SIZE, 0.0 if "phi" in family else 0.1)
    for family in ("bert", "gpt2", "opt", "llama", "gemma", "phi", "phi3", "t5-encoder")
}
LLAMA = CONFIGS["llama"], depth_of(CONFIGS["llama"], 2)
ADAPTERS = {"full": None, "LoRA": Lora(dropout=0.05), "LoRA bf16": Lora(dtype="model")}
SETTINGS = {"stock": None, **{name: MemSaveConfig.preset(name) for name in presets() if name != "selective"}}


def training(**fields):
    return Training(**dict(batch_size=BATCH, seq_len=TOKENS) | fields)


AUTOCAST = {"autocast": torch.bfloat16, "dtype": torch.float32}
MANY = [
    ("llama", {"lora": Lora(dtype="model")}, "stock"), ("t5", {}, "stock"), ("bert", {"padded": True}, "exact"),
    ("gpt2", {"lora": Lora(dtype="model")}, "tempo"), ("llama", AUTOCAST, "exact"),
    ("llama", {"checkpointing": True}, "exact"), ("llama", {"accumulation": 4}, "stock"),
    ("opt", {"attention": "eager"}, "exact"),
]  # fmt: skip
MORE = [("llama", {"lora": Lora(), "quantized": "nf4"}, "exact")]
MORE += [(family, {"lora": lora}, s) for family in CONFIGS for lora in ADAPTERS.values() for s in SETTINGS]
MANY += [pytest.param(*one, marks=MATRIX) for one in MORE if one not in MANY]


@pytest.mark.long
@pytest.mark.parametrize(("family", "fields", "setting"), MANY)
def test_few_layers_tell_of_many(family, fields, setting):
    config, memsave, of = CONFIGS[family], SETTINGS[setting], training(**fields)
    layers = (11 if of.autocast or of.quantized else 8) if memsave else 6
    depth = depth_of(config, layers)
    told = trace_in_full(config, depth, of, memsave)
    true = trace_at(config, depth, of, memsave)
    assert sum(told.by_kind.values()) == pytest.approx(sum(true.by_kind.values()), rel=0.01)
    assert told.peak == pytest.approx(true.peak, rel=0.001)
    assert told.at_loss == pytest.approx(true.at_loss, rel=0.001)
    assert (told.parameters, told.trained, told.numbers) == (true.parameters, true.trained, true.numbers)
    assert told.states == pytest.approx(true.states, rel=1e-3)
    assert list(told.per_layer) == list(depth)
    # The last two blocks are counted, and not taken to lie on a line.
    assert {Place("backward", stack, n - i) for stack, n in true.blocks.items() for i in (1, 2)} <= told.places.keys()
    assert {place.phase for place in told.places} == {"forward", "backward", "optimizer"}
    for place, moment in told.places.items():
        assert moment.live == pytest.approx(true.places[place].live, rel=0.005), place
        assert moment.gradients == pytest.approx(true.places[place].gradients, rel=0.01), place


@pytest.mark.long
def test_a_timelines_blocks_come_in_order_and_back():
    trace = trace_at(CONFIGS["t5"], depth_of(CONFIGS["t5"], 2), training(seq_len=8), None)
    parts = ("of", 0), ("of", 1), ("after", 1)
    assert [f"{p.phase} {p.where}".strip() for p in trace.timeline] == [
        "forward outside of the blocks",
        *(f"forward {part} block {n} of {s}.block" for s in ("encoder", "decoder") for part, n in parts),
        "backward outside of the blocks",
        *(f"backward of block {n} of {s}.block" for s in ("decoder", "encoder") for n in (1, 0)),
        "optimizer",
    ]


def traced(config, of, memsave, on_cpu=True):
    """Bytes kept, and the peak of both passes without weights and the batch."""
    found = trace_at(config, depth_of(config), of, memsave, on_cpu=on_cpu)
    ids = sum(t.nbytes for t in make_batch(text_head(config), config, of.batch_size, of.seq_len).values())
    passes = max(m.live for place, m in found.places.items() if place.phase != "optimizer")
    return sum(found.by_kind.values()), passes - found.parameters - ids


def assert_as_a_real_step(config, of, memsave):
    """By two meters that know nothing of the estimate."""
    kept, peak = traced(config, of, memsave)
    torch.manual_seed(0)
    model, batch = build(config, of), make_batch(text_head(config), config, of.batch_size, of.seq_len)
    if memsave is not None:
        patch(model, memsave)
    true_kept = measure_kept(model, batch, forward := forward_of(model, of.autocast))
    by_ops = sum(s.nbytes for s in true_kept.storages if s.op != "unseen")  # without the states of CPU's generators
    assert kept == pytest.approx(by_ops, rel=0.01)
    assert peak == pytest.approx(count_peak(lambda: forward(**batch).loss.backward()).peak, rel=0.03)
    return peak


def shallow(family, layers, **fields):
    config = CONFIGS[family]
    return type(config)(**config.to_dict() | depth_of(config, layers) | fields)


REAL = [(family, "full", "exact") for family in ("gemma", "opt", "phi", "phi3")]
REAL += [("bert", "LoRA bf16", "exact"), ("llama", "LoRA", "exact"), ("gpt2", "LoRA", "stock")]
REAL += [("t5", "full", "tempo"), ("bert", "full", "wta-crs")]
MORE_REAL = itertools.product(CONFIGS, ADAPTERS, ("stock", "exact", "tempo", "wta-crs"))
REAL += [pytest.param(*one, marks=MATRIX) for one in MORE_REAL if one not in REAL]


@pytest.mark.long
@pytest.mark.parametrize(("family", "adapters", "setting"), REAL)
def test_a_real_step_keeps_and_peaks_as_predicted(family, adapters, setting):
    assert_as_a_real_step(shallow(family, 4), training(lora=ADAPTERS[adapters], optimizer="sgd"), SETTINGS[setting])


#: So many words that logits take more than 128 MiB in fp32: stock's are whole, and ours are never there at once.
WORDS = 70_000
LOGITS = BATCH * TOKENS * WORDS * 4
FP32 = {"dtype": torch.float32, "optimizer": "sgd"}


@pytest.mark.long
@pytest.mark.parametrize(("family", "lora"), [("llama", None), ("t5", Lora())])
def test_logits_are_whole_in_stock_alone_in_a_real_step_and_on_the_stand_in(family, lora, monkeypatch):
    monkeypatch.setattr(chunked_loss, "TILE", 1)  # chunks as on CPU: else a device's has all rows of this batch
    monkeypatch.setattr(chunked_loss, "ROWS", 1)
    config, of = shallow(family, 2, vocab_size=WORDS), training(lora=lora, **FP32)
    on_cpu = assert_as_a_real_step(config, of, MemSaveConfig())
    (_, here), (_, stock) = (traced(config, of, memsave, on_cpu=False) for memsave in (MemSaveConfig(), None))
    gradients = 0 if lora else WORDS * 128 * 4  # of the head or of the embeddings
    assert here == pytest.approx(on_cpu, rel=0.2)  # other attention
    assert stock > gradients + 2 * LOGITS > here


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "checkpointing", "memsave"),  # attention's output lies otherwise in Phi
    halved(["llama", "gemma", "opt"], [False, True], [MemSaveConfig(), None]),
)
def test_the_stand_in_keeps_what_a_real_step_keeps(family, checkpointing, memsave):
    # Without dropout, in fp32 and with as many heads of k and v, the CPU's kernels keep what CUDA's do.
    heads = {"num_key_value_heads": 4} if hasattr(CONFIGS[family], "num_key_value_heads") else {}
    config = shallow(family, 4, **heads, **({"dropout": 0.0} if family == "opt" else {}))
    of = training(dtype=torch.float32, checkpointing=checkpointing, attention="efficient")
    (here, _), (there, _) = (traced(config, of, memsave, on_cpu) for on_cpu in (False, True))
    assert here == pytest.approx(there, rel=0.01)


def test_optimizers_have_the_states_they_have_and_foreach_holds_the_parameters_once_more():
    parameter, found = torch.nn.Parameter(torch.ones(256, 128)), {}
    parameter.grad = torch.ones_like(parameter)
    for name, make in OPTIMIZERS.items():
        optimizer = make([parameter])
        optimizer.step()
        states = [t for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor) and t.dim()]
        found[name] = sum(t.nbytes for t in states) / (256 * 128)
    each = {"adamw": 8, "adamw_fused": 8, "adamw_8bit": 2 + 2 * 4 / 256, "sgd": 0, "sgd_momentum": 4}
    assert found == each | {"adafactor": 4 * (256 + 128) / (256 * 128)}
    fused, foreach = (trace_at(*LLAMA, training(optimizer=name), None) for name in ("adamw_fused", "adamw"))
    highest = [max(m.live for p, m in t.places.items() if p.phase == "optimizer") for t in (fused, foreach)]
    assert highest[1] - highest[0] == pytest.approx(foreach.trained, rel=0.02)


@pytest.mark.long
def test_adapters_on_four_bits_keep_a_quarter_of_the_weights():
    of = training(batch_size=1, seq_len=8, lora=Lora(r=1))
    half, quarter = (trace_at(*LLAMA, replace(of, quantized=q), None).parameters for q in (None, "nf4"))
    weights = 2 * (2 * 128**2 + 2 * 128 * 64 + 3 * 128 * 352)
    others = 2 * 512 * 128
    assert half - quarter == pytest.approx(weights * (2 - 0.516) - others * 2, rel=0.05)


@pytest.mark.parametrize("family", ["bart-encoder", "mixtral"])
def test_heads_with_a_bias_and_experts_are_estimated(family):
    """BART adds a buffer to its logits; what a mixture's router picks has no number here."""
    result = estimate(config_of(family, Size(hidden=64, layers=2)), batch_size=1, seq_len=16)
    assert 0 < result.patched.kept < result.stock.kept


@pytest.mark.parametrize("first", [3, 4, 5])
def test_a_model_whose_first_layers_are_unlike_is_estimated_as_it_is(first):
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4, vocab_size=512)
    sizes |= dict(num_hidden_layers=9, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16)
    config = AutoConfig.for_model("qwen3_moe", **sizes, mlp_only_layers=list(range(first)))
    found, true = (estimate(config, batch_size=1, seq_len=16), trace_at(config, {}, training(), None))
    assert found.stock.parameters == found.patched.parameters == true.parameters


@pytest.mark.long
def test_sharding_divides_what_it_says():
    config, of = CONFIGS["llama"], training(batch_size=1, seq_len=8)
    trace = trace_in_full(config, depth_of(config, 8), of, None)
    whole, zero1, zero2, fsdp = (trace.sharded(name, 4) for name in ("ddp", "zero1", "zero2", "fsdp"))
    assert whole.states == pytest.approx(4 * zero1.states, rel=1e-3)
    assert whole.parameters == zero1.parameters == zero2.parameters == pytest.approx(4 * fsdp.parameters, rel=1e-3)
    assert whole.peak > zero1.peak > zero2.peak > fsdp.peak > whole.peak / 4
    assert trace.sharded("fsdp", 1) == whole == trace


@pytest.mark.long
def test_the_result_is_readable_and_plain_and_read_of_a_model():
    result = estimate(CONFIGS["bert"], batch_size=2, seq_len=32, memory=2**30, dtype="fp32")
    text = str(result)
    assert "bert, 12 layers" in text and "patched" in text and "Fits in 1.00 GiB (1.1 GB): " in text
    assert result.patched.needed == result.patched.peak + CONTEXT + WORKSPACES
    plain = result.to_dict()
    stock = plain["stock"]
    assert plain["fits"] is True and hf_memsave.estimate is estimate
    assert sum(stock["by_module"].values()) == stock["kept"] == sum(stock["by_kind"].values())
    assert 0 < plain["patched"]["kept"] < stock["kept"]
    assert sum(stock[name] for name in ("parameters", "gradients", "states", "activations")) == stock["peak"]
    model = build(CONFIGS["bert"], training(dtype=torch.float32))
    plain["stock"]["by_kind"].clear()
    result.stock.by_module.clear()
    for of in (CONFIGS["bert"], model):  # the first is not traced again
        again = estimate(of, batch_size=2, seq_len=32, memory="1GiB", dtype="fp32")
        assert sum(again.stock.by_kind.values()) == sum(again.stock.by_module.values()) == again.stock.kept > 0
        assert (again.stock.peak, again.patched) == (result.stock.peak, result.patched)


@pytest.mark.long
def test_where_there_are_gpus_it_runs_in_another_process_which_passes_errors_on(monkeypatch):
    of = dict(batch_size=1, memsave=False, layers=3)
    here = estimate(CONFIGS["gpt2"], seq_len=16, **of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "trace_at", None)
    monkeypatch.setattr(module, "_KNOWN", {})
    assert estimate(CONFIGS["gpt2"], seq_len=16, **of) == here
    with pytest.raises(MeasureError, match="expected at most 1,024 tokens"):
        estimate(CONFIGS["gpt2"], seq_len=1025, **of)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
@pytest.mark.parametrize("sharding", [("ddp", 1), ("zero1", 2)], ids=str)
def test_the_largest_batch_is_the_last_that_fits_where_the_optimizers_step_is_the_peak(optimizer, sharding):
    config, depth = shallow("llama", 4, vocab_size=8000), {"num_hidden_layers": 4}
    of = training(batch_size=1, seq_len=64, optimizer=optimizer, holds_output=True)  # which grows with the batch

    def needed(number):
        return trace_in_full(config, depth, replace(of, batch_size=number), None).sharded(*sharding).needed

    for mib in (0, 1, 3, 8):
        memory = needed(1) + mib * 2**20
        found = largest(config, depth, of, None, "batch_size", memory, sharding)
        assert needed(found) <= memory < needed(found + 1)


def test_layers_that_are_not_alike_are_told():
    config = CONFIGS["llama"]
    one, two = (trace_at(config, depth_of(config, n), training(), None) for n in (3, 4))
    odd = type(two)(**{**vars(two), "places": dict(itertools.islice(two.places.items(), 3))})
    with pytest.raises(MeasureError, match="are not alike"):
        trace_at_full_depth([one, odd], Depths(depth_of(config, 4), depth_of(config, 3), depth_of(config, 1)))


@pytest.mark.parametrize("limit", [0, 1, 7, 8, 100, 999, 5000])
def test_the_search_finds_the_largest(limit):
    def needed(number):
        asked.append(number)
        return 1000 + 10 * number + number // 3

    for start in (1, 8, 300):
        asked = []
        assert search(needed, needed(limit), start, 1000) == min(limit, 1000)
        assert len(set(asked)) < 25
