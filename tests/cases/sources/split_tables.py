"""Tables split into shards: they train as one table does, under every strategy."""

import functools

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases.arms import MIRRORED, ONE_DEVICE, SERVERS, TWO_EACH, WORKERS
from tests.cases.case import case

ROWS, COLUMNS, BATCH, RATE = 11, 3, 6, 0.5
rng = np.random.default_rng(7)
IDS = rng.integers(0, ROWS, (24, 4)).astype("int32")
Y = rng.standard_normal((24, COLUMNS)).astype("float32")
TABLE = rng.standard_normal((ROWS, COLUMNS)).astype("float32")


class Sum(keras.layers.Layer):
    def call(self, rows):
        return tf.reduce_sum(rows, -2)


def train(world, layer, optimizer=None):
    """Returns a model of the sum of four rows, after two epochs."""
    with world.scope():
        model = keras.Sequential([keras.Input((4,), dtype="int32"), layer(), Sum()])
        model.compile(optimizer or keras.optimizers.SGD(RATE), "mse")
    model.fit(IDS, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model


def right(clip=None, accumulated=1, momentum=None):
    """Returns the table after descent along dense gradients, accumulated and then clipped by a norm; with a momentum, its moving average."""
    table = TABLE.astype("float64")
    average = None
    total = 0
    for number, begin in enumerate([*range(0, len(IDS), BATCH)] * 2, 1):
        ids, y = IDS[begin : begin + BATCH], Y[begin : begin + BATCH]
        slope = 2 * (table[ids].sum(1) - y) / y.size
        grad = np.zeros_like(table)
        np.add.at(grad, ids, np.repeat(slope[:, None], 4, 1))
        total = total + grad / accumulated
        if number % accumulated == 0:
            if clip:
                total *= clip / max(clip, np.linalg.norm(total))
            table -= RATE * total
            total = 0
        if momentum is not None:
            average = table if average is None else momentum * average + (1 - momentum) * table
            average = average.copy()
    return table if momentum is None else average


@case(ONE_DEVICE, MIRRORED, WORKERS, TWO_EACH, SERVERS, full=(ONE_DEVICE, WORKERS, TWO_EACH))
def shards_have_the_bits_of_one_table(world):
    whole = train(world, lambda: keras.layers.Embedding(ROWS, COLUMNS, weights=TABLE)).get_weights()[0]
    tables = {}
    # Two shards on two workers are one for each: tests/multiprocess/test_tables.py.
    counts = (1, 3, 4) if world.workers == 2 else (1, 2, 3)
    for shards in counts:
        model = train(world, lambda n=shards: tfdist.layers.Embedding(ROWS, COLUMNS, shards=n, weights=TABLE))
        assert len(model.trainable_variables) == shards
        tables[shards] = model.layers[0].table.numpy()
    equal = {shards: np.array_equal(table, whole) for shards, table in tables.items()}
    return {"table": (tables[3], right()), "equal": (equal, dict.fromkeys(counts, True))}


@case(ONE_DEVICE, MIRRORED, WORKERS, SERVERS, full=(ONE_DEVICE, WORKERS))
def clipnorm_of_shards_is_that_of_one_table(world):
    layer = functools.partial(tfdist.layers.Embedding, ROWS, COLUMNS, shards=3, weights=TABLE)
    with world.scope():
        optimizer = keras.optimizers.SGD(RATE, clipnorm=0.5)
    model = train(world, layer, optimizer)
    return {"table": (model.layers[0].table.numpy(), right(clip=0.5))}


def options_with_rows_on_workers(world, options, **how):
    """Returns this worker's rows after a training with an optimizer's options, beside arithmetic."""
    layer = functools.partial(tfdist.layers.Embedding, ROWS, COLUMNS, shards=2, weights=TABLE)
    with world.scope():
        optimizer = keras.optimizers.SGD(RATE, **options)
    model = train(world, layer, optimizer)
    ((part, rows),) = model.layers[0].table.own(range(ROWS))
    return {"rows": (rows, right(**how)[part])}


@case(WORKERS, TWO_EACH, full=(TWO_EACH,))
def clipnorm_of_rows_on_workers(world):
    return options_with_rows_on_workers(world, {"clipnorm": 2.0}, clip=2.0)


@case(WORKERS, TWO_EACH, full=(TWO_EACH,))
def accumulation_of_rows_on_workers(world):
    options = {"gradient_accumulation_steps": 2, "global_clipnorm": 1.0}
    return options_with_rows_on_workers(world, options, clip=1.0, accumulated=2)


@case(WORKERS, TWO_EACH, full=(TWO_EACH,))
def average_of_rows_on_workers(world):
    return options_with_rows_on_workers(world, {"use_ema": True, "ema_momentum": 0.5}, momentum=0.5)


@case(SERVERS, full=())
def each_server_has_a_shard(world):
    initial = tfdist.layers.Embedding(ROWS, COLUMNS, seed=5)
    initial.build()
    with world.scope():
        layer = tfdist.layers.Embedding(ROWS, COLUMNS, seed=5, combiner="sum")
        model = keras.Sequential([keras.Input((4,), dtype="int32"), layer])
        model.compile(keras.optimizers.Adagrad(RATE), "mse")
    devices = [tf.DeviceSpec.from_string(shard.value.device) for shard in layer.table.shards]
    first = layer.table.numpy()
    model.fit(IDS, Y, batch_size=BATCH, shuffle=False, verbose=0)
    path = str(world.folder / "model.keras")
    world.trainer.save(model, path)
    with world.scope():
        loaded = keras.models.load_model(path)
    slots = [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables]
    world.trainer.export(model, str(world.folder / "exported"))
    exported = tf.saved_model.load(str(world.folder / "exported"))
    table = layer.table.numpy()
    return {
        "servers": (sorted((each.job, each.task) for each in devices), [("ps", 0), ("ps", 1)]),
        "initial": (np.array_equal(first, initial.table.numpy()), True),
        "loaded": (loaded.layers[0].table.numpy(), table),
        "slots": ([keras.ops.convert_to_numpy(v) for v in loaded.optimizer.variables], slots),
        "served": (exported.serve(IDS[:2]), table[IDS[:2]].sum(1)),
    }


@case(MIRRORED, SERVERS, error=r"ids of users must be 0 to 10 .input_dim=11.. Received:")
def an_id_out_of_range(world):
    with world.scope():
        layer = tfdist.layers.Embedding(ROWS, COLUMNS, shards=2, combiner="sum", name="users")
        model = keras.Sequential([keras.Input((4,), dtype="int32"), layer])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    model.fit(IDS + 1, Y, batch_size=BATCH, verbose=0)
