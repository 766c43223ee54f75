"""Run one training step and count its bytes: the highest moment of each block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.count.kept import OpCall, made_by, names_of, storages
from hf_memsave.count.peak import Count, rounded
from hf_memsave.measure.figures import AWAY, Moment, Place, Trace
from hf_memsave.measure.inputs import device_of, loss_of
from hf_memsave.measure.kernels import workspace
from hf_memsave.tape.offload import queue_of
from hf_memsave.tape.private import tree_leaves

#: The bytes to a multiple of which CUDA's allocator rounds up.
UNIT = 512


def trace_step(
    model: nn.Module, batch: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, forward: Callable[..., Any],
    accumulation: int = 1, holds_output: bool = False,
) -> Trace:  # fmt: skip
    """Trace one step, with the optimizer's states made before as from the second step on; it leaves no gradients."""
    device = device_of(model)
    make_states(optimizer)
    parameters = nbytes_of([*model.parameters(), *model.buffers()], device)
    states = nbytes_of([dict(state) for state in optimizer.state.values()], device)
    count = _Places(model, device, parameters + states + nbytes_of(dict(batch), device))
    held: list[Any] = []
    with count:
        if holds_output:  # until there is the next one, which may be in the next step
            with torch.no_grad():
                held.append(forward(**batch))
        for _ in range(min(accumulation, 2)):  # from the second batch on, gradients are there already
            has_loss = run_passes(model, batch, forward, held if holds_output else None, count.begin)
        count.begin("optimizer")
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    of_block: dict[str, int] = {}
    seen: set[int] = set()
    for module, (stack, _) in count.blocks.items():
        own = [x for x in (*module.parameters(), *module.buffers()) if id(x) not in seen]
        seen.update(map(id, own))
        of_block[stack] = max(of_block.get(stack, 0), nbytes_of(own, device))
    return Trace(
        places=count.places, blocks=Counter(stack for stack, _ in count.blocks.values()), of_block=of_block,
        parameters=parameters, trained=nbytes_of([p for p in model.parameters() if p.requires_grad], device),
        states=states, in_flight=count.queue.bound, flops=count.flops, by_kind=dict(count.by_kind),
        by_module=dict(count.by_module), model=type(model).__name__, has_loss=has_loss,
        inputs={name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)},
    )  # fmt: skip


def run_passes(
    model: nn.Module, batch: Mapping[str, Tensor], forward: Callable[..., Any], held: list[Any] | None,
    begin: Callable[[str], None] = lambda phase: None,
) -> bool:  # fmt: skip
    """Run forward and backward of a training step, each announced by ``begin``; return whether there was a loss."""
    begin("forward")
    output = forward(**batch)
    has_loss = not isinstance(output, Mapping) or output.get("loss") is not None
    if has_loss:
        loss = loss_of(output, model, batch)
        if held is not None:
            held[:] = [output]
        del output
    else:  # the sum of all outputs is differentiated, and they are held
        made = [x for x in tree_leaves(dict(output)) if isinstance(x, Tensor) and x.requires_grad]
        loss = torch.stack([x.float().sum() for x in made]).sum()
    begin("backward")
    loss.backward()
    return has_loss


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its states, by a step with zero gradients."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


#: Op -> a function that counts its operations, as PyTorch's own counter; of products of each expert's rows, ours.
FLOPS: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, "_grouped_mm", None): lambda a, b, *_, **__: 2 * a.numel() * b.shape[-1]
} | flop_registry


class _Places(Count):
    """A count of the bytes alive by place, with ``base``; hooks of blocks and on their gradients tell the place."""

    def __init__(self, model: nn.Module, device: str, base: int) -> None:
        super().__init__(device, UNIT)
        self.queue = queue_of(next((p.device for p in model.parameters()), torch.device(device)))
        self.queue.bound = 0
        self.live, self.gradients, self.moved = base, 0, self.queue.moved
        self.place = Place("forward")
        self.places: dict[Place, Moment] = {}
        self.flops = 0
        self.names = names_of(model)
        self.by_kind: Counter[str] = Counter()
        self.by_module: Counter[str] = Counter()
        self.blocks: dict[nn.Module, tuple[str, int]] = {}
        self.waiting: set[Tensor] = {p for p in model.parameters() if p.requires_grad}  # for a gradient
        numbers: Counter[str] = Counter()
        for name, module in model.named_modules():
            if isinstance(module, GradientCheckpointingLayer):
                stack = name.rpartition(".")[0]
                self.blocks[module] = stack, numbers[stack]
                numbers[stack] += 1

    def begin(self, phase: str) -> None:
        """Begin the next phase; as the first backward begins, record what is alive of the forward as kept."""
        if phase == "forward" and not self.by_kind:
            self.flops = 0  # of a step, and not of the output that is held from the one before
        if phase == "backward" and not self.by_kind:
            for entry in self.made.values():
                if entry.maker is not None:
                    self.by_kind[entry.maker.kind] += entry.counted
                    path = entry.maker.module.split(".")
                    self.by_module[".".join("*" if part.isdecimal() else part for part in path)] += entry.counted
            if moved := self.queue.moved - self.moved:
                self.by_kind[AWAY] = self.by_module[AWAY] = moved
        self.place = Place(phase)

    def after(self, call: OpCall, given: list[tuple[Any, int]], made: list[torch.UntypedStorage]) -> None:
        """Count operations as well, and record what made each storage in the first forward."""
        super().after(call, given, made)
        if (flops := FLOPS.get(call.func.overloadpacket)) is not None:
            args = [x for x in call.args if not isinstance(x, torch.dtype)]  # of an output that is wider
            self.flops += flops(*args, **call.kwargs, out_val=call.output)
        if self.place.phase == "forward" and not self.by_kind:
            for storage in made:
                if (entry := self.made.get(storage._cdata)) is not None:
                    entry.maker = made_by(self.names, call.func, entry.counted)

    def note(self, call: OpCall) -> None:
        """Record the bytes alive after an op if they are the most in its place."""
        live = self.live + workspace(call.func, call.args)
        known = self.places.get(self.place)
        if known is None or live > known.live:
            self.places[self.place] = Moment(live, self.gradients, str(call.func))

    def __enter__(self) -> Any:
        for block in self.blocks:
            self._undo.callback(block.register_forward_pre_hook(self._enter_block).remove)
            self._undo.callback(block.register_forward_hook(self._leave_block).remove)
        for p in self.waiting:
            self._undo.callback(p.register_post_accumulate_grad_hook(self._accumulated).remove)
        return super().__enter__()

    def _enter_block(self, module: nn.Module, args: Any) -> None:
        if self.place.phase == "forward":
            self.place = Place("forward", *self.blocks[module])

    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.place.phase != "forward":
            return
        self.place = self.place._replace(is_after=True)
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(partial(self._differentiate, Place("backward", *self.blocks[module])))

    def _differentiate(self, place: Place, gradient: Tensor) -> None:
        self.place = place

    def _accumulated(self, p: Tensor) -> None:
        if p in self.waiting and p.grad is not None:
            self.waiting.remove(p)
            self.gradients += rounded(p.grad.untyped_storage().nbytes(), UNIT)


def nbytes_of(tensors: Any, device: str) -> int:
    """Return the bytes of all storages of ``tensors`` on a type of device, each rounded up."""
    found = {s._cdata: s for s in storages(tree_leaves(tensors), lambda kind: kind == device)}
    return sum(rounded(s.nbytes(), UNIT) for s in found.values())
