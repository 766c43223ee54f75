"""``quiet``: a module of a kind that a configuration leaves to stock; only dropouts inside are recorded on the tape."""

from typing import Any

import torch.nn.functional as F
from torch import nn

from hf_memsave.ops.op import Op
from hf_memsave.tape import current
from hf_memsave.tape.dropout import dropout
from hf_memsave.tape.table import UNRECORDED, UNRECORDED_BUT_DROPOUTS


def _unrecorded(module: nn.Module, patch: Any, *args: Any, **kwargs: Any) -> Any:
    if (tape := current()) is None:
        return patch.stock.forward(module, *args, **kwargs)
    is_ours = tape.frame.table.get(F.dropout) is dropout
    with tape.using(table=UNRECORDED_BUT_DROPOUTS if is_ours else UNRECORDED):
        return patch.stock.forward(module, *args, **kwargs)


LEFT_TO_STOCK = Op("quiet", _unrecorded, is_implied=True)
