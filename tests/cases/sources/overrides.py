"""Every method of `keras.Model` that a class may override, and an object may get assigned.

The model is y = x with the targets 0. Of five rows in batches of four, the last batch has one row, which one replica has.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfdist
from tests.cases.arms import ALL, MIRRORED, SERVERS, TWO_EACH, WORKERS
from tests.cases.case import case

SYNCHRONOUS = (MIRRORED, WORKERS, TWO_EACH)
FURTHER = (MIRRORED, TWO_EACH, SERVERS)
X = np.array([[1.0], [2.0], [1.0], [2.0], [3.0]], "float32")
LOSS = 19 / 5  # 1 + 4 + 1 + 4 + 9
FIT = {"batch_size": 4, "shuffle": False, "verbose": 0}
SCORES = np.array([[0.1], [0.9], [0.6], [0.4], [0.8]], "float32")
LABELS = np.array([[0], [1], [1], [0], [0]], "float32")
AREA = 5 / 6  # five of the six pairs of a positive and a negative are in order


def line(world, kind=keras.Model, rate=0.0, **compiled):
    """Returns a model that multiplies by 1."""
    with world.scope():
        inputs = keras.Input((1,))
        model = kind(inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs))
        if "metrics" in compiled:
            compiled["metrics"] = [make() for make in compiled["metrics"]]
        model.compile(keras.optimizers.SGD(rate), **{"loss": "mse", **compiled})
    return model


def fitted(model, x=X, y=0 * X, **how):
    history = model.fit(x, y, validation_data=(x, y), **FIT, **how).history
    return {name: values[-1] for name, values in history.items()}


def same(found, right):
    """Returns pairs of the logs of training and validation, and of the right ones of both."""
    return {prefix + name: (found[prefix + name], value) for prefix in ("", "val_") for name, value in right.items()}


class Doubles(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        logs["two"] = 2 * logs["loss"]
        return logs


@case(*ALL, full=())
def compute_metrics(world):
    found = fitted(line(world, Doubles))
    return same(found, {"loss": LOSS, "two": 2 * LOSS})


@case(*ALL)
def compute_metrics_beside_an_area(world):
    model = line(world, Doubles, metrics=[functools.partial(keras.metrics.AUC, name="auc")])
    found = fitted(model, SCORES, LABELS)
    return same(found, {"auc": AREA, "loss": np.mean((SCORES - LABELS) ** 2)})


@case(*ALL)
def compute_metrics_of_a_batch(world):
    model = line(world, Doubles)
    trained = model.train_on_batch(X, 0 * X, return_dict=True)
    tested = model.test_on_batch(X, 0 * X, return_dict=True)
    return {name: ([logs["loss"], logs["two"]], [LOSS, 2 * LOSS]) for name, logs in (("a", trained), ("b", tested))}


@case(*ALL, full=FURTHER)
def compute_metrics_of_an_object(world):
    model = line(world)
    of_class = model.compute_metrics

    def compute(*args, **kwargs):
        logs = of_class(*args, **kwargs)
        return {**logs, "two": 2 * logs["loss"]}

    model.compute_metrics = compute
    return same(fitted(model), {"loss": LOSS, "two": 2 * LOSS})


@case(*SYNCHRONOUS, error="compute_metrics of Doubles.*jit_compile=False")
def compute_metrics_that_xla_compiles(world):
    line(world, Doubles, jit_compile=True).fit(X, 0 * X, **FIT)


class Results(keras.Model):
    def get_metrics_result(self):
        logs = super().get_metrics_result()
        return {**logs, "two": 2 * logs["loss"]}


@case(*ALL)
def get_metrics_result(world):
    return same(fitted(line(world, Results)), {"loss": LOSS, "two": 2 * LOSS})


@case(*ALL, full=FURTHER)
def get_metrics_result_of_an_object(world):
    model = line(world)
    of_class = model.get_metrics_result
    model.get_metrics_result = lambda: {**of_class(), "two": 2 * of_class()["loss"]}
    return same(fitted(model), {"loss": LOSS, "two": 2 * LOSS})


@case(*ALL)
def reset_metrics(world):
    """The metrics count on over two epochs."""

    class Keeps(keras.Model):
        def reset_metrics(self):
            pass

    model = line(world, Keeps)
    found = model.fit(X, 0 * X, epochs=2, **FIT).history
    model.evaluate(X[:1], 0 * X[:1], verbose=0)
    return {"loss": (found["loss"], [LOSS] * 2), "all": (model.get_metrics_result()["loss"], (2 * 19 + 1) / 11)}


@case(*ALL, full=FURTHER)
def reset_metrics_of_an_object(world):
    model = line(world)
    model.reset_metrics = lambda: None
    found = model.fit(X, 0 * X, epochs=2, **FIT).history
    evaluated = model.evaluate(X[:1], 0 * X[:1], verbose=0)
    return {"loss": (found["loss"], [LOSS] * 2), "all": (evaluated, (2 * 19 + 1) / 11)}


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 3 * super().compute_loss(x, y, y_pred, sample_weight, training)


@case(*ALL)
def compute_loss(world):
    model = line(world, OwnLoss, rate=0.01)
    found = model.fit(X, 0 * X, **FIT).history
    w = 1 - 0.01 * 3 * 2 * 10 / 4
    right = (4 * 3 * 10 / 4 + 3 * 9 * w**2) / 5
    return {"loss": (found["loss"], [right]), "kernel": (model.get_weights()[0], [[w - 0.01 * 3 * 2 * 9 * w]])}


@case(*ALL, full=FURTHER)
def compute_loss_of_an_object(world):
    model = line(world, rate=0.01)
    of_class = model.compute_loss
    model.compute_loss = lambda *args, **kwargs: 3 * of_class(*args, **kwargs)
    model.fit(X[:4], 0 * X[:4], **FIT)
    return {"kernel": (model.get_weights()[0], [[1 - 0.01 * 3 * 2 * 10 / 4]])}


class Total(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tfdist.total(ops.sum((y_pred - y) ** 2))


@case(*ALL)
def compute_loss_of_a_sum(world):
    model = line(world, Total, rate=0.01)
    model.fit(X[:4], 0 * X[:4], **FIT)
    return {"kernel": (model.get_weights()[0], [[1 - 0.01 * 2 * 10]])}


def step(model, data):
    x, y = data[:2]
    with tf.GradientTape() as tape:
        loss = ops.mean((model(x, training=True) - y) ** 2)
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    model.mean.update_state(loss)
    return {"loss": model.mean.result(), "two": 2 * model.mean.result()}


def tested(model, data):
    model.mean.update_state(ops.mean((model(data[0]) - data[1]) ** 2))
    return {"loss": model.mean.result(), "two": 2 * model.mean.result()}


@case(*ALL)
def steps_of_an_object(world):
    """`model.train_step = f`, with Keras' step and with the user's own."""
    model, wrapped = line(world, rate=0.01), line(world, rate=0.01)
    with world.scope():
        model.mean = keras.metrics.Mean(name="mean")
    model.train_step, model.test_step = functools.partial(step, model), functools.partial(tested, model)
    own = wrapped.train_step
    wrapped.train_step = lambda data: own(data)
    history = model.fit(X[:4], 0 * X[:4], **FIT).history
    wrapped.fit(X[:4], 0 * X[:4], **FIT)
    w = 1 - 0.01 * 2 * 10 / 4
    evaluated = model.evaluate(X, 0 * X, batch_size=4, verbose=0, return_dict=True)
    right = (2.5 * 1 + 9) / 2 * w**2  # a mean over batches, as in one process
    return {
        "loss": ([history["loss"][0], history["two"][0]], [2.5, 5]),
        "kernels": ([m.get_weights()[0][0, 0] for m in (model, wrapped)], [w, w]),
        "evaluated": ([evaluated["loss"], evaluated["two"]], [right, 2 * right]),
    }


class Steps(keras.Model):
    train_step, test_step = step, tested


@case(*ALL, full=())
def steps(world):
    with world.scope():
        model = line(world, Steps, rate=0.01)
        model.mean = keras.metrics.Mean(name="mean")
    history = model.fit(X[:4], 0 * X[:4], **FIT).history
    w = 1 - 0.01 * 2 * 10 / 4
    evaluated = model.evaluate(X, 0 * X, batch_size=4, verbose=0, return_dict=True)
    right = (2.5 * 1 + 9) / 2 * w**2
    return {
        "loss": ([history["loss"][0], history["two"][0]], [2.5, 5]),
        "kernel": (model.get_weights()[0], [[w]]),
        "evaluated": ([evaluated["loss"], evaluated["two"]], [right, 2 * right]),
    }


class Wrapped(keras.Model):
    """Its functions are Keras' own, which it calls, and it adds to the logs."""

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            super().make_train_function(force)
            self.train_function = adding(self.train_function)

    def make_test_function(self, force=False):
        if self.test_function is None or force:
            super().make_test_function(force)
            self.test_function = adding(self.test_function)


class Logged(keras.Model):
    """Its functions only watch."""

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            super().make_train_function(force)
            run = self.train_function
            self.train_function = lambda iterator: run(iterator)


def adding(run):
    def function(iterator):
        logs = run(iterator)
        return {**logs, "two": 2 * logs["loss"]}

    return function


@case(*ALL)
def functions_around_keras_own(world):
    return same(fitted(line(world, Wrapped)), {"loss": LOSS, "two": 2 * LOSS})


@case(*ALL)
def a_function_around_keras_own_over_epochs(world):
    model = line(world, Logged, rate=0.01)
    found = model.fit(X, 0 * X, epochs=2, **FIT).history
    losses, w = [], 1.0
    for _ in range(2):
        seen = 0.0
        for rows in (X[:4], X[4:]):
            seen += float(((w * rows) ** 2).sum())
            w -= 0.01 * 2 * w * float((rows**2).mean())
        losses.append(seen / 5)
    return {"loss": (found["loss"], losses), "kernel": (model.get_weights()[0], [[w]])}


def wrap_function(model, name, wrap):
    """Gives an object a `make_..._function` that wraps the function which the class makes."""
    make, attribute = getattr(model, f"make_{name}"), name

    def make_wrapped(force=False):
        if getattr(model, attribute) is None or force:
            make(force)
            setattr(model, attribute, wrap(getattr(model, attribute)))
        return getattr(model, attribute)

    setattr(model, f"make_{name}", make_wrapped)


@case(*ALL)
def functions_of_an_object(world):
    model = line(world)
    wrap_function(model, "train_function", adding)
    wrap_function(model, "test_function", adding)
    wrap_function(model, "predict_function", lambda run: lambda batches: 2 * run(batches))
    return {
        **same(fitted(model), {"loss": LOSS, "two": 2 * LOSS}),
        "predicted": (model.predict(X, batch_size=4, verbose=0), 2 * X),
    }


class Largest(keras.metrics.Metric):
    """Computes with NumPy, from the values of tensors."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(np.maximum(self.largest.numpy(), y_pred.numpy().max()))

    def result(self):
        return self.largest


@case(MIRRORED, WORKERS)
def a_metric_and_a_loss_that_compute_with_numpy(world):
    def loss(y_true, y_pred):
        return ops.square(y_pred - y_true) * float(np.size(y_pred.numpy()) > 0)

    model = line(world, metrics=[Largest], loss=loss, run_eagerly=True)
    return same(fitted(model), {"loss": LOSS, "largest": 3})


@case(*SYNCHRONOUS, error="make_train_function.*next\\(iterator\\).*train_step")
def a_function_that_draws_its_batch(world):
    class Draws(keras.Model):
        def make_train_function(self, force=False):
            self.train_function = lambda iterator: self.distribute_strategy.run(self.train_step, (next(iterator),))

    line(world, Draws).fit(X, 0 * X, **FIT)


@case(*ALL)
def predictions(world):
    class Predicts(keras.Model):
        def predict_step(self, data):
            return 2 * super().predict_step(data)

    class Function(keras.Model):
        def make_predict_function(self, force=False):
            if self.predict_function is None or force:
                super().make_predict_function(force)
                run = self.predict_function
                self.predict_function = lambda batches: 2 * run(batches)
            return self.predict_function

    pairs = {}
    for kind in (Predicts, Function):
        model = line(world, kind)
        pairs[kind.__name__] = (model.predict(X, batch_size=4, verbose=0), 2 * X)
    model = line(world)
    of_class = model.predict_step
    model.predict_step = lambda data: 2 * of_class(data)
    return {
        **pairs,
        "assigned": (model.predict(X, batch_size=4, verbose=0), 2 * X),
        "on a batch": (model.predict_on_batch(X), 2 * X),
    }


@case(*ALL)
def loops(world):
    """`fit`, `evaluate`, `predict` and their siblings on a batch call Keras' own and change what these return."""

    class Loops(keras.Model):
        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs).history

        def evaluate(self, *args, **kwargs):
            return {**super().evaluate(*args, **{**kwargs, "return_dict": True}), "more": 7.0}

        def predict(self, *args, **kwargs):
            return 2 * super().predict(*args, **kwargs)

        def train_on_batch(self, *args, **kwargs):
            return 2 * super().train_on_batch(*args, **kwargs)

        def test_on_batch(self, *args, **kwargs):
            return 2 * super().test_on_batch(*args, **kwargs)

        def predict_on_batch(self, *args, **kwargs):
            return 2 * super().predict_on_batch(*args, **kwargs)

    model = line(world, Loops)
    history = model.fit(X, 0 * X, validation_data=(X, 0 * X), **FIT)
    return {
        "fit": ([history["loss"][0], history["val_loss"][0], history["val_more"][0]], [LOSS, LOSS, 7]),
        "evaluate": (model.evaluate(X, 0 * X, verbose=0)["loss"], LOSS),
        "predict": (model.predict(X, verbose=0), 2 * X),
        "on_batch": ([model.train_on_batch(X, 0 * X), model.test_on_batch(X, 0 * X)], [2 * LOSS] * 2),
        "predict_on_batch": (model.predict_on_batch(X), 2 * X),
    }


@case(*ALL)
def loops_of_an_object(world):
    """`fit` calls the `evaluate` that the object was given."""
    model = line(world)
    evaluate, predict, on_batch = model.evaluate, model.predict, model.train_on_batch
    model.evaluate = lambda *args, **kwargs: {**evaluate(*args, **{**kwargs, "return_dict": True}), "more": 7.0}
    model.predict = lambda *args, **kwargs: 2 * predict(*args, **kwargs)
    model.train_on_batch = lambda *args, **kwargs: 2 * on_batch(*args, **kwargs)
    history = model.fit(X, 0 * X, validation_data=(X, 0 * X), **FIT).history
    return {
        "fit": ([history["loss"][0], history["val_loss"][0], history["val_more"][0]], [LOSS, LOSS, 7]),
        "predict": (model.predict(X, verbose=0), 2 * X),
        "on_batch": (model.train_on_batch(X, 0 * X), 2 * LOSS),
    }


@case(*SYNCHRONOUS, full=True)
def stateless_loss(world):
    model = line(world)
    variables = [model.trainable_variables, model.non_trainable_variables]
    loss, *_ = model.stateless_compute_loss(*variables, [], x=X, y=0 * X, y_pred=X)
    return {"loss": (loss, LOSS)}
