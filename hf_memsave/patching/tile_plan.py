"""What is learned of a block before it runs in tiles: where it mixes tokens, and that it does so nowhere else.

The block's code runs on a few tokens, of a number that is no other size in it, so that shapes tell where tokens are. A
NaN in one of them may come out at that token alone; and what a part of the tokens gives is what all of them give there,
though all are one token (a mixture of experts of a limited capacity then drops some). Where tensors have no numbers,
shapes alone decide.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave.device import HALVES, default_generator, is_autocast
from hf_memsave.patching.checkpointed import OF_ADAPTERS
from hf_memsave.patching.tile_mode import CannotTileError, Graph, Plan, Rows, Standin, dead_products, unswapped
from hf_memsave.tape import Tape
from hf_memsave.tape.private import innermost_mode, next_number, without

#: The fewest tokens of a sequence that is worth a try, and how many are tried with where tiles are smaller.
FEWEST, _TRIED = 32, 61
#: The part of the tokens that may choose another expert by the last bit of 16.
_TIES = 0.05
#: What a block's code raises where it cannot run on some tokens alone.
FAILURES = RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError, CannotTileError
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor among a block's arguments."""

    number: int


def plan_of(
    block: nn.Module, part: Callable[..., Any], given: list[Tensor], tiles: list[tuple[int, int]], has_numbers: bool
) -> Plan:
    """Returns what was learned of ``block``, with the reason where it cannot run in tiles.

    Args:
        block: A repeated block.
        part: Runs its code on a tile.
        given: The tensors that it is called with, its input ``[batch, tokens, width]`` first.
        tiles: The tiles to come.
        has_numbers: Whether tensors have numbers to look at.
    """
    plan = Plan()
    plan.why_not = _before_running(block)
    if plan.why_not is not None:
        return plan
    buffers = [(b, b.clone()) for b in block.buffers()] if has_numbers else []
    owned = [(m, d, dict(d), _sizes(d)) for m in block.modules() for d in (m.__dict__, m._buffers)]
    generator = default_generator(given[0].device)
    state = generator.get_state() if has_numbers else None
    tape = innermost_mode()
    try:
        # Under hooks that do nothing, none of it is kept by a tape, nor goes to main memory.
        with without(isinstance(tape, Tape), False), saved_tensors_hooks(Tensor.detach, Tensor.detach):
            _learn_and_test(plan, block, part, given, tiles, None if state is None else (generator, state))
    except FAILURES as error:
        plan.why_not = why_failed(error)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # a write would count as one to what autograd keeps
                    buffer.copy_(before)
        if state is not None:
            generator.set_state(state)
    for module, now, then, sizes in owned:
        changed = [name for name in now.keys() | then.keys() if now.get(name) is not then.get(name)]
        changed += [name for name, size in _sizes(now).items() if size != sizes.get(name, size)]
        if changed:  # which is the last tile's then, and without a graph
            plan.why_not = f"its {type(module).__name__} keeps what it computes ({', '.join(sorted(changed))})"
            now.clear()
            now.update(then)
            lists = {name: one for name, one in then.items() if name in sizes and isinstance(one, list)}
            for name, one in lists.items():
                del one[sizes[name] :]
    return plan


def why_failed(error: Exception) -> str:
    """Why a block does not run in tiles, one of :data:`FAILURES` having been raised."""
    if isinstance(error, CannotTileError):
        return str(error)
    return f"its code fails on a part of the tokens ({type(error).__name__}: {(str(error) or '-').splitlines()[0]})"


def _sizes(own: dict[str, Any]) -> dict[str, int]:
    return {name: len(value) for name, value in own.items() if isinstance(value, (list, dict, set))}


def _learn_and_test(
    plan: Plan, block: nn.Module, part: Callable[..., Any], given: list[Tensor], tiles: list[tuple[int, int]], drew: Any
) -> None:
    tried = _learn(plan, block, part, given, tiles)
    if drew is not None and not torch.equal(drew[0].get_state(), drew[1]):
        raise CannotTileError("it draws random numbers of its own")

    def test() -> None:
        if drew is not None:
            _test(plan, part, *tried)
        _run_tiles(plan, part, given, tiles, drew is not None)

    with torch.no_grad():
        try:
            test()
        except CannotTileError:  # a product may be read without a graph, as DoRA's norms are
            plan.dead = [({}, {}) for _ in plan.dead]
            test()


def signature(block: nn.Module) -> tuple[Any, ...]:
    """What decides which code of a block runs: its plan holds as long as this, and which weights want gradients."""
    found: list[Any] = []
    for module in block.modules():
        own = module.__dict__
        adapters = [repr(own.get(name)) for name in OF_ADAPTERS] if OF_ADAPTERS[0] in own else ()
        name = getattr(unswapped(module, "config"), "_attn_implementation", None)
        hooks = own_hooks(module) if module is not block else ()
        found += [type(module), module.training, id(unswapped(module, "forward")), hooks, name, *adapters]
    return tuple(found)


def wanted_in(block: nn.Module) -> list[tuple[nn.Module, str]]:
    """The weights that want gradients, each by its owner and name, under which an engine may put others in backward."""
    every = [(p, m, name) for m in block.modules() for name, p in m._parameters.items() if p is not None]
    return list({id(p): (m, name) for p, m, name in every if p.requires_grad}.values())


def own_hooks(module: nn.Module) -> tuple[int, ...]:
    """Numbers of the hooks that see what ``module`` is called with and gives, or gradients of that."""
    every = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return tuple(n for hooks in every if hooks for n, hook in hooks.items() if not _is_idle(hook))


def _is_idle(hook: Any) -> bool:
    """Whether it is Transformers' own, which stays for good once a call wanted attentions, and this call does not."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None or getattr(hook, "__module__", "") != capturing.__name__:
        return False
    wanted = capturing._active_collector.get()
    return not wanted or all("hidden_states" in name for name in wanted)


def _before_running(block: nn.Module) -> str | None:
    for name, module in block.named_modules():
        if module.training and isinstance(module, _BATCH_NORMS):
            return f"{name} ({type(module).__name__}) computes statistics of all tokens"
        if "_fsdp_wrapped_module" in module._modules:
            return f"{name} ({type(module).__name__}) is a unit of FSDP1 of its own"
        if name and own_hooks(module):
            return f"{name} ({type(module).__name__}) has hooks, which would see tiles"
    if any(hasattr(parameter, "ds_id") for parameter in block.parameters()):
        return "its parameters are DeepSpeed ZeRO-3's, which come and go with each layer"
    return None


def _learn(
    plan: Plan, block: nn.Module, part: Callable[..., Any], given: list[Tensor], tiles: list[tuple[int, int]]
) -> Any:
    """Fill the plan; returns what to test it with."""
    hidden, *others = given
    sizes = {n for x in (*block.parameters(), *given) for n in x.shape}
    most = min(max(_TRIED, max(end - start for start, end in tiles)), hidden.shape[1] - 1)
    many = _prime(most, sizes)
    few = _prime(many * 2 // 3, sizes)
    rows = hidden[:, :many].detach().clone()
    tensors = [x.detach().requires_grad_(x.requires_grad) for x in others]
    o: list[Tensor] = []
    caught: list[Standin] = []
    first_number = 0 if "_flat_param" in block._parameters else next_number()  # FSDP1 makes views of it beforehand
    weights = [getattr(module, name) for module, name in wanted_in(block)]
    while True:  # one call of attention more in each run
        with torch.enable_grad():
            h = rows.clone().requires_grad_()
            zeros = [x.detach().clone().requires_grad_() for x in o]
            standin, output = part(plan, (0, many), h, tensors, zeros, False, True)
        own = Graph([h, *zeros, *tensors, *weights], first_number)
        if standin.caught is None:
            break
        caught.append(standin)
        mixing = plan.mixings[-1]
        found = standin.caught.arguments
        in_rows = [found[name] for name in mixing.rows]
        whole = [x for name, x in found.items() if isinstance(x, Tensor) and name not in mixing.rows]
        wanted = [*in_rows, *whole], in_rows
        plan.dead.append(tuple(dead_products(standin.products, each, own) for each in wanted))
        o.append(_like_output(found["query"], found["value"], mixing.out))
    if not plan.mixings:
        raise CannotTileError("it calls no attention that hf_memsave knows")
    first = output[0] if isinstance(output, tuple) else output
    if not isinstance(first, Tensor) or first.shape != h.shape:
        raise CannotTileError(f"it returns no tensor of its input's shape, but {type(first).__name__}")
    plan.dead.append((dead_products(standin.products, [first], own),) * 2)
    if isinstance(output, tuple):
        plan.extras = tuple(_extra(x, tensors) for x in output[1:])
    return rows, tensors, o, (few, many)


def _prime(most: int, sizes: set[int]) -> int:
    """The largest prime number up to ``most`` that divides no size: what is so long has a row for each token."""
    for n in range(most, 4, -1):
        if all(n % i for i in range(2, int(n**0.5) + 1)) and all(size % n for size in sizes):
            return n
    raise CannotTileError(f"no number of tokens up to {most} is told from its other sizes")


def _like_output(query: Tensor, value: Tensor, out: Rows) -> Tensor:
    """Zeros, as attention of these gives: ``[batch, heads, tokens, width]``, or tokens before heads."""
    dtype = torch.get_autocast_dtype(query.device.type) if is_autocast(query) else query.dtype
    zeros = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=dtype)
    return zeros if out.dim == -2 else zeros.transpose(-2, -3).contiguous()


def _extra(x: Any, tensors: list[Tensor]) -> Any:
    """What stands for another output of the block: an argument that it hands on, or None."""
    for number, one in enumerate(tensors, 1):
        if one is x:
            return Slot(number)
    if x is not None:
        raise CannotTileError(f"it returns {type(x).__name__} beside its output")


def _test(
    plan: Plan, part: Callable[..., Any], rows: Tensor, tensors: list[Tensor], o: list[Tensor], sizes: tuple[int, int]
) -> None:
    """Raise where tokens of one run change what others give, but for attention."""
    few, many = sizes
    tokens = [0, many // 2, many - 1]
    hurt = rows.clone()
    hurt[:, tokens] = torch.nan
    allowed = set(tokens)
    filled = []
    for n, (mixing, x) in enumerate(zip(plan.mixings, o, strict=True)):
        one = x.clone(memory_format=torch.contiguous_format)
        mixing.out.of(one, 1 + n, 2 + n).fill_(torch.nan)
        filled.append(one)
    for stage in range(len(o) + 1):
        outs = _outs(plan, part, hurt, tensors, filled[:stage], (0, many), stage)
        nans = [_by_token(out, where).isnan().any(1).nonzero().flatten().tolist() for out, where in outs]
        if not all(allowed.issuperset(hurt_too) for hurt_too in nans):
            raise CannotTileError("what it computes of one token changes others, not by attention alone")
        allowed = allowed | {1 + stage}
    hurt[:, tokens] = torch.randn_like(hurt[:, tokens]) * 10 * rows.std()  # some functions let no NaN pass
    others = [i for i in range(many) if i not in tokens]
    for stage in range(len(o) + 1):
        before, after = (_outs(plan, part, x, tensors, o[:stage], (0, many), stage) for x in (rows, hurt))
        for (expected, where), (out, _) in zip(before, after, strict=True):
            if not _is_near(_by_token(out, where)[others], _by_token(expected, where)[others], out, _TIES):
                raise CannotTileError("what it computes of one token changes others, not by attention alone")
    starts = 0, (many - few) // 2, many - few
    alike = (rows[:, n : n + 1].expand_as(rows).contiguous() for n in (0, many // 2))  # one may choose by the last bit
    is_alone = all(_is_alone(plan, part, rows, tensors, o, sizes, start, _TIES) for start in starts)
    if not is_alone or not any(_is_alone(plan, part, x, tensors, o, sizes, starts[-1]) for x in alike):
        raise CannotTileError("what it computes of a token depends on how many others there are (capacity, statistics)")


def _is_near(found: Tensor, expected: Tensor, like: Tensor, ties: float = 0.0) -> bool:
    """Whether tokens are as expected, but for a few roundings; in 16 bits all but a part of them."""
    dtype = torch.get_autocast_dtype(like.device.type) if is_autocast(like) else like.dtype
    slack = torch.finfo(dtype).eps * (2 if dtype in HALVES else 64)
    error, norms = (found.float() - expected.float()).norm(dim=1), expected.float().norm(dim=1)
    far = int((~(error <= slack * norms.max())).sum())
    return far <= (ties * len(error) if dtype in HALVES else 0)


def _is_alone(
    plan: Plan, part: Callable[..., Any], rows: Tensor, tensors: list[Tensor], o: list[Tensor], sizes: tuple[int, int],
    start: int, ties: float = 0.0,
) -> bool:  # fmt: skip
    few, many = sizes
    end = start + few
    for stage in range(len(o) + 1):
        wholes = _outs(plan, part, rows, tensors, o[:stage], (0, many), stage)
        cut = [m.out.of(x, start, end) for m, x in zip(plan.mixings, o[:stage], strict=False)]
        parts = _outs(plan, part, rows[:, start:end], tensors, cut, (start, end), stage)
        for (whole, where), (out, _) in zip(wholes, parts, strict=True):
            if not _is_near(_by_token(out, where), _by_token(whole, where)[start:end], out, ties):
                return False
    return True


def _outs(
    plan: Plan, part: Callable[..., Any], rows: Tensor, tensors: list[Tensor], o: list[Tensor], tile: tuple[int, int],
    stage: int,
) -> list[tuple[Tensor, Any]]:  # fmt: skip
    """What a stage gives, and where its tokens are."""
    return _outs_of(plan, stage, *part(plan, tile, rows, tensors, [x.detach().clone() for x in o], False))


def _outs_of(plan: Plan, stage: int, standin: Any, output: Any) -> list[tuple[Tensor, Any]]:
    if stage < len(plan.mixings):
        caught = standin.caught.arguments
        return [(caught[name], where) for name, where in plan.mixings[stage].rows.items()]
    return [(output[0] if isinstance(output, tuple) else output, Rows(-2, 1))]


def _by_token(tensor: Tensor, where: Rows) -> Tensor:
    """``[tokens, all else]``."""
    apart: Tensor = tensor.unflatten(where.dim, (where.outer, -1))
    return apart.movedim(where.dim % tensor.dim() + 1, 0).flatten(1)


def _run_tiles(
    plan: Plan, part: Callable[..., Any], given: list[Tensor], tiles: list[tuple[int, int]], has_numbers: bool
) -> None:
    """Run the first and the last tile as they are, the last also but for its first token, which changes no other."""
    hidden, *tensors = (x.detach() for x in given)
    (start, end), whole = tiles[-1], []
    for tile in (tiles[0], (start, end), (start + 1, end)):
        rows, o, outs = hidden[:, slice(*tile)], list[Tensor](), []
        for stage, mixing in enumerate([*plan.mixings, None]):
            standin, output = part(plan, tile, rows, tensors, o, False)
            outs += _outs_of(plan, stage, standin, output)
            if mixing is not None:
                found = standin.caught.arguments
                o = [*o, _like_output(found["query"], found["value"], mixing.out)]
        whole, before = outs, whole
    for (out, where), (expected, _) in zip(whole, before, strict=True):
        expected = _by_token(expected, where)
        if has_numbers and not _is_near(_by_token(out, where), expected[1:], out, max(_TIES, 1.5 / len(expected))):
            raise CannotTileError("what it computes of a token depends on how many others there are")
