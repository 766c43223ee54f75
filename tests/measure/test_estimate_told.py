"""What an estimate tells people: small models in MiB, where each peak is, and what makes a step fit that does not."""

import json
import re
from dataclasses import replace

import pytest

from hf_memsave import MemSaveConfig, estimate, plan
from hf_memsave.cli import main
from hf_memsave.config.sizes import gib
from hf_memsave.measure import largest as module
from hf_memsave.measure.largest import largest
from hf_memsave.measure.models import depth_of, most_tokens
from hf_memsave.measure.training import Training
from support.helpers import MATRIX, on_stand_in
from support.zoo import Size, config_of

pytestmark = on_stand_in

SIZE, HEADS = Size(hidden=128, layers=3), {"num_key_value_heads": 4}
LLAMA = config_of("llama", SIZE, **HEADS)
STEP = dict(batch_size=1, seq_len=16)


@pytest.mark.long
def test_a_small_models_figures_are_in_mib_and_the_optimizers_step_is_told_apart():
    """All parameters are trained on few tokens: the peak is in the optimizer's step."""
    full = estimate(LLAMA, **STEP, memory="505MiB")
    for memory in (full.stock, full.patched):
        assert memory.peak == max(memory.in_passes, memory.in_optimizer) == memory.in_optimizer
        assert memory.in_optimizer == pytest.approx(memory.fixed + memory.temporaries, rel=0.001)
        assert memory.temporaries == pytest.approx(memory.trained, rel=0.02)  # foreach takes them once more
    text = str(full)
    rows = dict(re.findall(r"^ *(\S.*?)  +([\d.,]+ \w+)", text, re.MULTILINE))
    assert set(rows) >= {"gradients", "kept for backward", "peak of the optimizer's step", "peak of the step"}
    assert all(re.fullmatch(r"[1-9][\d.,]* [KM]iB", cell) for cell in rows.values())
    assert "stock and patched: the peak is in the optimizer's step, in _foreach_" in text
    assert "Lower it with fused AdamW (Trainer: optim='adamw_torch_fused') or foreach=False" in text
    parts = [gib(getattr(full.patched, name)) for name in ("fixed", "parameters", "trained", "states")]
    fixed = "Fixed at any batch: {} (parameters {}, gradients {}, states {}).".format(*parts)
    assert f"Does not fit in 505.00 MiB (529.5 MB): {gib(full.patched.needed - full.memory)}" in text
    assert fixed in text
    assert re.fullmatch(r"<Estimate of llama, 3 layers, .*: stock .*, patched .*, does not fit in .*>", repr(full))


@pytest.mark.long
def test_two_peaks_name_their_columns_and_one_that_is_elsewhere_asks_for_no_other_optimizer():
    wide = config_of("llama", SIZE, **HEADS, vocab_size=20_000)  # so that logits are in chunks
    text = str(estimate(wide, batch_size=16, seq_len=128))
    assert re.search(r"^stock: the peak is in the backward, in \w+\.\npatched: the peak is in the", text, re.MULTILINE)
    assert "Lower it" not in text and "it in" not in text


@pytest.mark.long
def test_a_plan_shows_stock_and_the_cheapest_of_each_rung():
    step = dict(batch_size=16, seq_len=128, optimizer="sgd")
    floor = plan(LLAMA, budget="99GiB", **step)
    assert re.fullmatch(r"<BudgetPlan for 99.00 GiB: no product runs again, [\d.]+ MiB, 0.0% more work>", repr(floor))
    assert [one.family.rung for one in floor.fitting] == [None, "gate", "block"]
    least = floor.tried[-1].needed
    found = plan(LLAMA, budget=(least + floor.best.needed) // 2, **step)
    assert found.fitting[0] == found.best and {"gate", "block"} <= {one.family.rung for one in found.fitting}
    order = [(one.config.offload, one.cost) for one in found.fitting]
    assert order == sorted(order)
    text = str(found)
    assert re.search(r"^stock +\S+ MiB +0.0% .* too much$", text, re.MULTILINE)
    assert re.search(r"^stock, gradient checkpointing +\S+ MiB +[\d.]+% +", text, re.MULTILINE)
    stock = estimate(LLAMA, **step, memsave=False).stock.needed
    checkpointed = estimate(LLAMA, **step, memsave=False, checkpointing=True).stock.needed
    assert [needed for needed, _ in found.stock.values()] == [stock, checkpointed]


@pytest.mark.long
def test_the_command_says_what_makes_a_step_fit_and_each_of_it_does(tmp_path, capsys):
    LLAMA.save_pretrained(tmp_path)
    command = ["estimate", str(tmp_path), "--seq-len", "16", "--batch-size", "1", "--memory", "569MiB"]
    assert main([*command, "--json", str(tmp_path / "a.json")]) == 1
    told = capsys.readouterr().out
    assert "patched: no batch fits, not even of 8 tokens." in told and "is 0" not in told
    changes = json.loads((tmp_path / "a.json").read_text())["what_fits"]
    assert f"Each of these alone makes it fit, patched: {'; '.join(changes)}." in told
    limit = dict(memory="569MiB", **STEP)
    ways = {"fused AdamW": dict(optimizer="adamw_fused"), "LoRA (r=8)": dict(lora={"r": 8})}
    for words, fields in ways.items():
        result = estimate(LLAMA, **limit, **fields)
        told = [change for change in changes if change.startswith(words)]
        assert result.fits == bool(told), words
        assert not told or f"({result.patched.needed / 2**20:,.2f} MiB)" in told[0]
    assert {"8-bit AdamW", "LoRA (r=8)"} <= {change.rpartition(" (")[0] for change in changes}


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("batch_size", marks=MATRIX), "seq_len"])
def test_the_largest_is_found_by_few_traces_and_one_more_does_not_fit(name, monkeypatch):
    asked = []
    search = module.search
    monkeypatch.setattr(module, "search", lambda needed, *rest: search(lambda n: asked.append(n) or needed(n), *rest))
    step, limit = dict(batch_size=16, seq_len=64, optimizer="sgd"), 700 * 2**20
    of = Training(**step)
    found = largest(LLAMA, depth_of(LLAMA), of, MemSaveConfig(), name, limit, ("ddp", 1))
    step_of = 8 if name == "seq_len" else 1
    needed = [estimate(LLAMA, **step | {name: number}).patched.needed for number in (found, found + step_of)]
    assert needed[0] <= limit < needed[1]
    assert len(asked) <= 7 and {found // step_of, found // step_of + 1} <= set(asked)


@pytest.mark.long
def test_the_longest_sequence_is_one_that_the_model_has_positions_for():
    """RoBERTa has two rows more, for no token."""

    def longest(config, limit, **fields):
        of = Training(batch_size=1, **fields)
        return largest(config, depth_of(config), of, MemSaveConfig(), "seq_len", limit, ("ddp", 1))

    size, fields = replace(SIZE, layers=4), {"max_position_embeddings": 66}
    config = config_of("roberta", size, **fields)
    assert most_tokens(config) == longest(config, 2**36, seq_len=16) == 64
    short = config_of("llama", size, **HEADS, **fields)  # which has no table of them
    assert longest(short, 600 * 2**20, seq_len=128, optimizer="sgd") > 128
