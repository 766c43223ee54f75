"""What a fused layer launches and moves beside its products, at the sizes that are quoted; counted without a GPU."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hf_memsave import MemSaveConfig, patch
from hf_memsave.measure.fake_device import fake_device
from hf_memsave.ops.loss import chunked_loss
from support.accuracy import OfLinear
from support.fake import on_fake
from support.families import QUOTED, build
from support.launches import APPROXIMATE, Launches, counted


@pytest.mark.long
@pytest.mark.parametrize("setting", ["Llama-3-8B, full", "Llama-3-8B, LoRA p=.05"])
def test_llama_takes_half_of_stocks_launches_and_less_of_its_bytes(setting):
    found = counted(setting, ["stock", "Triton"], layers=(1, 2))
    print(setting, found)
    (launches, nbytes), (stock_launches, stock_nbytes) = found["Triton"], found["stock"]
    assert launches <= 0.5 * stock_launches
    assert nbytes <= 0.6 * stock_nbytes


@pytest.mark.long
def test_bert_under_autocast_takes_less_than_half_of_stocks_launches_and_three_quarters_of_its_bytes():
    found = counted("BERT-Large, S512, bf16 autocast", ["stock", "Triton"], layers=(2, 4))
    print(found)
    (launches, nbytes), (stock_launches, stock_nbytes) = found["Triton"], found["stock"]
    assert launches <= 0.44 * stock_launches
    assert nbytes <= 0.72 * stock_nbytes


@pytest.mark.long
@pytest.mark.parametrize("way", APPROXIMATE)
def test_what_is_not_exact_takes_a_fraction_of_the_launches_and_bytes_that_it_takes_without_kernels(way):
    names = [f"{way}, torch", f"{way}, Triton"]
    found = counted("BERT-Large, S512, bf16", ["stock", *names], layers=(1, 2))
    print(way, found)
    (launches, nbytes), (by_torch, bytes_by_torch) = found[names[1]], found[names[0]]
    assert launches <= 0.35 * by_torch
    assert nbytes <= min(1.65 * found["stock"][1], 0.8 * bytes_by_torch)


def test_a_chunk_of_a_loss_moves_fewer_bytes_than_stocks_and_by_one_kernel_a_quarter():
    """Llama-3-8B's frozen head, two chunks: 44.0 bytes a logit in stock, 32.6 by PyTorch's functions, 11.2 here."""
    words, width, tokens = 128256, 4096, 260
    found = {}
    with fake_device() as device:
        x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        w, target = torch.zeros(words, width, dtype=x.dtype, device=device), torch.zeros(tokens, device=device).long()
        like = torch.empty(tokens, words, device="meta")
        for way in ("stock", "torch", "Triton"):
            with Launches() as run:
                if way == "stock":
                    loss = F.cross_entropy(F.linear(x, w).float(), target)
                else:
                    head = OfLinear(w, steps=((torch.Tensor.float, (), {}),), fuses_loss=way == "Triton")
                    loss = chunked_loss.cross_entropy(x, head, like, target)
                loss.backward()
            found[way] = run.count, run.nbytes / tokens / words
    print(found)
    assert found["Triton"][1] <= 12
    assert found["torch"][1] <= 33 <= 0.75 * found["stock"][1]
    assert found["Triton"][0] <= 18 <= 0.35 * found["torch"][0]


def test_bytes_are_those_that_an_operation_reads_and_writes():
    x, w = torch.ones(4, 8), torch.ones(8)
    with Launches() as found:
        y = x + w
        y.add_(1)
        y.expand(3, 4, 8) * 2
        x @ x.T
    assert dict(found.names) == {"add": 1, "add_": 1, "mul": 1}
    assert found.nbytes == 4 * ((32 + 8 + 32) + (32 + 32) + (32 + 96))


def launches(name, config, layers):
    size = replace(QUOTED, layers=layers)
    with on_fake(lambda: build(name, size, torch.bfloat16, dropout=0.0), size=size) as (model, batch):
        if config is not None:
            patch(model, config)
        for _ in range(2):
            model.zero_grad()
            with Launches() as found:
                model(**batch).loss.backward()
    return found.count


@pytest.mark.long
@pytest.mark.parametrize(("name", "most"), [("llama", 0.4), ("gemma", 0.4), ("gpt2", 0.85)])
def test_on_a_gpu_a_layer_takes_fewer_launches_than_stock(name, most):
    configs = None, MemSaveConfig(), MemSaveConfig(backend="triton")
    few, more = ([launches(name, config, n) for config in configs] for n in (4, 6))
    stock, torch_backend, triton = ((b - a) / 2 for a, b in zip(few, more, strict=True))
    print(f"{name}, launches of a layer: stock {stock}, torch {torch_backend}, triton {triton}")
    assert triton <= most * stock < torch_backend
