"""`keras.distribution` beside a Trainer: `auto_shard_dataset` of a DataParallel, and distributions that contradict the strategy."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import MIRRORED, SERVERS, WORKERS
from tests.cases.case import case
from tests.cases.sources.policies import X, linear, parts_of, steps_of, trained

SIZE = 4  # rows in a batch of a worker


def parallel(**options):
    return keras.distribution.DataParallel(**options).scope()


def check_own(world, lengths, arrays, **compiled):
    """Trains each worker's own data in batches of SIZE, which are its parts of the global batch, as Keras means it on JAX."""
    parts = parts_of(world, lengths)
    x, y = parts[world.rank]
    own = [x, y] if arrays else [tf.data.Dataset.from_tensor_slices((x, y)).batch(SIZE)]
    validation = (x, y) if arrays else own[0]
    how = {"batch_size": SIZE, "verbose": 0} if arrays else {"verbose": 0}
    with parallel(auto_shard_dataset=False):
        model = linear(world, metrics=["mae"], **compiled)
        shuffle = {"shuffle": False} if arrays else {}
        history = model.fit(*own, epochs=2, validation_data=validation, **shuffle, **how).history
        evaluated, rows = model.evaluate(*own, **how), model.predict(own[0], **how)
    pairs = trained(model, history, steps_of(parts, SIZE), epochs=2)
    x, y = (np.concatenate(each).astype("float64") for each in zip(*parts, strict=True))
    w, b = (each.item() for each in model.get_weights())
    predicted, squares = x * w + b, np.mean((x * w + b - y) ** 2)
    return pairs | {
        "evaluate": (evaluated, [squares, np.mean(np.abs(predicted - y))]),
        "validation": (history["val_loss"][-1], squares),
        "predict": (rows, predicted),
    }


@case(full=True)
def own_datasets_of_equal_lengths(world):
    return check_own(world, (12, 12), arrays=False)


@case(WORKERS, full=True)
def own_datasets_of_unequal_lengths(world):
    return check_own(world, (17, 7), arrays=False)


@case(WORKERS, full=True)
def own_arrays_of_unequal_lengths(world):
    return check_own(world, (17, 7), arrays=True)


@case(WORKERS, full=True)
def own_datasets_in_executions(world):
    return check_own(world, (1, 23), arrays=False, steps_per_execution=2)


@case()
def shared_data(world):
    """The default: all workers give the same data in global batches, and Keras does not shard them a second time."""
    x, y = X / 10, 3 - X / 5
    with parallel():
        model = linear(world)
        history = model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), epochs=2, verbose=0).history
    return trained(model, history, steps_of([(x, y)], 8), epochs=2)


@case(WORKERS)
def own_data_by_attribute_set_after_the_scope(world):
    """Keras' error about data names this way: `distribution.auto_shard_dataset = False`."""
    parts = parts_of(world, (12, 12))
    distribution = keras.distribution.DataParallel()
    model = linear(world)
    keras.distribution.set_distribution(distribution)
    try:
        distribution.auto_shard_dataset = False
        own = tf.data.Dataset.from_tensor_slices(parts[world.rank]).batch(SIZE)
        history = model.fit(own, verbose=0).history
    finally:
        keras.distribution.set_distribution(None)
    return trained(model, history, steps_of(parts, SIZE))


@case(WORKERS, error="Received: x: 'a shared dataset' on worker:0, x: 'own rows' on worker:1")
def sharding_on_one_worker_alone(world):
    with parallel(auto_shard_dataset=world.rank == 0):
        linear(world).fit(tf.data.Dataset.from_tensor_slices((X, X)).batch(8), verbose=0)


@case(
    WORKERS,
    error="validation_split cannot split rows that are already sharded .* Give each worker's part as validation_data",
)
def split_of_own_arrays(world):
    with parallel(auto_shard_dataset=False):
        linear(world).fit(X, X, validation_split=0.5, verbose=0)


@case(
    MIRRORED,
    error="devices of tfdist.Trainer and of keras.distribution.DataParallel must be the same. Received: cpu:0, cpu:1 and cpu:0",
)
def other_devices_after_the_trainer(world):
    with parallel(devices=["cpu:0"]):
        linear(world)


@case(SERVERS, error="strategy parameter_server contradicts keras.distribution.DataParallel")
def beside_parameter_servers(world):
    with parallel():
        linear(world)


@case(error="keras.distribution has a ModelParallel, which this Trainer cannot follow")
def model_parallel(world):
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((1, len(devices)), ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel"] = (None, "model")
    with keras.distribution.ModelParallel(layout_map=layouts).scope():
        linear(world)
