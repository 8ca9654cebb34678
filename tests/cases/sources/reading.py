"""Variables of the model and the optimizer, read by users' code."""

import keras
import numpy as np

from tests.cases.arms import MIRRORED, SERVERS, WORKERS
from tests.cases.case import case

RATE = 0.25
READERS = {
    "float": float,
    "int": int,
    "round": lambda variable: round(float(variable), 4),
    "percent": lambda variable: float("%.4f" % variable),  # noqa: UP031 (the form that is tested)
    "format": lambda variable: float(f"{float(variable):.4f}"),
    "float32": np.float32,
    "asarray": np.asarray,
    "float64": lambda variable: np.array(variable, dtype="float64"),
    "mean": np.mean,
    "numpy": lambda variable: variable.numpy(),
    "convert_to_numpy": keras.ops.convert_to_numpy,
    "value": lambda variable: float(variable.value),
    "array of value": lambda variable: np.asarray(variable.value),
    "value.numpy": lambda variable: variable.value.numpy(),
    "sum": lambda variable: float(variable + 1) - 1,
}


def small_model(world):
    keras.utils.set_random_seed(1)
    with world.scope():
        inputs = keras.Input((1,))
        model = keras.Model(inputs, keras.layers.BatchNormalization()(keras.layers.Dense(1)(inputs)))
        model.compile(keras.optimizers.SGD(RATE), "mse")
    return model


def read(name, variable, right):
    pairs = {f"{name} {reader}": (take(variable), right) for reader, take in READERS.items() if reader != "int"}
    pairs[f"{name} int"] = int(variable), int(right)
    pairs[f"{name} compared"] = (
        [bool(variable > right - 0.5), bool(variable < right - 0.5), bool(variable == right), bool(variable != right)],
        [True, False, True, False],
    )
    return pairs


@case(MIRRORED, WORKERS, SERVERS)
def numbers_of_variables_after_fit(world):
    model = small_model(world)
    model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=4, verbose=0)
    return read("rate", model.optimizer.learning_rate, RATE) | read("steps", model.optimizer.iterations, 2)


@case(MIRRORED, WORKERS, SERVERS)
def numbers_of_variables_before_fit(world):
    model = small_model(world)
    return read("rate", model.optimizer.learning_rate, RATE) | read("steps", model.optimizer.iterations, 0)


@case(MIRRORED, WORKERS, SERVERS)
def numbers_of_variables_in_the_scope(world):
    model = small_model(world)
    with world.scope():
        return read("rate", model.optimizer.learning_rate, RATE) | read("steps", model.optimizer.iterations, 0)


@case(MIRRORED, WORKERS, SERVERS)
def numbers_of_variables_in_callbacks(world):
    model, pairs = small_model(world), {}

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            pairs.update(read(f"{epoch} rate", self.model.optimizer.learning_rate, RATE / 2**epoch))
            pairs.update(read(f"{epoch} steps", self.model.optimizer.iterations, 2 * (epoch + 1)))
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2

    model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=4, epochs=2, verbose=0, callbacks=[Reads()])
    return pairs


@case(MIRRORED, WORKERS, SERVERS)
def arrays_of_variables(world):
    model = small_model(world)
    dense, norm = model.layers[1:]
    dense.set_weights([np.full((1, 1), 3.0), np.full(1, 2.0)])
    norm.moving_mean.assign(np.full(1, 5.0))
    pairs = {}
    for name, variable, right in (
        ("kernel", dense.kernel, [[3]]),
        ("bias", dense.bias, [2]),
        ("mean", norm.moving_mean, [5]),
    ):
        for reader in ("asarray", "float64", "numpy", "convert_to_numpy", "array of value", "value.numpy"):
            pairs[f"{name} {reader}"] = READERS[reader](variable), right
    return pairs


@case(MIRRORED, WORKERS, SERVERS)
def a_loaded_optimizer_read_as_numbers(world):
    with world.scope():
        config = keras.optimizers.serialize(keras.optimizers.Adam(RATE, beta_1=0.5))
        optimizer = keras.optimizers.deserialize(config)
        optimizer.build([keras.Variable(np.zeros(2))])
        metric = keras.metrics.Sum()
        count = keras.Variable(7, dtype="int32", trainable=False)
    metric.update_state([1.0, 2.5])
    return (
        read("rate", optimizer.learning_rate, RATE)
        | read("count", count, 7)
        | {"metric": (float(metric.result()), 3.5), "total": (float(metric.variables[0]), 3.5)}
    )
