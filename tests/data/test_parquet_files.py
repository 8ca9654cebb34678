"""`arrays_from` for Parquet files: types, windows, their memory, and errors of reading."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import parquet

from tests.data.formats import N, X, Y, opened, parquets, rows, vectors
from tfdist import data
from tfdist.errors import ConfigError, DataError

TEXTS = [f"text {number}" for number in range(N)]


@pytest.mark.parametrize("window", [1, 9])
def test_each_row_is_once_in_an_epoch_of_any_window(tmp_path, window):
    parquets(tmp_path, 5, 5, 9)
    x, y = rows(opened("parquet", tmp_path, window=window).dataset(epochs=2))
    assert [sorted(epoch) for epoch in np.split(y, 2)] == [list(Y)] * 2
    np.testing.assert_array_equal(x, X[y])


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        *((pa.array((Y % 2).astype(kind)), (Y % 2).astype(kind)) for kind in ("?", "i1", "u8", "f2", "f4", "f8")),
        (vectors(X.astype("f2").reshape(N, 6)), X.astype("f2").reshape(N, 6)),
        (vectors(X > 40), X > 40),
        (pa.array(TEXTS), [text.encode() for text in TEXTS]),
        (pa.array(TEXTS, pa.large_string()), [text.encode() for text in TEXTS]),
        (pa.array([b"\0\xff" * n for n in range(N)]), [b"\0\xff" * n for n in range(N)]),
        (pa.array([b"\0%2d" % n for n in range(N)], pa.binary(3)), [b"\0%2d" % n for n in range(N)]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_types(tmp_path, column, expected):
    parquets(tmp_path, 6, value=column)
    stored = data.arrays_from(tmp_path, 4, shuffle=False, columns="value")
    (found,) = rows(stored.dataset())
    assert found.dtype == getattr(expected, "dtype", object)
    np.testing.assert_array_equal(found, expected)
    assert stored.dataset().element_spec == stored.specimen().element_spec


def test_a_map_decodes_images_that_are_bytes(tmp_path):
    images = [np.full((2, 3, 3), number, np.uint8) for number in range(N)]
    parquets(tmp_path, x=pa.array([tf.io.encode_png(image).numpy() for image in images]), y=pa.array(Y))

    def decode(x, y):
        return tf.map_fn(lambda png: tf.ensure_shape(tf.io.decode_png(png, 3), (2, 3, 3)), x, tf.uint8), y

    x, y = rows(data.arrays_from(tmp_path, 4, map=decode).dataset())
    np.testing.assert_array_equal(x, np.array(images)[y])


def test_memory_holds_the_row_groups_of_two_windows(tmp_path):
    wide = np.random.default_rng(0).random((N, 1 << 14))
    parquets(tmp_path, group=2, x=vectors(wide))
    stored = data.arrays_from(tmp_path, 2, window=4, columns="x")
    gc.collect()  # what earlier tests have left
    before = pa.total_allocated_bytes()
    rows(stored.dataset(epochs=2))
    assert 0 < pa.total_allocated_bytes() - before <= 12 * wide[0].nbytes


def test_the_default_window_depends_on_the_bytes_of_a_row(tmp_path):
    parquets(tmp_path)
    assert data.arrays_from(tmp_path).source.window == 1 << 18
    parquets(tmp_path, x=pa.array([os.urandom(1 << 20) for _ in range(N)]))
    assert 100 < data.arrays_from(tmp_path, columns="x").source.window <= 128


def damaged(folder):
    parquets(folder)
    path = folder / "part0.parquet"
    with parquet.ParquetFile(path) as file:
        column = file.metadata.row_group(1).column(1)
        begin, size = column.dictionary_page_offset or column.data_page_offset, column.total_compressed_size
    content = bytearray(path.read_bytes())
    content[begin : begin + size] = bytes(255 - value for value in content[begin : begin + size])
    path.write_bytes(content)


WITH_NULL = pa.array([None if number == 5 else number for number in range(N)])


def nulls_without_statistics(folder):
    table = pa.table({"x": vectors(X), "y": WITH_NULL})
    parquet.write_table(table, folder / "part0.parquet", row_group_size=4, write_statistics=False)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (damaged, "part0.parquet, row group 1, column 'y' cannot be read: .*Write the file again"),
        (nulls_without_statistics, "part0.parquet, row group 1, column 'y' has 1 nulls"),
    ],
)
def test_an_error_while_reading_names_file_row_group_and_column(tmp_path, prepare, message):
    prepare(tmp_path)
    stored = data.arrays_from(tmp_path, 4)
    with pytest.raises(DataError, match=message), data.row_source.explaining_reads():
        list(stored.dataset())


def test_without_pyarrow_the_error_names_the_extra(tmp_path, monkeypatch):
    parquets(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'tfdist\[parquet\]'"):
        data.arrays_from(tmp_path)
