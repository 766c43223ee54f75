"""Two real processes over gloo: data parallel training of a patched model equals stock's, bit for bit."""

import datetime
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import measure_kept, patch
from hf_memsave.patching.swap import is_patched
from support.families import batch_for, build
from support.steps import assert_same

RANKS, STEPS = 2, 2
TIMEOUT = datetime.timedelta(seconds=60)
FAMILIES = ("bert", "llama")

pytestmark = pytest.mark.long


def ddp(model, patched):
    if patched:
        patch(model)
    return DistributedDataParallel(model)


def ddp_then_patch(model, patched):
    wrapped = DistributedDataParallel(model)
    if patched:
        patch(wrapped)
    return wrapped


def checkpointed_ddp(model, patched):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return ddp(model, patched)


def fsdp(model, patched):
    """Each block's parameters, its norms' too, are freed after its forward and gathered again in backward."""
    if patched:
        patch(model)
    return shard(model)


def fsdp_then_patch(model, patched):
    shard(model)
    if patched:
        patch(model)
    return model


def shard(model):
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS = {
    "ddp": ddp, "ddp, patched after": ddp_then_patch, "ddp and checkpointing": checkpointed_ddp, "fsdp2": fsdp,
    "fsdp2, patched after": fsdp_then_patch,
}  # fmt: skip
CASES = [(family, how) for how in WRAPPERS for family in reversed(FAMILIES)]


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(family, how, patched, rank):
    """Losses, averaged gradients of the last step and final parameters; every rank has data and masks of its own."""
    model = build(family)
    parallel = WRAPPERS[how](model, patched)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    torch.manual_seed(10 + rank)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = parallel(**batch_for(model, padded=True, seed=2 * number + rank)).loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    found = {"losses": torch.stack(losses), "patched": torch.tensor(sum(map(is_patched, model.modules())))}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter)
        if parameter.grad is not None:
            found[f"{name}.grad"] = full(parameter.grad)
    found["kept"] = torch.tensor(measure_kept(parallel, batch_for(model, padded=True)).total)
    return found


def alone(family):
    """The same in one process: each rank's batch in turn, with that rank's random state."""
    model = build(family)
    patch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    states = [torch.Generator().manual_seed(10 + rank).get_state() for rank in range(RANKS)]
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            torch.set_rng_state(states[rank])
            loss = model(**batch_for(model, padded=True, seed=2 * number + rank)).loss
            states[rank] = torch.get_rng_state()
            (loss / RANKS).backward()
        optimizer.step()
    found = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, measure_kept(model, batch_for(model, padded=True)).total


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS, timeout=TIMEOUT
    )
    found = {}
    try:
        for case in CASES:
            found[case] = {patched: train(*case, patched, rank) for patched in (True, False)}
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


@pytest.mark.parametrize(("family", "how"), CASES)
def test_parallel_training_equals_stock_bit_for_bit(family, how, ranks):
    for found in of_case(ranks, (family, how)):
        ours, stock = ({k: v for k, v in found[patched].items() if k != "kept"} for patched in (True, False))
        assert (ours.pop("patched") > 0, stock.pop("patched") > 0) == (True, False)
        assert_same(ours, stock)


@pytest.mark.parametrize(("family", "how"), CASES)
def test_the_ranks_did_average_over_different_data(family, how, ranks):
    first, second = (found[True] for found in of_case(ranks, (family, how)))
    assert not torch.equal(first["losses"], second["losses"])
    for name in first:
        assert name == "losses" or torch.equal(first[name], second[name]), name


@pytest.mark.parametrize(("family", "how"), CASES)
def test_gradients_and_kept_bytes_are_those_of_a_single_process(family, how, ranks):
    expected, kept = alone(family)
    for found in of_case(ranks, (family, how)):
        assert_same({name: found[True][name] for name in expected}, expected)
        assert found[True]["kept"].item() <= kept
