r"""Blocks that run in tiles of the sequence, forward and backward: a block's own Python code, on some tokens at a time.

Attention alone mixes tokens (:mod:`~hf_memsave.patching.tile_mode` stands in for it), and runs once, on all of them::

    forward     A: tiles up to attention -> q, k, v      attention -> o          B: tiles from attention on -> output
    backward    A again                                  attention, its graph    B with graphs: d input, d o, weights
                                                         attention's backward    A with graphs: d input +=, weights

and so on where there are two attentions, as in a decoder that looks at an encoder. Kept for backward: the block's input
alone, as with ``checkpoint="block"``, and one bit an element of what a dropout drops from. While a tile's graph lives,
a tape keeps the floor of it. A block that mixes tokens otherwise stays at "block".

Exact: every row is computed as in stock. Gradients of weights are summed over tiles in fp32, rounded once, and handed
to autograd once, so they are stock's up to the order of sums.
Source: Chen et al. (2016), arXiv:1604.06174, for a rerun's idea.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.device import default_generator, has_numbers
from hf_memsave.logs import warn_once
from hf_memsave.ops.op import once_differentiable
from hf_memsave.patching.checkpointed import checkpoint_block, run_differs, state_of
from hf_memsave.patching.swap import patch_of, stock_class
from hf_memsave.patching.taped import settings_of
from hf_memsave.patching.tile_mode import (
    LOCK,
    Call,
    CannotTileError,
    Mask,
    Plan,
    Reached,
    Rows,
    Standin,
    attentions_in,
    caught_in,
    quantized_in,
)
from hf_memsave.patching.tile_plan import FAILURES, FEWEST, Slot, own_hooks, plan_of, signature, wanted_in, why_failed
from hf_memsave.tape import Tape, current
from hf_memsave.tape.as_stock import counted
from hf_memsave.tape.private import tree_leaves, tree_map, without_hooks

#: Tokens of a tile where nothing tells what is free.
TOKENS = 4096
#: The part of what is free that the work on one tile may take.
_PART = 0.25
#: Where a block finds the plans that were made of it.
PLANS = "_memsave_tiles"


def tile_tokens(tiles: int | str | None, block: nn.Module, hidden: Tensor, free: int | None = None) -> int:
    """Returns how many tokens of each sequence a tile has.

    Args:
        tiles: As :attr:`MemSaveConfig.tiles`.
        block: The block that runs.
        hidden: Its input, ``[batch, tokens, width]``.
        free: Bytes that are free on the device; None asks CUDA, and elsewhere takes a fixed number of tokens.
    """
    batch, seq = hidden.shape[:2]
    if isinstance(tiles, int):
        return min(tiles, seq)
    least = max(TOKENS // max(batch, 1), 256)
    if free is None and hidden.device.type == "cuda":
        device = hidden.device
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free -= torch.cuda.memory_allocated(device)
    if free is None:
        return min(least, seq)
    widths = sum(max(p.shape) for p in block.parameters() if p.dim() > 1)  # what its products give, about
    fits = int(free * _PART / (3 * batch * max(widths, 1) * hidden.itemsize))
    return min(max(fits // 1024 * 1024, least), seq)


def tile(function: Any, *args: Any) -> Any:
    """In the place of ``checkpoint``: a block's forward in tiles; run again as a whole where it is short, or cannot."""
    given = *getattr(function, "args", ()), getattr(getattr(function, "func", None), "__self__", None)
    block = next((one for one in given if isinstance(one, nn.Module)), None)
    kwargs = dict(getattr(function, "keywords", None) or {})
    patch = None if block is None else patch_of(block)
    if block is None or patch is None or patch.config is None or torch.compiler.is_compiling():
        return checkpoint_block(function, *args)
    if block not in function.args and own_hooks(block):  # Transformers 5.0 has a block's own hooks run within
        return checkpoint_block(function, *args)
    run = _Run(block, patch, args, kwargs)
    if not run.is_long:
        return checkpoint_block(function, *args)
    if run.plan().why_not is not None:
        return checkpoint_block(function, *args)
    run.before = state_of(function, block)
    run.function = partial(function.func, *function.args)  # without what the block was called with
    generator = default_generator(run.given[0].device) if has_numbers(run.given[0]) else None
    state = None if generator is None else generator.get_state()
    try:
        return run.start()
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:  # of tokens of another number than those that the plan was tried with
        run.refuse(why_failed(error))
    if generator is not None:
        generator.set_state(state)
    return checkpoint_block(function, *args)


class Plans(dict[Any, Plan]):
    """Of a block, by how it was called; a copy or a pickle of the block makes its own."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Plans, ()

    def __deepcopy__(self, memo: Any) -> Plans:
        return Plans()


class _Run:
    """One call of a block: its code, arguments and tiles."""

    def __init__(self, block: nn.Module, patch: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.block, self.config, self.number = block, patch.config, patch.block
        first: Any = args[0] if args else kwargs.get("hidden_states")
        is_hidden = isinstance(first, Tensor) and first.dim() == 3 and first.is_floating_point()
        self.tiles: list[tuple[int, int]] = []
        self.seq = 0
        if is_hidden:
            self.seq = seq = first.shape[1]
            size = max(tile_tokens(self.config.tiles, block, first), 2)
            even = -(-seq // max(-(-seq // size), 1))
            starts = [start for start in range(0, seq, max(even, 1)) if start == 0 or seq - start > 1]  # no tile of one
            self.tiles = list(zip(starts, [*starts[1:], seq], strict=True))
            self.tiles = self.tiles if has_numbers(first) else self.tiles[:2]  # the others have as many bytes
        if not self.is_long:
            return  # nothing else is asked of it
        self.code: Any = stock_class(block).forward
        self.function: Any = None
        self.before: dict[str, Any] = {}
        self.signature = signature(block)
        self.weights: list[tuple[nn.Module, str]] = []
        given = [first, *(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))]
        self.given: list[Tensor] = list({id(x): x for x in given}.values())
        slots = {id(x): Slot(n) for n, x in enumerate(self.given)}
        self.arguments = tree_map(lambda x: slots.get(id(x), x), (args, kwargs))
        self.masks: list[Mask | None] = []
        self.states: list[Tensor | None] = []
        self.learned: Plan | None = None
        self.attentions, self.quantized = attentions_in(block), quantized_in(block)
        kinds = {first.device.type, "cpu"}
        self.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    @property
    def is_long(self) -> bool:
        """Whether there is more than one tile."""
        return len(self.tiles) > 1 and self.seq >= FEWEST

    def plan(self) -> Plan:
        """What is known of the block as it is called now; learned at the first such call."""
        hidden = self.given[0]
        known = self.block.__dict__.setdefault(PLANS, Plans())
        wanted = [(id(module), name) for module, name in wanted_in(self.block)]
        kinds = repr(tree_map(self._kind, self.arguments)), repr(self.autocast)
        key = hidden.shape[0], *kinds, *self.signature, *wanted
        if key not in known:
            with LOCK, _under(self.autocast):  # another thread may have made it since
                of = self.block, self.part, self.given, self.tiles, has_numbers(hidden)
                known[key] = known.get(key) or plan_of(*of)
            self.refuse(known[key].why_not)
        self.learned = known[key]
        return self.learned

    def refuse(self, why: str | None) -> None:
        """Say why the block runs as a whole, from now on."""
        if why is None:
            return
        if self.learned is not None:
            self.learned.why_not = why
        warn_once(
            f"hf_memsave: {type(self.block).__name__} does not run in tiles: {why}. It runs again as a whole, as with "
            "checkpoint='block'."
        )

    def _kind(self, x: Any) -> Any:
        """What of an argument decides which code runs: not its numbers, such as a longest length."""
        if isinstance(x, Slot):
            tensor = self.given[x.number]
            return x.number, tensor.dim(), tensor.dtype, tensor.requires_grad
        return x if isinstance(x, (bool, str, type(None))) else type(x).__name__

    def start(self) -> Any:
        """The block's output."""
        given, self.given = self.given, []
        self.weights = wanted_in(self.block)
        parameters = [getattr(module, name) for module, name in self.weights]
        run = partial(_Tiled.apply, self, len(given), *given, *parameters)
        tape = current()
        log = logging.getLogger("torch._subclasses.fake_tensor")  # tells of grouped products that it cannot count
        before, log.disabled = log.disabled, log.disabled or (tape is not None and tape.ledger is not None)
        try:
            out = counted(tape, "block", run, self._stock, given, self.block)
        finally:
            log.disabled = before
        assert self.learned is not None
        if self.learned.extras is None:
            return out
        return out, *(given[x.number] if isinstance(x, Slot) else x for x in self.learned.extras)

    def settings(self) -> Any:
        """What a tape is laid with."""
        return settings_of(self.config, self.number, "bitsandbytes" in sys.modules)

    def _stock(self, *given: Tensor) -> Any:
        args, kwargs = tree_map(lambda x: given[x.number] if isinstance(x, Slot) else x, self.arguments)
        return self.code(self.block, *args, **kwargs)

    def part(
        self, plan: Plan, tile: tuple[int, int], hidden: Tensor, tensors: list[Tensor], given: list[Tensor],
        draws: bool = True, learns: bool = False,
    ) -> tuple[Standin, Any]:  # fmt: skip
        """The block's code on a tile: what stood in for attention, and the output, or None where that was reached."""
        values = [hidden, *tensors]
        args, kwargs = tree_map(lambda x: values[x.number] if isinstance(x, Slot) else x, self.arguments)
        standin = Standin(plan, tile, self.seq, given, tensors, self.masks if draws else None, self.tiles, learns)
        output = None
        with contextlib.suppress(Reached), caught_in(self.attentions, self.quantized), standin:
            output = self.code(self.block, *args, **kwargs)
        return standin, output

    # Forward

    def gather(self, stage: int, hidden: Tensor, tensors: list[Tensor], given: list[Tensor]) -> Call:
        """How attention is called, with the rows of all tokens."""
        plan: Any = self.learned
        rows: dict[str, Rows] = plan.mixings[stage].rows
        call: Any = None
        for start, end in self.tiles:
            parts = [m.out.of(o, start, end) for m, o in zip(plan.mixings, given, strict=False)]
            caught: Any = self.part(plan, (start, end), hidden[:, start:end], tensors, parts)[0].caught
            if call is None:
                found = caught.arguments.items()
                call = Call(caught.function, {k: rows[k].empty(x, self.seq) if k in rows else x for k, x in found})
            for name, value in caught.arguments.items():
                if isinstance(value, (bool, int, float, str)) and value != (before := call.arguments[name]):
                    raise CannotTileError(f"it calls attention with {name}={value}, and with {before} for other tokens")
            for name, where in rows.items():
                where.put(call.arguments[name], start, end, caught.arguments[name])
        return call  # type: ignore[no-any-return]

    def attend(self, stage: int, call: Call) -> Tensor:
        """Attention of all tokens, which draws what it drew before."""
        first = call.arguments["query"]
        generator = default_generator(first.device) if has_numbers(first) else None
        is_again = stage < len(self.states)
        if generator is None or is_again and self.states[stage] is None:
            return call.function(**call.arguments)
        now = generator.get_state()
        if is_again:
            generator.set_state(self.states[stage])
        try:
            return call.function(**call.arguments)
        finally:
            if is_again:
                generator.set_state(now)
            else:
                self.states.append(None if torch.equal(generator.get_state(), now) else now)

    def forward(self, hidden: Tensor, tensors: list[Tensor]) -> Tensor:
        """The output, of all tokens; nothing is kept."""
        plan: Any = self.learned
        given: list[Tensor] = []
        for stage in range(len(plan.mixings)):
            given.append(self.attend(stage, self.gather(stage, hidden, tensors, given)))
        output: Any = None
        for start, end in self.tiles:
            parts = [m.out.of(o, start, end) for m, o in zip(plan.mixings, given, strict=True)]
            part = _first(self.part(plan, (start, end), hidden[:, start:end], tensors, parts)[1])
            output = Rows(-2, 1).empty(part, self.seq) if output is None else output  # laid out as stock's
            output[:, start:end] = part
        return output  # type: ignore[no-any-return]

    # Backward

    def backward(self, hidden: Tensor, tensors: list[Tensor], wants: list[bool], d_output: Tensor) -> list[Any]:
        """Gradients of the input, of other arguments and of the weights."""
        plan: Any = self.learned
        is_wanted, rest = wants[0], wants[1:]
        tensors = [x.detach().requires_grad_() if want else x for x, want in zip(tensors, rest, strict=False)]
        parameters = [getattr(module, name) for module, name in self.weights]
        sinks = [x for x in tensors if x.requires_grad] + parameters
        sums: list[Tensor | None] = [None] * len(sinks)
        stages: list[Any] = []
        given: list[Tensor] = []
        for stage, mixing in enumerate(plan.mixings):
            call = self.gather(stage, hidden, tensors, given)
            entries = {k: call.arguments[k].detach().requires_grad_() for k in (*mixing.rows, *mixing.wants)}
            with torch.enable_grad(), Tape(*self.settings()):
                o = self.attend(stage, Call(call.function, call.arguments | entries))
            stages.append((entries, o))
            given.append(o.detach())
            del call, o, entries
        d_hidden = torch.empty_like(hidden) if is_wanted else None
        d_given: list[Any] = [None] * len(given)
        for stage in range(len(given), -1, -1):
            d_entries: dict[str, Tensor] = {}
            if stage < len(given):
                entries, o = stages.pop()
                given.pop()
                with without_hooks(sinks):
                    inputs = [*entries.values(), *sinks]
                    found = list(torch.autograd.grad(o, inputs, d_given.pop(), allow_unused=True))
                d_entries = {name: d for name in entries if (d := found.pop(0)) is not None}
                _add(sums, found)
                del entries, o, inputs, found
            for start, end in self.tiles:
                incoming = d_entries if stage < len(plan.mixings) else d_output
                tile = start, end
                self._of_tile(stage, tile, hidden, tensors, given, incoming, d_hidden, d_given, sinks, sums)
            del d_entries
        of_tensors = iter(sums)
        found_sums = [next(of_tensors) if x.requires_grad else None for x in tensors] + list(of_tensors)
        owners = [*tensors, *parameters]
        return [d_hidden, *(None if s is None else s.to(p.dtype) for s, p in zip(found_sums, owners, strict=True))]

    def _of_tile(
        self, stage: int, tile: tuple[int, int], hidden: Tensor, tensors: list[Tensor], given: list[Tensor],
        incoming: Any, d_hidden: Tensor | None, d_given: list[Any], sinks: list[Tensor], sums: list[Tensor | None],
    ) -> None:  # fmt: skip
        """Differentiate what a tile made: its output, or what it handed to attention."""
        plan: Any = self.learned
        start, end = tile
        h = hidden[:, start:end].detach().requires_grad_(d_hidden is not None)
        outs = [m.out for m in plan.mixings[:stage]]
        parts = [rows.of(o, start, end).detach().requires_grad_() for rows, o in zip(outs, given, strict=True)]
        with torch.enable_grad(), Tape(*self.settings()):
            standin: Any
            standin, output = self.part(plan, tile, h, tensors, parts)
            if isinstance(incoming, dict):
                rows_of, caught = plan.mixings[stage].rows, standin.caught.arguments
                pairs = [(caught[k], rows_of[k].of(d, start, end)) for k, d in incoming.items() if k in rows_of]
                pairs += [(caught[k], d) for k, d in incoming.items() if k not in rows_of and start == 0]
                if d_hidden is not None:  # made last, differentiated first: added up in stock's order
                    pairs.append((h.view_as(h), d_hidden[:, start:end].clone()))
            else:
                pairs = [(_first(output), incoming[:, start:end])]
        pairs = [(x, d) for x, d in pairs if x.requires_grad]
        del standin, output
        inputs = [*([] if d_hidden is None else [h]), *parts, *sinks]
        if not pairs:
            return
        with without_hooks(sinks):
            outputs, gradients = zip(*pairs, strict=True)
            found = list(torch.autograd.grad(outputs, inputs, gradients, allow_unused=True))
        del pairs, outputs, gradients
        if d_hidden is not None:
            d = found.pop(0)
            d_hidden[:, start:end] = 0 if d is None else d
        for i, rows in enumerate(outs):
            d = found.pop(0)
            if d_given[i] is None:
                d_given[i] = torch.zeros_like(given[i])
            if d is not None:
                into = rows.of(d_given[i], start, end)
                rows.put(d_given[i], start, end, into + d if stage < len(plan.mixings) else d)
        _add(sums, found)


def _add(sums: list[Tensor | None], found: Iterable[Tensor | None]) -> None:
    """Add gradients to sums in fp32 or wider."""
    for i, one in enumerate(found):
        if one is not None:
            wide = torch.promote_types(one.dtype, torch.float32)
            before = sums[i]
            sums[i] = one.to(wide, copy=True) if before is None else before.add_(one)


class _Tiled(torch.autograd.Function):
    """Kept: the block's arguments."""

    @staticmethod
    def forward(ctx: Any, run: _Run, count: int, *given: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.count = run, count
        with _under(run.autocast):
            output = run.forward(given[0], list(given[1:count]))
        ctx.save_for_backward(*given[:count], *(bits for mask in run.masks if mask for bits in mask.take()))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> Any:
        run, (hidden, *rest) = ctx.run, ctx.saved_tensors
        tensors, bits = rest[: ctx.count - 1], iter(rest[ctx.count - 1 :])
        for what, now in state_of(run.function, run.block).items():
            if now != run.before[what]:
                raise run_differs(run.block, what)
        wants = all(getattr(module, name).requires_grad for module, name in run.weights)
        if signature(run.block) != run.signature or not wants or set(wanted_in(run.block)) - set(run.weights):
            raise run_differs(run.block, "another forward, another attention, or other weights that want gradients")
        for mask in filter(None, run.masks):
            mask.give(bits)
        try:
            with _under(run.autocast):
                return None, None, *run.backward(hidden, tensors, list(ctx.needs_input_grad[2:]), d_output)
        finally:
            for mask in filter(None, run.masks):
                mask.take()


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


@contextlib.contextmanager
def _under(states: Any) -> Iterator[None]:
    """As autocast was; what it casts is not shared, as what it casts without a graph would be with one."""
    with contextlib.ExitStack() as stack:
        for kind, is_on, dtype in states:
            stack.enter_context(torch.autocast(kind, dtype, is_on, cache_enabled=False))
        yield
