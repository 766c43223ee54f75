"""The planner: the cheapest exact setting that fits, found without a device, and true of a real step."""

import pytest
import torch
from transformers import BertConfig, LlamaConfig

import hf_memsave
from hf_memsave import MemSaveConfig, MemSaveError, patch
from hf_memsave.errors import PlanError
from hf_memsave.measure.estimate import CONTEXT, WORKSPACES, estimate
from hf_memsave.measure.peak import count_peak
from hf_memsave.measure.training import Training, build, trace_at, training_of
from hf_memsave.planner.plan import plan

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning"),
]

LAYERS = 8
WIDE = dict(hidden_size=128, num_attention_heads=4, vocab_size=256, num_hidden_layers=LAYERS)
CONFIGS = {
    "bert": BertConfig(**WIDE, intermediate_size=512, attention_probs_dropout_prob=0.0),
    "llama": LlamaConfig(**WIDE, intermediate_size=352, num_key_value_heads=2, pad_token_id=0),
}
STEP = dict(batch_size=8, seq_len=128, optimizer="sgd")


def needed(config, memsave):
    return estimate(config, **STEP, memsave=memsave).patched.needed


@pytest.fixture(scope="module", params=CONFIGS)
def ends(request):
    """A configuration, and what its step needs at the floor, up to the gate, and with whole blocks run again."""
    config = CONFIGS[request.param]
    return config, [needed(config, MemSaveConfig(checkpoint=rung)) for rung in (None, "gate", "block")]


def test_what_fits_at_the_floor_costs_nothing(ends):
    config, (floor, *_) = ends
    found = plan(config, budget=floor, **STEP)
    assert found.config == MemSaveConfig()
    assert found.best.cost == 0
    assert len(found.tried) == 1


def traced(config, rung, layers):
    """What a setting needs, by its own step, traced at full depth: no mixture of others."""
    memsave = MemSaveConfig(checkpoint=rung, layers={"checkpoint": layers} if rung else None)
    depth = {"num_hidden_layers": LAYERS}
    return trace_at(config, depth, training_of(**STEP), memsave, keeps=False).trace.peak + CONTEXT + WORKSPACES


@pytest.fixture(scope="module")
def of_every_setting(ends):
    config, _ = ends
    settings = [(None, 0), *((rung, n) for rung in ("gate", "block") for n in range(1, LAYERS + 1))]
    return config, {setting: traced(config, *setting) for setting in settings}


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_it_finds_what_brute_force_finds(of_every_setting, share):
    """Of all settings, each traced by itself, the one with the fewest layers of the cheaper rung that fits."""
    config, needs = of_every_setting
    budget = int(min(needs.values()) + share * (needs[None, 0] - min(needs.values())))
    found = plan(config, budget=budget, **STEP)
    rung, layers = found.config.checkpoint, dict(found.config.layers)["checkpoint"]
    assert needs[rung, layers] == pytest.approx(found.best.needed, rel=0.005)
    assert needs[rung, layers] <= 1.005 * budget
    assert needs[rung, layers - 1 or LAYERS] > 0.995 * budget or layers == 1
    if rung == "block":
        assert all(needs["gate", n] > 0.995 * budget for n in range(1, layers + 1))


def test_a_larger_budget_never_costs_more(ends):
    config, (floor, _, least) = ends
    budgets = [int(least + share * (floor - least)) for share in (0.02, 0.6, 1.0)]
    costs = [plan(config, budget=budget, **STEP).best.cost for budget in budgets]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == plan(config, budget=budgets[0], **STEP).best.cost


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("share", [0.4])
def test_a_real_step_stays_within_the_budget(family, share):
    """The same step on CPU, all its storages counted; what a CPU keeps for itself differs by a few percent."""
    config = CONFIGS[family]
    floor, least = (needed(config, MemSaveConfig(checkpoint=rung)) for rung in (None, "block"))
    budget = int(least + share * (floor - least))
    found = plan(config, budget=budget, **STEP)
    training = Training(**STEP)
    torch.manual_seed(0)
    model = build(config, training).to(torch.bfloat16)
    patch(model, found.config)
    ids = torch.randint(0, 256, (STEP["batch_size"], STEP["seq_len"]))
    labels = ids if family == "llama" else torch.zeros(len(ids), dtype=torch.long)
    model(input_ids=ids[:1, :8], labels=labels[:1, :8] if family == "llama" else labels[:1]).loss.backward()
    model.zero_grad()
    peak = count_peak(lambda: model(input_ids=ids, labels=labels).loss.backward()).peak
    weights = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert peak + weights <= 1.03 * (budget - CONTEXT - WORKSPACES)


def test_too_small_a_budget_is_an_error_by_how_much():
    with pytest.raises(PlanError, match=r"which is .* too much\. Use a smaller batch"):
        hf_memsave.plan(CONFIGS["llama"], budget="100MiB", **STEP)


@pytest.mark.parametrize("budget", ["24", "much", 0, -1, None, 1.5])
def test_a_budget_is_bytes_or_a_size_with_a_unit(budget):
    with pytest.raises(MemSaveError, match="expected bytes, or a text such as '16GiB'"):
        plan(CONFIGS["llama"], budget=budget, **STEP)


def test_it_prints_as_a_table():
    text = str(plan(CONFIGS["llama"], budget="24GiB", **STEP))
    assert text.splitlines()[0].startswith("the floor")
    assert "The cheapest in 24.00 GiB: the floor" in text
