"""Two real processes over gloo: linears that run again find weights that come and go."""

import contextlib
import datetime
import io
import os
import re
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from hf_memsave import MemSaveConfig, PatchError, measure_kept, patch
from hf_memsave.ops.loss import chunked_loss
from support import accuracy
from support.compiled import interpreted
from support.in_rows import SIZE as LONG
from support.in_rows import assert_near, in_rows
from support.steps import assert_same, patched
from support.zoo import VOCAB, Size, batch_for, build

#: Engines, orders and kinds of checkpointing are in test_engines.py.
RANKS, STEPS = 2, 2
#: That a model keeps some MiB.
SIZE = Size(hidden=64, batch=4, seq=64)
TIMEOUT = datetime.timedelta(seconds=60)

pytestmark = pytest.mark.long


def shard(model, units=(GradientCheckpointingLayer,), **options):
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in model.modules():
        if isinstance(module, units):
            fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def stays_then_goes(model, number, seed):
    """Parameters are gathered once in the first step, and twice from then on."""
    model.set_reshard_after_forward(number > 0)
    return [forward(model, seed)]


def two_forwards(model, number, seed):
    """The first backward frees what the second forward has read."""
    model.set_reshard_after_forward(False)
    return [forward(model, seed), forward(model, seed + 1)]


def by_hand(model, number, seed):
    """Gathered and freed by the user, with a forward in between that has no backward; gradients are added up."""
    model.set_reshard_after_forward(False)
    model.set_requires_gradient_sync(number > 0)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    loss = forward(model, seed)
    with torch.no_grad():
        forward(model, seed + 1)
    for unit in units:
        unit.reshard()
    return [loss]


def forward(model, seed):
    """Sums of residuals are in fp32, and what is added to them is not: they are remade from those of the block before.

    Returns:
        The loss.
    """
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch_for(model, seed=seed)).loss


UNITS = {"blocks": (GradientCheckpointingLayer,), "attention": (LlamaAttention, LlamaMLP)}
USES = {"stays, then goes": stays_then_goes, "two forwards": two_forwards, "by hand": by_hand}
AGAIN = {"gate": {"checkpoint": "gate"}, "gate and offload": {"checkpoint": "gate", "offload": True}}
#: How a model is wrapped whose blocks run in tiles.
TILED = {
    "tiles, DDP": DistributedDataParallel,
    "tiles, DDP's buckets": partial(DistributedDataParallel, gradient_as_bucket_view=True, static_graph=True),
    "tiles, FSDP2": shard,
    "tiles, FSDP2 that stays": partial(shard, reshard_after_forward=False),
    "tiles, FSDP2 in bf16": partial(shard, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
}
#: Who shards the head, and whether the loss is computed outside of the model.
HEADS = list(product(("root", "resharded", "head"), (False, True)))
SHARDED = [*(("blocks", use) for use in USES), ("attention", "two forwards")]


def train_sharded(units, use, options, rank):
    """Losses, gradients, and what is kept then, of a model that FSDP2 shards and the user meddles with."""
    model = build("llama")
    if options is not None:
        patch(model, MemSaveConfig(**options))
    shard(model, UNITS[units])
    found = {}
    for number in range(STEPS):
        losses = USES[use](model, number, 10 * number + 5 * rank)
        for loss in losses:
            loss.backward()
        found[f"losses {number}"] = torch.stack(losses).detach()
    found |= {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    with torch.autocast("cpu", torch.bfloat16):
        return found, measure_kept(model, batch_for(model)).total


def refusal():
    """Of linears that FSDP1 has wrapped already."""
    linears = ModuleWrapPolicy({torch.nn.Linear})
    model = FullyShardedDataParallel(build("llama"), auto_wrap_policy=linears, device_id=torch.device("cpu"))
    with pytest.raises(PatchError) as error:
        patch(model, MemSaveConfig(checkpoint="gate"))
    return str(error.value)


def first_step_said(rank):
    """What a process without handlers of its own writes as a model is trained under DistributedDataParallel."""
    with contextlib.redirect_stderr(io.StringIO()) as written:
        model = patched(build("llama", SIZE))
        model = DistributedDataParallel(model)
        for number in range(STEPS):
            model(**batch_for(model.module, SIZE, seed=10 * number + rank)).loss.backward()
    return written.getvalue()


def compiled_under(engine, fields):
    """Gradients of two micro-batches, and the report, of a model whose blocks are compiled or not."""
    model = build("llama")
    report = patch(model, **fields)
    whole = DistributedDataParallel(model) if engine == "DDP" else shard(model)
    with pytest.MonkeyPatch.context() as monkeypatch, interpreted(monkeypatch):
        for seed in range(2):
            whole(**batch_for(model, seed=seed + dist.get_rank()), use_cache=False).loss.backward()
        return {name: full(p.grad) for name, p in model.named_parameters()}, str(report)


def tiled_under(engine, fields, rank):
    """Losses, gradients, weights' hooks and classes in rows: two steps of two micro-batches of GPT-2 with dropouts."""
    model = build("gpt2", LONG, torch.float32 if "bf16" in engine else torch.float64)
    if fields:
        patch(model, MemSaveConfig(**fields))
    whole, calls, found = TILED[engine](model), Counter(), {}
    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda weight, name=name: calls.update([name]))
    for number in range(2):
        model.zero_grad()
        for part in range(2):
            is_quiet = engine == "tiles, DDP" and part == 0
            if "FSDP2" in engine:
                whole.set_requires_gradient_sync(part == 1)
            with whole.no_sync() if is_quiet else contextlib.nullcontext():
                torch.manual_seed(rank)
                loss = whole(**batch_for(model, LONG, seed=10 * number + 5 * part + rank)).loss
                loss.backward()
            found[f"loss {number} {part}"] = loss.detach()
        found |= {f"{number} {name}": full(p.grad) for name, p in model.named_parameters()}
    return found, dict(calls), in_rows(model)


def head_under(how, is_outside, is_patched, rank):
    """Gradients where FSDP2 frees the head of a chunked loss; where blocks run again, its norm runs in rows."""
    model = accuracy.lm("llama")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    if is_patched:
        patch(model, MemSaveConfig(checkpoint="block" if is_outside else None))
    if how == "head":
        fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (RANKS,)))
    shard(model, reshard_after_forward=how == "resharded" or None)
    batch = batch_for(model, accuracy.LONG, seed=rank)
    labels = batch.pop("labels") if is_outside else None
    out = model(**batch)
    loss = F.cross_entropy(out.logits.view(-1, VOCAB), labels.view(-1)) if is_outside else out.loss
    loss.backward()
    return {name: full(p.grad) for name, p in model.named_parameters()}


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS, timeout=TIMEOUT
    )
    found = {}
    try:
        for case in ("first step", "refusal", *SHARDED, *HEADS, "DDP", "FSDP2", *TILED):
            if case == "first step":
                found[case] = first_step_said(rank)
            elif case in SHARDED:
                found[case] = {name: train_sharded(*case, AGAIN.get(name), rank) for name in (*AGAIN, "stock")}
            elif case in HEADS:
                with pytest.MonkeyPatch.context() as monkeypatch:
                    monkeypatch.setattr(chunked_loss, "CHUNK", accuracy.SMALL)
                    found[case] = [head_under(*case, is_patched, rank) for is_patched in (True, False)]
            elif case in TILED:
                found[case] = [tiled_under(case, fields, rank) for fields in ({"tiles": 40}, {})]
            elif case in ("DDP", "FSDP2"):
                found[case] = [compiled_under(case, fields) for fields in ({"compile": True}, {})]
            else:
                found[case] = refusal()
            torch.save(found, folder / f"{rank}.new")
            os.replace(folder / f"{rank}.new", folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process found, up to the case in which it died."""
    folder = tmp_path_factory.mktemp("ranks")
    death = ""
    try:
        mp.spawn(work, (folder,), nprocs=RANKS)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        death = str(error)
    files = [folder / f"{rank}.pt" for rank in range(RANKS)]
    return [torch.load(file) if file.exists() else {} for file in files], death


def of_case(ranks, case):
    found, death = ranks
    missing = [rank for rank, cases in enumerate(found) if case not in cases]
    assert not missing, f"ranks {missing} did not finish this case: {death}"
    return [cases[case] for cases in found]


@pytest.mark.parametrize("case", SHARDED, ids="/".join)
def test_linears_that_run_again_find_weights_that_the_user_gathers_and_frees(case, ranks):
    """And keep no more than in a single process."""
    model = patched(build("llama"), MemSaveConfig(**AGAIN["gate"]))
    with torch.autocast("cpu", torch.bfloat16):
        expected = measure_kept(model, batch_for(model)).total
    for found in of_case(ranks, case):
        for name in AGAIN:
            assert_same(found[name][0], found["stock"][0])
        assert found["gate"][1] <= expected < found["stock"][1] / 2


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_compiled_blocks_train_on_two_processes(engine, ranks):
    for (got, report), (expected, _) in of_case(ranks, engine):
        assert "compiled    2 x LlamaDecoderLayer: " in report and "graph" in report
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_a_head_that_fsdp2_frees_trains_like_stock(case, ranks):
    for got, expected in of_case(ranks, case):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("case", TILED)
def test_blocks_in_tiles_have_stocks_gradients_and_run_each_hook_of_a_weight_as_often(case, ranks):
    slack = 0.02 if "bf16" in case else 1e-10
    for (got, calls, rows), (expected, stock_calls, _) in of_case(ranks, case):
        assert rows == {"GPT2MLP"} and calls == stock_calls
        assert_near(got, expected, slack, least=1e-3)


def test_one_process_says_what_the_first_step_keeps(ranks):
    said, nothing = of_case(ranks, "first step")
    model = build("llama", SIZE)
    compared = patch(model).compare(batch_for(model, SIZE))
    kept, stock = re.findall(r"keeps ([\d.]+) MiB for backward where stock would keep ([\d.]+) MiB", said)[0]
    assert nothing == "" and said.count("the first step keeps") == len(said.splitlines()) == 1
    assert float(kept) * 2**20 == pytest.approx(compared.patched.total, rel=0.02)
    assert float(stock) * 2**20 == pytest.approx(compared.stock.total, rel=0.02)


def test_linears_that_fsdp1_has_wrapped_are_refused_with_the_remedy(ranks):
    for message in of_case(ranks, "refusal"):
        assert "q_proj (FullyShardedDataParallel): it is a unit of FSDP1. Wrap whole blocks, or patch before" in message
