"""What a fused layer launches and moves beside its products, at the sizes that are quoted; counted without a GPU."""

import pytest
import torch
import torch.nn.functional as F

from hf_memsave.measure.fake_device import fake_device
from support.accuracy import unread
from support.helpers import MATRIX
from support.launches import APPROXIMATE, Launches, counted


@pytest.mark.long
@pytest.mark.parametrize(("setting", "layers", "most_launches", "most_bytes"), [
    ("Llama-3-8B, full", (1, 2), 0.5, 0.6), ("Llama-3-8B, LoRA p=.05", (1, 2), 0.5, 0.6),
    ("BERT-Large, S512, bf16 autocast", (2, 4), 0.44, 0.69),
])  # fmt: skip
def test_a_layer_takes_half_of_stocks_launches_and_less_of_its_bytes(setting, layers, most_launches, most_bytes):
    found = counted(setting, ["stock", "Triton"], layers=layers)
    print(setting, found)
    (launches, nbytes), (stock_launches, stock_nbytes) = found["Triton"], found["stock"]
    assert launches <= most_launches * stock_launches
    assert nbytes <= most_bytes * stock_nbytes


#: Codes take a minute each: torch's own have thousands of launches.
WAYS = [pytest.param(way, marks=MATRIX if "int" in way else ()) for way in APPROXIMATE]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_exact_takes_a_fraction_of_the_launches_and_bytes_that_it_takes_without_kernels(way):
    names = [f"{way}, torch", f"{way}, Triton"]
    found = counted("BERT-Large, S512, bf16", ["stock", *names], layers=(1, 2))
    print(way, found)
    (launches, nbytes), (by_torch, bytes_by_torch) = found[names[1]], found[names[0]]
    assert launches <= 0.4 * by_torch
    assert nbytes <= min(1.65 * found["stock"][1], 0.8 * bytes_by_torch)


def test_chunks_of_a_loss_move_fewer_bytes_than_stocks_and_by_one_kernel_two_fifths():
    """Llama-3-8B's frozen head, two chunks: 40.0 bytes a logit in stock, 32.5 by PyTorch's functions, 16.5 here."""
    words, width, tokens = 128256, 4096, 2048
    found = {}
    with fake_device() as device:
        x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        w, target = torch.zeros(words, width, dtype=x.dtype, device=device), torch.zeros(tokens, device=device).long()
        for way in ("stock", "torch", "Triton"):
            with Launches() as run:
                if way == "stock":
                    loss = F.cross_entropy(F.linear(x, w).float(), target)
                else:
                    loss = F.cross_entropy(unread(x, w, fuses_loss=way == "Triton").float(), target)
                loss.backward()
            found[way] = run.count, run.nbytes / tokens / words
    print(found)
    assert found["Triton"][1] <= 16.6 <= 0.42 * found["stock"][1]
    assert found["torch"][1] <= 33 <= 0.83 * found["stock"][1]
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
