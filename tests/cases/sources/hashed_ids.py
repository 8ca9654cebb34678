"""Ids that enter a table while it trains: the rows of a dict on all ranks, with evictions at backups."""

import functools

import keras
import tensorflow as tf

import tfdist
from tests.cases.arms import MIRRORED, ONE_DEVICE, SERVERS, TWO_EACH, WORKERS
from tests.cases.case import case
from tests.helpers.hashed_rows import Dict, batches_of_ids

CAPACITY, COLUMNS, BATCH, FREQ, RATE = 10, 3, 7, 3, 0.1
IDS, Y = batches_of_ids(10 * BATCH + 1, 2 * COLUMNS)  # the last batch has fewer examples than there are replicas

FULL = "hashed_embedding is full: new ids stay unknown until a backup removes ids"


class Lost(Exception):
    pass


class Lose(keras.callbacks.Callback):
    only_observes = True

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 * FREQ:
            raise Lost


def build(world, optimizer, **arguments):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    with world.scope():
        layer = tfdist.layers.HashedEmbedding(CAPACITY, COLUMNS, seed=3, **arguments)
        model = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Flatten()])
        model.compile(optimizer(RATE), "mse")
    return model


def fit(world, model, folder, callbacks=()):
    backup = tfdist.BackupAndRestore(world.folder / folder, save_freq=FREQ)
    world.trainer.fit(
        model, IDS, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[*callbacks, backup]
    )


@functools.cache
def first_row(number):
    layer = tfdist.layers.HashedEmbedding(1, COLUMNS, seed=3)
    return layer(tf.constant([number]), training=True).numpy()[0]


def trained(world, min_count, shards):
    """Compares the rows of a training, and those of the saved model."""
    model = build(world, keras.optimizers.SGD, min_count=min_count, shards=shards)
    unknown = first_row(0)  # row 0 of the table has the first value of id 0
    expected = Dict(CAPACITY, COLUMNS, min_count, unknown, first_row)
    fit(world, model, "backup")
    batches = [slice(begin, begin + BATCH) for begin in range(0, len(IDS), BATCH)] * 2
    for step, batch in enumerate(batches, 1):
        expected.train(IDS[batch], Y[batch].reshape(-1, 2, COLUMNS), RATE)
        if step % FREQ == 0:
            expected.evict()
    found = world.trainer.predict(model, IDS, batch_size=BATCH, verbose=0)
    pairs = {"rows": (found, expected.look_up(IDS).reshape(len(IDS), -1))}
    path = str(world.folder / "model.keras")
    world.trainer.save(model, path, delete_backup=False)
    if world.rank == 0:
        loaded = keras.models.load_model(path)
        pairs["loaded"] = (loaded.predict(IDS, verbose=0), found)
    return pairs


ARMS = (ONE_DEVICE, MIRRORED, WORKERS, TWO_EACH)


@case(*ARMS, full=(ONE_DEVICE, MIRRORED, TWO_EACH), warning=FULL)
def rows_of_a_dict_in_shards(world):
    return trained(world, min_count=2, shards=2)


@case(*ARMS, full=True, warning=FULL)
def rows_of_a_dict(world):
    return trained(world, min_count=1, shards=1)


@case(MIRRORED, WORKERS, ONE_DEVICE, full=(ONE_DEVICE,), warning=FULL)
def to_the_bit_after_a_break(world):
    trained = {}
    for folder, callbacks in (("undisturbed", []), ("lost", [Lose()]), ("lost", [])):
        model = build(world, keras.optimizers.Adam, min_count=2)
        try:
            fit(world, model, folder, callbacks)
        except Lost:
            assert callbacks
        local = world.trainer.strategy.experimental_local_results
        variables = [*model.variables, *model.optimizer.variables]
        trained[folder] = {v.path: [own.numpy().tobytes().hex() for own in local(v.value)] for v in variables}
    return {"variables": (trained["lost"], trained["undisturbed"])}


@case(SERVERS, error=r"needs replicas that admit the same ids in the same order", full=())
def asynchronous_workers(world):
    build(world, keras.optimizers.SGD).fit(IDS, Y, verbose=0)
