"""`arrays_from` for Parquet files: rows and types read, the memory of a window, and errors of files."""

from __future__ import annotations

import os
import sys

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import parquet

from tests.data.test_array_files import N, X, Y, cut, rows
from tfdist import data
from tfdist.errors import ConfigError, DataError

TEXTS = [f"text {number}" for number in range(N)]


def vectors(x):
    kind = pa.array(x.ravel())
    for size in x.shape[:0:-1]:
        kind = pa.FixedSizeListArray.from_arrays(kind, size)
    return kind


def write(folder, *shards, group=4, **columns):
    columns = columns or {"x": vectors(X), "y": pa.array(Y)}
    ends = [0, *shards, N]
    for number in range(len(shards) + 1):
        begin, end = ends[number], ends[number + 1]
        table = pa.table({name: column[begin:end] for name, column in columns.items()})
        path = folder / f"part{number}.parquet"
        parquet.write_table(table, path, row_group_size=group, write_page_checksum=True, compression="zstd")


@pytest.mark.parametrize("shards", [(), (0, 7), (1, 22), (5, 5, 9)])
@pytest.mark.parametrize("window", [None, 1, 9])
def test_files_hold_the_rows_in_order(tmp_path, shards, window):
    write(tmp_path, *shards)
    stored = data.arrays_from(tmp_path, batch_size=4, window=window)
    x, y = rows(stored.in_order().dataset())
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    x, y = rows(stored.dataset(epochs=2))
    assert [sorted(epoch) for epoch in np.split(y, 2)] == [list(Y)] * 2
    np.testing.assert_array_equal(x, X[y])
    np.testing.assert_array_equal(rows(stored.dataset(1, start_epoch=1))[1], y[N:])


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
    write(tmp_path, 6, value=column)
    stored = data.arrays_from(tmp_path, 4, shuffle=False, columns="value")
    (found,) = rows(stored.dataset())
    assert found.dtype == getattr(expected, "dtype", object)
    np.testing.assert_array_equal(found, expected)
    assert stored.dataset().element_spec == stored.specimen().element_spec


def test_a_map_decodes_images_that_are_bytes(tmp_path):
    images = [np.full((2, 3, 3), number, np.uint8) for number in range(N)]
    write(tmp_path, x=pa.array([tf.io.encode_png(image).numpy() for image in images]), y=pa.array(Y))

    def decode(x, y):
        return tf.map_fn(lambda png: tf.ensure_shape(tf.io.decode_png(png, 3), (2, 3, 3)), x, tf.uint8), y

    x, y = rows(data.arrays_from(tmp_path, 4, map=decode).dataset())
    np.testing.assert_array_equal(x, np.array(images)[y])


def test_memory_holds_the_row_groups_of_two_windows(tmp_path):
    write(tmp_path, group=2)
    stored = data.arrays_from(tmp_path, 2, window=4)
    rows(stored.dataset(epochs=2))
    assert sum(stored.source.sizes[list(stored.source._decoded)]) <= 12


def test_the_default_window_depends_on_the_bytes_of_a_row(tmp_path):
    write(tmp_path)
    assert data.arrays_from(tmp_path).source.window == 1 << 18
    write(tmp_path, x=pa.array([os.urandom(1 << 20) for _ in range(N)]))
    assert 100 < data.arrays_from(tmp_path, columns="x").source.window <= 128


def damaged(folder):
    write(folder)
    path = folder / "part0.parquet"
    with parquet.ParquetFile(path) as file:
        column = file.metadata.row_group(1).column(1)
        begin, size = column.dictionary_page_offset or column.data_page_offset, column.total_compressed_size
    content = bytearray(path.read_bytes())
    content[begin : begin + size] = bytes(255 - value for value in content[begin : begin + size])
    path.write_bytes(content)


WITH_NULL = pa.array([None if number == 5 else number for number in range(N)])
FAULTS = {
    "truncated": (
        lambda folder: (write(folder), cut(folder / "part0.parquet", 400)),
        r"part0.parquet cannot be read: ",
    ),
    "no parquet": (
        lambda folder: (write(folder), cut(folder / "part0.parquet", 3)),
        r"part0.parquet cannot be read: Parquet file size is 3 bytes",
    ),
    "missing": (
        lambda folder: (write(folder, 4), parquet.write_table(pa.table({"x": [1]}), folder / "part1.parquet")),
        "part1.parquet lacks column 'y'. Add it",
    ),
    "mixed types": (
        lambda folder: (
            write(folder, 4),
            parquet.write_table(pa.table({"x": vectors(X), "y": [0.5] * N}), folder / "part1.parquet"),
        ),
        "must have one type of column 'y'. Received: int64 in .*part0.parquet, double in .*part1.parquet",
    ),
    "lists": (
        lambda folder: write(folder, x=pa.array([[1]] * N), y=pa.array(Y)),
        "column 'x' has the type list<.*lists of a fixed size",
    ),
    "dates": (
        lambda folder: write(folder, x=pa.array(Y, pa.date64()), y=pa.array(Y)),
        "column 'x' has the type date32",
    ),
    "nulls": (
        lambda folder: write(folder, x=pa.array(Y), y=WITH_NULL),
        "part0.parquet, row group 1, column 'y' has 1 nulls. Write the file with",
    ),
    "both kinds": (
        lambda folder: (write(folder), np.save(folder / "x.npy", X)),
        "holds .npy and .parquet files: give a pattern",
    ),
    "no examples": (lambda folder: write(folder, x=vectors(X)[:0]), "holds no examples"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_its_file(tmp_path, name):
    prepare, message = FAULTS[name]
    prepare(tmp_path)
    with pytest.raises(ConfigError, match=message):
        data.arrays_from(tmp_path, columns=("x",) if name == "no examples" else ("x", "y"))


def nulls_without_statistics(folder):
    table = pa.table({"x": vectors(X), "y": WITH_NULL})
    parquet.write_table(table, folder / "part0.parquet", row_group_size=4, write_statistics=False)


def changed(folder):
    write(folder)
    return lambda: os.utime(folder / "part0.parquet", (1, 1))


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (damaged, "part0.parquet, row group 1, column 'y' cannot be read: .*Write the file again"),
        (nulls_without_statistics, "part0.parquet, row group 1, column 'y' has 1 nulls"),
        (changed, "part0.parquet has changed since it was opened"),
    ],
)
def test_an_error_while_reading_names_file_row_group_and_column(tmp_path, prepare, message):
    change = prepare(tmp_path)
    stored = data.arrays_from(tmp_path, 4)
    if change:
        change()
    with pytest.raises(DataError, match=message), data.stored.explaining_reads():
        list(stored.dataset())


def test_without_pyarrow_the_error_names_the_extra(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'tfdist\[parquet\]'"):
        data.arrays_from(tmp_path)
