"""`arrays_from` for `.npy` and `.npz` files: types, patterns, and rows of several shards."""

from __future__ import annotations

import numpy as np
import pytest

from tests.data.formats import WRITERS, N, X, Y, npy, opened, rows
from tfdist import data
from tfdist.data import array_files


@pytest.mark.parametrize("kind", ["npy", "npz"])
@pytest.mark.parametrize("long_row", [0, 10**6])
def test_short_and_long_rows_of_several_shards_are_gathered(tmp_path, monkeypatch, kind, long_row):
    monkeypatch.setattr(array_files, "LONG_ROW", long_row)
    WRITERS[kind](tmp_path, 5, 5, 9)
    x, y = rows(opened(kind, tmp_path).dataset())
    assert sorted(y) == list(Y)
    np.testing.assert_array_equal(x, X[y])


@pytest.mark.parametrize("dtype", ["u1", "?", "<f2", ">f4", ">i8", "c8"])
def test_types_and_byte_orders(tmp_path, dtype):
    values = (np.arange(12).reshape(6, 2) % 2).astype(dtype)
    np.savez(tmp_path / "a.npz", odd=np.zeros(1, "u1"), x=values)  # not aligned
    (x,) = rows(data.arrays_from(tmp_path, 4, shuffle=False, columns="x").dataset())
    assert x.dtype == values.dtype.newbyteorder("=")
    np.testing.assert_array_equal(x, values)


def test_a_pattern_selects_files_and_columns_name_the_structure(tmp_path):
    npy(tmp_path)
    np.save(tmp_path / "empty.npy", np.zeros((N, 0)))
    stored = data.arrays_from(tmp_path / "*.npy", 5, shuffle=False, columns=({"a": "x", "none": "empty"}, "y"))
    inputs, y = next(stored.dataset().as_numpy_iterator())
    assert (inputs["a"].shape, inputs["none"].shape, list(y)) == ((5, 2, 3), (5, 0), [0, 1, 2, 3, 4])
