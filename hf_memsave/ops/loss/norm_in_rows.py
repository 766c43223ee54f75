r"""``norm_in_rows``: a norm between the blocks and the head, a few rows at a time, forward and backward.

A norm that is written in Python makes six copies of its input in fp32 in backward: where blocks run again, they are the
peak of a step. With x ``[T, H]``, bytes an element::

    eager    2 for x, in bf16, and 24 at the peak
    here     2 for x, 2 for its gradient, and 24 of one chunk

Each row has stock's bits on CPU. Gradients of weights are summed over rows in fp32 and rounded once, in another order
than stock's: so a norm that trains is stock's own while those copies fit in a chunk, as logits are. That a norm mixes
no tokens is tested with a NaN, once, which may reach its own token alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_memsave.arch.sites import kind_of
from hf_memsave.device import has_numbers
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.head import draws
from hf_memsave.ops.op import Op
from hf_memsave.tape import current
from hf_memsave.tape.again import AutocastState
from hf_memsave.tape.as_stock import counted
from hf_memsave.tape.price import CASTS
from hf_memsave.tape.private import FakeTensor, all_subclasses, no_modes, stands_for_many, tree_map
from hf_memsave.tape.tape import MADE

#: Copies of its input in fp32 that a norm makes at the peak of its backward.
_COPIES = 6
#: Part of a chunk beyond which rows are fewer where that changes no bit, and which they take at least.
_PART = 8
#: Whether each norm was found to be token-wise.
_tested: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


class _Given(TorchFunctionMode):
    """Functions are given other tensors in place of parameters: what converts one, the first of two, which is wider."""

    def __init__(self, parameters: Iterable[Tensor], given: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.given = {id(p): pair for p, pair in zip(parameters, given, strict=True)}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, low = kwargs or {}, {key: pair[1] for key, pair in self.given.items()}
        if func in CASTS and id(args[0]) in self.given:
            args = self.given[id(args[0])][0], *args[1:]
        if getattr(func, "__name__", "") != "__get__":  # an attribute is asked of the parameter itself
            args, kwargs = tree_map(lambda a: low.get(id(a), a), (args, kwargs))
        with no_modes():
            return func(*args, **kwargs)


class _Norm:
    """One call of a norm: its forward, under the autocast of now, and how many rows run at once."""

    def __init__(self, module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> None:
        self.module, self.forward, self.rows = module, forward, rows
        self.autocast = AutocastState(x.device.type)

    def of(self, x: Tensor, parameters: Sequence[Tensor], wide: Sequence[Tensor] = ()) -> Tensor:
        """Of x ``[1, rows, H]``, with these in place of the module's parameters, which may be elsewhere in backward."""
        given = zip(wide or parameters, parameters, strict=True)
        with self.autocast, all_subclasses(), _Given(self.module.parameters(), given):
            return self.forward(x)

    def parts(self, x: Tensor) -> Iterator[slice]:
        """Rows that run at once; where nothing has numbers, the others have as many bytes."""
        starts = range(0, x.shape[1], self.rows)
        return (slice(start, start + self.rows) for start in (starts if has_numbers(x) else starts[:2]))

    @torch.no_grad()
    def __call__(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """The norm of x ``[..., H]``."""
        flat, y = x.view(1, -1, x.shape[-1]), x
        for part in self.parts(flat):
            made = self.of(flat[:, part], parameters)
            if y is x:
                y = made.new_empty(x.shape)
            y.view(flat.shape)[:, part] = made
        return y


class _InRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: _Norm, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(x, *parameters)
        ctx.set_materialize_grads(False)
        return norm(x, *parameters)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        norm, tensors, wants = ctx.norm, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if dy is None:
            return None, *(None for _ in wants)
        if torch.is_grad_enabled() or stands_for_many(dy):  # what this gives is differentiated in turn; or of several
            with torch.enable_grad():
                views = [tensor.view_as(tensor) for tensor in tensors]  # x may have been made of a weight too
                y = norm.of(views[0], views[1:])
            inputs = [view for view, is_wanted in zip(views, wants, strict=True) if is_wanted]
            given = iter(torch.autograd.grad(y, inputs, dy, None, torch.is_grad_enabled(), allow_unused=True))
            return None, *(next(given) if is_wanted else None for is_wanted in wants)
        x, *parameters = (tensor.detach() for tensor in tensors)
        flat, dy = x.view(1, -1, x.shape[-1]), dy.reshape(1, -1, x.shape[-1])
        dx, sums = torch.empty_like(flat), dict[int, Tensor]()
        for part in norm.parts(flat):
            rows = flat[:, part].requires_grad_()
            # A weight for each row, in fp32: autograd would round the gradients of each chunk's rows as it sums them.
            wide = [p.to(torch.promote_types(p.dtype, torch.float32)).expand(rows.shape[1:]) for p in parameters]
            wanted = [i for i, is_wanted in enumerate(wants[1:]) if is_wanted]
            leaves = [wide[i].requires_grad_() for i in wanted]
            with torch.enable_grad():
                y = norm.of(rows, [one.to(p.dtype) for one, p in zip(wide, parameters, strict=True)], wide)
            dx[:, part], *found = torch.autograd.grad(y, [rows, *leaves], dy[:, part], allow_unused=True)
            del y
            for i in wanted:
                if (one := found.pop(0)) is not None:
                    total = one.sum(0)
                    sums[i] = sums[i].add_(total) if i in sums else total
        return None, dx.view(x.shape), *(sums[i].to(p.dtype) if i in sums else None for i, p in enumerate(parameters))


def _rows(module: nn.Module, x: Tensor) -> int:
    """How many rows of x ``[..., H]`` run at once; 0 where stock's own norm shall run."""
    own, wide = list(module.parameters()), torch.promote_types(x.dtype, torch.float32)
    of_row = _COPIES * wide.itemsize * x.shape[-1]
    is_plain = type(x) in MADE and x.is_contiguous() and x.is_floating_point() and x.dim() > 1 and x.numel() > 0
    is_ours = all(type(p) in (nn.Parameter, FakeTensor) and p.shape == x.shape[-1:] and p.is_leaf for p in own)
    # Of replicas, and in FSDP1's units, weights are attributes; ZeRO-3's come and go.
    is_away = any(isinstance(one, Tensor) for one in vars(module).values()) or any(hasattr(p, "ds_id") for p in own)
    chunk, least = chunked_loss.CHUNK, chunked_loss.CHUNK // _PART
    few = chunk if any(p.requires_grad for p in own) else least
    if not (is_plain and is_ours) or is_away or draws(module) or x.shape[:-1].numel() * of_row <= few:
        return 0
    return max(1, min(chunk, max(least, x.nbytes)) // of_row)


def _is_token_wise(norm: _Norm, x: Tensor) -> bool:
    """Whether a NaN stays with its token, and nothing but x and the module's parameters wants a gradient."""
    rows = torch.ones(2, 3, x.shape[-1], dtype=x.dtype, device=x.device)
    rows[0, 1] = torch.nan
    try:
        with torch.enable_grad():
            y = norm.of(rows, [p.detach() for p in norm.module.parameters()])
    except Exception:  # of so few tokens it is not computed
        return False
    if not isinstance(y, Tensor) or y.shape != rows.shape or y.requires_grad:
        return False
    if norm.module not in _tested and has_numbers(x):
        _tested[norm.module] = torch.equal(y.isnan().all(-1), rows.isnan().any(-1))
    return _tested.get(norm.module, True)


def _norm(module: nn.Module, patch: Any, *args: Any, **kwargs: Any) -> Any:
    tape, forward = current(), partial(patch.stock.forward, module)
    if tape is not None and len(args) == 1 and not kwargs and isinstance(x := args[0], Tensor):
        rows = _rows(module, x) if torch.is_grad_enabled() else 0
        norm, own = _Norm(module, forward, x, rows), list(module.parameters())
        if rows and _is_token_wise(norm, x):
            y = counted(tape, "norm", partial(_InRows.apply, norm, x, *own), forward, args, module)
            tape.record(y, norm, (x, *own))  # so that it is made again, where what follows asks for it
            return y
    return forward(*args, **kwargs)


def runs_in_rows(cls: Any) -> bool:
    """Whether modules of a stock class are norms that may run in rows: not those whose backward is one function."""
    return kind_of(cls) == "norm" and cls.forward not in (nn.LayerNorm.forward, nn.RMSNorm.forward)


def _check(module: nn.Module, value: Any) -> str:
    has_parts = bool(module._modules or module._buffers)
    return "it has modules or buffers of its own" if has_parts else ""


NORM_IN_ROWS = Op("norm_in_rows", _norm, _check, is_implied=True)
