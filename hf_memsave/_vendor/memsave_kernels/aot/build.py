"""What a launch compiles to on a GPU that need not be there: registers, stack and the width of loads and stores.

A launch is recorded from the package's own functions, called on empty CPU tensors, so that signature, alignment,
constants and warps are those of a real call. Triton brings ptxas and cuobjdump.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from memsave_kernels import _launch

ARCHITECTURES = (80, 90, 100)
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1", torch.int16: "*i16", torch.float64: "*fp64",
}  # fmt: skip
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Launch(NamedTuple):
    """One launch that was asked for, on a device with one processor."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int


class Build(NamedTuple):
    """What ptxas made of a launch.

    Attributes:
        registers: Of a thread.
        stack: Bytes of a thread that do not fit in registers.
        loads: Bits of each load from global memory in the program text, sorted.
        stores: Bits of each store.
        barriers: At which the warps of a program wait for each other, in the program text.
    """

    registers: int
    stack: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    barriers: int


@contextmanager
def recording():
    """Yields a list that every launch on CPU tensors is added to, instead of being run."""
    found: list[Launch] = []
    before = _launch.launch_elsewhere
    _launch.launch_elsewhere = lambda *asked: found.append(Launch(*asked))
    try:
        yield found
    finally:
        _launch.launch_elsewhere = before


def record(call: Callable[[], Any]) -> list[Launch]:
    """The launches of a call."""
    with recording() as found:
        call()
    return found


def build(launch: Launch, architecture: int, is_aligned: bool = True, **options: Any) -> Build:
    """Compiles a launch.

    Args:
        launch: What :func:`record` found.
        architecture: Compute capability, such as 90.
        is_aligned: Whether Triton is told which pointers and numbers are multiples of 16.
        **options: Of the compilation, such as ``maxnreg``.

    Returns:
        What came out.

    Raises:
        ValueError: The constants are not in the kernel's order, in which a compiled kernel takes them.
    """
    names = launch.kernel.arg_names
    if list(names[len(launch.args) :]) != list(launch.constants):
        raise ValueError(f"{launch.kernel.__name__} expected its constants in order, got {list(launch.constants)}")
    signature, constants, hints = {}, {}, {}
    for i, (name, arg) in enumerate(zip(names, (*launch.args, *launch.constants.values()), strict=True)):
        if name in launch.constants or arg is None or (type(arg) is int and arg == 1):
            signature[name], constants[name] = "constexpr", arg
            continue
        signature[name] = _type_of(arg)
        multiple = arg.data_ptr() if isinstance(arg, torch.Tensor) else arg
        if is_aligned and type(multiple) is int and multiple % 16 == 0:
            hints[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=hints)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": launch.num_warps, **options})
    return _read(compiled.asm["cubin"])


def _type_of(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return _TYPES[arg.dtype]
    if isinstance(arg, _launch.Long) or (isinstance(arg, int) and not -(2**31) <= arg < 2**31):
        return "i64"
    return "i32" if isinstance(arg, int) else "fp32"


def _read(cubin: bytes) -> Build:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, text = (_dump(flag, file.name) for flag in ("-res-usage", "-sass"))
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    spilled = re.findall(r"\b(?:LDL|STL)\b", text)
    barriers = len(re.findall(r"\bBAR\b", text))
    return Build(registers, max(stack, len(spilled)), _widths("LDG", text), _widths("STG", text), barriers)


def _dump(flag: str, file: str) -> str:
    return subprocess.run([_CUOBJDUMP, flag, file], check=True, capture_output=True, text=True).stdout


def _widths(instruction: str, text: str) -> tuple[int, ...]:
    found = []
    for options in re.findall(rf"\b{instruction}((?:\.[A-Z0-9_]+)+)", text):
        width = re.search(r"\.(?:[US]?(8|16|64|128|256))\b", options)
        found.append(int(width[1]) if width else 32)
    return tuple(sorted(found))
