"""Files and options that `arrays_from` and `records_from` cannot use: one sentence each, with the file and the position."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest

from tests.data.formats import N, X, Y, cut, examples, npy, npz, parse_one, write_records
from tests.data.test_record_files import flip, positions
from tfdist import data
from tfdist.errors import ConfigError


def shard_of(x=X[:5], y=Y[:5], name="part9"):
    return lambda folder: (npz(folder, 7), np.savez(folder / f"{name}.npz", x=x, y=y))


ARRAYS = {
    "empty": (lambda folder: None, "holds no .npy or .npz file: give a folder that does"),
    "Parquet": (
        lambda folder: (folder / "0.parquet").touch(),
        r"For Parquet, .* use tfdist.data.rows_from\(datasets.load_dataset\(",
    ),
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


RECORDS = {
    "no file": (lambda path: path.unlink(), r"no file matches .*x.tfrecord. Give a pattern"),
    "empty": (lambda path: path.write_bytes(b""), "x.tfrecord: no records"),
    "other": (lambda path: path.write_bytes(b"a" * 99), "x.tfrecord is not a TFRecord file"),
    "short": (lambda path: path.write_bytes(b"a"), "x.tfrecord is damaged: the record at byte 0 is truncated"),
    "gzip": (lambda path: path.write_bytes(gzip.compress(path.read_bytes())), "x.tfrecord is compressed.*`gunzip <"),
    "truncated": (lambda path: cut(path, 140), r"x.tfrecord is damaged: the record at byte \d+ is truncated. Write"),
    "header": (lambda path: flip(path, positions(path)[2] + 8), "has a damaged header. Write the file again, or"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_fault_of_arrays_names_its_file(tmp_path, name):
    write, message = ARRAYS[name]
    write(tmp_path)
    columns = ("x", "y") if name in ("unequal npz", "mixed types", "mixed shapes") else None
    with pytest.raises(ConfigError, match=message):
        data.arrays_from(tmp_path, columns=columns)


@pytest.mark.parametrize("name", RECORDS)
def test_a_fault_of_records_names_its_file_and_position(tmp_path, name):
    change, message = RECORDS[name]
    write_records(tmp_path / "x.tfrecord", examples())
    change(tmp_path / "x.tfrecord")
    with pytest.raises(ConfigError, match=message):
        data.records_from(tmp_path / "x.tfrecord", parse_one)


def open_source(source, folder, **options):
    if source == "records":
        return data.records_from(**{"pattern": folder, "parse": parse_one, **options})
    return data.arrays_from(folder, **options)


@pytest.mark.parametrize(("source", "suffix"), [("arrays", "npy"), ("records", "tfrecord")])
def test_all_faults_are_named_at_once_but_not_a_thousand(tmp_path, source, suffix):
    for number in range(30):
        (tmp_path / f"x-{number}.{suffix}").write_bytes(b"neither an array nor a record")
    with pytest.raises(ConfigError) as error:
        open_source(source, tmp_path)
    assert len(error.value.faults) == 11
    assert f"x-1.{suffix}" in error.value.faults[1]
    assert error.value.faults[-1].startswith("20 further errors")


OPTIONS = [
    ("arrays", {"batch_size": 0}, "batch_size must be a whole number, 1 or more. Received: 0"),
    ("arrays", {"seed": -1, "window": 0.5}, "seed must be .*\nwindow must be a whole number"),
    ("arrays", {"map": 3}, "map must be a function of a batch. Received: 3"),
    ("arrays", {"columns": ("x", 3)}, r"columns must be names of arrays.* Received: \('x', 3\)"),
    ("arrays", {"columns": "z"}, "there is no array 'z'. Add it, or name others in `columns`: x, y"),
    (
        "records",
        {"batch_size": 0, "parse": None},
        "batch_size must be .*\nparse must be a function of a batch. Received: None",
    ),
    ("records", {"on_corrupt": "warn"}, "on_corrupt must be 'fail' or 'skip'. Received: 'warn'"),
    ("records", {"pattern": 3}, "pattern must be a path, .* Received: 3"),
    ("records", {"pattern": []}, "pattern is an empty list"),
    (
        "records",
        {"pattern": ["x-*", "s3://b/x-*"]},
        "no file matches x-.*\nrecords_from reads local files, not s3://b/x-",
    ),
]


@pytest.mark.parametrize(("source", "options", "message"), OPTIONS)
def test_a_wrong_option_is_a_fault(tmp_path, source, options, message):
    npy(tmp_path) if source == "arrays" else write_records(tmp_path / "x.tfrecord", examples())
    with pytest.raises(ConfigError, match=message):
        open_source(source, tmp_path, **options)
