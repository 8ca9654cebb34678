"""`rows_from`: rows, types and order of each kind of source, and sources that it cannot use."""

from __future__ import annotations

import os

import datasets
import h5py
import numpy as np
import pytest
import tensorflow as tf

from tests.data.formats import N, X, Y, rows
from tfdist import data
from tfdist.data import arrow_rows, row_source
from tfdist.errors import ConfigError, DataError

datasets.disable_progress_bars()
VALUES = {
    "x": X,
    "byte": (np.arange(N * 4) % 256).astype(np.uint8).reshape(N, 4),
    "int": Y.astype(np.int32),
    "double": Y / 7,
    "half": Y.astype(np.float16),
    "flag": Y % 3 == 0,
    "flags": (np.arange(N * 2) % 3 == 0).reshape(N, 2),
    "text": np.array([f"text ä{number}" for number in range(N)]),
}
FEATURES = datasets.Features(
    {
        "x": datasets.Array2D((2, 3), "float32"),
        "byte": datasets.List(datasets.Value("uint8")),
        "int": datasets.Value("int32"),
        "double": datasets.Value("float64"),
        "half": datasets.Value("float16"),
        "flag": datasets.Value("bool"),
        "flags": datasets.List(datasets.Value("bool"), length=2),
        "text": datasets.Value("string"),
    }
)


class Own:
    """A source of the user."""

    def __init__(self, values=VALUES):
        self.values = values

    def __len__(self):
        return N

    def __getitem__(self, indices):
        return {name: values[indices] for name, values in self.values.items()}


def arrow(folder, begin=0, end=N):
    part = datasets.Dataset.from_dict({name: list(values[begin:end]) for name, values in VALUES.items()}, FEATURES)
    path = folder / f"arrow-{begin}-{end}"
    if not path.exists():
        part.save_to_disk(path)
    return datasets.load_from_disk(path)


def several(folder):
    """A dataset of two files and one part in memory, whose first file has several chunks."""
    parts = [arrow(folder, 0, 7), arrow(folder, 7, 9)]
    return datasets.concatenate_datasets([*parts, arrow(folder).select(range(9, N))])


def shuffled(folder):
    """A dataset whose rows a second table of indices has brought back in order."""
    found = several(folder).shuffle(seed=1)
    return found.select(np.argsort(found["int"]))


def parquet(folder):
    """A Parquet file of several row groups, which `datasets` converts to Arrow."""
    path = folder / "0.parquet"
    arrow(folder).to_parquet(path, batch_size=5)
    return datasets.load_dataset("parquet", split="train", data_files=str(path), cache_dir=folder / "converted")


def hdf5(folder, **options):
    path = folder / f"{len(options)}.h5"
    if not path.exists():
        with h5py.File(path, "w", userblock_size=512) as file:
            for name, values in VALUES.items():
                if name == "text":
                    values = [text.encode() for text in values]
                file.create_dataset(name, data=values, **options)
    file = h5py.File(path, "r")
    return {name: file[name] for name in VALUES}


def grain_source():
    import grain

    class Source(grain.sources.RandomAccessDataSource):
        def __len__(self):
            return N

        def __getitem__(self, index):
            return {name: values[index] for name, values in VALUES.items()}

    return Source()


def mapped(folder):
    for name, values in VALUES.items():
        np.save(folder / f"{name}.npy", values)
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in VALUES}


KINDS = {
    "arrays": lambda folder: VALUES,
    "big endian": lambda folder: {name: v if v.dtype.kind == "U" else v.astype(v.dtype.newbyteorder(">")) for name, v in VALUES.items()},
    "memory maps": mapped,
    "own": lambda folder: Own(),
    "datasets": arrow,
    "several files": several,
    "select": lambda folder: datasets.concatenate_datasets([arrow(folder)] * 2).select(range(5, 5 + N)).select([*range(N - 5, N), *range(N - 5)]),
    "shuffle": shuffled,
    "format": lambda folder: arrow(folder).with_format("numpy"),
    "transform": lambda folder: arrow(folder).with_transform(lambda batch: {name: np.array(batch[name], VALUES[name].dtype) for name in batch}),
    "Parquet": parquet,
    "HDF5": hdf5,
    "HDF5, chunks": lambda folder: hdf5(folder, chunks=True),
    "grain": lambda folder: grain_source(),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


def column(name):
    values = VALUES[name]
    return np.array([text.encode() for text in values], object) if values.dtype.kind == "U" else values


@pytest.mark.parametrize(
    ("kind", "long_row"), [*((kind, 2048) for kind in KINDS), ("several files", 0), ("shuffle", 0)]
)
def test_rows_and_types_are_those_of_numpy(folder, monkeypatch, kind, long_row):
    monkeypatch.setattr(arrow_rows, "LONG_ROW", long_row)
    monkeypatch.setattr(row_source, "BLOCK_ROWS", 4)
    found = data.rows_from(KINDS[kind](folder), 4, seed=2)
    assert (found.num_examples, found.steps_per_epoch) == (N, 6)
    assert found.specimen().element_spec == found.dataset().element_spec
    order = rows(data.rows_from(Y, 4, seed=2).dataset().map(lambda y: (y,)))[0]
    assert sorted(order) == list(Y) != list(order)
    for dataset, indices in ((found.in_order().dataset(), Y), (found.dataset(), order)):
        batches = list(dataset.as_numpy_iterator())
        assert set(batches[0]) == set(VALUES)
        for name in VALUES:
            values = np.concatenate([batch[name] for batch in batches])
            assert values.dtype == column(name).dtype, name
            np.testing.assert_array_equal(values, column(name)[indices], name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_begins_at_any_step(folder, kind):
    whole = list(data.rows_from(KINDS[kind](folder), 4, seed=2).parts(1, [0], 0, 9).as_numpy_iterator())
    resumed = list(data.rows_from(KINDS[kind](folder), 4, seed=2).parts(1, [0], 5, 4).as_numpy_iterator())
    tf.nest.map_structure(np.testing.assert_array_equal, resumed, whole[5:])


@pytest.mark.parametrize("kind", ["own", "several files", "HDF5", "grain"])
def test_workers_read_the_parts_of_one_batch(folder, kind):
    whole, *parts = (
        list(data.rows_from(KINDS[kind](folder), 4, seed=2).parts(*of, 0, 6).as_numpy_iterator())
        for of in ((1, [0]), (3, [0, 1]), (3, [2]))
    )
    for step, batch in enumerate(whole):
        values = np.concatenate([batch["int"] for batch in (*parts[0][2 * step : 2 * step + 2], parts[1][step])])
        np.testing.assert_array_equal(values[: len(batch["int"])], batch["int"])


def test_files_of_datasets_are_mapped(folder):
    """Arrow reads no number: its random access takes several times as long."""
    source = several(folder).shuffle(seed=1)
    read = arrow_rows.open_dataset(source, [name for name in VALUES if name not in ("flag", "flags", "text")])
    source.with_format = None
    assert read(Y[:2])["int"].dtype == np.int32


def test_columns_choose_the_structure_and_the_columns_that_are_read(folder):
    uneven = arrow(folder).add_column("uneven", [list(range(n)) for n in range(N)])
    for source in (uneven, Own(), VALUES):
        found = data.rows_from(source, 4, shuffle=False, columns=({"a": "x", "b": "x"}, "int"))
        inputs, y = next(found.dataset().as_numpy_iterator())
        np.testing.assert_array_equal(inputs["b"], X[:4])
        assert list(y) == [0, 1, 2, 3]


def test_images_are_the_bytes_of_their_files(tmp_path):
    images = [tf.io.encode_png(np.full((2, 3, 3), number, np.uint8)).numpy() for number in range(4)]
    paths = [str(tmp_path / f"{number}.png") for number in range(4)]
    for path, image in zip(paths, images, strict=True):
        tf.io.write_file(path, image)
    held = [{"bytes": images[0], "path": None}, *paths[1:]]
    source = datasets.Dataset.from_dict({"image": held}, datasets.Features({"image": datasets.Image()}))
    (found,) = rows(data.rows_from(source, 3, shuffle=False, columns="image").dataset())
    assert list(found) == images


def test_the_rows_of_some_positions_are_part_of_a_description(folder):
    texts = {
        data.rows_from(source).describe()
        for source in (arrow(folder), arrow(folder).shuffle(seed=1), VALUES, {**VALUES, "x": X + 1})
    }
    assert len(texts) == 3


class Bad(Own):
    def __init__(self, read, length=N):
        self.__class__ = type("Bad", (Bad,), {"__getitem__": lambda self, i: read(i), "__len__": lambda self: length})


LISTS = {"tokens": [[1, 2], [3]], "y": [0, 1]}
WRONG = {
    "a number": (3, "The source of rows_from must be NumPy arrays.*Received: builtins.int"),
    "lists": (([1, 2], [3, 4]), "The source of rows_from must be NumPy arrays.*Received: builtins.tuple"),
    "a tf.data.Dataset": (tf.data.Dataset.range(3), r"or an object with __len__\(\) and __getitem__"),
    "unequal": ((X, Y[1:]), r"must have equal numbers of rows. Received: \[\(23, 2, 3\), \(22,\)\]"),
    "scalar": (np.array(3), "must have equal numbers of rows"),
    "empty": (X[:0], "source holds no rows. Give one that has some. Received: numpy.ndarray"),
    "dates": (np.zeros(3, "M8[s]"), "Cannot convert .*datetime64|M8.* The source of rows_from"),
    "objects": (np.array([{}, {}]), "must return arrays of numbers, strings or bytes. Received: {}"),
    "splits": (datasets.DatasetDict(train=datasets.Dataset.from_dict(LISTS)), r"must be one split, such as source\['train'\]"),
    "uneven": (datasets.Dataset.from_dict(LISTS), "Column 'tokens' of source has lists of 1 to 2 elements. Rows must have one shape: pad"),
    "nulls": (datasets.Dataset.from_dict({"y": [0, None]}), "Column 'y' of source has nulls"),
    "a struct": (datasets.Dataset.from_dict({"y": [{"a": 0}, {"a": 1}]}), "Column 'y' of source has the type struct<a: int64>"),
    "row by row": (Bad(lambda i: X[int(i)]), r"source\[indices\] has raised TypeError \(.*\)\. Correct the source. The source of rows_from"),
    "too few rows": (Bad(lambda i: X[:1]), r"must return arrays of 2 rows for 2 indices. Received: float32\[1, 2, 3\]"),
    "no arrays": (Bad(lambda i: [0, 1]), "must return arrays of 2 rows for 2 indices. Received: 0"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "message"), WRONG.values(), ids=WRONG)
def test_a_source_that_cannot_be_used_is_one_sentence(source, message):
    with pytest.raises(ConfigError, match=message):
        data.rows_from(source)


@pytest.mark.parametrize("source", [Own(), VALUES, X, "datasets"], ids=["own", "arrays", "array", "datasets"])
def test_columns_that_are_not_there(folder, source):
    source = arrow(folder) if isinstance(source, str) else source
    message = (
        "columns must be names of the source's columns: (byte, double, .*|none, as its rows are no dict). Received: "
    )
    with pytest.raises(ConfigError, match=message):
        data.rows_from(source, columns=("x", "z"))
    with pytest.raises(ConfigError, match=r"batch_size must be .*\n.*columns must be names of columns, such as"):
        data.rows_from(source, 0, columns=(1,))


def later(i):
    """Rows whose errors come after the first and the last one."""
    if 5 in i:
        raise KeyError("of\nthe user")
    return X[i][:, : 1 if 7 in i else 2]


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (4, r"source\[indices\] has raised KeyError \('of"),
        (7, r"rows of one type and shape. Expected: float32\[2, 3\], as its first row. Received: float32\[1, 3\], for the rows from 7 on"),
    ],
)  # fmt: skip
def test_an_error_of_a_later_row_is_a_data_error(begin, message):
    found = data.rows_from(Bad(later), 1, shuffle=False)
    with pytest.raises(DataError, match=message), row_source.explaining_reads():
        list(found.parts(1, [0], begin, 2))


def test_a_mapped_hdf5_file_that_changes_is_an_error(tmp_path):
    found = data.rows_from(hdf5(tmp_path)["x"])
    os.utime(tmp_path / "0.h5", (1, 1))
    with pytest.raises(DataError, match=r"0.h5 has changed since it was opened"), row_source.explaining_reads():
        list(found.dataset())
