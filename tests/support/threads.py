"""Threads that change places often."""

import sys
from contextlib import contextmanager


@contextmanager
def switching(interval: float):
    """Threads change places this often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
