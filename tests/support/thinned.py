"""Long lists of cases, of which `make test` runs some and `make matrix` the others."""

import pytest

from support.helpers import MATRIX, thinned

__all__ = ["chosen", "thinned"]


def chosen(cases, some):
    """Every case, but those whose first values are ``some`` left to `make matrix`."""
    return [pytest.param(*case, marks=() if case[0] in some or case[:2] in some else MATRIX) for case in cases]
