"""Every private name of PyTorch that the tape uses, each with what it answers; one test names them all."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from traceback import walk_stack, walk_tb
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.autograd.variable import Variable
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

from hf_memsave.device import STAND_IN

#: The number of the backward that runs on this thread; -1 outside of one.
backward_id: Callable[[], int] = torch._C._current_graph_task_id
#: Whether that backward gets to a node later: not where it was asked for other gradients alone.
is_to_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
#: Whether autocast is on for any device.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
#: Whether a ``torch.func`` transform runs: autocast does not work as usual there, and tensors have no storages.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_is_in_batch: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
#: A context in which no function mode is called.
no_modes = torch._C.DisableTorchFunction
#: Copies each tensor of a list into the one at its place in another, on CUDA in one launch.
copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
#: SDPA's own softmax of scores, over the last dimension: rows that may see nothing give zeros.
safe_softmax: Callable[[torch.Tensor], torch.Tensor] = functools.partial(torch._safe_softmax, dim=-1)
#: A view that is the negative of what its storage has.
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
#: Ops that autograd calls: a conversion, a view that it does not know for one; softmaxes, and where their dimension is.
to_copy, unsafe_view = torch.ops.aten._to_copy.default, torch.ops.aten._unsafe_view.default
softmaxes: dict[Any, int] = {
    torch.ops.aten._softmax.default: 1, torch.ops.aten._log_softmax.default: 1,
    torch.ops.aten._softmax_backward_data.default: 2, torch.ops.aten._log_softmax_backward_data.default: 2,
}  # fmt: skip
#: Ops that sort, rank or count, or accumulate along a dimension.
COUNTING = frozenset(getattr(torch.ops.aten, name) for name in (
    "bincount cumsum cumprod cummax cummin histc kthvalue median mode searchsorted sort topk unique_consecutive "
    "unique_dim _unique2"
).split())  # fmt: skip
#: What ``tensor.data = other`` calls.
set_data: Callable[..., None] = operator.attrgetter("data.__set__")(torch.Tensor)
#: The class of the nodes that a ``torch.autograd.Function`` puts into the graph; they are its contexts.
node_class: Callable[[Any], Any] = operator.attrgetter("_backward_cls")
#: The function mode innermost on this thread; to pop and to push one; to pop and to push saved-tensor hooks.
innermost_mode: Callable[[], TorchFunctionMode | None] = torch.overrides._get_current_function_mode
pop_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
push_mode: Callable[[TorchFunctionMode], None] = torch._C._push_on_torch_function_stack
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
count_modes: Callable[[], int] = torch._C._len_torch_function_stack
get_mode: Callable[[int], Any] = torch._C._get_function_stack_at
#: How many dispatch modes, which see each op, are on.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
#: The number that this thread's next autograd node gets.
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_module_call = torch.nn.Module._call_impl.__code__
_hooks_of_all: tuple[Any, ...] = (
    torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks, torch.nn.modules.module._global_backward_hooks,
)  # fmt: skip
#: Contexts in which tensor subclasses' ``__torch_function__`` is off, or on; whether it is (not in a backward by one).
no_subclasses, all_subclasses = torch._C.DisableTorchFunctionSubclass, torch._C._EnableTorchFunction
asks_classes: Callable[[], bool] = torch._C._is_torch_function_enabled
#: Functions of ``torch.nn.functional`` that are written in C++, in place among them.
c_functions = torch._C._nn
#: The function that every refusal of saved-tensor hooks comes from.
_refuses: Any = inspect.unwrap(disable_saved_tensors_hooks)
#: The class of ``torch.ops.library.name.overload``.
OpOverload = torch._ops.OpOverload
#: Types of what a model calls as ``torch.ops.library.name``, with or without ``.overload``.
OPS = frozenset({OpOverload, torch._ops.OpOverloadPacket})
#: Devices that autocast can be on for, the one that a library may add among them.
AUTOCAST = ("cpu", "cuda", "privateuseone")


@functools.cache
def written_by(op: Any) -> frozenset[tuple[int, str]]:
    """Return the place and name of each argument that an op of ``torch.ops`` writes to, as its schemas say."""
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    arguments = [pair for overload in overloads for pair in enumerate(overload._schema.arguments)]
    return frozenset((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor beneath one of ``torch.func`` transforms, or the tensor itself."""
    return torch._C._functorch.get_unwrapped(tensor) if in_transform() and _is_wrapped(tensor) else tensor


def stands_for_many(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` may stand for several: in ``torch.func``'s transforms, or by ``is_grads_batched``."""
    return _is_wrapped(tensor) or _is_in_batch(tensor)


#: What the dispatcher calls autocast on a device; the stand-in for CUDA does as CUDA would.
_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", STAND_IN: "AutocastCUDA"}


def is_registered(op: str, key: str) -> bool:
    """Return whether the dispatcher has an own kernel for ``op`` (``aten::pow.Scalar``) at dispatch key ``key``."""
    is_known = torch._C._dispatch_has_kernel(op)  # some overloads are Python's alone
    return is_known and torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


@functools.cache
def has_autocast(name: str, device: str) -> bool:
    """Return whether autocast converts the arguments of ``aten::name``, on devices of this type."""
    key = _AUTOCAST_KEYS.get(device, "AutocastPrivateUse1")
    packet = getattr(torch.ops.aten, name)
    return any(is_registered(getattr(packet, overload).name(), key) for overload in packet.overloads())


def is_one_kernel(*args: Any, **kwargs: Any) -> bool:
    """Return whether SDPA of these arguments runs as one kernel, which keeps q, k and v, and not as many functions."""
    is_known = args[0].device.type in ("cpu", "cuda", STAND_IN)
    return not is_known or torch._fused_sdp_choice(*args, **kwargs) != SDPBackend.MATH.value


def is_cudnn(*args: Any, **kwargs: Any) -> bool:
    """Return whether ``F.scaled_dot_product_attention`` of these arguments runs cuDNN's kernel."""
    return bool(torch._fused_sdp_choice(*args, **kwargs) == SDPBackend.CUDNN_ATTENTION.value)


def no_dispatch() -> contextlib.AbstractContextManager[Any]:
    """Enter a context in which no dispatch mode sees calls, unless tensors are fake: a mode makes them so."""
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return contextlib.nullcontext() if is_fake else torch._C._DisableTorchDispatch()


def innermost_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the (pack, unpack) pair of saved-tensor hooks innermost on this thread; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@contextlib.contextmanager
def without(is_mode: bool, is_hooks: bool) -> Iterator[None]:
    """Run without the innermost function mode if ``is_mode``, and the innermost saved-tensor hooks if ``is_hooks``."""
    mode, hooks = pop_mode() if is_mode else None, innermost_hooks() if is_hooks else None
    if hooks is not None:
        pop_hooks()
    try:
        yield
    finally:
        if hooks is not None:
            push_hooks(*hooks)
        if mode is not None:
            push_mode(mode)


def is_only_mode(mode: TorchFunctionMode) -> bool:
    """Return whether calls ask ``mode`` first, and after it no mode but a default device."""
    if innermost_mode() is not mode:
        return False
    return all(type(get_mode(i)) is DeviceContext for i in range(count_modes() - 1))


def checkpoint_frame(hooks: Any = None) -> tuple[Any, Any]:
    """Return what ``torch.utils.checkpoint``, if ``hooks`` (or the innermost ones) are its own, knows of its call.

    That is an object that is the same in every run of the call, and one for this run, which lives until it ends; None
    and None outside of a non-reentrant checkpoint.
    """
    hooks = innermost_hooks() if hooks is None else hooks
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    if not inspect.isfunction(pack):
        return None, None
    held = dict(zip(pack.__code__.co_freevars, (cell.cell_contents for cell in pack.__closure__ or ()), strict=True))
    frame = held.get("frame")
    if frame is None and (found := held.get("target_frame_ref")) is not None:
        frame = found()
    return (frame, pack) if hasattr(frame, "recompute_fn") else (None, None)


def function_in_backward() -> Any:
    """Return the context of the ``torch.autograd.Function`` whose backward the engine runs; None if it runs none."""
    node = torch._C._current_autograd_node()
    return node if isinstance(node, FunctionCtx) else None


def functions_in_forward() -> Iterator[Any]:
    """Yield the contexts of Functions in whose forwards the caller runs (a reentrant checkpoint's), innermost first."""
    for frame, _ in walk_stack(sys._getframe(1)):
        code = frame.f_code
        context = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "forward" and code.co_argcount else None
        if isinstance(context, FunctionCtx):
            yield context


def checkpointed_call() -> Any:
    """Return an object of the checkpointed call that runs, in forward or again in backward; None outside of any."""
    if (frame := checkpoint_frame()[0]) is not None or torch.is_grad_enabled() and backward_id() < 0:
        return frame
    return function_in_backward() if torch.is_grad_enabled() else next(functions_in_forward(), None)


def modules_that_run() -> tuple[list[torch.nn.Module], list[str]]:
    """Return the three innermost modules that this thread runs, and the names of functions within the innermost."""
    modules: list[torch.nn.Module] = []
    names: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(modules) < 3:
        if (code := frame.f_code) is _module_call:
            modules.append(frame.f_locals["self"])
        elif not modules:
            names.append(code.co_name)
        frame = frame.f_back
    return modules, names


def is_running(function: Callable[..., Any]) -> bool:
    """Return whether this thread is within a call of ``function``, one written in Python."""
    return any(frame.f_code is function.__code__ for frame, _ in walk_stack(sys._getframe(1)))


def are_all_watched() -> bool:
    """Return whether hooks that are not ours run around every module, beside its own."""
    hooks = [hook for hooks in _hooks_of_all if hooks for hook in hooks.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("hf_memsave.") for hook in hooks)


def sequence_number(node: Any) -> int:
    """Return the number of an autograd node: nodes of one thread are numbered in order."""
    return int(getattr(node, "_sequence_nr", int)())


def hooks_work() -> bool:
    """Return whether saved-tensor hooks are of use here: not under ``torch.compile``, which recomputes anyway."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not in_transform()
        and forward_ad._current_level < 0
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    )


def refuses_hooks(error: BaseException) -> bool:
    """Return whether ``disable_saved_tensors_hooks``, which every refusal comes from, raised ``error``."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code is _refuses.__code__


@contextlib.contextmanager
def without_hooks(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Run without the tensor hooks of ``leaves``, for gradients that are only a part of theirs."""
    hooked = [(leaf, leaf._backward_hooks) for leaf in leaves if leaf.is_leaf and leaf._backward_hooks]
    for leaf, _ in hooked:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, hooks in hooked:
            leaf._backward_hooks = hooks


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Run without ``torch.func``'s transforms and the vmap of ``is_grads_batched``, in which nothing can be drawn."""
    levels = torch._C._vmapmode_increment_nesting()
    for _ in range(levels):
        torch._C._vmapmode_decrement_nesting()
    try:
        with torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(levels - 1):
            torch._C._vmapmode_increment_nesting()


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that runs now ends."""
    Variable._execution_engine.queue_callback(callback)


def compile_nothing_of(*functions: Callable[..., Any]) -> None:
    """Have Dynamo begin no graph at ``functions``, nor at what they call, if this version of PyTorch can."""
    frames = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for function in functions:
            frames.set_code_exec_strategy(function.__code__, skip)


def is_concrete(x: torch.Tensor) -> bool:
    """Return whether a program may read the values of ``x``: not of a fake tensor, nor where ``make_fx`` traces."""
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return not isinstance(x, FakeTensor) and (tracing is None or tracing.get_proxy_mode() is None)


class Note:
    """An object that lives as long as the autograd node it is on, for weak references, which nodes refuse."""

    @classmethod
    def of(cls, node: Any) -> Note:
        """Return the one note on ``node``, made at the first call."""
        return node.metadata.setdefault("hf_memsave", cls())


def autocast_cache() -> weakref.ref[Note]:
    """Return a weak reference to a note on a cast that autocast's cache alone keeps: it dies as that is emptied."""
    enabled = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", True)
    try:
        drop: Any = id
        with no_dispatch(), torch.enable_grad(), saved_tensors_hooks(drop, drop):  # which a checkpoint would count
            leaf = torch.empty(0, 0, dtype=torch.float32, device="cpu", requires_grad=True)
            product: Any = torch.mm(leaf, leaf)
    finally:
        torch.set_autocast_enabled("cpu", enabled)
    return weakref.ref(Note.of(product.grad_fn.next_functions[0][0]))


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Run without autocast on any device; its cache stays, unlike where a ``torch.autocast`` ends."""
    on = [device for device in AUTOCAST if torch.is_autocast_enabled(device)]
    for device in on:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)
