"""Two real processes over gloo under DeepSpeed ZeRO-2 and ZeRO-3, with the configs we ship; patched before or after."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[2] / "configs" / "deepspeed"
CASES = [(stage, order) for stage in (2, 3) for order in ("before", "after")]
FAMILIES = ("bert", "llama")

pytestmark = pytest.mark.long


def worker(folder):
    """One rank: losses and final parameters of every case, stock and patched."""
    import deepspeed
    import torch

    from hf_memsave import patch
    from hf_memsave.patching.swap import is_patched
    from support.families import batch_for, build

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes to compile, and in no path with a space
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])

    def train(family, stage, order):
        model = build(family)
        if order == "before":
            patch(model)
        config = json.loads((CONFIGS / f"zero{stage}.json").read_text())
        config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
        config["bf16"] = {"enabled": False}
        config["zero_optimization"] |= {"overlap_comm": False}
        if stage == 3:  # release every parameter after use, a norm's weight too
            config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config
        )
        if order == "after":
            patch(model)
        torch.manual_seed(10 + rank)
        losses = []
        for number in range(3):
            loss = engine(**batch_for(model, padded=True, seed=2 * number + rank)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            total = sum(p.detach().double().abs().sum().item() for p in model.parameters())
        return {"losses": losses, "parameters": total, "patched": sum(map(is_patched, model.modules()))}

    deepspeed.init_distributed(dist_backend="gloo")
    found = {
        f"{family} {stage} {order}": train(family, stage, order)
        for family in FAMILIES
        for stage in (2, 3)
        for order in ("before", "after", "never")
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # what DeepSpeed and gloo still have at work aborts a process that ends as others do, now and then


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("zero")
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(("stage", "order"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_zero_trains_as_stock_does(family, stage, order, ranks):
    for found in ranks:
        ours, stock = (found[f"{family} {stage} {how}"] for how in (order, "never"))
        assert (ours.pop("patched") > 0, stock["patched"]) == (True, 0)
        assert ours == {"losses": stock["losses"], "parameters": stock["parameters"]}
        assert len(set(stock["losses"])) == 3


if __name__ == "__main__":
    worker(sys.argv[1])
