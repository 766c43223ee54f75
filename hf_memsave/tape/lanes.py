"""How a storage is copied to main memory and back: at once, or on two streams of CUDA's beside the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_memsave.device import current_stream


class AtOnce:
    """A device whose copies are made when they are asked for, such as a CPU: it has neither streams nor events.

    ``room`` gives so many bytes of main memory for a device.
    """

    is_at_once = True

    def __init__(self, device: torch.device, room: Callable[[int, torch.device], Tensor]) -> None:
        self.device, self.room = device, room

    def now(self) -> Any:
        """The stream that the caller works on."""

    def mark(self) -> Any:
        """An event: the device has done what that stream was given until now."""

    def send(self, there: Tensor, made: Any) -> tuple[Tensor, Any]:
        """Copy ``there`` to main memory, after the event ``made``: the copy, and the event when it is done."""
        return self.room(len(there), self.device).copy_(there), None

    def fetch(self, host: Tensor, left: Any) -> tuple[Tensor, Any]:
        """Copy ``host`` back, after ``left`` and what the caller's stream was given: the copy, and when it is done."""
        return host.to(self.device, copy=True), None

    def wait(self, event: Any, stream: Any) -> None:
        """What ``stream`` is given from now on comes after ``event``."""

    def lend(self, there: Tensor, event: Any, home: Any) -> None:
        """The caller's stream reads ``there``, memory of the stream ``home``, after ``event``."""


class Streams(AtOnce):
    """CUDA, with a stream each way. What comes back lies in memory of the stream that the caller works on."""

    is_at_once = False

    def __init__(self, device: torch.device, room: Callable[[int, torch.device], Tensor]) -> None:
        super().__init__(device, room)
        self.out, self.into = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def now(self) -> Any:
        """One that autograd has set, in backward."""
        return current_stream(self.device)

    def mark(self) -> Any:
        """A host that waits for it sleeps."""
        return self.now().record_event(torch.cuda.Event(blocking=True))

    def send(self, there: Tensor, made: Any) -> tuple[Tensor, Any]:
        """Into pinned memory."""
        host = self.room(len(there), self.device)
        self.out.wait_event(made)
        with torch.cuda.stream(self.out):
            host.copy_(there, non_blocking=True)
        return host, self.out.record_event()

    def fetch(self, host: Tensor, left: Any) -> tuple[Tensor, Any]:
        """Into memory that the caller's stream may have used until now."""
        there = torch.empty(len(host), dtype=torch.uint8, device=self.device)
        self.into.wait_event(left)
        self.into.wait_stream(self.now())
        with torch.cuda.stream(self.into):
            there.copy_(host, non_blocking=True)
        return there, self.into.record_event()

    def wait(self, event: Any, stream: Any) -> None:
        """The host does not wait."""
        stream.wait_event(event)

    def lend(self, there: Tensor, event: Any, home: Any) -> None:
        """Each caller may be on a stream of its own."""
        now = self.now()
        now.wait_event(event)
        if now != home:
            there.record_stream(now)
