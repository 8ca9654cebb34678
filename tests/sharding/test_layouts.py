"""The layouts of values over a mesh."""

import itertools

import numpy as np
import pytest

from tfdist.sharding.layouts import Grid, Layout

SHAPE = (4, 6, 2)
GRIDS = [
    Grid(("batch", "model"), (2, 2), "batch"),
    Grid(("model", "batch"), (2, 3), "batch"),
    Grid(("batch", "rows", "columns"), (1, 2, 3), "batch"),
]


def test_the_last_axis_varies_fastest():
    grid = GRIDS[0]
    assert [grid.coordinates(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert grid.data_group(1) == [1, 3]
    assert grid.model_group(1) == [0, 1]


@pytest.mark.parametrize("grid", GRIDS)
def test_pieces_of_a_model_group_are_the_whole_value(grid):
    whole = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    others = [axis for axis in grid.axes if axis != grid.batch]
    tried = 0
    for split in set(itertools.permutations([*others, None, None, None], 3)):
        layout = Layout(SHAPE, split, grid)
        if layout.fault():
            continue
        tried += 1
        sizes, index, order = layout.joining()
        for rank in range(grid.ranks):
            pieces = [whole[layout.slices(member)] for member in grid.model_group(rank)]
            assert {piece.shape for piece in pieces} == {layout.piece_shape}
            parts = np.reshape(pieces, [*sizes, *layout.piece_shape])[index]
            np.testing.assert_array_equal(parts.transpose(order).reshape(SHAPE), whole)
    assert tried >= 3


@pytest.mark.parametrize(
    ("split", "fault"),
    [
        (("model",), "has 1 dimensions"),
        (("model", "model", None), "names an axis twice"),
        (("batch", None, None), "names 'batch'"),
        ((None, "deep", None), "names 'deep', which is not an axis of the mesh"),
    ],
)
def test_a_fault_is_named(split, fault):
    assert fault in Layout(SHAPE, split, GRIDS[0]).fault()


def test_parts_must_divide():
    grid = Grid(("batch", "model"), (1, 4), "batch")
    assert "a dimension of size 6 into 4 parts along 'model'" in Layout(SHAPE, (None, "model", None), grid).fault()
