"""The same rows in files of each format, for tests of their sources."""

from __future__ import annotations

import itertools
import pathlib

import numpy as np
import tensorflow as tf

from tfdist import data

N = 23
X = np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3)
Y = np.arange(N)
FEATURES = {"x": tf.io.FixedLenFeature([2, 3], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}


def pieces(*ends):
    """Returns the number, begin and end of each file, of which the last one ends with the rows."""
    return [(number, *piece) for number, piece in enumerate(itertools.pairwise([0, *ends, N]))]


def npy(folder, *ends, x=X, y=Y):
    for number, begin, end in pieces(*ends):
        suffix = f"-{number:05d}" if ends else ""
        last = end if end < N else None
        np.save(folder / f"x{suffix}.npy", x[begin:last])
        np.save(folder / f"y{suffix}.npy", y[begin:last])


def npz(folder, *ends, save=np.savez):
    for number, begin, end in pieces(*ends):
        save(folder / f"part{number}.npz", odd=np.zeros(number, np.uint8), x=X[begin:end], y=Y[begin:end])


def examples(begin=0, end=N):
    for number in range(begin, end):
        x = tf.train.Feature(float_list=tf.train.FloatList(value=X[number].ravel()))
        y = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
        yield tf.train.Example(features=tf.train.Features(feature={"x": x, "y": y})).SerializeToString()


def write_records(path, records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def tfrecord(folder, *ends):
    for number, begin, end in pieces(*ends):
        write_records(folder / f"part-{number}.tfrecord", examples(begin, end))


def parse_one(record):
    example = tf.io.parse_single_example(record, FEATURES)
    return example["x"], example["y"]


def parse_all(records):
    example = tf.io.parse_example(records, FEATURES)
    return example["x"], example["y"]


WRITERS = {"npy": npy, "npz": npz, "tfrecord": tfrecord}


def opened(kind, folder, batch_size=4, **options):
    """Returns the rows in files of a format."""
    pattern = folder / f"*.{kind}"
    if kind == "tfrecord":
        return data.records_from(pattern, parse_one, batch_size, **options)
    return data.arrays_from(pattern, batch_size, columns=("x", "y"), **options)


def rows(dataset):
    """Returns the columns of a dataset of batches."""
    return [np.concatenate(column) for column in zip(*dataset.as_numpy_iterator(), strict=True)]


def cut(path: pathlib.Path, size):
    path.write_bytes(path.read_bytes()[:size])
