"""Untrained weights that layers, metrics and steps assign: counts, maxima, queues, codebooks."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfdist
from tests.cases.arms import MIRRORED, SERVERS, WORKERS
from tests.cases.case import case

ROWS = np.arange(1, 24, dtype="float32")[:, None]  # 23: batches of 6 leave 5, of 22 one


class Declared(keras.layers.Layer):
    """Counts its examples, and keeps the first replica's last batch."""

    def build(self, shape):
        def add(name, kind, **how):
            return self.add_weight(
                **{"shape": (), "initializer": "zeros", "trainable": False, "aggregation": kind, "name": name, **how}
            )

        self.count, self.sum = add("count", "sum"), add("sum", "sum", shape=(1,), initializer="ones")
        self.whole = add("whole", "sum", dtype="int32")
        self.mean = add("mean", "mean")
        self.first = add("first", "only_first_replica", shape=(1,))
        self.seen = add("seen", "only_first_replica", dtype="bool")

    def call(self, x):
        examples = ops.shape(x)[0]
        self.count.assign_add(ops.cast(examples, "float32"))
        self.whole.assign_add(examples)
        self.sum.assign(self.sum + ops.sum(x, axis=0))
        self.mean.assign(ops.mean(x))
        self.first.assign(x[0])
        self.seen.assign(ops.max(x) > 0)
        return x


def declared(world, rate=0.0, **compiled):
    with world.scope():
        layer = Declared()
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate), "mse", **compiled)
    return model, layer


def counts(layer):
    return np.array([float(layer.count.numpy()), float(layer.whole.numpy()), float(layer.sum.numpy()[0])])


def right(epochs=1.0, before=0.0):
    return np.array([before + 23 * epochs, before + 23 * epochs, before + 1 + ROWS.sum() * epochs])


def fit(model, batch_size=6, epochs=1, **more):
    model.fit(ROWS, ROWS, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, **more)


def gradients_through_the_whole_batch(world, batch_size):
    pairs = {}
    right = times_mean_on_one_device([ROWS[i : i + batch_size] for i in range(0, 23, batch_size)])
    for kind in (keras.Model, OwnStep, WholeStep):
        data = tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).batch(batch_size)
        pairs[kind.__name__] = times_mean(world, kind, data).get_weights()[0], right
    return pairs


@case(MIRRORED, WORKERS, SERVERS, full=(MIRRORED, SERVERS))
def gradients_through_the_whole_batch_are_those_of_one_device(world):
    return gradients_through_the_whole_batch(world, 22)


@case(MIRRORED, WORKERS, SERVERS, full=True)
def so_are_those_of_parts_of_unequal_lengths(world):
    return gradients_through_the_whole_batch(world, 6)


@case(MIRRORED, WORKERS, SERVERS, full=())
def declared_weights_hold_what_they_say(world):
    model, layer = declared(world)
    fit(model, epochs=2)
    parts = 1 if world.arm == SERVERS else 2
    last = ROWS[18:]  # of 5: the parts have 3 and 2
    halves = [last] if parts == 1 else [last[:3], last[3:]]
    return {
        "counts": (counts(layer), right(2)),
        "mean": (layer.mean.numpy(), np.mean([half.mean() for half in halves])),
        "first": (layer.first.numpy(), last[0]),
        "seen": (layer.seen.numpy(), True),
    }


@case(MIRRORED, WORKERS, SERVERS)
def a_replica_without_examples_adds_nothing(world):
    model, layer = declared(world)
    fit(model, batch_size=22)  # the second batch has one example
    return {"counts": (counts(layer), right()), "first": (layer.first.numpy(), ROWS[22])}


@case(MIRRORED, WORKERS, SERVERS)
def setting_a_sum_sets_it(world):
    model, layer = declared(world)
    fit(model)
    layer.count.assign(7)
    found = [float(layer.count.numpy())]
    layer.count.assign_add(1)
    found.append(float(layer.count.numpy()))
    weights = [np.full_like(value, 5) for value in model.get_weights()]
    model.set_weights(weights)
    found.append(float(layer.count.numpy()))
    fit(model)
    return {"values": (found, [7, 8, 5]), "counts": (counts(layer), right(before=5) - np.array([0, 0, 1]))}


@case()
def counts_are_saved_and_loaded(world):
    model, _ = declared(world)
    fit(model)
    folder = os.path.join(tempfile.gettempdir(), f"tfdist-counts-{os.getppid()}-{os.getpid()}-{world.rank}")
    os.makedirs(folder, exist_ok=True)
    model.save_weights(f"{folder}/x.weights.h5")
    again, other = declared(world)
    again.load_weights(f"{folder}/x.weights.h5")
    loaded = counts(other)
    fit(again)
    return {"loaded": (loaded, right()), "after": (counts(other), right(2))}


@case(MIRRORED, WORKERS, SERVERS)
def steps_of_one_execution_count_each(world):
    model, layer = declared(world, steps_per_execution=3)
    fit(model)
    return {"counts": (counts(layer), right())}


@case(full=True)
def compiled_and_eager_steps_count_as_others(world):
    pairs = {}
    for name, how in {"xla": {"jit_compile": True}, "eager": {"run_eagerly": True}}.items():
        model, layer = declared(world, **how)
        fit(model, batch_size=22)
        pairs[name] = (counts(layer), right())
    return pairs


@case(full=True)
def evaluate_and_predict_count_too(world):
    model, layer = declared(world)
    model.evaluate(ROWS, ROWS, batch_size=22, verbose=0)
    found = [counts(layer)]
    model.predict(ROWS, batch_size=22, verbose=0)
    found.append(counts(layer))
    model.predict_on_batch(ROWS[:3])
    rights = [right(), right(2), right(2) + np.array([3, 3, ROWS[:3].sum()])]
    return {"evaluate": (found[0], rights[0]), "predict": (found[1], rights[1]), "batch": (counts(layer), rights[2])}


@case(MIRRORED, WORKERS, SERVERS)
def means_are_right_after_validation_and_evaluate(world):
    """Each replica has its part of a batch, and the mean is that over replicas."""
    parts = 1 if world.arm == SERVERS else 2

    def mean_of(last):
        return np.mean([part.mean() for part in np.array_split(last, parts) if len(part)])

    model, layer = declared(world)
    fit(model, validation_data=(ROWS[:11], ROWS[:11]), validation_batch_size=7)
    pairs = {"validation": (layer.mean.numpy(), mean_of(ROWS[7:11]))}
    model.evaluate(ROWS[:9], ROWS[:9], batch_size=9, verbose=0)
    pairs["evaluate"] = layer.mean.numpy(), mean_of(ROWS[:9])
    if world.arm != SERVERS:
        model.predict(ROWS[2:7], batch_size=5, verbose=0)
        pairs["predict"] = layer.mean.numpy(), mean_of(ROWS[2:7])
        model.predict(ROWS[:1], batch_size=5, verbose=0)
        pairs["one example"] = layer.mean.numpy(), ROWS[0, 0]
    return pairs


@case(full=True)
def declared_weights_beside_an_undeclared_integer_count_eagerly(world):
    """The step is traced once, to see what the integer depends on."""

    class Both(Declared):
        def build(self, shape):
            super().build(shape)
            self.steps = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

        def call(self, x):
            self.steps.assign_add(1)
            return super().call(x)

    with world.scope():
        layer = Both()
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    fit(model)
    return {"counts": (counts(layer), right()), "steps": (layer.steps.numpy(), 4)}


class CountsRows(keras.layers.Layer):
    """Counts the rows of the whole batch in an integer that declares nothing."""

    def build(self, shape):
        self.n = self.add_weight(shape=(), initializer="zeros", dtype="int64", trainable=False)

    def call(self, x):
        self.n.assign_add(ops.cast(ops.shape(tfdist.whole_batch(x))[0], "int64"))
        return x


@case(WORKERS, full=True)
def an_integer_counts_the_whole_batch_eagerly(world):
    with world.scope():
        layer = CountsRows()
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    fit(model)
    return {"n": (layer.n.numpy(), 23)}


@case()
def a_model_that_is_built_by_its_first_step_gathers(world):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.rows, self.dense = CountsRows(), keras.layers.Dense(1)

        def call(self, x):
            return self.dense(self.rows(x))

    with world.scope():
        model = Own()
        model.compile(keras.optimizers.SGD(0.0), "mse")
    fit(model)
    return {"n": (model.rows.n.numpy(), 23)}


@case()
def a_step_counts_in_a_weight_of_its_model(world):
    class Counting(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

        def train_step(self, data):
            self.seen.assign_add(ops.cast(ops.shape(data[0])[0], "float32"))
            return super().train_step(data)

    with world.scope():
        inputs = keras.Input((1,))
        model = Counting(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.0), "mse")
    fit(model)
    return {"seen": (model.seen.numpy(), 23)}


@case(error=r"aggregation='sum', and a replica assigns it where .* cannot be combined")
def a_count_outside_of_steps_is_rejected(world):
    _, layer = declared(world)
    world.trainer.strategy.run(lambda: layer(tf.ones([2, 1])))


class Queue(keras.layers.Layer):
    """Keeps the newest rows, and a maximum, as one process would."""

    def build(self, shape):
        self.queue = self.add_weight(shape=(8, shape[-1]), initializer="zeros", trainable=False)
        self.top = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        rows = tfdist.whole_batch(x)
        self.queue.assign(ops.concatenate([rows, self.queue])[:8])
        self.top.assign(ops.maximum(self.top, ops.max(rows)))
        return x


def queued(batch_size):
    queue = np.zeros((8, 1), "float32")
    for begin in range(0, len(ROWS), batch_size):
        queue = np.concatenate([ROWS[begin : begin + batch_size], queue])[:8]
    return queue


@case(MIRRORED, WORKERS, SERVERS)
def a_queue_holds_rows_of_the_data_in_their_order(world):
    pairs = {}
    for batch_size in (6, 22):
        with world.scope():
            layer = Queue()
            model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        fit(model, batch_size)
        pairs[f"queue {batch_size}"] = layer.queue.numpy(), queued(batch_size)
        pairs[f"top {batch_size}"] = layer.top.numpy(), 23
    return pairs


class Codebook(keras.layers.Layer):
    """Replaces each row by the nearest code; codes are moving means of their rows."""

    def build(self, shape):
        def add(start):
            return self.add_weight(shape=start.shape, initializer=lambda *_, **__: ops.array(start), trainable=False)

        self.codes, self.counts, self.sums = add(CODES), add(np.ones(4, "float32")), add(CODES)

    def call(self, x, training=False):
        nearest = ops.argmin(ops.sum((x[:, None] - self.codes) ** 2, axis=-1), axis=-1)
        out = ops.take(self.codes, nearest, axis=0)
        if training:
            rows, places = tfdist.whole_batch(x), ops.one_hot(tfdist.whole_batch(nearest), 4)
            self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(places, axis=0))
            self.sums.assign(0.9 * self.sums + 0.1 * ops.transpose(places) @ rows)
            self.codes.assign(self.sums / self.counts[:, None])
        return x + ops.stop_gradient(out - x)


CODES = np.random.default_rng(1).standard_normal((4, 2)).astype("float32")


@case()
def a_codebook_moves_as_on_one_device(world):
    x = np.random.default_rng(2).standard_normal((41, 2)).astype("float32")  # batches of 8 leave one row
    with world.scope():
        layer = Codebook()
        model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(x, x[:, :1], batch_size=8, epochs=3, shuffle=False, verbose=0)
    codes, counts, sums = CODES, np.ones(4), CODES
    for _ in range(3):
        for begin in range(0, 41, 8):
            rows = x[begin : begin + 8]
            places = np.eye(4)[((rows[:, None] - codes) ** 2).sum(-1).argmin(-1)]
            counts, sums = 0.9 * counts + 0.1 * places.sum(0), 0.9 * sums + 0.1 * places.T @ rows
            codes = sums / counts[:, None]
    return {"codes": (layer.codes.numpy(), codes), "counts": (layer.counts.numpy(), counts)}


class TimesMean(keras.layers.Layer):
    """Multiplies each example by the mean over the batch."""

    def call(self, z):
        return z * ops.mean(tfdist.whole_batch(z))


class OwnStep(keras.Model):
    whole_loss = False

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            if self.whole_loss:
                p, y = tfdist.whole_batch(p), tfdist.whole_batch(y)
            loss = ops.mean((p - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


class WholeStep(OwnStep):
    whole_loss = True


def times_mean(world, kind, data, rate=2e-5, **how):
    with world.scope():
        inputs = keras.Input((1,))
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = kind(inputs, TimesMean()(dense(inputs)))
        model.compile(keras.optimizers.SGD(rate), "mse", **how)
    model.fit(data, epochs=1, verbose=0)
    return model


def times_mean_on_one_device(batches, rate=2e-5):
    w = 1.0
    for x in batches:
        x = x.astype("float64")
        z, m = w * x, (w * x).mean()
        w -= rate * np.mean(2 * (z * m - x) * (x * m + z * x.mean()))
    return np.array([[w]])


@case()
def gradients_of_executions_whose_batches_differ_are_too(world):
    """The second and third step of an execution have batches of 8 and 7."""
    right = times_mean_on_one_device([ROWS[i : i + 8] for i in (0, 8, 16)])
    pairs = {}
    for kind in (keras.Model, OwnStep):
        data = tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).batch(8)
        pairs[kind.__name__] = times_mean(world, kind, data, steps_per_execution=3).get_weights()[0], right
    return pairs


@case(full=True)
def gradients_of_several_steps_and_eager_ones_are_too(world):
    pairs = {}
    right = times_mean_on_one_device([ROWS[i : i + 22] for i in (0, 22)])
    for name, how in {"several": {"steps_per_execution": 2}, "eager": {"run_eagerly": True}}.items():
        for kind in (keras.Model, OwnStep):
            data = tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).batch(22)
            model = times_mean(world, kind, data, **how)
            pairs[f"{kind.__name__} {name}"] = model.get_weights()[0], right
    return pairs


@case(WORKERS)
def workers_with_data_of_their_own_gather_unequal_parts(world):
    # The first worker has batches of 4 and 4, the second one of 3 and none.
    parts = (ROWS[:8], ROWS[8:11])
    right = times_mean_on_one_device([np.concatenate([ROWS[:4], ROWS[8:11]]), ROWS[4:8]])

    def make(context):
        return tf.data.Dataset.from_tensor_slices((parts[world.rank], parts[world.rank])).batch(4)

    pairs = {}
    for kind in (keras.Model, OwnStep):
        data = world.trainer.strategy.distribute_datasets_from_function(make)
        pairs[kind.__name__] = times_mean(world, kind, data).get_weights()[0], right
    return pairs


@case()
def predictions_see_the_whole_batch(world):
    with world.scope():
        inputs = keras.Input((1,))
        model = keras.Model(inputs, TimesMean()(inputs))
    found = model.predict(ROWS, batch_size=22, verbose=0)
    direct = model(ROWS[:4])
    return {
        "predict": (found, np.concatenate([ROWS[:22] * 11.5, ROWS[22:] * 23])),
        "call": (direct, ROWS[:4] * 2.5),
    }


@case()
def integers_are_gathered_exactly(world):
    large = np.array([2**62 + 1, -5, 2**53 + 1, 7, 2**40 + 3], "int64")
    kept = {}

    class Keep(keras.Model):
        def train_step(self, data):
            x, _ = data
            kept["wide"].assign(tfdist.whole_batch(x))
            kept["narrow"].assign(tfdist.whole_batch(tf.cast(x % 1000003, tf.int32)))
            kept["flags"].assign(tfdist.whole_batch(x > 6))
            return {"loss": 0.0}

    with world.scope():
        how = {"trainable": False, "aggregation": "only_first_replica"}
        inputs = keras.Input((), dtype="int64")
        model = Keep(inputs, inputs)
        kept = {
            "wide": model.add_weight(shape=(5,), dtype="int64", initializer="zeros", **how),
            "narrow": model.add_weight(shape=(5,), dtype="int32", initializer="zeros", **how),
            "flags": model.add_weight(shape=(5,), dtype="bool", initializer="zeros", **how),
        }
        model.compile()
    model.fit(large, large, batch_size=5, shuffle=False, verbose=0)
    return {
        "wide": (kept["wide"].numpy() - large, np.zeros(5)),
        "narrow": (kept["narrow"].numpy(), large % 1000003),
        "flags": (kept["flags"].numpy(), large > 6),
    }


def gathering(world, call, **how):
    class Gather(keras.layers.Layer):
        def call(self, x):
            return x + ops.sum(call(x))

    with world.scope():
        model = keras.Sequential([keras.Input((1,)), Gather(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", **how)
    fit(model)


@case(error=r"whole_batch cannot gather .* within tf\.cond.*; call it before")
def a_gather_in_a_condition_is_rejected(world):
    gathering(world, lambda x: tf.cond(ops.max(x) > 3, lambda: ops.sum(tfdist.whole_batch(x)), lambda: 0.0))


@case(error=r"whole_batch cannot gather .* XLA.*jit_compile=False")
def a_gather_within_xla_is_rejected(world):
    gathering(world, tfdist.whole_batch, jit_compile=True)


@case(error=r"whole_batch takes a tensor with a row for each example .*before you concatenate")
def rows_that_are_no_examples_are_rejected(world):
    gathering(world, lambda x: tfdist.whole_batch(ops.concatenate([x, x])))


@case(error=r"whole_batch takes a tensor with a row for each example\. Received: shape \[\]")
def a_scalar_is_rejected(world):
    gathering(world, lambda x: tfdist.whole_batch(ops.max(x)))


@case(error="whole_batch is called by a replica outside of a step")
def a_gather_outside_of_steps_is_rejected(world):
    world.trainer.strategy.run(lambda: tfdist.whole_batch(tf.ones([2, 1])))


class Undeclared(keras.layers.Layer):
    """What the report has: a count, a maximum and a queue of this replica's rows."""

    def build(self, shape):
        def add(shape, name, **how):
            return self.add_weight(shape=shape, name=name, initializer="zeros", trainable=False, **how)

        self.n, self.steps, self.rate = add((), "n"), add((), "steps"), add((), "rate")
        self.seen = add((), "seen", aggregation="mean")

    def call(self, a):
        self.n.assign_add(ops.cast(ops.shape(a)[0], "float32"))
        self.steps.assign_add(1.0)
        self.rate.assign(0.5 * self.rate + 1)
        self.seen.assign(ops.mean(a))
        return a


class OwnNorm(keras.layers.BatchNormalization):
    """Keras' own code assigns its weights."""


@case(warning=r"^The weight Undeclared: .*/n is assigned .*aggregation=\"sum\".*tfdist\.whole_batch")
def a_count_that_declares_nothing_gets_a_warning(world):
    with world.scope():
        layer = Undeclared()
        model = keras.Sequential([keras.Input((1,)), layer, OwnNorm(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    fit(model)
    return {"n": (layer.n.numpy(), 11.5), "steps": (layer.steps.numpy(), 4)}


@case(warning=r"^The weight Undeclared: .*/n is assigned")
def a_count_of_batches_of_a_known_size_gets_a_warning(world):
    with world.scope():
        layer = Undeclared()
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(tf.data.Dataset.from_tensor_slices((ROWS[:12], ROWS[:12])).batch(6, drop_remainder=True), verbose=0)
    return {"n": (layer.n.numpy(), 6), "steps": (layer.steps.numpy(), 2)}


@case()
def means_of_two_types(world):
    class Double(keras.layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(
                shape=(), initializer="zeros", dtype="float64", trainable=False, aggregation="mean"
            )

        def call(self, x):
            self.mean.assign(ops.cast(ops.mean(x), "float64"))
            return x

    with world.scope():
        layer, norm = Double(), OwnNorm(momentum=0.5)
        model = keras.Sequential([keras.Input((1,)), layer, norm, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(ROWS[:12], ROWS[:12], batch_size=12, shuffle=False, verbose=0)
    return {"mean": (layer.mean.numpy(), 6.5), "norm": (norm.moving_mean.numpy(), [3.25])}


@case()
def what_keras_assigns_or_is_the_same_everywhere_gets_none(world):
    class Steps(keras.layers.Layer):
        def build(self, shape):
            self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.whole = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

        def call(self, x):
            self.steps.assign_add(1.0)
            self.whole.assign_add(ops.shape(tfdist.whole_batch(x))[0])
            return x

    with world.scope():
        layer, norm = Steps(), OwnNorm(momentum=0.5)
        model = keras.Sequential([keras.Input((1,)), layer, norm, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(ROWS[:12], ROWS[:12], batch_size=12, shuffle=False, verbose=0)
    return {"count": (layer.whole.numpy(), 12), "norm": (norm.moving_mean.numpy(), [3.25])}
