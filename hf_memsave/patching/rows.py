r"""Submodules that compute each row by itself, such as MLPs and norms, run on some rows at a time.

With checkpoint="tiles", inside a block that runs again, the largest such submodules keep their input and nothing else::

    forward     y[rows] = module(x[rows])                    some thousand rows of x ``[*, H]`` at a time
    backward    dx[rows], dw += the gradients of module(x[rows])

So an MLP's wide tensors never exist for all rows at once. Attention, residual sums and all between submodules run as in
stock. The norm between blocks and head, whose Python code makes six copies in fp32, runs in rows with "block" too.
Exact: weight gradients are summed over the parts in fp32, and returned to autograd once.

Whether a submodule mixes rows is found by running it. Before its first use in each of its states it runs on some of the
model's own rows: with a NaN or other numbers in a few of them, and in two parts, forward and backward. In each forward
a few rows, far apart, run once more, and must give what they gave among others. A module that fails runs whole.
Source: Chen et al. (2016), arXiv:1604.06174, for what runs again in parts.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_memsave.arch.sites import first_of_experts, kind_of
from hf_memsave.device import HALVES, default_generator, has_numbers
from hf_memsave.errors import MemSaveError
from hf_memsave.logs import warn_once
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.tape import Tape, current, private
from hf_memsave.tape.as_stock import run_counted
from hf_memsave.tape.dropout import DROPOUTS, drop, dropout_arguments, mask_as_bits, mask_of
from hf_memsave.tape.frame import Frame
from hf_memsave.tape.handles import written
from hf_memsave.tape.tape import MADE
from hf_memsave.tape.tensors import nodes_before

#: Rows of all sequences that run at a time where ``tiles="auto"``.
ROWS = 4096
#: Most rows that a module is tried with, and that each forward computes once more.
_TRIED, _CHECKED = 64, 16
#: Copies of its input in fp32 that a norm makes in backward; they may take 1/_PART of a chunk of the loss.
_COPIES, _PART = 6, 8
#: Module -> its state -> names of its parameters that require gradients, None if it runs whole; and why, or "".
_found: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[list[str] | None, str]]] = weakref.WeakKeyDictionary()
#: Where a checkpoint's frame has which calls, by number, ran in rows; and a tape how many calls there were.
_DECIDED = "_memsave_rows"
#: Most states of a module that are remembered.
_MOST = 99
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_PARTS = ("_modules", "_buffers")
_SIMPLE = (bool, int, float, str, type(None), torch.dtype)
#: Errors of a module that cannot run on some rows.
_FAILURES = RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError
#: Why a module runs whole that may be neither MLP nor norm: the one reason that is not logged.
_OTHER = "it gives no tensor with a row for each of its input's, and no wider"


class CannotRunInRowsError(MemSaveError):
    """A module cannot run on some rows at a time; the message says why."""


def may_run_in_rows(module: nn.Module, cls: Any) -> bool:
    """Return whether to try ``module``, of stock class ``cls``: no attention, router, container or single function."""
    if kind_of(cls) in ("norm", "attention"):
        return kind_of(cls) == "norm" and not cls.forward.__module__.startswith("torch.")
    within = [(child, parent) for parent in module.modules() for child in parent._modules.values()]
    of_many = [c for c, p in within if isinstance(c, _CONTAINERS) and not type(p).__module__.startswith("peft.")]
    routes = of_many or any(c is not None and first_of_experts(c) for c, _ in within)
    return bool(within or first_of_experts(module)) and not routes and not issubclass(cls, _CONTAINERS)


def forget(module: nn.Module) -> None:
    """Forget what trying ``module`` gave, so that it is tried again."""
    _found.pop(module, None)


def reasons(module: nn.Module) -> list[str]:
    """Return, for each state in which ``module`` was to run in rows, why it ran whole, or ""."""
    return [why for _, why in _found.get(module, {}).values()]


def run_in_rows(module: nn.Module, forward: Callable[..., Any], rows: int | str, args: Any, kwargs: Any) -> Any:
    """Return ``forward(module, *args)``, run on some rows at a time; NotImplemented if it is to run whole.

    ``rows`` are tokens of each sequence at a time; "auto": :data:`ROWS` of all sequences; "norm": by a chunk of the
    loss. To run in rows, ``args`` are tensors ``[*, H]`` of equally many rows, and there are no ``kwargs``.

    Raises:
        CannotRunInRowsError: In backward, if it ran in rows in its forward and now cannot.
    """
    if kwargs or not args or torch.compiler.is_compiling() or (tape := current()) is None:
        return NotImplemented
    x = args[0]
    if not all(type(a) in MADE and a.dim() > 1 and a.shape[:-1] == x.shape[:-1] for a in args):
        return NotImplemented
    most = rows * (x.shape[0] if x.dim() > 2 else 1) if isinstance(rows, int) else ROWS
    most = _rows_of_norm(module, x) if rows == "norm" else most
    # A module of two arguments adds a residual to a dense layer: not worth it, unless it makes wider tensors.
    is_worth = (
        len(args) == 1 or first_of_experts(module) or any(max(p.shape) > x.shape[-1] for p in module.parameters())
    )
    if not 0 < most < x.shape[:-1].numel() or not x.is_floating_point() or not is_worth:
        return NotImplemented
    # A block that runs again in backward runs each of its calls, by number, as in its forward.
    frame = None if tape.outer is None else private.checkpoint_frame(tape.outer)[0]
    decided = {} if frame is None else vars(frame).setdefault(_DECIDED, {})
    number = tape.memo[_DECIDED] = tape.memo.get(_DECIDED, 0) + 1
    run, y = _Run(module, forward, args, max(most, 2)), NotImplemented
    generator = default_generator(x.device)
    state = generator.get_state() if has_numbers(x) else None
    try:
        run.names = decided[number] if number in decided else _names_of(run, args)
        if run.names is not None:
            given = *args, *run.parameters()
            run.versions = [g._version for g in given[len(args) :] if frame is None]  # a rerun reads those of backward
            is_asked = number in decided and any(g.requires_grad for g in given)
            held = [tape.pack(a) for a in args] if is_asked else []  # a checkpoint's early stop ends the rerun here
            y = run_counted(tape, "rows", partial(_InRows.apply, run, *given), partial(forward, module), args, module)
            del held
            if kind_of(type(module)) == "norm":
                tape.record(y, run, given)  # so that it is recomputed for functions after it
    except CannotRunInRowsError as error:
        if number in decided:
            raise
        run.names, _found[module][run.key] = None, (None, str(error))
        if str(error) != _OTHER:
            warn_once(f"hf_memsave: {type(module).__name__} runs whole, and not in rows: {error}.")
        if run.masks.again:  # run whole, it draws masks as in stock
            generator.set_state(state)
    decided.setdefault(number, run.names)
    return y


def _names_of(run: _Run, args: Sequence[Tensor]) -> list[str] | None:
    """Return the names of the parameters that require gradients, None if it runs whole; try each state once."""
    if private.are_all_watched():  # by hooks that would see parts
        return None
    known = _found.setdefault(run.module, {})
    kinds = [(a.dim(), a.shape[-1], a.dtype, a.requires_grad) for a in args]
    run.key = *kinds, run.autocast, _state_of(run.module)
    if (found := known.get(run.key)) is None:
        if len(known) > _MOST:
            known.clear()
        found = known[run.key] = _tried(run, args), ""
    return found[0]


def _rows_of_norm(module: nn.Module, x: Tensor) -> int:
    """Return how many rows the last norm runs at a time; 0 for all, while its copies are small beside a chunk."""
    of_row, chunk = _COPIES * max(x.itemsize, 4) * x.shape[-1], chunked_loss.CHUNK
    few = chunk if any(p.requires_grad for p in module.parameters()) else chunk // _PART  # in parts, sums change bits
    is_small = x.shape[:-1].numel() * of_row <= few
    return 0 if is_small else max(1, min(chunk, max(chunk // _PART, x.nbytes)) // of_row)


class _Run:
    """One call of a module: its forward, the autocast around it, and which rows of its arguments run at a time."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], args: Sequence[Tensor], most: int) -> None:
        self.module, self.forward, self.count = module, forward, len(args)
        self.names: list[str] | None = None  # of its parameters that require gradients
        self.versions: list[int] = []
        self.key: Any = None
        self.lead, kind = args[0].shape[:-1], args[0].device.type
        self.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        rows = self.lead.numel()
        even = -(-rows // -(-rows // most))
        starts = [start for start in range(0, rows, even) if start == 0 or rows - start > 1]  # no part of one row
        self.parts = [slice(*ends) for ends in zip(starts, [*starts[1:], rows], strict=True)]
        if not has_numbers(args[0]):
            self.parts = self.parts[:2]  # the others have as many bytes
        self.checked = _spread(rows, _CHECKED, args[0].device)
        self.masks = _Masks(rows, [*self.parts, self.checked], [])

    def parameters(self) -> list[Tensor]:
        """Return the current parameters that require gradients: FSDP2 may have replaced them since the forward."""
        return [self.module.get_parameter(name) for name in self.names or ()]

    def flat(self, x: Tensor) -> Tensor:
        """Return ``x [*, H]`` as ``[1, ..., rows, H]``."""
        return x.reshape(*[1] * (len(self.lead) - 1), -1, x.shape[-1])

    @contextlib.contextmanager
    def as_stock(self, masks: _Masks, module: nn.Module | None = None) -> Iterator[Callable[..., Any]]:
        """Give the stock forward, to run under no tape; turn errors but out-of-memory into CannotRunInRowsError."""
        tape = isinstance(private.innermost_mode(), Tape)
        try:
            with private.without(tape, False), saved_tensors_hooks(Tensor.detach, Tensor.detach), masks:
                # No cache of casts: one made without a graph must not serve code that needs a gradient.
                with torch.autocast(*self.autocast, cache_enabled=False):
                    yield partial(masks.run, partial(self.forward, module or self.module))
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            first = (str(error) or "-").splitlines()[0]
            raise CannotRunInRowsError(f"its code fails on some rows ({type(error).__name__}: {first})") from error

    def are_near(self, found: Tensor, expected: Tensor) -> bool:
        """Return whether rows are equal but for a few roundings, and not finite at the same places."""
        _, low, is_on = self.autocast
        dtype = next((d for d in (low if is_on else None, expected.dtype) if d in HALVES), None)
        slack = 2 * torch.finfo(dtype).eps if dtype else 64 * torch.finfo(torch.float32).eps  # also in fp64
        is_finite, of = expected.isfinite(), expected.float()
        error = torch.where(is_finite, found.float() - of, 0).norm(dim=-1)
        most = torch.where(is_finite, of, 0).norm(dim=-1).max()
        return bool((error <= slack * most).all() & (found.isfinite() == is_finite).all())

    @torch.no_grad()
    def __call__(self, *given: Tensor) -> Tensor:
        """Return the output ``[*, out]`` of all rows of the arguments, which come first in ``given``."""
        flat = [self.flat(a) for a in given[: self.count]]
        y: Any = None
        self.masks.reset()
        with self.as_stock(self.masks) as forward:
            for part in self.parts:
                made = forward(*(f[..., part, :] for f in flat))
                y = made.new_empty(*self.lead, made.shape[-1]) if y is None else y
                self.flat(y)[..., part, :] = made
            if has_numbers(y) and private.backward_id() < 0:
                with _disable_current_modes():  # selective checkpointing would look for it in the rerun, too
                    made = forward(*(f[..., self.checked, :] for f in flat))
                if not self.are_near(made, self.flat(y)[..., self.checked, :]):
                    raise CannotRunInRowsError("what it computes of a row depends on the others")
        self.masks.reset()
        return y  # type: ignore[no-any-return]

    def gradients(self, args: Sequence[Tensor], wants: Sequence[bool], dy: Tensor) -> list[Tensor | None]:
        """Return gradients of ``args``, then of the parameters, summed over the parts in fp32 or wider."""
        parameters = self.parameters()
        flat, dy = [self.flat(a.detach()) for a in args], self.flat(dy)
        self.masks.reset()
        of_args: list[Any] = [None] * len(flat)
        sums: list[Any] = [None] * len(parameters)
        for part in self.parts:
            rows = [f[..., part, :].requires_grad_(want) for f, want in zip(flat, wants, strict=False)]
            with torch.enable_grad(), self.as_stock(self.masks) as forward:
                y = forward(*rows)
            leaves = [*(x for x in rows if x.requires_grad), *parameters]
            with private.without_hooks(parameters):
                found = list(torch.autograd.grad(y, leaves, dy[..., part, :], allow_unused=True))
            del y
            for i, x in enumerate(rows):
                if x.requires_grad and (one := found.pop(0)) is not None:
                    of_args[i] = torch.zeros_like(flat[i]) if of_args[i] is None else of_args[i]
                    of_args[i][..., part, :] = one
            for i, one in enumerate(found):
                if one is not None:
                    wide = torch.promote_types(one.dtype, torch.float32)
                    sums[i] = one.to(wide, copy=True) if sums[i] is None else sums[i].add_(one)
            del found, one, rows, leaves, x
        self.masks.reset()
        dxs = [None if dx is None else dx.view(a.shape) for dx, a in zip(of_args, args, strict=True)]
        return [*dxs, *(None if s is None else s.to(p.dtype) for s, p in zip(sums, parameters, strict=True))]

    def differentiable(self, args: Sequence[Tensor], wants: Sequence[bool], dy: Tensor) -> list[Tensor | None]:
        """Return :meth:`gradients`, computed of all rows at once: for double backward, or for a batch of ``dy``."""
        is_open, cut, is_twice = list[bool](), partial[Any](_Cut.apply), torch.is_grad_enabled()
        with torch.enable_grad(), self.as_stock(_Masks(self.lead.numel(), [slice(None)], self.masks.again)) as forward:
            own = args if is_twice else [a.detach().requires_grad_(a.is_floating_point()) for a in args]
            views = [cut(a, is_open) if want else a for a, want in zip(own, wants, strict=False)]
            y = forward(*map(self.flat, views)).reshape(*self.lead, -1)
        leaves = [*(x for x, want in zip(views, wants, strict=False) if want), *self.parameters()]
        with private.without_hooks(self.parameters()):
            found = list(torch.autograd.grad(y, leaves, dy, None, is_twice, allow_unused=True))
        is_open.append(True)
        return [*(found.pop(0) if want else None for want in wants[: self.count]), *found]


class _InRows(torch.autograd.Function):
    """The autograd node of a run: it keeps the arguments, and returns gradients of them and of the parameters."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *given: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*given[: run.count])
        ctx.set_materialize_grads(False)
        return run(*given)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        run, wants = ctx.run, ctx.needs_input_grad[1:]
        if dy is None:
            return None, *(None for _ in wants)
        args = ctx.saved_tensors
        for parameter, version in zip(run.parameters(), run.versions, strict=False):
            if parameter._version != version:
                raise written(parameter, version)
        is_whole = torch.is_grad_enabled() or private.stands_for_many(dy)
        return None, *(run.differentiable if is_whole else run.gradients)(args, wants, dy)


class _Cut(torch.autograd.Function):
    """The identity, which passes no gradient on while ``is_open`` is empty: the first derivative ends at x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_open: list[bool]) -> Tensor:
        ctx.is_open = is_open
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        return dx if ctx.is_open else None, None


class _Masks(TorchFunctionMode):
    """A mode that runs dropouts of some rows with stock's masks, drawn for all rows at once and kept in bits.

    There are ``count`` rows, of which ``parts`` run together, in order. ``again`` has functions that draw each mask
    again, added as it is drawn for the first time; None drops nothing.
    """

    frame = Frame({}, "seed")  # read by functions that draw for a tape

    def __init__(self, count: int, parts: Sequence[Any], again: list[Callable[[], Tensor]] | None) -> None:
        super().__init__()
        self.count, self.parts, self.again = count, parts, again
        self.bits: list[list[Any]] = []
        self.part = self.number = self.rows = 0

    def run(self, forward: Callable[..., Any], *xs: Tensor) -> Any:
        """Run ``forward`` on ``xs``, the rows of the next part."""
        self.number, self.rows = 0, xs[0].shape[:-1].numel()
        out = forward(*xs)
        self.part += 1
        return out

    def reset(self) -> None:
        """Forget the bits, and start over with the first part."""
        self.bits.clear()
        self.part = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in DROPOUTS:
            return func(*args, **kwargs)
        x, p, training, inplace = dropout_arguments(*args, **kwargs)
        if training is not True or p == 0:
            return func(*args, **kwargs)
        is_plain = func in (F.dropout, torch.dropout) and not inplace and 0 < p < 1 and x.is_contiguous()
        if not is_plain or x.dim() < 2 or x.shape[:-1].numel() != self.rows:
            raise CannotRunInRowsError("it drops out otherwise than by a plain dropout of rows")
        if self.again is None:
            return x
        if self.number == len(self.bits):
            self.bits.append(self._drawn(x, p, self.again))
        again, bits = self.bits[self.number][self.part]
        self.number += 1
        return drop(x, again(bits), p)

    @torch.no_grad()
    def _drawn(self, x: Tensor, p: float, known: list[Callable[[], Tensor]]) -> list[Any]:
        """Draw the next mask, of all rows; return a decoder and the bits of it for each part."""
        tape: Any = self
        if self.number == len(known):
            mask, again = mask_of(tape, x.new_empty(*x.shape[:-2], self.count, x.shape[-1]), p)
            known.append(again)
        else:
            mask = known[self.number]()
        return [mask_as_bits(tape, mask[..., part, :].contiguous()) for part in self.parts]


class _Watch(TorchDispatchMode):
    """A mode that refuses ops that draw random numbers and, unless ``counts``, ops that sort or count rows."""

    def __init__(self, counts: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CannotRunInRowsError(f"it draws random numbers ({func})")
        if func.overloadpacket in private.COUNTING and not self.counts:
            raise CannotRunInRowsError(f"it counts or sorts, as routers do ({func})")
        return func(*args, **(kwargs or {}))


def _tried(run: _Run, args: Sequence[Tensor]) -> list[str]:
    """Try a module on some rows: raise if it mixes them; return names of its used parameters that require gradients."""
    for name, m in run.module.named_modules():
        hooks = m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks
        if (any(hooks) and name) or "_hf_hook" in vars(m):
            raise CannotRunInRowsError(f"{name or 'it'} ({type(m).__name__}) has hooks")
    if any(hasattr(p, "ds_id") for p in run.module.parameters()):
        raise CannotRunInRowsError("its parameters are DeepSpeed ZeRO-3's, which come and go")
    twin = _twin_of(run.module, {})  # so that the module keeps nothing of these calls
    tokens = _spread(run.lead[-1], max(2, _TRIED // run.lead[:-1].numel()), args[0].device)
    given = [a.detach()[..., tokens, :] for a in args]
    flat = [run.flat(x) for x in given]
    count = flat[0].shape[-2]
    half = max(1, count // 2 - 1)  # not where a sequence ends
    watch = _Watch(counts=bool(first_of_experts(run.module)))
    alone = _disable_current_modes() if has_numbers(given[0]) else contextlib.nullcontext()
    with torch.enable_grad(), alone, run.as_stock(_Masks(count, [], None), twin) as forward, watch:
        step = partial(_step, forward, dict(run.module.named_parameters()), [a.requires_grad for a in args])
        whole = step(given, 0)
        if has_numbers(given[0]):
            a, b = step([x[..., :half, :] for x in flat], 0), step([x[..., half:, :] for x in flat], half)
            is_same = whole.names == a.names == b.names
            for one, *parts in zip(whole.of_rows, a.of_rows, b.of_rows, strict=is_same):
                is_same &= run.are_near(torch.cat(parts, -2), run.flat(one))
            for one, *parts in zip(whole.of_weights, a.of_weights, b.of_weights, strict=is_same):
                is_same &= run.are_near((parts[0] + parts[1]).flatten(), one.flatten())
            if not is_same:
                raise CannotRunInRowsError("what it computes of a row depends on how many others there are")
            hurt = sorted({0, count // 2, count - 1})
            others = [i for i in range(count) if i not in hurt]
            for much in (torch.nan, 10.0):
                with torch.no_grad():
                    y = forward(*(_hurt(x, hurt, much) for x in flat))
                if not run.are_near(y[..., others, :], run.flat(whole.of_rows[0])[..., others, :]):
                    raise CannotRunInRowsError("what it computes of one row changes others")
    if _state_of(twin) != _state_of(run.module) or any(b._version for b in twin.buffers()):
        raise CannotRunInRowsError("it keeps what it computes")
    return whole.names


class _Outcome(NamedTuple):
    names: list[str]  # of the parameters that were used, and require gradients
    of_rows: list[Tensor]  # the output, and gradients of the arguments
    of_weights: list[Tensor]  # gradients of those parameters


def _step(forward: Any, parameters: dict[str, Tensor], wants: list[bool], xs: Sequence[Tensor], first: int) -> _Outcome:
    """Run ``forward(*xs)`` and a backward, of rows from number ``first`` on; raise if it cannot run in rows."""
    xs = [x.clone().requires_grad_(want) for x, want in zip(xs, wants, strict=True)]
    y = forward(*xs)
    if type(y) not in MADE or y.shape[:-1] != xs[0].shape[:-1] or y.shape[-1] > max(x.shape[-1] for x in xs):
        raise CannotRunInRowsError(_OTHER)
    if any(x._version or x.untyped_storage()._cdata == y.untyped_storage()._cdata for x in xs):
        raise CannotRunInRowsError("it writes to its input, or hands it on")
    leaves = {id(node.variable) for node in nodes_before([y]) if hasattr(node, "variable")}
    used = {name: p for name, p in parameters.items() if id(p) in leaves}
    if leaves - {id(one) for one in (*used.values(), *xs)}:
        raise CannotRunInRowsError("it computes with what wants a gradient, and is no parameter of its own")
    n = torch.arange(first * y.shape[-1], first * y.shape[-1] + y.numel(), device=y.device)
    dy = (n.sin() + n.log1p()).view(y.shape).to(y.dtype)  # its mean differs from row to row, too
    wanted = [x for x in xs if id(x) in leaves]
    with private.without_hooks(used.values()):
        found = torch.autograd.grad(y, [*wanted, *used.values()], dy) if leaves else ()
    return _Outcome([*used], [y.detach(), *found[: len(wanted)]], [*found[len(wanted) :]])


def _twin_of(module: Any, known: dict[nn.Module, Any]) -> Any:
    """Copy a module and its submodules, sharing parameters, but no buffer, list, set or dict."""
    if module not in known:
        known[module] = twin = object.__new__(type(module))
        own = {name: copy.copy(v) if isinstance(v, (dict, list, set)) else v for name, v in vars(module).items()}
        own["_buffers"] = {name: b if b is None else b.clone() for name, b in module._buffers.items()}
        own["_modules"] = {name: m and _twin_of(m, known) for name, m in module._modules.items()}
        twin.__dict__.update(own)
    return known[module]


def _state_of(module: nn.Module) -> Any:
    """Return a key of the attributes that decide which code runs, and of which parameters require gradients."""
    return tuple(
        (type(m), *(p is not None and p.requires_grad for p in m._parameters.values()))
        + tuple((name, _token(value)) for name, value in vars(m).items() if name not in _PARTS)
        for m in module.modules()
    )


def _token(value: Any, depth: int = 2) -> Any:
    if isinstance(value, _SIMPLE):
        return value
    if not depth or not isinstance(value, (dict, list, tuple, set)):
        return id(value)
    if isinstance(value, dict):
        return tuple((_token(key, 0), _token(one, depth - 1)) for key, one in value.items())
    return tuple(_token(one, depth - 1) for one in value)


def _spread(count: int, most: int, device: torch.device) -> Tensor:
    """Return up to ``most`` numbers below ``count``, evenly spread."""
    return torch.linspace(0, count - 1, min(count, most), device=device).long()


def _hurt(x: Tensor, rows: list[int], much: float) -> Tensor:
    """Return ``x`` with ``rows`` rolled by one feature and multiplied by ``much``, which may be NaN; integers stay."""
    if not x.is_floating_point():
        return x
    other = x.roll(1, -1) * much
    return x.index_copy(-2, torch.tensor(rows, device=x.device), other[..., rows, :])
