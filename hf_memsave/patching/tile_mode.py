"""What of a block mixes tokens, and what stands in for it while the block's own code runs on one tile of tokens.

A function mode watches the code. Attention is caught: a run on a tile stops there, and yields what attention is called
with; or goes on with its rows of what attention gave for all tokens. Arguments of the block stay whole (masks belong to
attention) until they meet a tensor of the tile, and are cut to its rows there. Dropouts draw stock's masks, for all
tokens at once, as the first tile comes to them. Products that nothing wanted is made of do not run.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from hf_memsave.device import fuses_dropout, is_autocast
from hf_memsave.errors import MemSaveError
from hf_memsave.patching.swap import stock_class
from hf_memsave.tape.codecs import CODERS
from hf_memsave.tape.dropout import DROPOUTS, as_bits, scale_of
from hf_memsave.tape.private import innermost_mode, tree_leaves, tree_map

_LINEAR, _ADDMM = F.linear, torch.addmm
_PRODUCTS = frozenset({_LINEAR, _ADDMM})
#: Attention, and what its arguments are called: PyTorch's, and Transformers' functions by whatever name.
_SDPA = F.scaled_dot_product_attention
_OF_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_OF_TRANSFORMERS = ("query", "key", "value", "attention_mask", "scaling", "dropout")
#: What Transformers finds our attention by, while a tile runs.
_NAME = "hf_memsave_tiles"


class Reached(Exception):
    """A tile's run has come to the attention that it was to come to."""


class CannotTileError(MemSaveError):
    """The code of a block does what tiles cannot; the message says what."""


class Rows(NamedTuple):
    """Where a tensor of a tile has its tokens: dimension ``dim``, counted from the end, is ``outer`` times as long."""

    dim: int
    outer: int

    def shape(self, part: Tensor, length: int) -> list[int]:
        """Of a tensor like ``part`` for so many tokens."""
        shape = list(part.shape)
        shape[self.dim] = self.outer * length
        return shape

    def empty(self, part: Tensor, length: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor for so many tokens, laid out as ``part`` is."""
        before = part.stride()
        order = sorted(range(part.dim()), key=lambda i: (-before[i], i))
        shape = self.shape(part, length)
        strides = [math.prod(shape[i] for i in order[order.index(j) + 1 :]) for j in range(part.dim())]
        return part.new_empty_strided(shape, strides, dtype=dtype)  # no view: what a block gives is written to

    def of(self, whole: Tensor, start: int, end: int) -> Tensor:
        """The rows of the tokens from ``start`` to ``end``, a view."""
        if self.outer == 1:
            return whole.narrow(self.dim, start, end - start)
        apart: Tensor = whole.unflatten(self.dim, (self.outer, -1)).narrow(self.dim, start, end - start)
        return apart.flatten(self.dim - 1, self.dim)

    def put(self, whole: Tensor, start: int, end: int, part: Tensor) -> None:
        """Write the rows of a tile."""
        if self.outer == 1:
            whole.narrow(self.dim, start, end - start).copy_(part)
        else:
            apart = whole.unflatten(self.dim, (self.outer, -1)).narrow(self.dim, start, end - start)
            apart.copy_(part.unflatten(self.dim, (self.outer, -1)))

    @staticmethod
    def in_(tensor: Tensor, length: int) -> Rows | None:
        """Where ``tensor`` has so many tokens, a number that is nothing else's size; None where it has none."""
        found = [i for i, size in enumerate(tensor.shape) if size and size % length == 0]
        if len(found) > 1:
            raise CannotTileError("it makes a tensor of tokens by tokens")
        return Rows(found[0] - tensor.dim(), tensor.shape[found[0]] // length) if found else None


class Call(NamedTuple):
    """One call of attention: the function, for a call of all tokens, and its arguments by their names."""

    function: Callable[..., Tensor]
    arguments: dict[str, Any]


class Mixing(NamedTuple):
    """What is known of a call of attention: its arguments that have a row for each token; and where its output has."""

    rows: dict[str, Rows]
    out: Rows
    wants: tuple[str, ...]  # the arguments that want a gradient
    flags: dict[str, bool]


class Plan:
    """What was learned of a block: its calls of attention, its dropouts, and by stage the products of no use."""

    def __init__(self) -> None:
        self.mixings: list[Mixing] = []
        self.dropouts: list[Rows | None] = []
        self.dead: list[tuple[dict[int, Any], ...]] = []  # in the first tile and others: number -> weight
        self.extras: tuple[Any, ...] | None = None
        self.why_not: str | None = None


class Mask:
    """A dropout's mask: one bit an element, by the first token of a tile."""

    coders = CODERS

    def __init__(self, x: Tensor, rows: Rows, seq: int, tiles: Iterable[tuple[int, int]], p: float) -> None:
        self.p, self.tiles = p, dict[int, Any]()
        whole = rows.empty(x, seq)
        if fuses_dropout(x):
            whole = torch.native_dropout(whole, p, True)[1]
        else:
            whole.bernoulli_(1 - p)
        for start, end in tiles:
            part = rows.of(whole, start, end).contiguous()
            again, bits = as_bits(self, part, p, not fuses_dropout(x))  # type: ignore[arg-type]
            self.tiles[start] = again, bits

    def take(self) -> list[Tensor]:
        """All bits, which it lets go of, for autograd to keep; :meth:`give` takes them back."""
        taken = [bits for _, bits in self.tiles.values()]
        self.tiles = {start: (again, None) for start, (again, _) in self.tiles.items()}
        return taken

    def give(self, bits: Iterator[Tensor]) -> None:
        """Take as many as there are."""
        self.tiles = {start: (again, next(bits)) for start, (again, _) in self.tiles.items()}

    def __call__(self, x: Tensor, start: int) -> Tensor:
        """The dropout of the rows from token ``start`` on."""
        again, bits = self.tiles[start]
        noise = again(bits)
        if not fuses_dropout(x):
            return x * noise  # type: ignore[no-any-return]
        return torch.ops.aten.native_dropout_backward(x, noise, scale_of(self.p, x.dtype))  # type: ignore[no-any-return]


class Standin(TorchFunctionMode):
    """While a block's code runs on the tokens from ``start`` to ``end`` of ``seq``.

    Args:
        plan: What is known of the block; learned where ``learns``.
        tile: Its first and last token; all tiles are ``tiles``.
        seq: How many tokens there are.
        given: What the first calls of attention gave for this tile: the run stops at the call after those.
        wholes: Tensors that the block was called with.
        masks: Of dropouts, by their number; None draws none and drops nothing.
        tiles: All tiles.
        learns: The plan is made of this run.
    """

    def __init__(
        self, plan: Plan, tile: tuple[int, int], seq: int, given: list[Tensor], wholes: Iterable[Tensor],
        masks: list[Mask | None] | None = None, tiles: Iterable[tuple[int, int]] = (), learns: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.plan, self.seq, self.given, self.masks, self.tiles = plan, seq, given, masks, tiles
        self.start, self.end = tile
        self.learns, self.is_first = learns, self.start == 0
        self.wholes = {id(one): one for one in wholes}
        known = {} if learns else plan.dead[len(given)][not self.is_first]
        self.dead: dict[int, Any] = known
        self.caught: Call | None = None
        self.products: list[Any] = []
        self.mixed = self.dropped = 0
        self.is_in_product = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return self.mix(Call(_sdpa, dict(zip(_OF_SDPA, args, strict=False)) | kwargs), Rows(-2, 1))
        if func in DROPOUTS:
            return self._drop(func, *args, **kwargs)
        if self.wholes:
            known = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            if any(id(t) in self.wholes for t in known):
                return self._of_wholes(func, args, kwargs, known)
        if func in _PRODUCTS:
            return self.product(func, args, kwargs)
        return func(*args, **kwargs)

    def mix(self, call: Call, out: Rows) -> Tensor:
        """Called in attention's place; its output would have tokens at ``out``."""
        number, length = self.mixed, self.end - self.start
        self.mixed += 1
        flags = {name: one for name, one in call.arguments.items() if isinstance(one, bool)}
        if number < len(self.plan.mixings) and flags != (before := self.plan.mixings[number].flags):
            raise CannotTileError(f"it calls attention with {flags}, and with {before} for another number of tokens")
        if self.learns and number == len(self.plan.mixings):
            tensors = {name: one for name, one in call.arguments.items() if isinstance(one, Tensor)}
            known = {name for name, one in tensors.items() if id(one) in self.wholes or _is_weight(one)}
            rows = {name: Rows.in_(one, length) for name, one in tensors.items() if name not in known}
            found = {name: one for name, one in rows.items() if one is not None}
            if "query" not in found:
                raise CannotTileError("its attention asks with what is not of its tokens")
            wants = tuple(name for name, one in tensors.items() if one.requires_grad)
            self.plan.mixings.append(Mixing(found, out, wants, flags))
        if number < len(self.given):
            return self.given[number]
        if number >= len(self.plan.mixings):
            raise CannotTileError("it calls attention more often than before")
        self.caught = call
        raise Reached

    def product(self, func: Any, args: Any, kwargs: Any, width: int | None = None) -> Any:
        """Called in a product's place, of ``width`` if it is no function of PyTorch."""
        if self.is_in_product:
            return func(*args, **kwargs)
        number = len(self.products)
        self.products.append(None)
        x, weight = (*args, None, None, None)[:2] if func is not _ADDMM else (*args, None, None, None)[1:3]
        if number in self.dead and self.dead[number] == (id(weight), weight.shape):
            width = width or (weight.shape[1] if func is _ADDMM else weight.shape[0])
            is_low = is_autocast(x) and x.is_floating_point() and x.dtype is not torch.float64
            dtype = torch.get_autocast_dtype(x.device.type) if is_low else x.dtype
            empty = x.new_empty(*x.shape[:-1], width, dtype=dtype)
            return empty if self.masks is not None else empty.fill_(torch.nan)  # a test sees where it is used
        self.is_in_product = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.is_in_product = False
        if self.learns:
            self.products[number] = result, weight
        return result

    def _drop(self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        number = self.dropped
        self.dropped += 1
        is_on = bool(training) and p > 0
        if self.learns and number == len(self.plan.dropouts):
            self.plan.dropouts.append(Rows.in_(input, self.end - self.start))
        if not is_on:
            return func(input, p, training, inplace)  # type: ignore[no-any-return]
        rows = self.plan.dropouts[number] if number < len(self.plan.dropouts) else None
        if rows is None or func not in (F.dropout, torch.dropout) or p >= 1:
            raise CannotTileError("it drops out what has no row for each token")
        if self.masks is None:
            return input
        while len(self.masks) <= number:
            self.masks.append(None)
        mask = self.masks[number]
        if mask is None:
            with torch.no_grad():
                mask = self.masks[number] = Mask(input, rows, self.seq, self.tiles, p)
        return mask(input, self.start)

    def _of_wholes(self, func: Any, args: Any, kwargs: Any, known: list[Tensor]) -> Any:
        length = self.end - self.start
        others = [t for t in known if id(t) not in self.wholes and not _is_weight(t)]
        cut: dict[int, Tensor] = {}
        for whole in known if length != self.seq else ():
            if id(whole) in self.wholes:
                part = whole
                for i in range(1, whole.dim() + 1):
                    if whole.shape[-i] == self.seq and any(t.dim() >= i and t.shape[-i] == length for t in others):
                        part = part.narrow(-i, self.start, length)
                if part is not whole:
                    cut[id(whole)] = part
        if cut:
            args, kwargs = tree_map(lambda x: cut.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs))
            return self.product(func, args, kwargs) if func in _PRODUCTS else func(*args, **kwargs)
        result = self.product(func, args, kwargs) if func in _PRODUCTS else func(*args, **kwargs)
        if not any(length in t.shape for t in others):
            self.wholes |= {id(t): t for t in tree_leaves(result) if isinstance(t, Tensor)}
        return result


def _sdpa(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
    return _SDPA(query, key, value, **rest)


class _Name(str):
    """An attention's name, by which Transformers finds :func:`_caught` instead."""

    def __hash__(self) -> int:
        return hash(_NAME)

    def __eq__(self, other: object) -> bool:
        return other == _NAME or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


def _caught(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """In the place of any of Transformers' attention functions, while a tile runs."""
    standin = innermost_mode()
    arguments = dict(zip(_OF_TRANSFORMERS, args, strict=False)) | kwargs
    if not isinstance(standin, Standin):  # another thread runs the module
        return _of_transformers(module, **arguments), None
    return standin.mix(Call(partial(_of_transformers, module), arguments), Rows(-3, 1)), None


def _of_transformers(module: Any, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
    known = inspect.unwrap(stock_class(module).forward).__globals__
    name = str(module.config._attn_implementation)
    function = known["ALL_ATTENTION_FUNCTIONS"].get(name, known.get("eager_attention_forward"))
    output: Tensor = function(module, query, key, value, rest.pop("attention_mask", None), **rest)[0]
    return output


def attentions_in(block: nn.Module) -> list[nn.Module]:
    """The modules in ``block`` that have Transformers choose their attention function by its name."""
    return [m for m in block.modules() if _is_attention(stock_class(m)) and "config" in m.__dict__]


@cache
def _is_attention(cls: Any) -> bool:
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def quantized_in(block: nn.Module) -> list[nn.Module]:
    """Linears of bitsandbytes in ``block``, whose products are no function that a mode sees."""
    return [m for m in block.modules() if stock_class(m).__module__.startswith("bitsandbytes.nn")]


def _quantized(module: Any, forward: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    standin, weight = innermost_mode(), getattr(module, "weight", None)
    if not isinstance(standin, Standin) or args or kwargs or not isinstance(weight, nn.Parameter):
        return forward(x, *args, **kwargs)
    return standin.product(lambda x, _: forward(x), (x, weight), {}, module.out_features)  # type: ignore[no-any-return]


#: Modules and attributes of theirs that are ours for now -> how many threads run a tile of them, and what was there.
_swapped: dict[tuple[nn.Module, str], tuple[int, Any]] = {}
#: Held while they change, and while a plan is made, which sees what a block's modules have then and later.
LOCK = threading.RLock()


def unswapped(module: nn.Module, name: str) -> Any:
    """Return the module's own attribute, or None, as it is where no thread runs a tile."""
    with LOCK:
        return _swapped.get((module, name), (0, module.__dict__.get(name)))[1]


@contextlib.contextmanager
def caught_in(attentions: Collection[nn.Module], quantized: Collection[nn.Module]) -> Iterator[None]:
    """Have these call :func:`_caught` where they would call attention, those :func:`_quantized` for their forward."""
    both = [*((module, "config") for module in attentions), *((module, "forward") for module in quantized)]
    with LOCK:
        for module, name in both:
            own = module.__dict__
            count, before = _swapped.get((module, name), (0, own.get(name)))
            _swapped[module, name] = count + 1, before
            if count:
                continue
            if name == "forward":
                own[name] = partial(_quantized, module, module.forward)
                continue
            ours = own[name] = copy.copy(before)
            ours.__dict__["_attn_implementation_internal"] = _Name(before._attn_implementation)
    try:
        yield
    finally:
        with LOCK:
            for module, name in both:
                count, before = _swapped.pop((module, name))
                if count > 1:
                    _swapped[module, name] = count - 1, before
                elif before is None:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = before


class Graph:
    """What a run may be made of: ``known`` tensors, and nodes that are no older than the one of number ``first``."""

    def __init__(self, known: Iterable[Tensor], first: int) -> None:
        wanted = [t for t in known if t.requires_grad]
        self.known, self.first = {id(t) for t in wanted}, first
        self.ends = {t.grad_fn for t in wanted} - {None}

    def of(self, wanted: Iterable[Tensor]) -> set[Any]:
        """The nodes that ``wanted`` was made by."""
        todo, seen = [t.grad_fn for t in wanted], set()
        while todo:
            if (node := todo.pop()) is None or node in seen:
                continue
            seen.add(node)
            if node in self.ends:
                continue
            leaf = getattr(node, "variable", None)
            if leaf is None and node._sequence_nr() < self.first or leaf is not None and id(leaf) not in self.known:
                raise CannotTileError("it computes with what wants a gradient, and is no weight of its own or argument")
            todo += [parent for parent, _ in node.next_functions]
        return seen


def dead_products(products: list[Any], wanted: Iterable[Tensor], graph: Graph) -> dict[int, Any]:
    """Numbers and weights of the products, by their results, that no wanted tensor was made of."""
    seen = graph.of(wanted)
    # Read at the end: what is written to in place has another node then.
    nodes = {n: (one[0].grad_fn, one[1]) for n, one in enumerate(products) if one is not None}
    is_dead = {n: w for n, (node, w) in nodes.items() if node is not None and node not in seen}
    return {n: (id(w), w.shape) for n, w in is_dead.items() if isinstance(w, nn.Parameter)}


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


AttentionInterface.register(_NAME, _caught)
