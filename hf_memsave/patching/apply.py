"""The step of ``patch`` and ``unpatch`` that changes the model, after all was collected and checked."""

from __future__ import annotations

from torch import nn

from hf_memsave.errors import PatchError
from hf_memsave.patching.checkpointed import AGAIN, choose_again
from hf_memsave.patching.collect import Found
from hf_memsave.patching.first_step import FIRST, LEDGER
from hf_memsave.patching.rows import forget
from hf_memsave.patching.sampled_layers import attach
from hf_memsave.patching.swap import is_wrapped, patched_class, set_class, stock_class
from hf_memsave.patching.taped import BUFFERS, CODED, COMPILED


def swap(model: nn.Module, found: Found) -> set[nn.Module]:
    """Patch the modules of ``model`` that ``found`` names, and give all others their stock classes.

    Returns:
        The modules whose class changes, or whether they run again in backward.

    Raises:
        PatchError: Another tool has put its own class over one of ours that is to change.
    """
    classes = {module: patched_class(patch) for module, patch in found.patches.items()}
    for name, module in model.named_modules():
        if is_wrapped(module) and classes.get(module) not in type(module).__mro__:
            raise PatchError(
                f"cannot undo {name or 'the model'}: its class is {type(module).__name__} of {type(module).__module__},"
                " which another tool (such as FSDP2) put over ours since. Undo before you wrap, or build the model "
                "again."
            )
    coded = dict.fromkeys(module for module, patch in found.patches.items() if patch.config and patch.config.storage)
    changed = {module for module in model.modules() if (AGAIN in module.__dict__) != (module in found.recomputed)}
    for module in model.modules():
        cls = classes.get(module, stock_class(module))
        if (compiled := getattr(cls, COMPILED, None)) is not None:
            compiled.why_not = ""  # of an earlier model of this class
        if type(module) is not cls and not is_wrapped(module):
            set_class(module, cls)
            changed.add(module)
        forget(module)
        for name in (BUFFERS, LEDGER, FIRST, CODED):
            if name != CODED or module not in coded:
                module.__dict__.pop(name, None)
    for index, module in enumerate(coded):
        module.__dict__.setdefault(CODED, (index, 0))
    choose_again(model, found.recomputed)
    attach(model)
    return changed
