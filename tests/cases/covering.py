"""Rows of features that cover all pairs of their values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

Item = tuple[str, Any]  # a feature, and its value
Row = dict[str, Any]


def rows(features: Mapping[str, Sequence[Any]], excluded: Set[frozenset[Item]]) -> list[Row]:
    """Returns rows, each with a value of every feature, such that each pair of values that can go together is in one.

    Args:
        features: The values of each feature. The first one goes with all values of the others.
        excluded: Sets of values that do not go together.
    """
    uncovered = dict.fromkeys(
        frozenset(pair)
        for one, other in itertools.combinations(features, 2)
        for pair in itertools.product(_items(features, one), _items(features, other))
    )
    for pair in [pair for pair in uncovered if _is_excluded(pair, excluded)]:
        del uncovered[pair]
    made = []
    while uncovered:
        row = _complete(next(iter(uncovered)), features, uncovered, excluded)
        made.append({name: row[name] for name in features})
        for pair in itertools.combinations(row.items(), 2):
            uncovered.pop(frozenset(pair), None)
    return made


def _items(features: Mapping[str, Sequence[Any]], name: str) -> list[Item]:
    return [(name, value) for value in features[name]]


def _is_excluded(items: Set[Item], excluded: Set[frozenset[Item]]) -> bool:
    return any(each <= items for each in excluded)


def _complete(
    pair: frozenset[Item],
    features: Mapping[str, Sequence[Any]],
    uncovered: Mapping[frozenset[Item], None],
    excluded: Set[frozenset[Item]],
) -> Row:
    """Returns a row that contains a pair, and of the uncovered pairs as many as its features, chosen one by one, can add."""
    row = dict(pair)
    for name in features:
        if name in row:
            continue
        possible = [
            item for item in _items(features, name) if not _is_excluded(frozenset({*row.items(), item}), excluded)
        ]
        counts = [sum(frozenset({item, other}) in uncovered for other in row.items()) for item in possible]
        row[name] = possible[counts.index(max(counts))][1]
    return row
