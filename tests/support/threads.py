"""Train on two threads with dropout by seed, while a third draws random numbers, and count the wrong steps.

Each training thread has a model of its own. Both draw from the one generator of the process: so no step can be compared
with a step of stock. Instead, each dropout notes the mask that its forward applied, and each backward is compared with
the gradients that this mask gives. The third thread must not be given the same numbers twice.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave import MemSaveConfig, patch

#: Numbers in a mask: enough for a draw to take longer than a thread's turn.
ROWS, WIDTH = 64, 64
#: Draws among which one is looked for again.
RECENT = 10_000


class Count(NamedTuple):
    """Steps of all training threads, how many were wrong; draws of the thread that only draws, how many came again."""

    steps: int
    wrong: int
    draws: int
    again: int


class Net(nn.Module):
    """Dropout of ones gives its mask away: of its input only the mask is left."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Two dropouts, each between functions that keep nothing of it."""
        for _ in range(2):
            x = F.dropout(x * self.scale, 0.3)
            self.seen.append((x.detach() != 0).clone())
            x = x.sin() + 2
        return x


def expected(net: Net, x: Tensor, masks: list[Tensor]) -> Tensor:
    """The gradient that these masks give."""
    scale = net.scale.detach().clone().requires_grad_()
    for mask in masks:
        noise = mask.to(x.dtype).div_(1 - 0.3)
        x = ((x * scale) * noise).sin() + 2
    (gradient,) = torch.autograd.grad(x.sum(), scale)
    return gradient


def step(net: Net, x: Tensor) -> bool:
    """Train one step; whether its gradient is that of its masks."""
    net.zero_grad(set_to_none=True)
    net.seen.clear()
    net(x).sum().backward()
    return torch.equal(net.scale.grad, expected(net, x, net.seen))


@contextmanager
def switching(interval: float):
    """Threads change places this often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def count(seconds: float, interval: float = 1e-6, train: Callable[[Net, Tensor], bool] = step) -> Count:
    """Two training threads and one that draws, for a while."""
    found: list[bool] = []
    draws = again = 0
    end = time.monotonic() + seconds

    def trainer() -> None:
        net, x = Net(), torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) + 0.5
        patch(net, MemSaveConfig())
        while time.monotonic() < end:
            found.append(train(net, x))

    def drawer() -> None:
        nonlocal draws, again
        recent: dict[tuple[float, ...], None] = {}
        while time.monotonic() < end:
            drawn = tuple(torch.rand(4, dtype=torch.float64).tolist())
            draws, again = draws + 1, again + (drawn in recent)
            recent[drawn] = None
            if len(recent) > RECENT:
                del recent[next(iter(recent))]

    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (trainer, trainer, drawer)]
    with switching(interval):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return Count(len(found), found.count(False), draws, again)
