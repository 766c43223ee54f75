"""A default dtype that holds for the forward alone: what is made of whole numbers has it in backward too."""

import pytest
import torch
from torch import nn
from transformers import DebertaV2Config, DebertaV2ForMaskedLM

from hf_memsave import patch


class OfCounts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        share = torch.arange(300, 308, device=x.device) / 7
        return self.layer(x) * share.sqrt().sin() + torch.ones(8, device=x.device) * self.layer(x).tanh()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("later", [torch.float32, torch.bfloat16])
def test_what_is_made_of_whole_numbers_keeps_its_dtype(dtype, later, device):
    found = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = OfCounts().to(device, dtype)
        if patched:
            patch(model)
        x = torch.randn(4, 8, device=device).to(dtype)
        try:
            torch.set_default_dtype(dtype)
            loss = model(x).square().sum()
            torch.set_default_dtype(later)
            loss.backward()
            assert torch.get_default_dtype() is later
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_deberta_in_bf16(device):
    config = DebertaV2Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, max_position_embeddings=32,
    )  # fmt: skip
    found = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = DebertaV2ForMaskedLM(config).to(device, torch.bfloat16)
        if patched:
            patch(model)
        ids = torch.randint(3, 97, (2, 12), device=device)
        try:
            torch.set_default_dtype(torch.bfloat16)
            loss = model(input_ids=ids, labels=ids).loss
        finally:
            torch.set_default_dtype(torch.float32)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
