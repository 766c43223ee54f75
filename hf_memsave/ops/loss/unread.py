"""Logits that are computed when they are read.

A head returns :class:`Unread`: a tensor of a shape, dtype and device, without bytes, like any other to autograd. So
hooks, ``retain_grad``, views, writes in place and ``torch.autograd.grad`` are autograd's own; below it, an op that is
given such a tensor arrives in ``__torch_dispatch__``:

- a view, or a function of each row (pointwise, a softmax over the words), gives another unread tensor;
- an op with some numbers for each row (``gather``, ``logsumexp``, a sum over the words) is computed now, in chunks;
- any other op runs on the numbers, computed once from all logits by the head's own forward: they stay.

Gradients of logits are unread too; from them the head computes its own in chunks. Cross-entropy: :mod:`.chunked_loss`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from hf_memsave.config.sizes import gib
from hf_memsave.device import HALVES, is_autocast
from hf_memsave.errors import PatchError
from hf_memsave.logs import logger
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.head import HeadCall, gradients
from hf_memsave.ops.loss.rows import LOGITS, ByRow, Node, RowMap, parts_of, union, values, zero_outside
from hf_memsave.ops.loss.sums import gradient
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape import current, private
from hf_memsave.tape.as_stock import replacing_stock
from hf_memsave.tape.content import same
from hf_memsave.tape.private import no_autocast, no_modes, no_subclasses, softmaxes, stands_for_many, tree_leaves
from hf_memsave.tape.tensors import View

aten = torch.ops.aten
#: Views, by which rows may stay whole; and the ones among them that are told a shape.
_VIEWS = {
    aten.view.default, private.unsafe_view, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.transpose.int, aten.permute.default,
    aten.alias.default, aten.detach.default, aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default,
}  # fmt: skip
_SIZED = {aten.view.default, private.unsafe_view}
#: In backward: ops that fill up with zeros -> the view op whose backward each is; and ops that join parts.
_WIDENED = {aten.slice_backward.default: aten.slice.Tensor, aten.select_backward.default: aten.select.int}
_JOINED = {aten.stack.default, aten.cat.default}
#: Ops that give some numbers for each row, with the dimension as the second argument.
_REDUCED = {aten.sum.dim_IntList, aten.logsumexp.default, aten.argmax.default, aten.gather.default}
_COPY, _SCALED = private.to_copy, {aten.mul.Tensor, aten.div.Tensor}
#: Losses -> the names by which autocast knows them.
_LOSSES = {F.cross_entropy: "cross_entropy_loss", F.nll_loss: "nll_loss"}
_OF_LOSS = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_PLAIN = (Tensor, torch.nn.Parameter, private.FakeTensor)
#: Methods that read bytes and are no ops.
_RAW = {
    getattr(Tensor, name)
    for name in "numpy tolist data_ptr untyped_storage storage _typed_storage __array__ __dlpack__ __reduce_ex__ "
    "__deepcopy__ __repr__ share_memory_ is_shared".split()
}
_LARGE = 256  # size of a node beyond which it is read
_told: set[str] = set()
_CHANGED = "%s would change logits that are not computed yet. Use another function, or MemSaveConfig(loss='stock')."


class Cell:
    """The state that unread tensors on the same memory share: node, geometry and rows; and the numbers, once read."""

    def __init__(self, node: Node, like: View, place: RowMap) -> None:
        self.node, self.like, self.place = node, like, place
        self.real: Tensor | None = None


class Unread(Tensor):
    """Logits ``[..., V]``, their gradient, or a function of each row, not computed yet; see the module."""

    has_no_bytes = True  # so a mode that counts sees the ops that it runs
    hidden: Tensor  # the head's input
    call: HeadCall
    cell: Cell
    like: View
    place: RowMap

    @staticmethod
    def of(hidden: Tensor, call: HeadCall, cell: Cell, like: View | None = None, place: RowMap | None = None) -> Unread:
        """Make a tensor of all that is in ``cell``, or a view with the geometry of ``like`` and rows of ``place``."""
        like, place, make = like or cell.like, place or cell.place, cast("Any", Tensor._make_wrapper_subclass)
        options = dict(storage_offset=like.storage_offset(), dtype=like.dtype, device=hidden.device)
        with torch.inference_mode(False):  # where views of others are no inference tensors
            made: Unread = make(Unread, like.shape, strides=like.stride(), **options)
        made.hidden, made.call, made.cell, made.like, made.place = hidden, call, cell, like, place
        return made

    @staticmethod
    def of_node(hidden: Tensor, call: HeadCall, node: Node, dtype: torch.dtype, place: RowMap) -> Unread:
        """Make a tensor of the values of ``node`` for these rows, with a cell of its own."""
        with _geometry():
            like = torch.empty(place.shape(call.words), dtype=dtype, device="meta")
        return Unread.of(hidden, call, Cell(node, View(like), place))

    def taken_apart(self) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], Tensor]]:
        """Return the head's input, which a tape packs in place of this tensor, and a function that wraps it again."""
        rest = self.call, self.cell, self.like, self.place
        return [self.hidden], lambda parts: Unread.of(next(iter(parts)), *rest)

    def is_read(self) -> bool:
        """Return whether the numbers have been computed."""
        return self.cell.real is not None

    def numbers(self) -> Tensor:
        """Return the numbers, computed when they are first asked for, as a plain tensor without a graph."""
        cell, like = self.cell, self.like
        if cell.real is None:
            cell.real = _read(self.hidden, self.call, cell)
        return cell.real.as_strided(like.shape, like.stride(), like.storage_offset())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, x, made = kwargs or {}, args[0] if args else None, NotImplemented
        if func == private.set_data and isinstance(x, Unread):
            raise PatchError(_CHANGED % "logits.data = ...")
        if isinstance(x, Unread) and not x.is_read() and x.place.rows.size:
            if func in _LOSSES:
                made = _loss(x, func, args[1:], kwargs)
            elif func in (Tensor.gather, torch.gather) and torch.is_grad_enabled() and x.requires_grad:
                made = _gather(x, *args[1:], **kwargs)
            elif func in (Tensor.clone, torch.clone):
                x.numbers()
        if made is not NotImplemented:
            return made
        if func in _RAW:
            args = tuple(a.numbers().requires_grad_(a.requires_grad) if isinstance(a, Unread) else a for a in args)
        with no_subclasses():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags:
            raise PatchError(_CHANGED % func)
        unread = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Unread)]
        if not any(x.is_read() for x in unread):
            if (made := _derived(func, args, kwargs, unread)) is not NotImplemented:
                return made
            if (name := str(func)) not in _told:
                _told.add(name)
                size = unread[0].numel() * unread[0].element_size()
                logger.info("%s reads logits, or their gradient, whole: %s (said once)", name, gib(size))
        args, kwargs = private.tree_map(lambda a: a.numbers() if isinstance(a, Unread) else a, (args, kwargs))
        return func(*args, **kwargs)


def unread_logits(call: HeadCall, hidden: Tensor, dtype: torch.dtype) -> Unread:
    """Return the logits ``[..., V]`` of ``hidden`` ``[..., H]``, not computed yet."""
    with replacing_stock(current()):
        return cast("Unread", _OfHead.apply(hidden, call, dtype, *call.wanted()))


@contextlib.contextmanager
def _evaluating() -> Iterator[None]:
    """Turn off autograd, autocast and function modes while values are computed."""
    with torch.inference_mode(False), torch.no_grad(), no_modes(), no_autocast():
        yield


@contextlib.contextmanager
def _geometry() -> Iterator[None]:
    """Turn off autograd and all modes while functions are called with meta tensors, or with the numbers of rows."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def _bare(a: Any) -> Any:
    """Return a meta tensor like ``a``; unchanged if no tensor, or a scalar on the CPU, which promotes no dtype."""
    if not isinstance(a, Tensor) or (a.dim() == 0 and a.device.type == "cpu" and not isinstance(a, Unread)):
        return a
    like = a.like if isinstance(a, Unread) else View(a)
    last = int(like.storage_offset()) + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    memory = torch.empty(max(last, 0) + 1, dtype=like.dtype, device="meta")
    return memory.as_strided(like.shape, like.stride(), like.storage_offset())


def _read(hidden: Tensor, call: HeadCall, cell: Cell) -> Tensor:
    with _evaluating():
        call.check(hidden)
        logits = call.logits(hidden.detach()).reshape(-1, call.words)
        if not cell.place.rows.size:
            return logits.new_empty(cell.like.shape, dtype=cell.like.dtype)
        part = next(parts_of(cell.place.flat, call.count, logits))
        found = cell.place.shaped(values(cell.node, part, lambda: logits[part.index]))
        real = torch.empty_strided(found.shape, cell.like.stride(), dtype=found.dtype, device=found.device)
        return real.copy_(found)


def _derived(func: Any, args: Sequence[Any], kwargs: dict[str, Any], unread: list[Unread]) -> Any:
    """Return an op's result for these tensors, unread or computed by row; NotImplemented where it has to read them."""
    x = unread[0]
    if any(other.call is not x.call or other.cell.node.size > _LARGE for other in unread):
        return NotImplemented
    if func in _VIEWS:
        return _viewed(x, func, args[1:], kwargs)
    if not x.place.rows.size:
        return NotImplemented
    if func in _WIDENED:
        return _widened(x, func, *args[1:])
    if func in _JOINED and len(unread) == len(args[0]):
        return _joined(func, unread, args[1:])
    if func in (aten.mean.default, aten.sum.default) and x.is_floating_point():
        dtype = kwargs.get("dtype") or x.dtype
        whole = _reduced(x, aten.sum.dim_IntList, x.place.dim, dtype=_wide(dtype)).sum()
        return (whole if func is aten.sum.default else whole / x.numel()).to(dtype)
    if func in _REDUCED and args[0] is x and len(unread) == 1:
        return _reduced(x, func, *args[1:], **kwargs)
    is_pointwise = func.namespace == "aten" and torch.Tag.pointwise in func.tags
    if func in softmaxes or func is _COPY or (is_pointwise and torch.Tag.nondeterministic_seeded not in func.tags):
        return _by_row(func, args, kwargs, unread)
    return NotImplemented


def _viewed(x: Unread, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    place = x.place
    with _geometry():
        try:
            likes = func(_bare(x), *args, **kwargs)
            if func not in _SIZED:
                probes = func(place.probe(), *args, **kwargs)
            elif place.dim == x.dim() - 1 and likes.shape[-1:] == x.shape[-1:]:
                probes = RowMap(place.rows.reshape(*likes.shape[:-1], 1), likes.dim() - 1).probe()
            else:
                return NotImplemented
        except (RuntimeError, IndexError):  # stock's own error comes from the logits
            return NotImplemented
        is_one = isinstance(likes, Tensor)
        pairs = [(likes, probes)] if is_one else list(zip(likes, probes, strict=False))
        made = [(View(like), place.of_view(probe, like.shape, x.call.words)) for like, probe in pairs]
    if (not is_one and len(made) != len(likes)) or not all(there for _, there in made):
        return NotImplemented
    out = [Unread.of(x.hidden, x.call, x.cell, *one) for one in made]
    return out[0] if is_one else out


def _widened(x: Unread, func: Any, sizes: Sequence[int], *args: Any) -> Any:
    """Return the gradient of the whole: the gradient ``x`` of a part, and zeros elsewhere; or NotImplemented."""
    whole = x.place.parent
    if whole is None or whole.shape(x.call.words) != tuple(sizes):
        return NotImplemented
    with _geometry():
        part, own = _WIDENED[func](whole.probe(), *args), x.place.probe()
        if part.shape != own.shape or not torch.equal(part, own):
            return NotImplemented
    node = zero_outside(x.cell.node, x.place.flat, x.call.count, x.hidden)
    return Unread.of_node(x.hidden, x.call, node, x.dtype, whole)


def _joined(func: Any, parts: list[Unread], args: Sequence[Any]) -> Any:
    """Join gradients of parts of one tensor, which have no row in common; or return NotImplemented."""
    whole, kinds = parts[0].place.parent, {x.dtype for x in parts}
    if len(kinds) > 1 or not parts[0].is_floating_point():  # which ``cat`` converts
        return NotImplemented
    with _geometry():
        rows = func([torch.from_numpy(x.place.rows) for x in parts], *args).numpy()
    if whole is None or not np.array_equal(rows, whole.rows):
        return NotImplemented
    nodes = [zero_outside(x.cell.node, x.place.flat, x.call.count, x.hidden) for x in parts]
    return Unread.of_node(parts[0].hidden, parts[0].call, Node(sum, *nodes, rows=union(nodes)), parts[0].dtype, whole)


def _by_row(func: Any, args: Sequence[Any], kwargs: dict[str, Any], unread: list[Unread]) -> Any:
    """Apply a function to each row, in place if it writes to all that is in a cell; or return NotImplemented."""
    x, is_write = unread[0], func._schema.is_mutable
    if is_write:
        name = func._schema.name.removeprefix("aten::")
        packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
        if args[0] is not x or len(x.place.flat) != len(x.cell.place.flat) or packet is None:
            return NotImplemented
        func = getattr(packet, func._overloadname, None)
    laid_out = {name: a for name, a in kwargs.items() if name in ("memory_format", "layout")}
    is_elsewhere = kwargs.get("device", x.device) != x.device or kwargs.get("pin_memory")
    kwargs = {name: a for name, a in kwargs.items() if name not in ("device", "pin_memory", *laid_out)}
    given = [_argument(x, a) for a in args]
    is_known = not any(a is NotImplemented for a in given) and not any(isinstance(a, Tensor) for a in kwargs.values())
    if func is None or is_elsewhere or not is_known:
        return NotImplemented
    try:
        with _geometry():
            like = func(*map(_bare, args), **kwargs, **laid_out)
    except (RuntimeError, TypeError):  # in place it takes other arguments; or stock's own error
        return NotImplemented
    if not isinstance(like, Tensor) or like.shape != x.shape or (is_write and like.dtype != x.dtype):
        return NotImplemented
    node = _node(func, x, args, given, kwargs)
    if node is None or not is_write:
        return NotImplemented if node is None else Unread.of(x.hidden, x.call, Cell(node, View(like), x.place))
    x.cell.node = node
    return x


def _argument(x: Unread, a: Any) -> Any:
    """Return an argument as a node takes it; NotImplemented for a tensor as large as x, or with other rows."""
    if isinstance(a, Unread):
        return a.cell.node if a.place.is_at(x.place) else NotImplemented
    if not isinstance(a, Tensor):
        return NotImplemented if isinstance(a, (list, tuple)) else a
    is_scalar, dim, lead = a.dim() == 0, x.place.dim, x.dim() - a.dim()
    if type(a) not in _PLAIN or stands_for_many(a) or lead < 0:
        return NotImplemented
    if is_scalar or any(n not in (1, of) for n, of in zip(a.shape, x.shape[lead:], strict=True)):
        return a.detach().clone() if is_scalar else NotImplemented
    whole = a.detach().expand(x.shape)
    if whole.stride(dim) == 0:
        return ByRow(x.place.by_row(whole.narrow(dim, 0, 1).clone(), x.call.count))  # which may be written to later
    own = whole.movedim(dim, -1)
    is_by_word = all(step == 0 or n == 1 for n, step in zip(own.shape[:-1], own.stride()[:-1], strict=True))
    return own[(0,) * (own.dim() - 1)].clone() if is_by_word else NotImplemented


def _node(func: Any, x: Unread, args: Sequence[Any], given: list[Any], kwargs: dict[str, Any]) -> Node | None:
    first = given[0]
    if func is aten.clone.default or (func is _COPY and kwargs.get("dtype", x.dtype) == x.dtype):
        return cast("Node", first)
    run: Callable[..., Tensor] = partial(func, **kwargs) if kwargs else func
    if func in softmaxes:
        if args[softmaxes[func]] % x.dim() != x.place.dim:
            return None
        given[softmaxes[func]] = -1
        run = partial(_over_words, func, x.call.words)
    node = Node(run, *given)
    if isinstance(first, Node):
        is_scaled = func in _SCALED and isinstance(given[1], (int, float))
        node.rows = first.rows if is_scaled or func in (_COPY, aten.neg.default) else None
        node.rows = union(given) if func is aten.add.Tensor and not kwargs else node.rows
        if first.kept is not None and _is_backward(func, given, first.kept.node):
            node.kept = first.kept._replace(node=first.kept.node.args[0])
    return node


def _over_words(func: Any, words: int, *args: Any) -> Tensor:
    rows = max(len(a) for a in args if isinstance(a, Tensor) and a.dim() == 2)
    return func(*(a.expand(rows, words) if isinstance(a, Tensor) else a for a in args))


def _is_backward(func: Any, given: list[Any], node: Node) -> bool:
    """Return whether this function of a gradient is the backward of the function that made ``node``."""
    was, is_number = getattr(node.func, "func", node.func), len(given) == 2 and isinstance(given[1], (int, float))
    if func in _SCALED:
        return was is func and is_number and isinstance(node.args[1], (int, float)) and given[1] == node.args[1]
    is_of_tanh = func is aten.tanh_backward.default and was is aten.tanh.default and given[1] is node
    return is_of_tanh or (func is _COPY and was is _COPY)


def _reduced(x: Unread, func: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Compute some numbers of each row, a chunk of rows at a time; or return NotImplemented."""
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if not isinstance(dim, int) or dim % x.dim() != x.place.dim or "out" in kwargs:
        return NotImplemented
    call, node, place, is_gather, found = x.call, x.cell.node, x.place, func is aten.gather.default, None
    if is_gather and not _is_index(x, *args, **kwargs):
        return NotImplemented
    keeps = is_gather or bool(args[0] if args else kwargs.pop("keepdim", False))
    index = args[0].movedim(place.dim, -1).reshape(place.rows.size, -1) if is_gather else None
    with _evaluating():
        call.check(x.hidden)
        flat = x.hidden.detach().reshape(call.count, -1)
        step = chunked_loss.rows_of_chunk(call.words * _wide(x.dtype).itemsize * (2 + node.size), flat)
        for part in parts_of(place.flat, step, flat):
            z = values(node, part, partial(call.logits, flat[part.index], is_chunk=True))
            if index is not None:
                one = z.gather(-1, index[part.here])
            else:
                one = func(z, -1 if func is aten.argmax.default else [-1], True, **kwargs)
            if found is None:
                found = one.new_empty(place.rows.size, one.shape[-1])
            found[part.here] = one
            del z, one
    out = place.shaped(cast("Tensor", found))
    return out.contiguous() if keeps else out.squeeze(place.dim)


def _is_index(x: Unread, index: Any, sparse_grad: bool = False) -> bool:
    """Return whether ``gather`` over the words by ``index`` takes some of each row."""
    is_plain = type(index) in _PLAIN and index.dtype == torch.int64 and index.dim() == x.dim() and not sparse_grad
    if not is_plain or stands_for_many(index):
        return False
    return all(index.shape[d] == x.shape[d] for d in range(x.dim()) if d != x.place.dim)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _gather(x: Unread, dim: Any = None, index: Any = None, *, sparse_grad: bool = False) -> Any:
    is_here = isinstance(dim, int) and dim % x.dim() == x.place.dim and _is_index(x, index, sparse_grad)
    return _Chosen.apply(x, index) if is_here else NotImplemented


class _Chosen(torch.autograd.Function):
    """The logits of some words of each row, as autograd's own gradient would be as large as all logits."""

    @staticmethod
    def forward(ctx: Any, x: Unread, index: Tensor) -> Tensor:
        ctx.save_for_backward(x.hidden, index)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.place = x.call, x.place
        with no_subclasses():
            return torch.gather(x, x.place.dim, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (hidden, index), call, place = ctx.saved_tensors, ctx.call, ctx.place
        if stands_for_many(dy):
            return dy.new_zeros(place.shape(call.words)).scatter_add(place.dim, index, dy), None
        rows, words = [ByRow(place.by_row(a, call.count)) for a in (index, dy)], call.words
        node = Node(lambda index, dy: dy.new_zeros(len(dy), words).scatter_add_(-1, index, dy), *rows)
        return Unread.of_node(hidden, call, node, dy.dtype, place), None


class _OfHead(torch.autograd.Function):
    """The head's product: logits that are not computed yet; in backward, gradients of its parameters and input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: HeadCall, dtype: torch.dtype, *parameters: Tensor) -> Unread:
        ctx.save_for_backward(hidden)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.parameters = call, parameters
        rows = np.arange(call.count).reshape(*hidden.shape[:-1], 1)
        ctx.place = RowMap(rows, rows.ndim - 1)
        return Unread.of_node(hidden, call, LOGITS, dtype, ctx.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (hidden,), call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad[3:]
        wanted = [p for p, is_wanted in zip(ctx.parameters, needs, strict=True) if is_wanted and p.requires_grad]
        is_unread = isinstance(dy, Unread) and not dy.is_read() and dy.call is call and dy.place.is_at(ctx.place)
        node, wide = cast("Unread", dy).cell.node if is_unread else None, _wide(dy.dtype)
        if node is not None and node.kept is not None and node.kept.node is LOGITS:
            dx, of = node.kept.finish()
            return None if dx is None else dx.view(hidden.shape), None, None, *(of.get(id(p)) for p in ctx.parameters)
        call.check(hidden)
        if node is not None:
            rows = np.arange(call.count) if node.rows is None else node.rows
            step = chunked_loss.rows_of_chunk(call.words * wide.itemsize * (2 + node.size), hidden)
            parts, dz_of = parts_of(rows, step, hidden), lambda z, part: values(node, part, lambda: z)
            dx, sums = chunked_loss.in_chunks(call, hidden, parts, wanted, dz_of, ctx.needs_input_grad[0], len(rows))
            one = torch.ones((), dtype=wide, device=hidden.device)
            found = [gradient(tensors, one, p.dtype) for tensors, p in zip(sums, wanted, strict=True)]
        else:
            x = hidden.detach().requires_grad_()
            with torch.enable_grad(), no_modes(), saved_tensors_hooks(same, same):
                logits = call.logits(x.view_as(x))
            with no_autocast():
                dx, *found = gradients(logits, [x, *wanted], dy.numbers() if isinstance(dy, Unread) else dy)
        of = dict(zip(map(id, wanted), found, strict=True))
        return None if dx is None else dx.view(hidden.shape), None, None, *(of.get(id(p)) for p in ctx.parameters)


def _loss(x: Unread, func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute ``F.cross_entropy`` or ``F.nll_loss`` of unread logits; NotImplemented for all but one class a row."""
    given = dict(zip(_OF_LOSS, args, strict=False)) | kwargs
    target, dim = given.pop("target", None), x.place.dim
    ignored, how = given.get("ignore_index", -100), given.get("reduction", "mean")
    is_plain = type(target) in _PLAIN and target.dtype == torch.int64 and dim == min(1, x.dim() - 1)
    if not is_plain or target.shape != x.shape[:dim] + x.shape[dim + 1 :]:
        return NotImplemented
    if given.get("label_smoothing") or any(given.get(n) is not None for n in ("weight", "size_average", "reduce")):
        return NotImplemented
    if func is F.cross_entropy and how in ("mean", "sum") and torch.is_grad_enabled() and x.requires_grad:
        return chunked_loss.cross_entropy(x, target, ignored, how == "sum")
    is_widened = x.dtype in HALVES and is_autocast(x) and private.has_autocast(_LOSSES[func], x.device.type)
    logp: Tensor = x.float() if is_widened else x
    logp = F.log_softmax(logp, dim) if func is F.cross_entropy else logp
    is_counted = (target != ignored).unsqueeze(dim)
    chosen = torch.gather(logp, dim, target.unsqueeze(dim).where(is_counted, 0))
    losses = -chosen.where(is_counted, 0).squeeze(dim)
    if how not in ("mean", "sum"):
        return losses if how == "none" else NotImplemented
    whole = losses.sum(dtype=_wide(losses.dtype))
    return (whole / is_counted.sum() if how == "mean" else whole).to(losses.dtype)
