"""Pieces, for drawn sizes and numbers of ranks: each element is on one rank."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.sharding import pieces

DRAWS = 60


@pytest.mark.parametrize("seed", range(DRAWS))
def test_each_element_is_on_one_rank(seed):
    rng = np.random.default_rng(seed)
    before, count, after = (int(size) for size in rng.integers(0, 40, 3))
    ranks = int(rng.integers(1, 9))
    alignment = int(rng.integers(1, 5))
    for found in (pieces.contiguous(count, ranks), pieces.of_bucket([before, count, after], ranks, alignment)[1]):
        held = [element for part in found.ranges for element in range(part.begin, part.end)]
        assert held == list(range(found.elements))


def test_values_lie_in_a_bucket_one_after_the_other():
    first, scalar, last = pieces.of_bucket([5, 1, 7], ranks=2, alignment=4)
    assert [(r.begin, r.end) for r in first.ranges] == [(0, 5), (5, 5)]
    assert [(r.begin, r.end) for r in scalar.ranges] == [(0, 1), (1, 1)]
    assert [(r.begin, r.end) for r in last.ranges] == [(0, 4), (4, 7)]
