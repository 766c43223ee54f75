"""Under ``torch.compile`` a patched model keeps the floor: the partitioner gets a budget, and gives it back."""

import pytest
import torch
import torch._functorch.config as partitioner
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import cpp_extension
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memsave import patch
from support.families import Size, batch_for, build
from support.helpers import only_on_cpu
from support.steps import gradients

H = 256


@pytest.fixture(autouse=True)
def on_cpu_and_afresh(device):
    only_on_cpu(device)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def llama_8b(layers):
    """LLaMA-3-8B's proportions."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=H, intermediate_size=7 * H // 2, num_attention_heads=4, num_key_value_heads=1,
        num_hidden_layers=layers, vocab_size=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


def kept(model, batch):
    """Bytes that the compiled forward hands to its backward, without parameters and inputs."""
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers(), *batch.values())}
    found = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(**batch).loss
    total = sum(storage.nbytes() for storage in found.values())
    loss.backward()
    torch._dynamo.reset()
    return total


@pytest.mark.long
@pytest.mark.parametrize(("patched", "expected"), [(False, 34), (True, 23)], ids=["stock", "patched"])
def test_a_compiled_layer_keeps_the_floor(patched, expected):
    ids = torch.randint(0, 64, (2, 64))
    totals = []
    for layers in (1, 2):
        model = llama_8b(layers)
        if patched:
            patch(model)
        totals.append(kept(model, {"input_ids": ids, "labels": ids}))
    assert (totals[1] - totals[0]) / ids.numel() / H == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_the_budget_is_as_it_was(budget):
    model, seen = build("llama", Size(layers=1)), []
    patch(model)

    def backend(graph, inputs):
        seen.append(partitioner.activation_memory_budget)
        return graph.forward

    with partitioner.patch(activation_memory_budget=budget):
        torch.compile(model, backend=backend)(**batch_for(model, Size()))
        assert partitioner.activation_memory_budget == budget
    assert seen == [0.99 if budget == 1.0 else budget]


def test_a_compile_that_fails_gives_it_back():
    model = build("llama", Size(layers=1))
    patch(model)

    def backend(graph, inputs):
        raise ValueError("no")

    with pytest.raises(Exception, match="no"):
        torch.compile(model, backend=backend)(**batch_for(model, Size()))
    assert partitioner.activation_memory_budget == 1.0


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """PyTorch's, by a path without spaces: Inductor links by no other."""
    (tmp_path / "lib").symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(tmp_path / "lib"))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
def test_a_compiled_step_is_that_of_compiled_stock(backend, libraries):
    results = []
    for patched in (False, True):
        torch._dynamo.reset()
        model = build("llama", Size(layers=1), dropout=0.0)
        batch = batch_for(model, Size())
        if patched:
            patch(model)
        loss = torch.compile(model, backend=backend, fullgraph=True)(**batch).loss
        loss.backward()
        results.append({"loss": loss.detach(), **gradients(model)})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-5, atol=1e-7)
