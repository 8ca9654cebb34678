"""Splits of drawn shapes: the ranks store each element once, and any split of a value is read from any other one."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.sharding.layouts import Grid, Layout
from tfdist.sharding.split import Split, shape_of, split_bucket, split_rows, view

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def buckets(draw, shape):
    others = draw(st.tuples(shapes, shapes))
    bucket = split_bucket([others[0], shape, others[1]], draw(st.integers(1, 8)), draw(st.integers(1, 5)))
    return bucket[1]


@st.composite
def grids(draw, shape):
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    grid = Grid(("batch", "rows", "columns")[: len(sizes)], tuple(sizes), "batch")
    free = [None] * len(shape)
    axes = draw(st.sampled_from(sorted(set(itertools.permutations([*grid.axes[1:], *free], len(shape))), key=str)))
    layout = Layout(shape, axes, grid)
    return layout.split if not layout.fault() else Layout(shape, tuple(free), grid).split


@st.composite
def splits(draw, shape):
    kinds = [buckets(shape)]
    if shape:
        kinds += [grids(shape), st.integers(1, 8).map(lambda ranks: split_rows(shape, ranks))]
    return draw(st.one_of(kinds))


@st.composite
def pairs(draw):
    shape = draw(shapes)
    return draw(splits(shape)), draw(splits(shape))


def pieces(split: Split, whole: np.ndarray) -> list[np.ndarray | None]:
    return [None if index is None else view(whole, index) for index in split.indices]


def numbered(split: Split) -> np.ndarray:
    return np.arange(math.prod(split.shape)).reshape(split.shape)


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_the_ranks_store_each_element_once(pair):
    for split in pair:
        count = np.zeros(split.shape, int)
        for rank, index in enumerate(split.indices):
            if index is not None:
                view(count, index)[...] += 1
                assert split.size(rank) == math.prod(shape_of(index)) == view(count, index).size
        assert (count == 1).all()


@settings(max_examples=300, deadline=None)
@given(pairs(), st.integers(1, 7))
def test_chunks_are_read_from_any_split_and_written_to_any_other(pair, length):
    source, target = pair
    whole = numbered(source)
    held = pieces(source, whole)
    wanted = pieces(target, np.full_like(whole, -1))
    rows = (whole.shape or (1,))[0]
    for begin in range(0, rows, length):
        part = range(begin, min(begin + length, rows))
        chunk = np.full((len(part), *whole.shape[1:]), -1)
        for rank, piece in enumerate(held):
            overlap = source.overlap(rank, part)
            if overlap is not None:
                view(chunk, overlap[0])[...] = piece[overlap[1]]
        assert (chunk.reshape(-1) == whole.reshape(rows, -1)[begin : part.stop].reshape(-1)).all()
        for rank, piece in enumerate(wanted):
            overlap = target.overlap(rank, part)
            if overlap is not None:
                piece[overlap[1]] = view(chunk, overlap[0])
    for piece, right in zip(wanted, pieces(target, whole), strict=True):
        if right is not None:
            np.testing.assert_array_equal(piece, right)


@given(shapes, st.integers(1, 8))
def test_chunks_hold_each_row_once(shape, itemsize):
    split = Split(shape, ())
    rows = [row for rows in split.chunks(itemsize) for row in rows]
    assert rows == list(range((shape or (1,))[0]))


def test_chunks_are_of_64_mb_at_most_or_of_one_row():
    assert [*map(len, Split((10, 2**22), ()).chunks(4))] == [4, 4, 2]
    assert [*map(len, Split((2, 2**25), ()).chunks(4))] == [1, 1]


def test_values_lie_in_a_bucket_one_after_the_other():
    first, scalar, last = split_bucket([(5,), (), (7,)], ranks=2, alignment=4)
    assert [(index.start, index.stop) for (index,) in first.indices] == [(0, 5), (5, 5)]
    assert [(index.start, index.stop) for (index,) in scalar.indices] == [(0, 1), (1, 1)]
    assert [(index.start, index.stop) for (index,) in last.indices] == [(0, 4), (4, 7)]


def test_rows_in_turn():
    assert split_rows((5, 2), 2).indices == ((slice(0, 5, 2), slice(0, 2, 1)), (slice(1, 5, 2), slice(0, 2, 1)))
