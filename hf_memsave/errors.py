"""Every error this package raises on purpose; each message says what was expected, what was found, and the remedy."""

from __future__ import annotations

from typing import Any


class MemSaveError(Exception):
    """Base of all errors raised by hf_memsave.

    Args:
        message: What was expected and what was found, perhaps with the remedy.
        remedy: What to do, in Python.
        option: What to do on the command line instead; ``on_command_line`` is the message with that.
    """

    def __init__(self, message: str, remedy: str = "", option: str = "") -> None:
        super().__init__(f"{message} {remedy}".rstrip())
        self.on_command_line = f"{message} {option or remedy}".rstrip()


class ConfigError(MemSaveError, ValueError):
    """A :class:`~hf_memsave.MemSaveConfig` field, value or preset that does not exist."""


class PatchError(MemSaveError, RuntimeError):
    """A model that cannot be patched, or unpatched, as asked. The model is left as it was."""


class PlanError(MemSaveError, RuntimeError):
    """A plan that cannot be made, such as one that does not fit. The model is left as it was."""


class KeptTensorChangedError(MemSaveError, RuntimeError):
    """A tensor that backward needs was written to in place after it was kept."""


class MeasureError(MemSaveError, RuntimeError):
    """A model or a batch that cannot be built, loaded or run, so that there is nothing to measure."""


class CommandError(MemSaveError):
    """A command that cannot do what it was asked to."""


def not_a_module(call: str, got: Any) -> str:
    """Return the message for a call such as "patch(model)" whose argument is no module."""
    from torch import nn

    if isinstance(got, type) and issubclass(got, nn.Module):
        found, remedy = f"the class {got.__name__}", "Make a model of it first, or load one with its from_pretrained."
    elif isinstance(got, str):
        found, remedy = f"the text {got!r}", "Load the model first, as with AutoModelForCausalLM.from_pretrained."
    else:
        found = "None" if got is None else f"an object of class {type(got).__name__}"
        has_model = isinstance(getattr(got, "model", None), nn.Module)
        remedy = "Pass its .model." if has_model else "Pass the model that you train."
    return f"{call}: expected a torch.nn.Module, got {found}. {remedy}"
