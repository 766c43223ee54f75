"""Few of all combinations of settings."""

from itertools import combinations, product


def pairwise(*axes):
    """Combinations in which every two values of different axes meet: as few as a greedy choice needs."""
    values = [list(axis) for axis in axes]
    every = [tuple(enumerate(places)) for places in product(*(range(len(axis)) for axis in values))]
    missing, found = {pair for places in every for pair in combinations(places, 2)}, []
    while missing:
        best = max(every, key=lambda places: len(missing.intersection(combinations(places, 2))))
        missing.difference_update(combinations(best, 2))
        found.append(tuple(axis[place] for axis, (_, place) in zip(values, best, strict=True)))
    return found
