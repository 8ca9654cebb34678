"""Metrics that are no mean over examples, and every class of `keras.metrics`.

A class of Keras' is compared with the same class, updated batch by batch in a plain loop outside of any strategy.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfdist
from tests.cases.arms import MIRRORED, SERVERS, WORKERS
from tests.cases.case import case
from tests.helpers.options import options_set
from tfdist.compat import keras_metrics
from tools.site.metrics import EXAMPLES

X = np.arange(23, dtype="float32")[:, None]
BATCH = 11  # the last one has one example, so that a replica has none


def span(y_true, y_pred):
    return ops.max(y_true) - ops.min(y_true)


def dice(y_true, y_pred):
    return 1 - 2 * ops.sum(y_true * y_pred) / (ops.sum(y_true) + ops.sum(y_pred) + 1)


def batches(*arrays, size=BATCH):
    return [[each[i : i + size] for each in arrays] for i in range(0, len(arrays[0]), size)]


def identity(world, units=1, **compiled):
    """Returns a model whose output is its input. Metrics are made by functions."""
    with world.scope():
        for kind in {"metrics", "weighted_metrics"} & compiled.keys():
            compiled[kind] = [make() for make in compiled[kind]]
        model = keras.Sequential([keras.Input((units,)), keras.layers.Dense(units, kernel_initializer="identity")])
        model.compile(keras.optimizers.SGD(0.0), compiled.pop("loss", "mse"), **compiled)
    return model


class Top(keras.metrics.Metric):
    """The greatest label, the number of batches, and the last labels."""

    def __init__(self, name="top"):
        super().__init__(name=name)
        self.top = self.add_variable((), keras.initializers.Constant(-np.inf))
        self.batches = self.add_variable((), "zeros", dtype="int32")
        self.last = self.add_variable((4,), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.top.assign(ops.maximum(self.top, ops.max(y_true)))
        self.batches.assign_add(1)
        self.last.assign(ops.concatenate([self.last, ops.reshape(y_true, [-1])])[-4:])

    def reset_state(self):
        self.top.assign(-np.inf)
        self.batches.assign(0)
        self.last.assign(np.zeros(4))

    def result(self):
        return {"top": self.top, "batches": ops.cast(self.batches, "float32"), "median": ops.median(self.last)}


class Heavy(keras.metrics.Metric):
    """The greatest weighted label."""

    def __init__(self, name="heavy"):
        super().__init__(name=name)
        self.top = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        weights = 1 if sample_weight is None else sample_weight
        self.top.assign(ops.maximum(self.top, ops.max(ops.reshape(y_true, [-1]) * weights)))

    def result(self):
        return self.top


class Several(keras.metrics.Mean):
    """A mean over batches, of a class that continues from Keras'."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(dice(y_true, y_pred))


class Near(keras.metrics.Metric):
    """Counts each example by itself, with a message."""

    sums_examples = True

    def __init__(self, name="near"):
        super().__init__(name=name)
        self.near = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.near.assign_add(ops.sum(ops.cast(y_true > 5, "float32")))

    def result(self):
        return self.near


@case()
def function_of_one_number(world):
    model = identity(world, metrics=[lambda: span, lambda: dice], loss=dice)
    parts = batches(X)
    history = model.fit(X, X, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    right_span = np.mean([part.max() - part.min() for (part,) in parts])
    right_dice = np.mean([1 - 2 * (part**2).sum() / (2 * part.sum() + 1) for (part,) in parts])
    model.reset_metrics()
    found = model.test_on_batch(X, X, return_dict=True)
    return {
        "fit": (history["span"], [right_span] * 2),
        "dice": (history["dice"], [right_dice] * 2),
        "evaluate": (model.evaluate(X, X, batch_size=BATCH, verbose=0)[1], right_span),
        "on_batch": (found["span"], 22),
        "train_on_batch": (model.train_on_batch(X[:7], X[:7], return_dict=True)["span"], 6),
    }


@case()
def correlation_along_the_batch(world):
    model = identity(world, metrics=[lambda: keras.metrics.PearsonCorrelation(axis=0)])
    found = model.fit(X, -(X**2), batch_size=8, epochs=1, shuffle=False, verbose=0).history
    each = [np.corrcoef(x[:, 0], -(x[:, 0] ** 2))[0, 1] for (x,) in batches(X, size=8)]
    return {"pearson": (found["pearson_correlation"], [np.mean(each)])}


@case()
def class_that_keeps_a_maximum(world):
    model = identity(world, metrics=[Top, lambda: Several(name="several")], weighted_metrics=[Heavy])
    seen = []

    class Logs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append([float(logs["top"]), float(logs["batches"])])

    labels = 50 - X
    weights = np.linspace(2, 1, 23).astype("float32")
    found = model.fit(X, labels, BATCH, 2, shuffle=False, verbose=0, sample_weight=weights, callbacks=[Logs()]).history
    mean = np.mean([1 - 2 * (x * y).sum() / (x.sum() + y.sum() + 1) for x, y in batches(X, labels)])
    evaluated = model.evaluate(X, labels, batch_size=BATCH, verbose=0, return_dict=True)
    return {
        "top": (found["top"], [50, 50]),
        "batches": (found["batches"], [3, 3]),
        "median": (found["median"], [29.5, 29.5]),
        "several": (found["several"], [mean] * 2),
        "heavy": (found["heavy"], [100, 100]),
        "during the epoch": (seen, [[50, 1], [50, 2], [50, 3]] * 2),
        "evaluate": (evaluated["median"], 29.5),
    }


@case()
def class_that_returns_its_variable_beside_a_validation(world):
    """The validation gives the variable another value before the history gets that of training."""
    model = identity(world, metrics=[Heavy])
    small = X[:5] / 2
    found = model.fit(
        X, X, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, validation_data=(small, small)
    ).history
    return {"train": (found["heavy"], [22, 22]), "validation": (found["val_heavy"], [2, 2])}


@case()
def several_steps_of_one_execution(world):
    model = identity(world, metrics=[lambda: span, Top, Near], steps_per_execution=3)
    found = model.fit(X, X, batch_size=4, epochs=1, shuffle=False, verbose=0).history
    spans = [part.max() - part.min() for (part,) in batches(X, size=4)]
    return {
        "span": (found["span"], [np.mean(spans)]),
        "batches": (found["batches"], [6]),
        "median": (found["median"], [20.5]),
        "near": (found["near"], [17]),
    }


@case()
def several_outputs_with_masks(world):
    data = np.ones([9, 3, 1], "float32")
    data[4:, 1:] = 0  # masked
    labels = np.arange(27, dtype="int64").reshape(9, 3, 1) * 10_000_001
    with world.scope():
        inputs = keras.Input((3, 1))
        masked = keras.layers.Masking(0.0)(inputs)
        outputs = {
            "one": keras.layers.Activation("linear", name="one")(masked),
            "two": keras.layers.Flatten(name="two")(inputs),
        }
        model = keras.Model(inputs, outputs)

        class Masked(keras.metrics.Metric):
            def __init__(self, name="masked"):
                super().__init__(name=name)
                self.most = self.add_variable((2,), "zeros", dtype="float64")

            def update_state(self, y_true, y_pred, sample_weight=None):
                mask = getattr(y_pred, "_keras_mask", None)  # none where Keras builds the model
                counted = 0.0 if mask is None else ops.sum(ops.cast(mask, "float64"))
                largest = ops.max(ops.cast(y_true, "float64"))
                self.most.assign(ops.maximum(self.most, ops.stack([counted, largest])))

            def result(self):
                return {"counted": self.most[0], "largest": self.most[1] % 1000}

        model.compile(
            keras.optimizers.SGD(0.0),
            {"one": "mse", "two": "mse"},
            metrics={"one": [Masked()], "two": [span]},
        )
    found = model.evaluate(data, {"one": labels, "two": labels[..., 0]}, batch_size=5, verbose=0, return_dict=True)
    sizes = [float(part.max() - part.min()) for (part,) in batches(labels, size=5)]
    return {
        "counted": (found["counted"], 4 * 3 + 1),
        "largest": (found["largest"], 26 * 10_000_001 % 1000),
        "span": (found["two_span"] / np.mean(sizes), 1),
    }


@case()
def own_step_that_updates_a_metric(world):
    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            self.kept.update_state(y, self(x))
            return {"largest": self.kept.result()["top"], "batches": self.kept.result()["batches"]}

    with world.scope():
        inputs = keras.Input((1,))
        model = Own(inputs, keras.layers.Dense(1)(inputs))
        model.kept = Top(name="kept")
        model.compile(keras.optimizers.SGD(0.0))
    found = model.fit(X, 50 - X, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return {"largest": (found["largest"], [50, 50]), "batches": (found["batches"], [3, 3])}


@case(warning="The metric kept is counted on each replica's part of the batch.*within tf.cond")
def update_within_a_condition(world):
    class Own(keras.Model):
        def train_step(self, data):
            x, y = data

            def update():
                self.kept.update_state(y, self(x))
                return 0

            tf.cond(tf.reduce_all(y < 100), update, lambda: 1)
            return {"near": self.kept.result()}

    class Counts(Near):
        sums_examples = False

    with world.scope():
        inputs = keras.Input((1,))
        model = Own(inputs, keras.layers.Dense(1)(inputs))
        model.kept = Counts(name="kept")
        model.compile(keras.optimizers.SGD(0.0))
    model.fit(X, X, batch_size=BATCH, epochs=1, verbose=0)
    return {"near": (model.kept.result(), 17)}


@case(full=True)
def without_graphs(world):
    model = identity(world, metrics=[lambda: span, Top], run_eagerly=True)
    found = model.fit(X, X, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history
    spans = [part.max() - part.min() for (part,) in batches(X)]
    return {"span": (found["span"], [np.mean(spans)]), "median": (found["median"], [20.5])}


@case(full=True, warning="The metric span is counted on each replica's part of the batch.*XLA")
def compiled_by_xla(world):
    model = identity(world, metrics=[lambda: span], jit_compile=True)
    found = model.fit(X[:16], X[:16], batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return {"span": (found["span"], [3, 3])}


@case(WORKERS, warning="TopK.*saves no time among workers of one host")
def gathered_beside_an_update_that_is_skipped_if_not_finite(world):
    """The update, whose workers exchange pieces of the optimizer, is in a condition: its exchange has its turn beside the metric's."""
    adam = functools.partial(keras.optimizers.Adam, 0.0)
    kinds = {
        "compressed": (functools.partial(adam, global_clipnorm=0.5), "topk"),
        "scaled": (lambda: keras.optimizers.LossScaleOptimizer(adam()), None),
        "scaled and accumulated": (
            lambda: keras.optimizers.LossScaleOptimizer(adam(gradient_accumulation_steps=2)),
            None,
        ),
    }
    right = np.mean([part.max() - part.min() for (part,) in batches(X, size=4)])
    found = {}
    with options_set(world.trainer.strategy, shard_optimizer=True):
        for name, (make, compression) in kinds.items():
            with tfdist.Trainer(world.trainer.strategy, compression=compression).scope():
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), keras.layers.Dense(1)])
                model.compile(make(), loss="mse", metrics=[span])
            history = model.fit(X, X, batch_size=4, epochs=3, shuffle=False, verbose=0).history
            found[name] = history["span"], [right] * 3
    return found


@case(SERVERS, warning="The metric top keeps a value that is not a sum")
def maximum_under_parameter_servers(world):
    model = identity(world, metrics=[Top, lambda: span, lambda: Several(name="several")])
    found = model.fit(X, X, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history
    spans = [part.max() - part.min() for (part,) in batches(X)]
    means = [1 - 2 * (x**2).sum() / (2 * x.sum() + 1) for (x,) in batches(X)]
    return {"span": (found["span"], [np.mean(spans)]), "several": (found["several"], [np.mean(means)])}


@case(MIRRORED, WORKERS, SERVERS, full=(MIRRORED, SERVERS))
def every_class_of_keras(world):
    random, found = np.random.default_rng(1), {}
    logits = random.normal(size=(23, 3)).astype("float32")
    chosen = random.integers(0, 3, 23)
    inputs = {
        "numbers": (np.abs(logits[:, :2]) + 0.5, np.abs(logits[:, 1:]) + 1),
        "binary": (1 / (1 + np.exp(-logits[:, :1])), (chosen[:, None] == 1).astype("float32")),
        "classes": (np.exp(logits) / np.exp(logits).sum(1, keepdims=True), np.eye(3, dtype="float32")[chosen]),
    }
    inputs["labels"] = (inputs["classes"][0], chosen[:, None].astype("int32"))
    for data, (x, y) in inputs.items():
        makes = EXAMPLES[data]
        model = identity(world, x.shape[1], metrics=list(makes.values()))
        model.evaluate(x, y, batch_size=BATCH, verbose=0)
        for metric, (name, make) in zip(keras_metrics.compiled_metrics(model).metrics, makes.items(), strict=True):
            found[name] = (np.asarray(metric.result()), in_plain_loop(make, batches(y, x)))
    return found | values_alone(world)


def in_plain_loop(make, parts):
    metric = make()
    for part in parts:
        metric.update_state(*part)
    return np.asarray(metric.result())


def values_alone(world):
    """Returns the pairs of the metrics that are given values, by a step of the model's own."""

    class Own(keras.Model):
        def test_step(self, data):
            x, _ = data
            for metric in self.kept:
                metric.update_state(x[:, 0])
            return {metric.name: metric.result() for metric in self.kept}

    with world.scope():
        model = Own(entry := keras.Input((1,)), keras.layers.Dense(1)(entry))
        model.kept = [make(name=name.lower()) for name, make in EXAMPLES["values"].items()]
        model.compile()
    logs = model.evaluate(X, X, batch_size=BATCH, verbose=0, return_dict=True)
    return {
        name: (logs[name.lower()], in_plain_loop(make, batches(X[:, 0]))) for name, make in EXAMPLES["values"].items()
    }
