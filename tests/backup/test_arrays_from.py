"""A training on files resumes to the bit: also killed under a limit of a tenth of their memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import datasets
import h5py
import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import parquet

import tfdist
from tests.backup.test_backup import Interrupt, Interrupted
from tests.helpers.reused_model import ReusedModel
from tests.multiprocess import harness
from tfdist.data import row_source

ROWS, BATCH = 40, 8
STEPS = ROWS // BATCH


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns the folder of the same examples in all formats."""
    folder = tmp_path_factory.mktemp("files")
    x = np.random.default_rng(0).standard_normal((ROWS, 3), np.float32)
    y = x.sum(1, keepdims=True)
    np.savez(folder / "0.npz", x=x, y=y)
    with tf.io.TFRecordWriter(str(folder / "0.tfrecord")) as writer:
        for row in np.hstack([x, y]):
            writer.write(row.tobytes())
    with h5py.File(folder / "0.h5", "w") as file:
        file.update(x=x, y=y)
    features = datasets.Features(
        {"x": datasets.List(datasets.Value("float32")), "y": datasets.Array2D((1, 1), "float32")}
    )
    columns = {"x": list(x), "y": list(y[:, None])}
    datasets.Dataset.from_dict(columns, features).save_to_disk(folder / "arrow", num_shards=2)
    vectors = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3), "y": y[:, 0]}
    parquet.write_table(pa.table(vectors), folder / "0.parquet", row_group_size=7)
    np.savetxt(folder / "0.csv", np.hstack([x, y]), delimiter=",", header="a,b,c,y", comments="")
    (folder / "images").mkdir()
    for number, row in enumerate(x):
        png = tf.io.encode_png(np.uint8(100 + 20 * row.clip(-5, 5)).reshape(1, 1, 3))
        (folder / "images" / f"{number:02}.png").write_bytes(png.numpy())
    return folder


class Rows:
    """A source of the user."""

    def __init__(self, files):
        self.arrays = np.load(files / "0.npz")

    def __len__(self):
        return ROWS

    def __getitem__(self, indices):
        return {name: values[indices] for name, values in self.arrays.items()}


def of_dataset(files):
    dataset = datasets.load_from_disk(files / "arrow").shuffle(seed=3)
    return tfdist.data.rows_from(dataset, BATCH, seed=5, columns=("x", "y"), map=lambda x, y: (x, y[:, 0]))


def loaded(files, kind, columns, map, **of):
    """Returns the rows of a file or folder that `datasets` converts to Arrow."""
    dataset = datasets.load_dataset(kind, split="train", cache_dir=files / "converted", **of)
    return tfdist.data.rows_from(dataset, BATCH, seed=5, columns=columns, map=map)


def of_numbers(*columns):
    *x, y = (tf.cast(column, tf.float32)[:, None] for column in columns)
    return tf.concat(x, 1), y


def decode(png):
    pixels = tf.map_fn(lambda each: tf.ensure_shape(tf.io.decode_png(each), [1, 1, 3]), png, tf.uint8)
    x = tf.cast(pixels[:, 0, 0], tf.float32) / 255
    return x, tf.reduce_sum(x, 1, keepdims=True)


def of_hdf5(files):
    file = h5py.File(files / "0.h5")
    return tfdist.data.rows_from((file["x"], file["y"]), BATCH, seed=5)


def double(x, y):
    return 2 * x, y


def parse(record):
    values = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [4])
    return values[:3], values[3:]


SOURCES = {
    "arrays": lambda files: tfdist.data.arrays_from(files / "*.npz", BATCH, seed=5, map=double),
    "records": lambda files: tfdist.data.records_from(files / "*.tfrecord", parse, BATCH, seed=5),
    "rows": lambda files: tfdist.data.rows_from(Rows(files), BATCH, seed=5, columns=("x", "y")),
    "datasets": lambda files: of_dataset(files),
    "HDF5": lambda files: of_hdf5(files),
    "Parquet": lambda files: loaded(
        files, "parquet", ("x", "y"), lambda x, y: (x, y[:, None]), data_files=str(files / "0.parquet")
    ),
    "CSV": lambda files: loaded(files, "csv", ("a", "b", "c", "y"), of_numbers, data_files=str(files / "0.csv")),
    "images": lambda files: loaded(files, "imagefolder", "image", decode, data_dir=str(files / "images")),
}


@pytest.fixture(scope="module")
def reused(mirrored):
    with tfdist.Trainer(mirrored).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    return ReusedModel(model)


@pytest.mark.parametrize("kind", SOURCES)
def test_an_interrupted_training_resumes_to_the_bit(files, reused, mirrored, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(row_source, "BLOCK_ROWS", 10)

    def train(backups, *callbacks):
        trainer = tfdist.Trainer(mirrored, backup=tfdist.BackupAndRestore(tmp_path / backups, 3))
        model = reused.reset()
        data = SOURCES[kind](files)
        with contextlib.suppress(Interrupted):
            trainer.fit(model, data, epochs=2, verbose=0, callbacks=[*callbacks])
        return [weight.tobytes() for weight in model.get_weights()]

    whole = train("whole")
    train("interrupted", Interrupt(step=STEPS + 3))
    resumed = Interrupt()
    assert train("interrupted", resumed) == whole
    assert resumed.batches == [(1, 1), (1, 2), (1, 3), (1, 4)], "from step 6"


def end(run):
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1].split(" steps, ")


def start(*arguments):
    command = [sys.executable, "-m", "tests.backup.arrays_program", *map(str, arguments)]
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["arrays", "records"])
def test_a_killed_training_resumes_within_a_tenth_of_the_memory(tmp_path, kind):
    def run(backups, dies_at):
        return start(tmp_path / "files", tmp_path / backups, dies_at, kind)

    through = run("whole", 0)
    assert run("killed", 13).returncode == -signal.SIGKILL
    resumed = run("killed", 0)
    (steps, weights), (all_steps, expected) = (end(run) for run in (resumed, through))
    assert (int(all_steps), weights) == (24, expected)
    assert int(steps) in (14, 19), "from step 10; from step 5, if the backup of step 10 was still being written"
    assert "will not be exact" not in resumed.stderr + through.stderr
