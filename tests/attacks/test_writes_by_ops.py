"""In-place writes within a forward, in the spellings of ``torch.ops``, ``_foreach_`` and ``vmap``: as in stock."""

import pytest
import torch
from torch import nn

from hf_memsave import MemSaveConfig, patch


@torch.library.custom_op("hf_memsave_tests::scale_", mutates_args={"x"})
def scale_(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


@torch.library.custom_op("hf_memsave_tests::scale_all_", mutates_args={"xs"})
def scale_all_(by: float, xs: list[torch.Tensor]) -> None:
    for x in xs:
        x.mul_(by)


WRITES = {
    "method": lambda x: x.mul_(2),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "foreach, of two lists": lambda x: torch._foreach_copy_([x], [x + 1]),
    "overload": lambda x: torch.ops.aten.mul_.Tensor(x, 2.0),
    "packet": lambda x: torch.ops.aten.add_(x, 1.0),
    "out": lambda x: torch.ops.aten.mul.out(x, x, out=x),
    "custom": lambda x: scale_(x, 2.0),
    "custom, by name": lambda x: scale_(by=2.0, x=x),
    "custom, of a list": lambda x: scale_all_(2.0, [x]),
    "vmap": lambda x: torch.vmap(lambda row: row.mul_(2))(x),
}


class Net(nn.Module):
    """Stock keeps the fp32 copy of what is written to; the tape keeps what that was made from."""

    def __init__(self, write):
        super().__init__()
        self.first, self.second, self.write = nn.Linear(16, 32).bfloat16(), nn.Linear(32, 8), write

    def forward(self, x):
        h = self.first(x)
        y = self.second(h.float())
        with torch.set_grad_enabled(not getattr(self, "without_gradients", False)):
            self.write(h.detach())
        return y.pow(2).mean() + h.float().mean()


@pytest.mark.parametrize("without_gradients", [False, True])
@pytest.mark.parametrize("config", [MemSaveConfig(), MemSaveConfig(activation="stock", norm="stock", dropout="stock")])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_they_are_seen(write, config, without_gradients, device):
    found = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = Net(write).to(device)
        model.without_gradients = without_gradients
        if patched:
            patch(model, config)
        x = torch.randn(64, 16, device=device).bfloat16()
        for _ in range(3):  # also where a forward has shown what nobody needs
            model.zero_grad()
            loss = model(x)
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
