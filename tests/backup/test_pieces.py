"""Slots that ranks store in pieces are whole for every reader."""

import numpy as np
import pytest

from tfdist.backup import pieces
from tfdist.backup.contents import SHARED, SavePoint, part_of
from tfdist.backup.files import CorruptBackupError
from tfdist.backup.storage import Storage
from tfdist.sharding.split import split_rows, view

POINT = SavePoint(3, False)
SLOT = np.arange(6, dtype=np.float32).reshape(2, 3)


def write(folder, parts):
    """Writes a backup of the slot `7/a`; `parts` are, by rank, the first element and the elements of its pieces."""
    storage = Storage(str(folder), 0, len(parts))
    storage.write_part(POINT, SHARED, {"0/w": np.float32(5), pieces.shape_key("7/a"): np.array([2, 3], np.int64)})
    for rank, part in enumerate(parts):
        own = {pieces.piece_key((slice(begin, end, 1),), "7/a"): SLOT.reshape(-1)[begin:end] for begin, end in part}
        storage.write_part(POINT, part_of(rank), {**own, "rest": b"{}"})
    return storage


@pytest.mark.parametrize("parts", [[[(0, 6)]], [[(0, 4)], [(4, 6)]], [[(4, 6)], [], [(0, 4)]]])
def test_a_reader_joins_the_pieces_of_all_ranks(tmp_path, parts):
    storage = write(tmp_path, parts)
    shared = storage.read_shared(POINT, len(parts))
    assert shared.keys() == {"0/w", "7/a"}
    np.testing.assert_array_equal(shared["7/a"], SLOT)
    assert [*pieces.without_pieces(storage.read_part(POINT, part_of(0)))] == ["rest"]


@pytest.mark.parametrize("parts", [[[]], [[(0, 4)], []], [[(0, 4)], [(3, 6)]], [[(1, 6)]]])
def test_a_slot_of_which_elements_are_missing_or_there_twice_is_damaged(tmp_path, parts):
    with pytest.raises(CorruptBackupError, match=r"step-3 does not hold '7/a' once"):
        write(tmp_path, parts).read_shared(POINT, len(parts))


def join(shared, parts):
    ranks = [(f"rank-{rank}", part) for rank, part in enumerate(parts)]
    return pieces.join([("shared", shared), *ranks], "step-3")


def parts_of(whole, indices):
    return [{pieces.piece_key(index, "7/a"): view(whole, index)} for index in indices]


def test_pieces_of_several_dimensions():
    whole = np.arange(24.0).reshape(4, 6)
    shared = {pieces.shape_key("7/a"): np.array(whole.shape)}
    places = [(0, 2, 0, 3), (0, 2, 3, 6), (2, 4, 0, 6)]
    parts = parts_of(whole, [(slice(top, bottom, 1), slice(left, right, 1)) for top, bottom, left, right in places])
    np.testing.assert_array_equal(join(shared, [*parts, {}])["7/a"], whole)
    beyond = {pieces.piece_key((slice(2, 4, 1), slice(1, 7, 1)), "7/a"): whole[2:4]}
    for damaged in (parts[:2], [*parts, parts[0]], [*parts[:2], beyond]):
        with pytest.raises(CorruptBackupError, match="7/a"):
            join(shared, damaged)


@pytest.mark.parametrize("is_shared", [False, True])
def test_rows_of_a_table(is_shared):
    table = np.arange(10).reshape(5, 2)
    shared = {pieces.shape_key("7/a"): np.array(table.shape)}
    parts = parts_of(table, split_rows(table.shape, 2).indices)
    if is_shared:  # one process holds all shards: other parts are not read
        ranks = iter([("shared", shared | parts[0] | parts[1])])
        np.testing.assert_array_equal(pieces.join(ranks, "step-3")["7/a"], table)
        return
    np.testing.assert_array_equal(join(shared, parts)["7/a"], table)
    assert [*pieces.without_pieces({**parts[1], "rest": b"{}"})] == ["rest"]
    with pytest.raises(CorruptBackupError, match="7/a"):
        join(shared, parts[:1])


@pytest.mark.parametrize("slices", ["0:5:0,0:2:1", "0:5,0:2:1", "5:0:1,0:2:1", "0:5:1,0:2:1,0:1:1", "::,::", "0:10:1,"])
def test_a_key_that_is_none_is_damage(slices):
    shared = {pieces.shape_key("7/a"): np.array([5, 2])}
    with pytest.raises(CorruptBackupError, match="7/a"):
        join(shared, [{f"piece-{slices}/7/a": np.zeros((5, 2))}])
