# /// script
# dependencies = ["kernels", "torch"]
# ///
"""Replaces an MLP's forward by a layer of the build beside this file. Without a GPU it needs TRITON_INTERPRET=1."""

import copy
from pathlib import Path

import torch
from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class MLP(nn.Module):
    """A gated MLP, as in LLaMA."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes it by PyTorch's functions."""
        gate: Tensor = nn.functional.silu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


def main() -> None:
    """Prints how far the results of both are apart."""
    torch.manual_seed(0)
    stock = MLP(64, 128).to(DEVICE)
    ours, x = copy.deepcopy(stock), torch.randn(4, 16, 64, device=DEVICE)
    replace_kernel_forward_from_hub(MLP, "SwiGLUMLP")
    layer = LocalLayerRepository(Path(__file__).parent, layer_name="SwiGLUMLP")
    with use_kernel_mapping({"SwiGLUMLP": {DEVICE: layer}}):
        kernelize(ours, mode=Mode.TRAINING, device=DEVICE)
    for model in (stock, ours):
        model(x).square().sum().backward()
    torch.testing.assert_close(ours(x), stock(x))
    for (name, p), q in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad, q.grad)
        print(f"{name}: gradients differ by {(p.grad - q.grad).norm() / q.grad.norm():.1e} of their norm")


if __name__ == "__main__":
    main()
