"""Every error this package raises on purpose; each message says what was expected, what was found, and the remedy."""


class MemSaveError(Exception):
    """Base of all errors raised by hf_memsave."""


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
