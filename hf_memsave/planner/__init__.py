"""Choosing a configuration for a model, a batch and a memory limit."""

from hf_memsave.planner.auto_tempo import Plan, fast, smart
from hf_memsave.planner.trial import Trial

__all__ = ["Plan", "Trial", "fast", "smart"]
