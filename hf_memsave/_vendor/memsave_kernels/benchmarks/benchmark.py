"""Times a forward and a backward of kernels and of PyTorch's functions, for ``kernels benchmark``."""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark
from torch import Tensor


class TrainingBenchmark(Benchmark):
    """Compares gradients of the first input, which are small enough for bfloat16 to keep to the runner's 0.01."""

    seed = 0
    tokens, size, vocabulary = 4096, 4096, 32768

    def setup(self) -> None:
        def make(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, device=self.device)).bfloat16()

        self.x = make(self.tokens, self.size).requires_grad_()
        self.up, self.dy = make(self.tokens, self.size), make(self.tokens, self.size, scale=1 / 16)
        self.weight, self.head = make(self.size), make(self.vocabulary, self.size, scale=1 / 64)
        self.labels = torch.randint(self.vocabulary, (self.tokens,), device=self.device)

    def gradient(self, y: Tensor, dy: Tensor) -> Tensor:
        return torch.autograd.grad(y, self.x, dy)[0]

    def benchmark_rms_norm(self) -> None:
        self.out = self.gradient(self.kernel.rms_norm(self.x, self.weight, 1e-6, "llama"), self.dy)

    def verify_rms_norm(self) -> Tensor:
        wide = self.x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.gradient(self.weight * normed.bfloat16(), self.dy)

    def benchmark_gated(self) -> None:
        self.out = self.gradient(self.kernel.gated(self.x, self.up, "silu"), self.dy)

    def verify_gated(self) -> Tensor:
        return self.gradient(F.silu(self.x) * self.up, self.dy)

    def benchmark_linear_cross_entropy(self) -> None:
        loss = self.kernel.linear_cross_entropy(self.x, self.head, self.labels)
        self.out = self.gradient(loss, torch.full_like(loss, self.tokens))

    def verify_linear_cross_entropy(self) -> Tensor:
        loss = F.cross_entropy(F.linear(self.x, self.head).float(), self.labels)
        return self.gradient(loss, torch.full_like(loss, self.tokens))
