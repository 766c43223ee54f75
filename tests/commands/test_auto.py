"""``memsave auto``: from a saved model to a file that every ``memsave=`` takes; where the limit may be left out."""

import types
from functools import partial

import pytest
import torch
import yaml
from torch.nn.modules.module import register_module_forward_hook

from hf_memsave import MemSaveConfig, patch, unpatch
from hf_memsave.cli import main
from hf_memsave.errors import PlanError
from hf_memsave.planner import fast, smart
from hf_memsave.planner.trial import limit_of
from support.planning import SIZE, bert, between, needs, once
from support.zoo import batch_for


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model and a batch, and a limit that is half of what conversion frees."""
    folder, model = tmp_path_factory.mktemp("saved"), bert()
    model.set_attn_implementation("sdpa")  # what a saved model is loaded with
    batch = batch_for(model, SIZE)
    model.save_pretrained(folder)
    torch.save(batch, folder / "batch.pt")
    return types.SimpleNamespace(folder=folder, model=model, batch=batch, half=between(model, batch, 0.5))


@pytest.mark.long
@pytest.mark.parametrize("memsave", ["exact", "tempo"])
def test_auto_writes_or_prints_what_smart_finds_and_says_whether_it_is_exact(memsave, saved, tmp_path, capsys):
    line = ["auto", saved.folder, "--batch", saved.folder / "batch.pt", "--memory", f"{saved.half / 1024}KiB"]
    line += ["--out", tmp_path / "plan.yaml"] if memsave == "exact" else ["--memsave", memsave]
    assert main([*map(str, line)]) == 0
    output, error = capsys.readouterr()
    assert not [one for one in error.splitlines() if one.strip() and "Loading weights" not in one]  # Transformers' bar
    assert "too much" in output
    if memsave == "exact":
        assert "preset exact, cpu, limit" in output
        config = MemSaveConfig.from_file(tmp_path / "plan.yaml")
    else:
        assert "preset tempo (gradients are approximate), cpu" in output
        config = MemSaveConfig.from_dict(yaml.safe_load(output[output.index("activation: ") :]))
    assert config.layers and config.is_exact == (memsave == "exact")
    assert needs(saved.model, saved.batch, config) <= saved.half < needs(saved.model, saved.batch)
    assert patch(saved.model, config).patched
    unpatch(saved.model)


@pytest.mark.long
@pytest.mark.parametrize("how", [["--fast", "--max-batch", 2], ["--smart"]], ids=str)
def test_auto_writes_nothing_where_stock_is_better(how, saved, tmp_path, capsys):
    line = ["auto", saved.folder, *how, "--memory", "1GiB", "--out", tmp_path / "plan.yaml", "--autocast", "bf16"]
    ran = []
    handle = register_module_forward_hook(lambda *_: ran.append(torch.is_autocast_enabled("cpu")))
    assert main([*map(str, line)]) == 0 and ran and all(ran)
    handle.remove()
    output = capsys.readouterr().out
    assert "bf16 autocast" in output and "there is no configuration to write" in output
    assert not (tmp_path / "plan.yaml").exists()


def test_a_limit_may_be_left_out_on_one_cuda_device_only(monkeypatch):
    for name, value in {"memory_reserved": 300, "memory_allocated": 200, "mem_get_info": (500, 1000)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    of = dict(numel=lambda: 25, itemsize=2)
    on = {d: types.SimpleNamespace(device=torch.device(d), **of) for d in ("cuda:0", "cpu")}
    on["cuda:0"].grad, on["cpu"].grad = types.SimpleNamespace(**of), None

    def model(*devices):
        return types.SimpleNamespace(parameters=lambda: [on[d] for d in devices], buffers=lambda: [on["cpu"]])

    assert limit_of(None, model("cuda:0")) == 0.9 * (500 + 300 - 200 + 3 * 50)
    for devices in (["cpu"], ["cpu", "cuda:0"]):
        with pytest.raises(PlanError, match="got None for a model on cpu.*Name it"):
            limit_of(None, model(*devices))


IDS = torch.ones(2, 6, dtype=torch.long)
BATCH = {"input_ids": IDS, "labels": torch.zeros(2, dtype=torch.long)}
SMART, FAST = partial(smart, memory="1GiB", timer=once), partial(fast, memory="1GiB", timer=once)
#: What is called with a model, and what is said.
WRONG = {
    "no loss": (lambda model: SMART(model, {"input_ids": IDS}), "expected a loss in the output .*Add 'labels'"),
    "two sizes": (lambda model: FAST(model, BATCH | {"labels": IDS[:1, 0]}), "size, got {'input_ids': 2, 'labels': 1}"),
    "no mapping": (lambda model: FAST(model, IDS), "expected a mapping of tensors .*got Tensor"),
    "nothing": (lambda model: FAST(model, BATCH, False), "expected something to convert, got False"),
    "frozen": (lambda model: SMART(model.requires_grad_(False), BATCH), "expected parameters to train, got none"),
    "no batch": (lambda model: FAST(model, BATCH, max_batch=0), "max_batch: expected a whole number from 1, .* got 0"),
    "half": (lambda model: FAST(model, BATCH, max_batch=1.5), "max_batch: expected a whole number .* got 1.5"),
    "many losses": (
        lambda model: SMART(model, BATCH, forward=lambda **inputs: model(**inputs).logits),
        r"expected a loss in the output .*got a tensor \[2, 2\] .*of one number",
    ),
    "detached": (
        lambda model: SMART(model, BATCH, forward=lambda **inputs: model(**inputs).loss.detach()),
        "parameters .* require a gradient, got one that needs none",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_planned_is_refused(call, message):
    with pytest.raises(PlanError, match=message):
        call(bert())
