"""Measure and estimate the memory of a training step."""
