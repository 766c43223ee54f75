"""A module of any function."""

from torch import nn


class Calls(nn.Module):
    """A module of a function, and of the modules that it calls."""

    def __init__(self, fn, *parts):
        super().__init__()
        self.fn = fn
        if parts:
            self.parts = nn.ModuleList(parts)

    def forward(self, *args, **kwargs):
        return self.fn(*args, **kwargs)
