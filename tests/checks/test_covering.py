"""Rows of features cover all pairs that can go together."""

import itertools

from tests.cases import covering

FEATURES = {"a": [0, 1, 2], "b": [0, 1], "c": [0, 1, 2, 3], "d": [0, 1]}


def pairs_of(row):
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def test_rows_cover_all_pairs_but_the_excluded_ones():
    excluded = {frozenset({("a", 1), ("c", 2)}), frozenset({("a", 2), ("b", 1), ("d", 1)})}
    rows = covering.rows(FEATURES, excluded)
    every = set()
    for values in itertools.product(*FEATURES.values()):
        every |= pairs_of(dict(zip(FEATURES, values, strict=True)))
    assert set().union(*map(pairs_of, rows)) == every - {frozenset({("a", 1), ("c", 2)})}
    assert not any(each <= frozenset(row.items()) for row in rows for each in excluded)
    assert len(rows) < 16


def test_rows_are_equal_each_time():
    assert covering.rows(FEATURES, set()) == covering.rows(FEATURES, set())
