"""The order of stored examples, and the parts of batches, against plain loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.data import epoch_order
from tfdist.data.epoch_order import EpochOrder
from tfdist.data.stored import counts_of_part

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)
WINDOW = st.integers(1, 40)
FIRST = [758, 574, 553, 963, 707]  # of seed 7, epoch 0: a change would spoil the backups of earlier versions


def epoch(order, number, cuts=()):
    """Returns the (block, row) pairs of an epoch, read in pieces that end at `cuts`."""
    ends = [0, *sorted(min(cut, order.num_examples) for cut in cuts), order.num_examples]
    pieces = [order.examples(number, begin, end) for begin, end in itertools.pairwise(ends)]
    return [pair for blocks, rows in pieces for pair in zip(blocks.tolist(), rows.tolist(), strict=True)]


def stored(sizes):
    return [(block, row) for block, size in enumerate(sizes) for row in range(size)]


@given(SIZES, WINDOW, st.integers(0, 2**40), st.integers(0, 9), st.lists(st.integers(0, 72), max_size=3))
def test_an_epoch_has_each_row_once_however_it_is_read(sizes, window, seed, number, cuts):
    order = EpochOrder(sizes, seed, True, window)
    assert sorted(epoch(order, number)) == stored(sizes)
    assert epoch(EpochOrder(sizes, seed, True, window), number, cuts) == epoch(order, number)


@given(SIZES, st.lists(st.integers(0, 72), max_size=3))
def test_without_shuffle_each_epoch_has_the_stored_order(sizes, cuts):
    order = EpochOrder(sizes, 3, False, 4)
    assert epoch(order, 0, cuts) == epoch(order, 5) == stored(sizes)


@given(SIZES, WINDOW, st.integers(0, 9))
def test_a_window_reads_its_own_blocks_only(sizes, window, number):
    """Rows of a block appear within one window, whose length exceeds `window` by less than a block."""
    order, size = EpochOrder(sizes, 1, True, window), max(sizes)
    positions = {}
    for position, (block, _) in enumerate(epoch(order, number)):
        positions.setdefault(block, []).append(position)
    assert all(max(found) - min(found) < window + size for found in positions.values())


def test_epochs_and_seeds_have_different_orders_that_never_change():
    order = EpochOrder([1000], 7, True)
    assert order.examples(0, 0, 5)[1].tolist() == FIRST
    assert order.examples(1, 0, 5)[1].tolist() != FIRST
    assert EpochOrder([1000], 8, True).examples(0, 0, 5)[1].tolist() != FIRST


def test_each_row_comes_to_each_position_equally_often():
    counts = np.zeros((6, 6))
    for number in range(3000):
        _, rows = EpochOrder([6], 0, True).examples(number, 0, 6)
        counts[np.arange(6), rows] += 1
    assert abs(counts - 500).max() < 100  # five standard deviations


def test_memory_does_not_grow_with_the_rows():
    order = EpochOrder([1 << 40] * 4, 0, False)
    assert order.examples(9, (1 << 42) - 2, 1 << 42)[1].tolist() == [(1 << 40) - 2, (1 << 40) - 1]


@settings(max_examples=300)
@given(st.integers(1, 40), st.integers(1, 9))
def test_parts_are_even_and_in_order(size, replicas):
    parts = [counts_of_part(size, part, replicas) for part in range(replicas)]
    rows = [list(range(begin, begin + count)) for begin, (count, _, _) in parts]
    assert list(itertools.chain(*rows)) == list(range(size))
    assert [len(part) for part in rows] == [len(part) for part in np.array_split(np.arange(size), replicas)]
    assert all(counts[1:] == [size, sum(map(bool, rows))] for _, counts in parts)
    assert all(begin == 0 for begin, (count, _, _) in parts if not count)


@pytest.mark.parametrize("size", [0, 1, 5])
def test_a_permutation_has_each_number_once(size):
    assert sorted(epoch_order.permutation(size, "key")) == list(range(size))
