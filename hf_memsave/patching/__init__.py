"""Patching a model: collect what is to change, check all of it, then swap; and back."""
