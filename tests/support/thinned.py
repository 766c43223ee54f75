"""Long lists of cases, of which `make test` runs some and `make matrix` the others."""

from collections.abc import Container, Iterable
from itertools import product
from typing import Any

import pytest

from support.helpers import MATRIX


def thinned(every: int, *axes: Iterable[Any]) -> list[Any]:
    """Every combination, but one of ``every`` left to `make matrix`.

    Each value of an axis has a case in `make test` where another axis has ``every`` values or more.
    """
    found = []
    for places in product(*(enumerate(axis) for axis in axes)):
        case = [value for _, value in places]
        found.append(pytest.param(*case, marks=MATRIX if sum(place for place, _ in places) % every else ()))
    return found


def chosen(cases: Iterable[tuple[Any, ...]], some: Container[Any]) -> list[Any]:
    """Every case, but those whose first values are ``some`` left to `make matrix`."""
    return [pytest.param(*case, marks=() if case[0] in some or case[:2] in some else MATRIX) for case in cases]
