"""`arrays_from`: layouts of files, rows read, parts of batches, and errors of files."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist import data
from tfdist.data import array_files
from tfdist.data.stored import counts_of_part
from tfdist.errors import ConfigError, DataError

N = 23
X = np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3)
Y = np.arange(N)


def npy(folder, *shards, x=X, y=Y):
    ends = [0, *shards, len(x)]
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        suffix = f"-{number:05d}" if shards else ""
        np.save(folder / f"x{suffix}.npy", x[begin:end])
        np.save(folder / f"y{suffix}.npy", y[begin:end])


def npz(folder, *shards, save=np.savez, **more):
    ends = [0, *shards, N]
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        save(folder / f"part{number}.npz", odd=np.zeros(number, np.uint8), x=X[begin:end], y=Y[begin:end], **more)


def rows(dataset):
    return [np.concatenate(column) for column in zip(*dataset.as_numpy_iterator(), strict=True)]


@pytest.mark.parametrize("shards", [(), (0, 7), (1, 22), (5, 5, 9)])
@pytest.mark.parametrize("write", [npy, npz])
@pytest.mark.parametrize("long_row", [0, 10**6])
def test_layouts_hold_the_same_rows_in_order(tmp_path, monkeypatch, write, shards, long_row):
    monkeypatch.setattr(array_files, "_LONG_ROW", long_row)  # both ways to gather rows of several shards
    write(tmp_path, *shards)
    stored = data.arrays_from(tmp_path, batch_size=4, columns=("x", "y"))
    assert (stored.num_examples, stored.steps_per_epoch) == (N, 6)
    x, y = rows(stored.in_order().dataset())
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    x, y = rows(stored.dataset(epochs=2))
    assert [sorted(epoch) for epoch in np.split(y, 2)] == [list(Y)] * 2
    assert (y[:N] != y[N:]).any()
    np.testing.assert_array_equal(x, X[y])
    np.testing.assert_array_equal(rows(stored.dataset(1, start_epoch=1))[1], y[N:])


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


def test_map_takes_the_columns_of_a_batch(tmp_path):
    npy(tmp_path)

    def double(x, y):
        if tf.shape(x)[0] > 3:  # AutoGraph
            y = y + 1
        return tf.cast(x, tf.float16) * 2, y

    stored = data.arrays_from(tmp_path, 4, shuffle=False, map=double)
    x, y = rows(stored.dataset())
    np.testing.assert_array_equal(x, (X * 2).astype(np.float16))
    np.testing.assert_array_equal(y, np.where(Y < 20, Y + 1, Y))
    assert stored.specimen().element_spec[0].dtype == tf.float16


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 2), st.integers(0, 5), st.integers(1, 9))
def test_parts_are_those_of_the_global_batches(size, workers, local, start, window):
    """Workers of any number read the rows that one process reads, from any step on."""
    stored = data.arrays_from(test_parts_are_those_of_the_global_batches.folder, size, seed=3, window=window)
    replicas, steps = workers * local, stored.steps_per_epoch + 1
    batches = list(stored.parts(1, [0], start, steps).as_numpy_iterator())
    assert [len(y) for _, y in batches] == [
        min(size, N - step % stored.steps_per_epoch * size) for step in range(start, start + steps)
    ]
    for worker in range(workers):
        parts = range(worker * local, (worker + 1) * local)
        dataset = stored.parts(replicas, parts, start, steps, make=lambda batch, counts: (batch, counts))
        elements = list(dataset.as_numpy_iterator())
        assert len(elements) == steps * local
        for number, ((_, y), counts) in enumerate(elements):
            batch = batches[number // local][1]
            begin, expected = counts_of_part(len(batch), parts[number % local], replicas)
            assert counts.tolist() == [expected]
            np.testing.assert_array_equal(y, batch[begin : begin + max(expected[0], 1)])


@pytest.fixture(scope="module", autouse=True)
def _shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    npy(folder, 4, 4, 15)
    test_parts_are_those_of_the_global_batches.folder = folder


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def shard_of(x=X[:5], y=Y[:5], name="part9"):
    return lambda folder: (npz(folder, 7), np.savez(folder / f"{name}.npz", x=x, y=y))


FAULTS = {
    "empty": (lambda folder: None, "holds no .npy, .npz or .parquet file"),
    "both kinds": (lambda folder: (npy(folder), npz(folder)), "holds .npy and .npz files"),
    "other names": (lambda folder: np.save(folder / "images.npy", X), "holds the arrays images. Only x, y"),
    "more names": (lambda folder: (npy(folder), np.save(folder / "id.npy", Y)), "holds the arrays id, x, y. Only x, y"),
    "unequal": (
        lambda folder: npy(folder, y=Y[1:]),
        r"same number of examples. Received: 23 in .*x.npy, 22 in .*y.npy",
    ),
    "unequal npz": (shard_of(y=Y[:4]), r"Received: 5 in .*part9.npz\['x'\], 4 in .*part9.npz\['y'\]"),
    "mixed types": (
        shard_of(X[:5].astype("f8")),
        r"'x' must have one type .* float32\[2, 3\] in .*part0.*float64\[2, 3\]",
    ),
    "mixed shapes": (shard_of(X[:5, :1]), r"'x' must have one type .* float32\[2, 3\] in .*part0.*float32\[1, 3\]"),
    "missing column": (lambda folder: (npy(folder, 7), os.remove(folder / "y-00001.npy")), "shard 1 lacks array 'y'"),
    "truncated": (
        lambda folder: (npy(folder), cut(folder / "x.npy", 600)),
        "x.npy cannot be read: it is truncated: the file has 600",
    ),
    "truncated header": (lambda folder: (npy(folder), cut(folder / "x.npy", 50)), "x.npy cannot be read: "),
    "no header": (lambda folder: (npy(folder), cut(folder / "x.npy", 0)), "x.npy cannot be read: "),
    "truncated npz": (
        lambda folder: (npz(folder), cut(folder / "part0.npz", 700)),
        "part0.npz cannot be read: it is not a comp",
    ),
    "compressed": (lambda folder: npz(folder, save=np.savez_compressed), "array 'odd' is compressed.*np.savez, not"),
    "objects": (lambda folder: npy(folder, x=np.array([{}] * N)), "x.npy cannot be read: it holds Python objects"),
    "texts": (lambda folder: npy(folder, x=np.array(["a"] * N)), "x.npy cannot be read: it has the type <U1"),
    "number": (lambda folder: np.save(folder / "x.npy", 3.0), "is a single number"),
    "scattered": (lambda folder: npy(folder, x=np.asfortranarray(X)), "scattered .Fortran order."),
    "no examples": (lambda folder: npy(folder, x=X[:0], y=Y[:0]), "holds no examples: the arrays x, y have length 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_its_file(tmp_path, name):
    write, message = FAULTS[name]
    write(tmp_path)
    columns = ("x", "y") if name in ("unequal npz", "mixed types", "mixed shapes") else None
    with pytest.raises(ConfigError, match=message):
        data.arrays_from(tmp_path, columns=columns)


def test_all_faults_are_named_at_once_but_not_a_thousand(tmp_path):
    for number in range(30):
        (tmp_path / f"x-{number}.npy").write_bytes(b"no array")
    with pytest.raises(ConfigError) as error:
        data.arrays_from(tmp_path)
    assert len(error.value.faults) == 11
    assert "x-1.npy" in error.value.faults[1]
    assert error.value.faults[-1].startswith("20 further errors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more. Received: 0"),
        ({"seed": -1, "window": 0.5}, "seed must be .*\nwindow must be a whole number"),
        ({"map": 3}, "map must be a function of a batch. Received: 3"),
        ({"columns": ("x", 3)}, r"columns must be names of arrays.* Received: \('x', 3\)"),
        ({"columns": "z"}, "there is no array 'z'. Add it, or name others in `columns`: x, y"),
    ],
)
def test_a_wrong_option_is_a_fault(tmp_path, options, message):
    npy(tmp_path)
    with pytest.raises(ConfigError, match=message):
        data.arrays_from(tmp_path, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: cut(path, 300), r"x.npy has changed since it was opened \(680 bytes then, 300 now\)"),
        (lambda path: np.save(path, X), "x.npy has changed since it was opened"),
        (os.remove, "x.npy cannot be read any longer: No such file"),
    ],
)
def test_a_file_that_changes_is_an_error_not_another_number(tmp_path, change, message):
    npy(tmp_path)
    os.utime(tmp_path / "x.npy", (1, 1))
    stored = data.arrays_from(tmp_path, 4)
    list(stored.dataset())
    change(tmp_path / "x.npy")
    with pytest.raises(DataError, match=message), data.stored.explaining_reads():
        list(stored.dataset())


def test_descriptions_differ_if_the_rows_or_their_order_do(tmp_path):
    npy(tmp_path)
    texts = {data.arrays_from(tmp_path, **options).describe() for options in ({}, {}, {"seed": 1}, {"shuffle": False})}
    (tmp_path / "x.npy").rename(tmp_path / "x-0.npy")
    (tmp_path / "y.npy").rename(tmp_path / "y-0.npy")
    assert len(texts | {data.arrays_from(tmp_path).describe()}) == 4


def test_more_files_than_maps_that_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(array_files, "_MOST_MAPS", 2)
    npy(tmp_path, *range(1, N))
    stored = data.arrays_from(tmp_path, 4)
    assert sorted(rows(stored.dataset())[1]) == list(Y)
    assert len(stored.source._maps) == 2
