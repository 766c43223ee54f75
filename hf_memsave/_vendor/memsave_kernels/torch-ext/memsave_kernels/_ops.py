"""The ops of this package: each a function on tensors that PyTorch knows by name, with a fake for tracing."""

from collections.abc import Callable
from typing import Any

import torch

VERSION = "0.1.0"
#: Of the ops. Named after the package, so that two copies of it in one process do not meet.
NAMESPACE = f"{__package__}_{VERSION}".replace(".", "_")
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an op.

    Args:
        schema: Its name and arguments, as in ``"twice(Tensor x) -> Tensor"``.
        run: Allocates the outputs and launches the kernel.
        fake: Gives empty outputs of the same shapes, dtypes and strides.

    Returns:
        The op's overload, to be called as ``run`` is.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CUDA", "CPU"):
        _LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
