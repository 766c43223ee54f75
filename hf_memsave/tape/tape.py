"""The tape: a function mode that notes how tensors are made, and a saved-tensor hook that decides what to keep of them.

While a :class:`Tape` is innermost and gradients are on, calls of cheap functions in the table (``table.py``) are
recorded on the storages that they make, unless known to be of no use. Nothing is priced yet. When autograd wants to
keep a tensor, :meth:`Tape.pack` keeps what adds fewer bytes: the tensor, or the arguments of the call that made it.
Rules, each with an example in ``tests/tape/test_rules.py``:

1. A handle gives the packed tensor's bits and geometry in every backward, or raises; a code, what backward needs.
2. A content belongs to one hook context: nothing crosses from one checkpointed block into the next. Its owner is the
   lock of a tape, and a tape within another one links its contents by a mark of its own (storage.py).
3. A call that is not asked for outlives its block by one, if the block returns or keeps what it led to (blocks.py).
4. A storage's link to a content is strong while that is nowhere yet, and for two blocks once it is to be recomputed;
   else it is weak (storage.py).
5. What autograd holds refers to no :class:`Tape`, and has no graph of its own (content.py).
6. What earlier forwards taught decides which calls are recorded, and nothing else: no bit depends on it (calls.py).
7. Where the bytes of a parameter are just now decides nothing, unless a sharding engine owns it (parameters.py).
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from hf_memsave.tape import content as contents
from hf_memsave.tape import decide, parameters, private
from hf_memsave.tape.blocks import Blocks
from hf_memsave.tape.calls import UNUSED, Calls
from hf_memsave.tape.codecs import as_bits
from hf_memsave.tape.content import Content, KeptView, Ticket, alive, is_parameter, mapped, with_ref
from hf_memsave.tape.decide import is_cheaper
from hf_memsave.tape.frame import Frame
from hf_memsave.tape.handles import Handle, KeptTensor
from hf_memsave.tape.ledger import Ledger
from hf_memsave.tape.private import OPS, FakeTensor, in_transform, innermost_hooks
from hf_memsave.tape.recomputed import RecomputedProduct
from hf_memsave.tape.storage import MarkOf, Storages
from hf_memsave.tape.tensors import CONSTANT, is_flipped, is_plain, leaves, owned, place_of, plain_tensors, tensors_in
from hf_memsave.tape.wrappers import Wrapped, are_asked, by_class, taken_apart, waited

_fetch = operator.methodcaller("get")
_ONE_TENSOR = (Tensor,)
#: Among the notes on a storage: what hooks outside keep of its other views, by their places.
_OTHERS = "others"
#: What a tape does when a function of its table is called.
Handler = Callable[["Tape", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
#: Types of results that are recorded: no subclasses.
MADE = (Tensor, FakeTensor)


def new(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], remake: Any = None) -> Any:
    """Handle a function whose result is a new tensor, recomputed by ``remake`` or by the function itself."""
    if kwargs and kwargs.get("out") is not None:
        tape.before_writes(args, kwargs)
        return func(*args, **kwargs)
    out = func(*args, **kwargs) if kwargs else func(*args)
    if type(out) in MADE:
        tape.record(out, remake or func, args, kwargs)
    return out


class Tape(Storages, TorchFunctionMode):
    """``with Tape(Frame(table)): block(x)`` notes calls of functions in ``table``, and keeps what costs least.

    ``codec`` codes what has to be kept; None keeps it as it is. ``inputs`` are what the caller holds until backward,
    which costs nothing. ``calls`` are what earlier forwards of the same module had no use for. ``below`` are hooks to
    be entered with it, which are outside of it.
    """

    def __init__(
        self, frame: Frame, codec: Any = None, inputs: Iterable[Any] = (), ledger: Ledger | None = None,
        calls: Calls | None = None, mark_of: MarkOf = None, below: saved_tensors_hooks | None = None,
    ) -> None:  # fmt: skip
        super().__init__(frame, ledger, calls or Calls({}), mark_of)
        self.codec = codec
        self.at_end: list[Callable[[], None]] = []
        self.blocks = Blocks()
        self.is_quick = False  # nothing but this tape has a say in what is kept
        self._inputs, self._given = inputs, list[Content]()
        self.below, self.modes_before = below, 0  # hooks to enter with it; how many function modes were on before
        self.hooks_before: Any = None

    def __enter__(self) -> Tape:
        self.hooks_before, around = innermost_hooks(), private.innermost_mode()
        self.modes_before = private.count_modes() - isinstance(around, Tape)
        try:
            if self.below is not None:
                private.push_hooks(self.below.pack_hook, self.below.unpack_hook)
            self.outer = innermost_hooks()
            private.push_hooks(self.pack if self.ledger is None else self.pack_told, _fetch)
            if isinstance(around, Tape):  # that of the model, around a checkpointed block
                self.around, self.mark = around, around.mark + "_"
                private.pop_mode()
            self.is_quick = self.outer is self.around is self.codec is self.ledger is None
            private.push_mode(self)
            inputs, self._inputs = self._inputs, ()
            for tensor in tensors_in(inputs):
                if self.owns(content := self.content_of(tensor)):
                    content.is_input = content.is_kept = True
                    self._given.append(content)
        except BaseException:
            self._close(*sys.exc_info())
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            while self.at_end and error[0] is None:
                self.at_end.pop()()
        finally:
            self._close(*error)

    def _close(self, *error: object) -> None:
        # Not blindly: an interrupt may have kept PyTorch from putting this mode back, or a context within from ending.
        while (hooks := innermost_hooks()) is not None and hooks != self.hooks_before:
            private.pop_hooks()
        while private.count_modes() > self.modes_before:
            private.pop_mode()
        if isinstance(self.around, Tape):
            private.push_mode(self.around)
        self.end_block()  # the last one
        self.end_block()  # which forgets what the last one returned
        # Under a hook outside all is recorded: a checkpointed block that runs again must ask for the same tensors.
        if error[0] is None and self.outer is None:
            self.calls.end()
        self.close()
        for held in (self.at_end, self._given):
            held.clear()
        self.codec, self.frame = None, Frame({})

    def is_innermost(self) -> bool:
        """Return whether autograd asks this tape now: no foreign hook is inside it, and no ``torch.func`` transform."""
        hooks = innermost_hooks()
        return hooks is not None and getattr(hooks[0], "__self__", None) is self and not in_transform()

    def end_block(self, *outputs: Any) -> None:
        """End a block, which returns ``outputs``."""
        self.blocks.end(self, self.input_handle, outputs)

    # What was made, and from what

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling():  # a part of the model is compiled: none of this may be traced into its graph
            return func(*args, **(kwargs or {}))
        if types and types != _ONE_TENSOR and are_asked(types):
            return by_class(self, func, types, args, kwargs or {})
        handler = self.frame.table.get(func)
        if handler is None:
            if kwargs and (kwargs.get("out") is not None or kwargs.get("inplace")):
                self.before_writes(args, kwargs)
            if type(func) in OPS:
                self.before_op(func, args, kwargs)
            return func(*args, **kwargs) if kwargs else func(*args)
        if not is_grad_enabled() and not getattr(handler, "is_write", False):  # only what is written to is seen
            self.before_writes(args, kwargs or {})
            return func(*args, **(kwargs or {}))
        if handler is not new or kwargs:
            return handler(self, func, args, kwargs or {})
        out = func(*args)  # most calls: new() by itself
        if type(out) in MADE:
            self.record(out, func, args)
        return out

    def call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``func(*args, **kwargs)``, seen by this tape as if the model had called it."""
        return self.__torch_function__(func, (), args, kwargs)

    def record(self, out: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> None:
        """Note on the storage of ``out`` that ``func(*args, **kwargs)`` makes it, to the bit. It aliases none."""
        calls = self.calls  # every call comes here
        calls.state = made = hash((calls.state, getattr(func, "__name__", type(func)), out.numel().bit_length()))
        if self.outer is None and calls.known.get(made, 0) >= UNUSED:
            return
        try:
            seen = plain_tensors(args if not kwargs else (*args, *kwargs.values()))
            if seen is None:
                args, kwargs = waited(self.content_of, owned(args)), waited(self.content_of, owned(kwargs))
                found = leaves(args, kwargs)
                if not all(is_plain(x) and x.layout is torch.strided for x in found):
                    return
                seen = [(x, x._version) for x in found]
            storage = out.untyped_storage()
        except (RuntimeError, NotImplementedError):  # inference tensors have no version, sparse ones no storage
            return
        if parameters.Sharded.any_is_per_module:
            parameters.copy_per_module(self, func, seen)
        link = getattr(storage, self.mark, None)
        content: Any = link() if type(link) is weakref.ref else link
        if content is None or content.owner is not self.lock:
            content = Content(self.lock)
            setattr(storage, self.mark, content)
        elif content.call is not None or not _may_be_made_as(content, out):
            return
        content.call = contents.Call(func, args, kwargs, seen, made)
        content.version, content.dtype, content.stride = out._version, out.dtype, out.stride()
        content.nbytes = storage.nbytes()
        self.blocks.calls.append(weakref.ref(content))
        calls.made.append(made)
        if content.is_kept or content.parts:  # the op asked to keep its own result, before there was a call
            if is_cheaper(self, content, content.nbytes if content.is_kept else 1):
                self.recompute(content, storage)
            elif content.is_kept:
                self.blocks.forget_arguments(self, content, content.nbytes)
        elif content.nbytes_code:  # kept by the op, too, as a code
            self._forget_needless_code(content, storage)

    # What to keep

    def pack(self, tensor: Tensor) -> Handle:
        """Return the handle that autograd keeps in place of ``tensor``: autograd calls this for each saved tensor."""
        if (coder := self.frame.coder) is not None and (chosen := coder(tensor)) is not None:
            return chosen
        kind, content = type(tensor), None
        if kind is Tensor and tensor.layout is torch.strided:  # quickly
            storage = tensor.untyped_storage()
            link = getattr(storage, self.mark, None)
            content = link() if type(link) is weakref.ref else link
            if content is None:
                is_view_of_parameter = tensor._base is not None and is_parameter(tensor)
                if self.is_quick and tensor.dtype is not torch.bool and not is_view_of_parameter:
                    return self._keep_new(Content(self.lock), storage, tensor)
                content = self.content_on(storage, tensor)
            elif content.owner is not self.lock:
                if content.owner is None and self.outer is None:
                    return KeptTensor(tensor)
                content = self.content_on(storage, tensor)
        elif kind is not nn.Parameter and (content := self.content_of(tensor)) is not None:
            storage = tensor.untyped_storage()
        if content is None or content.owner is None:
            if self.outer is None and (content is not None or kind is nn.Parameter):
                return KeptTensor(tensor)
            if is_plain(tensor) or is_parameter(tensor):
                return self.keep(tensor)
            apart = taken_apart(tensor)
            is_of_one = apart is not None and len(apart[0]) == 1
            return Wrapped(tensor, self.pack_told(apart[0][0]), apart[1]) if apart and is_of_one else self.keep(tensor)
        is_open = content.tensor is None and (content.call is not None or content.make is not None)
        ticket = self.ticket(content, storage, tensor) if is_open else None
        return self.keep_or_reuse(content, storage, tensor) if ticket is None else ticket

    def _keep_new(self, content: Content, storage: Any, tensor: Tensor) -> Content:
        """Keep ``tensor`` as ``content``, where nothing else is known of its storage and no hook or codec has a say."""
        content.version = content.at = tensor._version
        dtype = tensor.dtype
        content.dtype = None if tensor.is_neg() or (dtype.is_complex and tensor.is_conj()) else dtype
        content.tensor, content.is_kept = tensor if tensor.is_leaf else tensor.detach(), True
        content.uses += 1
        setattr(storage, self.mark, weakref.ref(content))
        return content

    def pack_told(self, tensor: Tensor) -> Handle:
        """Call :meth:`pack`, and tell the ledger of it."""
        if self.ledger is not None:  # else a part of a wrapper, in later steps
            self.ledger.makers.see()
        entry, handle = self.note(tensor, self.content_of(tensor)), self.pack(tensor)
        if entry is not None and not self.frame.replaces_stock:
            entry.asked_by.append(weakref.ref(handle))
        return handle

    def ticket(self, content: Content, storage: Any, tensor: Tensor) -> Ticket | None:
        """Return a ticket of a tensor that is cheaper to recompute than to keep; None for any other."""
        if content.is_kept or not content.is_of(tensor):
            return None
        if content.make is not None:
            if content.reads and not content.is_there():
                return None
            if content.call is not None:
                self._forget_needless_code(content, storage)
        elif content.call is None:
            return None
        elif is_cheaper(self, content, storage.nbytes()):
            content = self.recompute(content, storage)
        else:
            return None
        return Ticket(content, tensor)

    def keep_or_reuse(self, content: Content, storage: Any, tensor: Tensor) -> Handle:
        """Return a handle of a tensor that has to be kept: of what is kept of it already, of a code, or of itself."""
        kept, is_kept, has_no_call = content.tensor, content.is_kept, content.call is None
        if kept is not None and not content.is_unversioned and content.is_of(tensor):
            is_its = kept.untyped_storage() is storage  # else it was frozen, or is another's cast
            return KeptView(content, tensor) if is_its else Ticket(content, tensor)
        if not is_kept and (self.codec is not None or tensor.dtype is torch.bool):
            code = self.codec if tensor.dtype is not torch.bool else as_bits
            if (coded := code(self, content, storage, tensor)) is not None:
                return coded
        if content.is_unversioned:
            fresh = self.keep(tensor)
            self.note(tensor, fresh)
            return fresh
        if content.is_handed_on and (same := self.handed_on(content, tensor)) is not None:
            same.uses += 1
            return same
        if kept is not None or content.make is not None or not (has_no_call or content.is_of(tensor)):
            return self._keep_beside(content, storage, tensor)  # of another version, or view
        if has_no_call and self.is_quick and not is_kept and not content.parts:
            return self._keep_new(content, storage, tensor)
        if has_no_call:
            content.version, content.dtype = tensor._version, None if is_flipped(tensor) else tensor.dtype
        self.keep(tensor, content)
        setattr(storage, self.mark, weakref.ref(content))
        if content.parts:
            self._forget_codes(content, tensor)
        if not is_kept and not has_no_call:
            self.blocks.forget_arguments(self, content, storage.nbytes())
        if content.is_handed_on or (has_no_call and self.ledger is None) or not content.is_of(tensor):
            content.uses += 1
            return content
        return Ticket(content, tensor)

    def handed_on(self, content: Content, tensor: Tensor) -> Content | None:
        """Return the content of this very view that was handed on to the hook outside; None if there is none."""
        if content.view is not None and content.view.is_of(tensor):
            return content
        others = self.notes(tensor).get(_OTHERS)
        return None if others is None else others.get(_view_of(tensor))

    def _keep_beside(self, content: Content, storage: Any, tensor: Tensor) -> Content:
        """Keep a view or version of a storage of which ``content`` keeps another one."""
        fresh = self.keep(tensor)
        fresh.version, fresh.dtype = tensor._version, tensor.dtype
        self.note(tensor, fresh)
        if content.is_handed_on:
            self.notes(tensor).setdefault(_OTHERS, weakref.WeakValueDictionary())[_view_of(tensor)] = fresh
        elif not is_flipped(tensor):
            self.link(storage, fresh, content)
            self._forget_codes(fresh, tensor)
        return fresh

    def _forget_codes(self, content: Content, tensor: Tensor) -> None:
        """Forget the codes that were kept instead of ``tensor``, which ``content`` keeps now."""
        for code in alive(content.parts):
            if not code.nbytes_code or (view := code.view) is None:
                continue
            is_same = view.version == tensor._version and view.dtype == tensor.dtype and not is_flipped(tensor)
            if view.is_of(tensor) if content.is_handed_on else is_same:
                code.forget_code(content)

    def recompute(self, content: Content, storage: Any) -> Content:
        """Recompute ``content`` from now on, of handles; return what gives it: it, or an equal cast of one input."""
        # Autocast converts an input for each product that takes it: as one content, so that backward converts once.
        call, parts, first = content.call, content.parts, None
        func = call.func
        if func in parameters.CASTS:
            x = call.seen[0][0]
            notes, key = self.notes(x), (place_of(x), is_flipped(x), content.dtype, content.stride)
            first = notes[key]() if key in notes else None
            if first is not None and (first.make is None or not decide.is_near(self, first)):
                first = None
            notes[key] = weakref.ref(content if first is None else first)
        if type(func) is RecomputedProduct and self.ledger is not None:
            self.ledger.recomputed += storage.nbytes()
        if first is not None and not content.holders():
            content.call, content = None, first
        else:
            content.become(func, (), block=self.block)
            if first is not None:
                content.builds_on(first)
                first.uses += 1
                content.make, content.inputs = contents.same, [first]
            else:
                content.inputs = [
                    a if (kind := type(a)) in CONSTANT
                    else self.input_handle(a, content) if kind is Tensor or kind is nn.Parameter
                    else mapped(a, partial(self.input_handle, content=content)) for a in call.args
                ]  # fmt: skip
                if call.kwargs:
                    handle_of, named = partial(self.input_handle, content=content), call.kwargs.items()
                    content.named = {name: a if type(a) in CONSTANT else mapped(a, handle_of) for name, a in named}
        setattr(storage, self.mark, content)  # who asked may be gone before another asks, as a statistic that is logged
        self.blocks.recomputed.append(weakref.ref(storage))
        for code in alive(parts) if parts else ():
            if code.nbytes_code and not content.is_lossy:
                code.forget_code(content)
        return content

    def input_handle(self, argument: Tensor, content: Content) -> Handle:
        """Return the handle of an argument of the call of ``content``: kept already or from now on, or recomputed."""
        storage = argument.untyped_storage()
        theirs = self.content_on(storage, argument)
        if theirs.owner is None:
            if parameters.is_copied(argument, theirs, content.make):
                return parameters.copy_of(self, argument)
            has_gathers = bool(getattr(content.make, "gathers", ()))
            if parameters.is_local(content.make) and not (theirs.is_per_module or has_gathers):
                content.reads = (*content.reads, storage)
            if not theirs.is_sharded:
                self.reads(content, argument)
            # Whose ``.data`` another tensor may replace before backward; but not where an engine fills it again.
            return self.keep(argument) if theirs.is_sharded else KeptTensor(argument.detach())
        if not argument.requires_grad:  # a write could give it a graph, which would then hold itself by this handle
            argument = argument.detach()
        handle: Handle | None = None
        if not theirs.is_kept and (theirs.call is not None if theirs.make is None else decide.is_near(self, theirs)):
            handle = self.ticket(theirs, storage, argument)
        if handle is None:
            theirs.readers = with_ref(theirs.readers, content)
            if self.ledger is not None:
                self.note(argument, theirs)
            handle = self.keep_or_reuse(theirs, storage, argument)
        if isinstance(handle, (Ticket, KeptView)):
            content.builds_on(handle.content)
        return handle

    def _forget_needless_code(self, content: Content, storage: Any) -> None:
        """Forget the code of a tensor that what is kept anyway can recompute."""
        if content.nbytes_code:
            kept = sum(a.tensor.nbytes for a in content.inputs if type(a) is Content and a.tensor is not None)
            if is_cheaper(self, content, kept):
                self.recompute(content, storage)


def _view_of(tensor: Tensor) -> tuple[Any, ...]:
    return place_of(tensor), is_flipped(tensor)


def _may_be_made_as(content: Content, out: Tensor) -> bool:
    """Return whether a call that makes ``out`` makes ``content``: if that is kept, in its version and geometry."""
    kept: Any = content.view if content.is_handed_on else content.tensor
    if kept is None:
        return content.make is None or (bool(content.nbytes_code) and content.stride == out.stride())
    return content.version == out._version and (kept.shape, kept.stride()) == (out.shape, out.stride())


private.compile_nothing_of(Tape.__torch_function__, Tape.pack, Tape.pack_told)
