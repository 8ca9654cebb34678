"""One task of `tools.bench.inputs`. Arguments: output folder, options as JSON."""

import json
import pathlib
import statistics
import sys
import time

import tfdist

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
trainer = tfdist.Trainer("multi_worker_mirrored" if OPTIONS["workers"] > 1 else "one_device")

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist import data as data_lib  # noqa: E402

SIZE, BATCH, SHARDS, SHAPE = 20_000, 64, 4, (64, 64, 3)
AUTOTUNE = tf.data.AUTOTUNE
ITEM_SECONDS, ITEMS = 0.005, 200
files = FOLDER / f"files-{trainer.task.index}"


def example(x, y):
    features = {
        "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[x.tobytes()])),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(y)])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write():
    files.mkdir()
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (SIZE, *SHAPE), np.uint8), rng.integers(0, 10, SIZE)
    np.save(files / "x.npy", x)
    np.save(files / "y.npy", y)
    if OPTIONS["data"] == "TFRecord":
        for shard in range(SHARDS):
            with tf.io.TFRecordWriter(str(files / f"{shard}.tfrecord")) as writer:
                for row in range(shard, SIZE, SHARDS):
                    writer.write(example(x[row], y[row]))


def parse(serialized):
    features = {"x": tf.io.FixedLenFeature([], tf.string), "y": tf.io.FixedLenFeature([], tf.int64)}
    parsed = tf.io.parse_example(serialized, features)
    return tf.reshape(tf.io.decode_raw(parsed["x"], tf.uint8), [-1, *SHAPE]), parsed["y"]


def from_memory_map():
    """Rows of a memory map by `numpy_function`, as fast as it was found to be."""
    x, y = (np.load(files / f"{name}.npy", mmap_mode="r") for name in "xy")

    def read(rows):
        images, labels = tf.numpy_function(lambda rows: (x[rows], y[rows]), [rows], (tf.uint8, tf.int64))
        return tf.ensure_shape(images, [None, *SHAPE]), tf.ensure_shape(labels, [None])

    return tf.data.Dataset.range(SIZE).shuffle(SIZE).batch(BATCH).map(read, AUTOTUNE).prefetch(AUTOTUNE)


def from_records():
    paths = tf.data.Dataset.from_tensor_slices([str(path) for path in sorted(files.glob("*.tfrecord"))]).shuffle(SHARDS)
    records = paths.interleave(tf.data.TFRecordDataset, num_parallel_calls=AUTOTUNE, cycle_length=SHARDS)
    return records.shuffle(10_000).batch(BATCH).map(parse, AUTOTUNE).prefetch(AUTOTUNE)


def item(index):
    time.sleep(ITEM_SECONDS)
    return np.full((BATCH, *SHAPE), index, np.uint8), np.full(BATCH, index % 10)


class Items(keras.utils.PyDataset):
    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        return item(index)


def from_generator(context):
    """One worker's half of the items."""
    spec = tf.TensorSpec([BATCH, *SHAPE], tf.uint8), tf.TensorSpec([BATCH], tf.int64)
    own = range(context.input_pipeline_id, ITEMS, context.num_input_pipelines)
    made = tf.data.Dataset.from_generator(lambda: map(item, own), output_signature=spec)
    return made.apply(tf.data.experimental.assert_cardinality(len(own))).prefetch(AUTOTUNE)


class Maps:
    """An object of the user, which reads memory maps."""

    def __init__(self):
        self.x, self.y = maps()

    def __len__(self):
        return SIZE

    def __getitem__(self, indices):
        return self.x[indices], self.y[indices]


def maps():
    return tuple(np.load(files / f"{name}.npy", mmap_mode="r") for name in "xy")


def arrow():
    """A dataset of two Arrow files."""
    import datasets
    import pyarrow as pa

    x, y = maps()
    column = pa.array(x.ravel())
    for size in SHAPE[::-1]:
        column = pa.FixedSizeListArray.from_arrays(column, size)
    path = files / "arrow"
    if not path.exists():
        datasets.Dataset(pa.table({"x": column, "y": y})).save_to_disk(path, num_shards=2)
    return datasets.load_from_disk(path)


def hdf5(rows=None):
    """Data sets of one file; with `rows`, in chunks of so many rows."""
    import h5py

    path = files / f"{rows}.h5"
    with h5py.File(path, "w") as file:
        for name, values in zip("xy", maps(), strict=True):
            file.create_dataset(name, data=values, chunks=rows and (rows, *values.shape[1:]))
    file = h5py.File(path, "r")
    return file["x"], file["y"]


def grain_source():
    import grain

    class Source(grain.sources.RandomAccessDataSource):
        def __init__(self):
            self.x, self.y = maps()

        def __len__(self):
            return SIZE

        def __getitem__(self, index):
            return self.x[index], self.y[index]

    return Source()


def rows(source):
    return data_lib.rows_from(source, BATCH)


MAKE = {
    "tf.data, memory map": from_memory_map,
    "arrays_from": lambda: data_lib.arrays_from(files, BATCH),
    "tf.data, TFRecord": from_records,
    "records_from": lambda: data_lib.records_from(files, parse, BATCH, batched=True),
    "rows_from, memory maps": lambda: rows(maps()),
    "rows_from, object": lambda: rows(Maps()),
    "rows_from, datasets": lambda: data_lib.rows_from(arrow(), BATCH, columns=("x", "y")),
    "rows_from, datasets.shuffle()": lambda: data_lib.rows_from(arrow().shuffle(seed=1), BATCH, columns=("x", "y")),
    "rows_from, HDF5": lambda: rows(hdf5()),
    "rows_from, HDF5 in chunks": lambda: rows(hdf5(8)),
    "rows_from, grain": lambda: rows(grain_source()),
    "tf.data, from_generator": lambda: from_generator,
    "PyDataset": Items,
    "shard='items'": lambda: data_lib.from_pydataset(Items(), "items"),
}


def build():
    with trainer.scope():
        layers = [
            keras.Input(SHAPE, dtype="uint8"),
            keras.layers.Lambda(lambda x: tf.cast(x[:, ::32, ::32, 0], tf.float32)),
        ]
        model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Epochs(keras.callbacks.Callback):
    """Notes the seconds of each epoch, and how long a step of it waited for its batch."""

    def __init__(self):
        super().__init__()
        self.seconds, self.waits = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self._began, self._waited, self._steps = time.perf_counter(), self.model.train_function.input_seconds, 0

    def on_train_batch_end(self, batch, logs=None):
        self._steps += 1

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._began)
        self.waits.append(1000 * (self.model.train_function.input_seconds - self._waited) / self._steps)


write()
given = {name: MAKE[name]() for name in OPTIONS["contenders"]}
models = {name: build() for name in given}
examples = ITEMS * BATCH if OPTIONS["data"] == "PyDataset" else SIZE
samples, waits = {name: [] for name in given}, {name: [] for name in given}
for number in range(OPTIONS["rounds"] + 1):
    for name, data in given.items():
        clock = Epochs()
        first = number * 3
        models[name].fit(data, epochs=first + 3, initial_epoch=first, verbose=0, callbacks=[clock])
        if number:  # the first round compiles, and fills caches
            samples[name].append(1e6 * statistics.median(clock.seconds) / examples)
            waits[name].append(statistics.median(clock.waits))
results = {"samples": samples, "waits": {name: statistics.median(values) for name, values in waits.items()}}
if trainer.is_chief:
    (FOLDER / "results.json").write_text(json.dumps(results))
