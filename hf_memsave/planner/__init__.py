"""Choose a configuration for a model, a batch and a memory limit."""

from hf_memsave.planner.auto_tempo import fast, smart
from hf_memsave.planner.trial import Plan, Trial

__all__ = ["Plan", "Trial", "fast", "smart"]
