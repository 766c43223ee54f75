"""A module of any function."""

from torch import nn


class Calls(nn.Module):
    """A module of a function."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args, **kwargs):
        return self.fn(*args, **kwargs)
