"""The ops of this package: each a function on tensors that PyTorch knows by name, with a fake for tracing."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

#: Of the ops, named after the package: in a build for the Hub the kernel's id, so that two builds do not meet.
NAMESPACE = str(__package__).replace(".", "_")
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an op, which tracing and modes see; without them ``run`` is called as it is, which takes less time.

    Args:
        schema: Its name and arguments, as in ``"twice(Tensor x) -> Tensor"``.
        run: Allocates the outputs and launches the kernel.
        fake: Gives empty outputs of the same shapes, dtypes and strides.

    Returns:
        A function, to be called as ``run`` is.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CUDA", "CPU"):
        _LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*args: Any) -> Any:
        is_plain = type(args[0]) is torch.Tensor and not torch.is_grad_enabled()
        is_seen = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
        return run(*args) if is_plain and not is_seen else op(*args)

    return call
