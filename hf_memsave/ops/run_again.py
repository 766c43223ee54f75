r"""``run_again``: a linear of a rung below the floor.

Kept for backward, with y the output ``[*, out]`` of a linear that is read by an activation, a norm or attention::

    the floor    y
    here         nothing: backward runs the linear's own forward again, on an input that is kept or remade

Exact: the same function of the same tensors. It costs the products again: at LLaMA-3-8B's widths 1/13 of a block's for
o_proj, 3/4 for all up to the gate. Source: Chen et al. (2016), arXiv:1604.06174; Korthikanti et al. (2022),
arXiv:2205.05198.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_memsave.ops.op import Op, is_parametrized
from hf_memsave.tape import current
from hf_memsave.tape.again import MOST_WORK_OF_A_BLOCK, LinearAgain
from hf_memsave.tape.private import FakeTensor


def _linear(module: nn.Module, patch: Any, *args: Any, **kwargs: Any) -> Any:
    y = patch.stock.forward(module, *args, **kwargs)
    tape = current()
    is_plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
    if tape is not None and is_plain and type(y) in (Tensor, FakeTensor):
        tape.most_work = MOST_WORK_OF_A_BLOCK
        tape.release(y)  # a quantized linear ends with a conversion, of what nobody can remake
        again = LinearAgain(partial(patch.stock.forward, module), y.device.type)
        tape.record(y, again, (args[0], *module.parameters(recurse=False)))
    return y


def _check(module: nn.Module, value: Any) -> str:
    return "it is parametrized: reading its weight computes it" if is_parametrized(module) else ""


def _refuse(module: nn.Module, value: Any) -> str:
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):
        return (
            f"cannot run again (checkpoint={value!r}): expected parameters that stay, got DeepSpeed ZeRO-3's, which "
            "are gone in backward. Use gradient checkpointing there, or ZeRO-2."
        )
    return ""


RUN_AGAIN = Op("run_again", _linear, _check, refuse=_refuse)
