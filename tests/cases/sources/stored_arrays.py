"""Arrays, records and other rows train as a plain loop in NumPy does, with each example once."""

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases.arms import MIRRORED, ONE_DEVICE, THREE_WORKERS, TWO_EACH, WORKERS
from tests.cases.case import case

BATCH, RATE = 8, 0.05
SIZES = (1, 9)  # less than a batch, and a bit more than one
FURTHER_SIZES = (2, 3, 7, 8, 27)
rng = np.random.default_rng(0)
X = rng.standard_normal((max(FURTHER_SIZES), 3)).astype(np.float32)
Y = abs(X.sum(1, keepdims=True))


def write(folder, size):
    """Writes examples in two files of arrays and two of records, of which the first may be empty."""
    folder.mkdir()
    (folder / "records").mkdir()
    ends = [0, size // 3, size]
    for shard in range(2):
        rows = slice(ends[shard], ends[shard + 1])
        np.savez(folder / f"{shard}.npz", x=X[rows], y=Y[rows])
        records = folder / "records" / f"{shard}.tfrecord"
        with tf.io.TFRecordWriter(str(records)) as writer:
            writer.write(b"to be damaged")
            for row in np.concatenate([X[rows], Y[rows]], 1):
                writer.write(row.tobytes())
        flip(records, 12)


def flip(path, position):
    """Damages one byte of a file."""
    contents = bytearray(path.read_bytes())
    contents[position] ^= 1
    path.write_bytes(contents)


def parse(record):
    row = tf.io.decode_raw(record, tf.float32)
    return tf.ensure_shape(row[:3], [3]), tf.ensure_shape(row[3:], [1])


def open_arrays(folder, seed=4):
    return tfdist.data.arrays_from(folder, BATCH, seed, window=5)


def open_records(folder, seed=4):
    return tfdist.data.records_from(folder / "records", parse, BATCH, seed, window=5, on_corrupt="skip")


class Rows:
    """A source of the user, which reads the files of arrays."""

    def __init__(self, folder):
        shards = [np.load(folder / f"{shard}.npz") for shard in range(2)]
        self.x, self.y = (np.concatenate([shard[name] for shard in shards]) for name in "xy")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, indices):
        return self.x[indices], self.y[indices]


def open_rows(folder, seed=4):
    return tfdist.data.rows_from(Rows(folder), BATCH, seed, window=5)


def linear(world):
    with world.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    return model


def folders(world, *sizes):
    """Returns a folder with examples for each size, the same for all ranks."""
    if world.rank == 0:
        for size in sizes:
            write(world.folder / str(size), size)
    world.gather()
    return [world.folder / str(size) for size in sizes]


def plain(stored, size, epochs, per_epoch):
    """Returns what the training must come to, by the batches of `dataset` and NumPy."""
    weights, bias, losses, validation = np.ones((3, 1)), np.zeros(1), [], []
    steps = stored.dataset(epochs=None).take(epochs * per_epoch).as_numpy_iterator()
    for _ in range(epochs):
        squares = count = 0
        for _ in range(per_epoch):
            x, y = next(steps)
            error = x @ weights + bias - y
            squares, count = squares + float((error**2).sum()), count + len(x)
            weights, bias = weights - RATE * 2 * x.T @ error / len(x), bias - RATE * 2 * error.mean(0)
        losses.append(squares / count)
        validation.append(float(((X[:size] @ weights + bias - Y[:size]) ** 2).mean()))
    predicted = X[:size] @ weights + bias
    return {
        "weights": [weights, bias],
        "loss": losses,
        "val_loss": validation,
        "evaluated": validation[-1],
        "predicted": predicted,
    }


def trained(world, open_data, sizes):
    """Compares trainings on files of some sizes with the loop."""
    model, pairs = linear(world), {}
    for size, folder in zip(sizes, folders(world, *sizes), strict=True):
        for steps in (None, 3) if size > 8 else (None,):
            stored = open_data(folder)
            model.set_weights([np.ones((3, 1)), np.zeros(1)])
            history = model.fit(stored, epochs=3, steps_per_epoch=steps, validation_data=stored, verbose=0).history
            found = {**history, "weights": model.get_weights(), "evaluated": model.evaluate(stored, verbose=0)}
            found["predicted"] = model.predict(stored, verbose=0)
            pairs[f"{size} {steps}"] = found, plain(stored, size, 3, steps or stored.steps_per_epoch)
    model.set_weights([np.ones((3, 1)), np.zeros(1)])
    model.fit(stored, class_weight=dict.fromkeys(range(10), 0.0), verbose=0)
    pairs["no weight"] = model.get_weights(), [np.ones((3, 1)), np.zeros(1)]
    return pairs


ARMS = (ONE_DEVICE, MIRRORED, WORKERS, TWO_EACH, THREE_WORKERS)
SKIPPED = "skipped damaged records: 1 of "


@case(*ARMS, full=(ONE_DEVICE, MIRRORED, TWO_EACH, THREE_WORKERS))
def arrays(world):
    return trained(world, open_arrays, SIZES)


@case(*ARMS, full=(ONE_DEVICE, MIRRORED, TWO_EACH, THREE_WORKERS), warning=SKIPPED)
def records(world):
    return trained(world, open_records, SIZES[1:])


@case(*ARMS, full=(ONE_DEVICE, MIRRORED, TWO_EACH, THREE_WORKERS))
def rows(world):
    return trained(world, open_rows, SIZES)


@case(*ARMS, full=True)
def arrays_of_further_sizes(world):
    return trained(world, open_arrays, FURTHER_SIZES)


@case(*ARMS, full=True, warning=SKIPPED)
def records_of_further_sizes(world):
    return trained(world, open_records, (*SIZES[:1], *FURTHER_SIZES))


@case(WORKERS, error=r"(?s)ConfigError: arrays_from in x must be the same on all tasks.*seed=1")
def arrays_of_unlike_seeds(world):
    (folder,) = folders(world, 9)
    linear(world).fit(open_arrays(folder, seed=world.rank), verbose=0)


@case(WORKERS, error=r"(?s)ConfigError: records_from in x must be the same on all tasks.*seed=1")
def records_of_unlike_seeds(world):
    (folder,) = folders(world, 9)
    linear(world).fit(open_records(folder, seed=world.rank), verbose=0)


@case(WORKERS, error=r"(?s)ConfigError: rows_from in x must be the same on all tasks.*digest")
def rows_that_differ(world):
    linear(world).fit(tfdist.data.rows_from((X + world.rank, Y), BATCH), verbose=0)


@case(
    WORKERS,
    THREE_WORKERS,
    full=(THREE_WORKERS,),
    ends_job=True,
    error=r"DataError: .*worker:\d: .*27/1.npz has changed since it was opened \(",
)
def a_file_that_has_changed(world):
    (folder,) = folders(world, 27)
    stored, model = open_arrays(folder), linear(world)
    world.gather()
    if world.rank == 0:
        np.savez(folder / "1.npz", x=X, y=Y)
    world.gather()
    model.fit(stored, epochs=9, verbose=0)


@case(
    WORKERS,
    THREE_WORKERS,
    full=(THREE_WORKERS,),
    ends_job=True,
    error=r"DataError: .*worker:\d: .*27/records/1.tfrecord is damaged: the record at byte \d+ has another checksum",
)
def a_damaged_record(world):
    (folder,) = folders(world, 27)
    path = folder / "records" / "1.tfrecord"
    if world.rank == 0:
        flip(path, path.stat().st_size - 1)
    world.gather()
    linear(world).fit(tfdist.data.records_from(path, parse, BATCH), epochs=9, verbose=0)
