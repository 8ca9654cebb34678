"""One generator that several loops read: no batch is lost, and none is used twice."""

import keras
import numpy as np

from tests.cases.arms import ALL, MIRRORED, TWO_EACH, WORKERS
from tests.cases.case import case
from tfdist.data import from_generator

SIZE = 4


def numbered(count=10**6):
    """Yields batches of examples that all have the number of their batch."""
    for number in range(count):
        yield np.full((SIZE, 1), number, "float32"), np.zeros((SIZE, 1), "float32")


def identity(world, **compiled):
    """Returns a model whose loss on a batch is the square of the batch's number, and that does not change."""
    with world.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse", **compiled)
    return model


def squares(*numbers):
    return float(np.mean(np.square(numbers, dtype="float64")))


@case(*ALL, full=True)
def several_fits(world):
    model, source = identity(world), numbered()
    losses = [model.fit(source, steps_per_epoch=3, verbose=0).history["loss"][0] for _ in range(5)]
    return {"loss": (losses, [squares(*range(first, first + 3)) for first in range(0, 15, 3)])}


@case(*ALL)
def loops_of_all_kinds_in_executions(world):
    model, source = identity(world, steps_per_execution=2), numbered()
    two_epochs = model.fit(source, epochs=2, steps_per_epoch=3, verbose=0).history["loss"]
    evaluated = model.evaluate(source, steps=3, verbose=0)
    predicted = model.predict(source, steps=2, verbose=0)
    last = model.fit(source, steps_per_epoch=1, verbose=0).history["loss"]
    return {
        "fit": (two_epochs, [squares(0, 1, 2), squares(3, 4, 5)]),
        "evaluate": (evaluated, squares(6, 7, 8)),
        "predict": (predicted[:, 0], np.repeat([9.0, 10.0], SIZE)),
        "last": (last, [squares(11)]),
    }


@case(*ALL)
def a_generator_that_ends(world):
    model, source = identity(world), numbered(7)
    losses = [model.fit(source, steps_per_epoch=3, verbose=0).history["loss"][0] for _ in range(2)]
    return {
        "full": (losses, [squares(0, 1, 2), squares(3, 4, 5)]),
        "remaining": (model.evaluate(source, verbose=0), squares(6)),
    }


@case(*ALL)
def a_generator_that_has_ended(world):
    """It is empty for all workers: Keras' error."""
    model, source = identity(world), numbered(2)
    model.fit(source, verbose=0)
    try:
        model.fit(source, verbose=0)
    except ValueError as error:
        return {"empty": ("must yield at least one batch" in str(error), True)}
    return {}


@case(*ALL)
def validations_on_a_generator(world):
    how = {"epochs": 3, "steps_per_epoch": 1, "validation_steps": 3, "verbose": 0}
    history = identity(world).fit(numbered(), validation_data=numbered(), **how).history
    right = [squares(*range(first, first + 3)) for first in (0, 3, 6)]
    return {"loss": (history["loss"], [0.0, 1.0, 4.0]), "val_loss": (history["val_loss"], right)}


@case(*ALL)
def one_generator_for_training_and_validation(world):
    source = numbered()
    how = {"epochs": 2, "steps_per_epoch": 2, "validation_steps": 1, "verbose": 0}
    history = identity(world).fit(source, validation_data=source, **how).history
    return {
        "loss": (history["loss"], [squares(0, 1), squares(3, 4)]),
        "val_loss": (history["val_loss"], [squares(2), squares(5)]),
    }


@case(MIRRORED, WORKERS, TWO_EACH)
def a_callback_that_evaluates_on_the_generator(world):
    """The batches between those of the evaluations are trained on."""
    model, source, evaluated = identity(world), numbered(), []

    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            evaluated.append(self.model.evaluate(source, steps=1, verbose=0))

    model.fit(source, steps_per_epoch=3, verbose=0, callbacks=[Evaluate()])
    return {"evaluated": (evaluated, [1.0, 9.0, 25.0])}


@case(WORKERS, TWO_EACH)
def items_of_a_generator(world):
    model, source = identity(world), numbered()
    losses = [
        model.fit(from_generator(source, "items"), steps_per_epoch=2, verbose=0).history["loss"][0] for _ in range(3)
    ]
    return {"loss": (losses, [squares(*range(first, first + 4)) for first in (0, 4, 8)])}
