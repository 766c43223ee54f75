"""Threads, and that they change places often."""

import sys
import threading
from contextlib import contextmanager


def in_threads(*calls):
    """Each on a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def switching(interval: float):
    """Threads change places this often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
