"""A table of as many rows as are updated by rows: what plain arithmetic makes of it, under every strategy."""

from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import SERVERS, TWO_EACH, WORKERS
from tests.cases.case import case
from tests.gradients.test_row_updates import IDS, OPTIMIZERS, TARGETS, arithmetic, build
from tests.helpers.options import options_set


def mode(world, name):
    """Sets `row_updates` of the program's strategy, which other cases share."""
    return options_set(world.trainer.strategy, row_updates=name)


def trained(world, name, row_updates):
    with mode(world, row_updates):
        with world.scope():
            model = build(OPTIMIZERS[name][2]())
        data = (IDS.reshape(-1, 3), TARGETS.reshape(-1, 1))
        model.fit(*data, batch_size=IDS.shape[1], shuffle=False, verbose=0)
    table = model.get_weights()[0]
    touched = np.unique(IDS)
    right = arithmetic(name, lazy=row_updates == "lazy")
    others = np.delete(np.arange(len(table)), touched)
    return {"rows": (table[touched], right[touched]), "others": (np.abs(table[others] - right[others]).max(), 0)}


@case(WORKERS, SERVERS, TWO_EACH, full=(TWO_EACH,))
def exact_rows(world):
    return trained(world, "adagrad", "auto")


@case(WORKERS, SERVERS, TWO_EACH, full=(TWO_EACH,))
def lazy_rows(world):
    return trained(world, "adam", "lazy")


@case(WORKERS, SERVERS, full=True)
def exact_rows_of_descent(world):
    return trained(world, "sgd", "auto")


@case(SERVERS)
def rows_are_updated_on_their_server(world):
    calls = []
    formula = keras.optimizers.Adagrad.update_step

    def update_step(optimizer, gradient, variable, learning_rate):
        calls.append((isinstance(gradient, tf.IndexedSlices), tf.zeros([]).device))
        formula(optimizer, gradient, variable, learning_rate)

    with mock.patch.object(keras.optimizers.Adagrad, "update_step", update_step):
        with world.scope():
            model = build(OPTIMIZERS["adagrad"][2]())
        model.fit(IDS[0], TARGETS[0], batch_size=IDS.shape[1], verbose=0)
    whole, devices = (set(each) for each in zip(*calls, strict=True))
    return {
        "a whole table": (sorted(whole), [False]),
        "devices": (sorted(devices), [model.weights[0].value.device]),
    }
