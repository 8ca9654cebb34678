"""A program for every task of a parameter-server cluster; its chief runs what `test_parameter_server.py` asserts.

Arguments: a folder for the results, names of scenarios (without any, those of the default tier).
"""

import contextlib
import os
import pathlib
import sys
import threading
import time

import tfdist
from tests.multiprocess import harness
from tests.multiprocess.roles import ask

OUT = pathlib.Path(sys.argv[1])
trainer = tfdist.Trainer("parameter_server")  # workers and servers stay here

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist import data  # noqa: E402
from tfdist.monitoring import TensorBoard  # noqa: E402
from tfdist.parameter_server import worker_step  # noqa: E402
from tfdist.parameter_server.scheduler import Scheduler  # noqa: E402
from tfdist.tasks import digits  # noqa: E402

OUT.mkdir(parents=True, exist_ok=True)
BATCH = 64
PAUSE = 0.15  # seconds, before each batch of data that come slowly: far longer than a step takes
rng = np.random.default_rng(0)
X, Y = rng.standard_normal((300, 8), np.float32), rng.integers(0, 3, 300).astype(np.int32)


class Recorder(keras.callbacks.Callback):
    """Keeps the order of hooks and the logs, and does something at a step of training."""

    def __init__(self, at=None, do=None):
        super().__init__()
        self.hooks, self.logs, self.iterations = [], [], []
        self._at, self._do, self._steps = at, do, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.hooks.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.hooks.append(("end", batch))
        self.logs.append(dict(logs))
        self._steps += 1
        if self._steps == self._at:
            self._do()

    def on_epoch_end(self, epoch, logs=None):
        self.hooks.append(("epoch", epoch))
        self.iterations.append(int(self.model.optimizer.iterations.numpy()))


def plain_dense(optimizer="adam", dropout=0.0):
    keras.utils.set_random_seed(3)
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dropout(dropout), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def dense(*args, **kwargs):
    with trainer.scope():
        return plain_dense(*args, **kwargs)


def function(context):
    return data.epochs((X, Y), context, 20, seed=1)


class Noisy(keras.Model):
    """Shows what each step has drawn."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, batch):
        logs = super().train_step(batch)
        return {**logs, "tensorflow": tf.random.uniform([]), "keras": keras.random.uniform([])}


def noise():
    """Returns what each of 40 steps has drawn, `[steps, 2]`: by keras.random and by tf.random, of two runs with one seed."""
    found, commit = [], worker_step.WorkerStep.commit

    def recording(self, traced, rows):
        found[-1].extend(rows[:, -2:])
        return commit(self, traced, rows)

    worker_step.WorkerStep.commit = recording
    try:
        for _ in range(2):
            found.append([])
            keras.utils.set_random_seed(3)
            with trainer.scope():
                model = Noisy()
                model.build((None, 8))
                model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            trainer.fit(model, X, Y, batch_size=20, epochs=8, verbose=0)
    finally:
        worker_step.WorkerStep.commit = commit
    return [np.array(rows) for rows in found]


def failure(do):
    try:
        do()
    except Exception as e:
        return type(e).__name__, str(e)
    return None


def train_digits():
    task = digits.Digits(digits.Options())
    keras.utils.set_random_seed(0)
    with trainer.scope():
        model = task.build_model()
        model.compile("adam", **task.compile_arguments())
    counted, commit = [], worker_step.WorkerStep.commit

    def recording(self, traced, rows):
        if self._step.__name__ == "train_step":
            counted.extend(rows.astype(np.float32))
        return commit(self, traced, rows)

    # Of training steps, each in a thread: when the chief has begun it, the step itself, its end, and that of what the chief does.
    spans, call, start, current = [], worker_step.WorkerStep.call, Scheduler.start, threading.local()

    def starting(self, function, results, key, kind, running):
        @contextlib.contextmanager
        def timed():
            current.span = [time.monotonic()]
            with running():
                yield
            if len(current.span) == 3:
                spans.append((*current.span, time.monotonic()))

        return start(self, function, results, key, kind, timed)

    def timing(self, traced, data, given):
        begin = time.monotonic()
        result = call(self, traced, data, given)
        if self._step.__name__ == "train_step":
            current.span += [begin, time.monotonic()]
        return result

    recorder = Recorder()
    worker_step.WorkerStep.commit, worker_step.WorkerStep.call, Scheduler.start = recording, timing, starting
    try:
        history = trainer.fit(
            model,
            lambda context: task.train_data(context, BATCH, 0),
            validation_data=task.eval_data(BATCH),
            epochs=3,
            steps_per_epoch=22,
            callbacks=[recorder, TensorBoard(OUT / "curves", 66, gradient_norm=True, histogram_freq=10)],
            verbose=0,
        )
    finally:
        worker_step.WorkerStep.commit, worker_step.WorkerStep.call, Scheduler.start = commit, call, start
    trainer.save(model, OUT / "digits.keras")
    devices = {v.path: v.value.device for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables)}
    return {
        "history": history.history,
        "epoch": history.epoch,
        "counted": counted,
        "spans": spans,
        "hooks": recorder.hooks,
        "logs": recorder.logs,
        "iterations": recorder.iterations,
        "evaluation": trainer.evaluate(model, *digits.load()[1], batch_size=BATCH, verbose=0),
        "devices": devices,
        "report": trainer.server_report(model),
        "loads": trainer.strategy.bytes_per_server,
    }


def evaluate_and_predict():
    """Of some sizes as `of_sizes`, and how long slow data take."""
    model = dense()

    def batches(count, pause=0.0):
        for first in range(0, 20 * count, 20):
            time.sleep(pause)
            yield X[first : first + 20], Y[first : first + 20]

    trainer.fit(model, batches(2), steps_per_epoch=2, verbose=0)  # data would come while the first step is traced
    board, began = TensorBoard(OUT / "curves_of_slow_data", 10), time.monotonic()
    trainer.fit(model, batches(10, PAUSE), steps_per_epoch=10, verbose=0, callbacks=[board])
    slow_data = time.monotonic() - began
    return {"slow_data": slow_data, **of_sizes(model, (1, 11, 41))}


def further_sizes():
    model = dense()
    trainer.fit(model, X, Y, verbose=0)
    return of_sizes(model, (10, 19, 20))


def of_sizes(model, sizes):
    """(number of examples, kind of data) -> results here and in plain Keras."""
    trainer.save(model, OUT / "dense.keras")
    plain = keras.models.load_model(OUT / "dense.keras")
    results = {}
    for size in sizes:
        x, y = X[:size], Y[:size]
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)

        def sharded(context, x=x, y=y):
            whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
            return whole.shard(context.num_input_pipelines, context.input_pipeline_id)

        expected = {
            "expected": plain.evaluate(x, y, batch_size=10, verbose=0),
            "expected_predictions": plain.predict(x, batch_size=10, verbose=0),
        }
        kinds = {"function": ((sharded,), {})}
        if size in (1, 11, 20):  # in turn: Keras makes such a dataset of arrays
            kinds["arrays"] = ((x, y), {"batch_size": 10})
        else:
            kinds["dataset"] = ((dataset,), {})
        for kind, (given, options) in kinds.items():
            recorder = TestRecorder()
            mine = trainer.evaluate(model, *given, **options, callbacks=[recorder], verbose=0)
            predictions = trainer.predict(model, given[0], **options, verbose=0)
            results[size, kind] = {
                "evaluation": mine,
                "predictions": predictions,
                "hooks": recorder.hooks,
                **expected,
            }
    return results


class TestRecorder(keras.callbacks.Callback):
    __test__ = False

    def __init__(self, at=None, do=None):
        super().__init__()
        self.hooks = []
        self._at, self._do = at, do

    def on_test_batch_end(self, batch, logs=None):
        self.hooks.append(batch)
        if batch == self._at:
            self._do()


def start_again(model, task):
    ask("start", task)
    deadline = time.monotonic() + 180
    while trainer.strategy.engine.scheduler.lost_workers:  # its step finds it lost, and back
        assert time.monotonic() < deadline
        time.sleep(0.3)  # it has TensorFlow to import
        trainer.predict(model, X[:40], batch_size=1, verbose=0)


def lose_a_worker_in_training():
    model = dense()

    def lose():
        ask("kill", "worker:1")

    recorder = Recorder(at=20, do=lose)
    before = trainer.server_report(model)["retried_steps"]
    history = trainer.fit(model, function, epochs=4, steps_per_epoch=30, callbacks=[recorder], verbose=0)
    lost = trainer.server_report(model)["retried_steps"] - before
    without = {"history": history.history, "iterations": recorder.iterations, "hooks": recorder.hooks, "retried": lost}
    start_again(model, "worker:1")
    ran = set()
    call = worker_step.WorkerStep.call

    def calling(self, traced, data, given):
        ran.add(tf.DeviceSpec.from_string(tf.constant(0).device).task)
        return call(self, traced, data, given)

    worker_step.WorkerStep.call = calling
    recorder = Recorder()
    trainer.fit(model, function, epochs=2, steps_per_epoch=30, callbacks=[recorder], verbose=0)
    worker_step.WorkerStep.call = call
    return {**without, "ran": ran, "iterations_after": recorder.iterations}


def statistics():
    """BatchNorm's moving mean where one worker sees only zeros and the other only tens.

    It begins between them: a worker that was late assigns what it has made of the mean at the begin.
    """
    with trainer.scope():
        normalization = keras.layers.BatchNormalization(
            momentum=0.99, moving_mean_initializer=keras.initializers.Constant(5.0)
        )
        model = keras.Sequential([keras.Input((1,)), normalization])
        model.compile("sgd", "mse")

    def constant(context):
        x = np.full((4, 1), 10.0 * context.input_pipeline_id, np.float32)
        return tf.data.Dataset.from_tensors((x, x)).repeat()

    trainer.fit(model, constant, steps_per_epoch=100, verbose=0)
    return float(model.layers[0].moving_mean.numpy()[0])


def lose_a_worker_in_evaluation():
    model = dense()
    trainer.save(model, OUT / "dense.keras")
    plain = keras.models.load_model(OUT / "dense.keras")
    recorder = TestRecorder(at=20, do=lambda: ask("kill", "worker:0"))
    mine = trainer.evaluate(model, X, Y, batch_size=2, callbacks=[recorder], verbose=0)
    start_again(model, "worker:0")

    def sharded(context):
        whole = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)
        return whole.shard(context.num_input_pipelines, context.input_pipeline_id)

    return {
        "evaluation": mine,
        "hooks": recorder.hooks,
        "function": trainer.evaluate(model, sharded, verbose=0),
        "expected": plain.evaluate(X, Y, batch_size=2, verbose=0),
    }


class Conditional(keras.Sequential):
    """Trains under a condition."""

    def train_step(self, batch):
        return tf.cond(
            tf.reduce_sum(batch[0]) < 1e9, lambda: super(Conditional, self).train_step(batch), lambda: {"loss": 0.0}
        )


def faults():
    model = dense()
    outside = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20).repeat()
    variable = tf.Variable(1.0)

    def python(context):
        spec = (tf.TensorSpec((20, 8)), tf.TensorSpec((20,), tf.int32))
        return tf.data.Dataset.from_generator(lambda: iter([(X[:20], Y[:20])]), output_signature=spec).repeat()

    def finite(context, repeated=1):
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(20).repeat(repeated)

    def uncounted(context):
        return finite(context).filter(lambda x, y: True)

    def fit(given, **options):
        return failure(lambda: trainer.fit(model, given, **{"steps_per_epoch": 60, "verbose": 0, **options}))

    def wrong_shape(context):
        return tf.data.Dataset.from_tensor_slices((X[:, :5], Y)).batch(20).repeat()

    def wrong_labels(context):  # the graph does not know
        return tf.data.Dataset.from_tensor_slices((X, Y + 2)).batch(20).repeat()

    def branching(context):
        def double_zeros(x, y):
            if y[0] == 0:
                x = x * 2
            return x, y

        return finite(context, None).map(double_zeros)

    def table(context):
        keys = tf.lookup.KeyValueTensorInitializer([0, 1, 2], [1, 2, 0])
        found = tf.lookup.StaticHashTable(keys, 0)
        return finite(context, None).map(lambda x, y: (x, found.lookup(y)))

    found = {
        "autograph": fit(branching),
        "table": fit(table),
        "python": fit(python),
        "outside": fit(lambda context: outside),
        "variable": fit(lambda context: finite(context, 9).map(lambda x, y: (x * variable, y))),
        "no dataset": fit(lambda context: X),
        "finite": fit(finite),
        "uncounted": fit(uncounted),
        "no steps": fit(function, steps_per_epoch=None),
        "shape": fit(wrong_shape),
        "labels": fit(wrong_labels),
        "endless": failure(lambda: trainer.evaluate(model, function, verbose=0)),
    }
    for name, options in {"jit": {"jit_compile": True}, "eagerly": {"run_eagerly": True}}.items():
        with trainer.scope():
            other = plain_dense()
            other.compile("adam", "mse", **options)
        found[name] = failure(lambda other=other: trainer.fit(other, X, Y, verbose=0))
    for name, options in {
        "accumulation": {"gradient_accumulation_steps": 2},
        "ema": {"use_ema": True, "ema_overwrite_frequency": 2},
    }.items():
        with trainer.scope():
            optimizer = keras.optimizers.SGD(**options)
        other = dense(optimizer)
        found[name] = failure(lambda other=other: trainer.fit(other, X, Y, verbose=0))
    with trainer.scope():
        optimizer = keras.optimizers.Muon()
        normalized = keras.layers.SpectralNormalization(keras.layers.Dense(3), name="spectral")
        other = keras.Sequential([keras.Input((8,)), normalized])
        other.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found["muon"] = failure(lambda: trainer.fit(dense(optimizer), X, Y, verbose=0))
    found["spectral"] = failure(lambda: trainer.fit(other, X, Y, verbose=0))
    with trainer.scope():
        other = keras.Sequential([keras.layers.Dense(3)])
    found["unbuilt"] = failure(lambda: trainer.predict(other, X, verbose=0))
    with trainer.scope():
        other = Conditional([keras.Input((8,)), keras.layers.Dense(3)])
        other.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found["in a condition"] = failure(lambda: trainer.fit(other, X, Y, verbose=0))
    layer = keras.layers.Dense(3)
    layer.build((None, 8))
    with trainer.scope():
        other = keras.Sequential([keras.Input((8,)), layer])
        other.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found["layer outside"] = failure(lambda: trainer.fit(other, X, Y, verbose=0))
    scale = tf.Variable(1.0, name="outside")
    with trainer.scope():
        inputs = keras.Input((8,))
        other = keras.Model(inputs, keras.layers.Lambda(lambda x: x * scale)(keras.layers.Dense(3)(inputs)))
        other.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found["variable outside"] = failure(lambda: trainer.fit(other, X, Y, verbose=0))
    # After all these it still trains.
    recorder = Recorder()
    trainer.fit(model, X, Y, batch_size=20, callbacks=[recorder], verbose=0)
    return found, recorder.iterations


def save_files():
    """Saves to relative paths, in a folder in which the servers are not. Returns what was loaded less what was saved."""
    model = dense()
    trainer.fit(model, X, Y, verbose=0)
    before = os.getcwd()
    os.chdir(OUT)
    try:
        trainer.export(model, "exported")
        loaded = tf.saved_model.load("exported")
        (served,) = loaded.signatures["serving_default"](tf.constant(X)).values()
        checkpoint, weights = tf.train.Checkpoint(model=model), model.get_weights()
        path = checkpoint.save("saved")
        for variable in model.variables:
            variable.assign(tf.zeros_like(variable))
        checkpoint.restore(path)
    finally:
        os.chdir(before)
    restored = max(np.abs(a - b).max() for a, b in zip(weights, model.get_weights(), strict=True))
    return {"served": np.abs(served.numpy() - trainer.predict(model, X, verbose=0)).max(), "restored": restored}


def records():
    """Trains on TFRecord files that the chief reads."""
    path = str(OUT / "rows.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for row in np.concatenate([X, Y[:, None].astype(np.float32)], 1):
            writer.write(row.tobytes())

    def parse(batch):
        rows = tf.reshape(tf.io.decode_raw(batch, tf.float32), [-1, 9])
        return rows[:, :8], tf.cast(rows[:, 8], tf.int32)

    stored, model = data.records_from(path, parse, BATCH, batched=True), dense()
    history = trainer.fit(model, stored, epochs=2, verbose=0, validation_data=stored).history
    return {
        "steps": int(model.optimizer.iterations.numpy()),
        "evaluated": [trainer.evaluate(model, *each, verbose=0) for each in ((stored,), (X, Y))],
        "validated": history["val_loss"][-1],
        "differs": np.abs(trainer.predict(model, stored, verbose=0) - trainer.predict(model, X, verbose=0)).max(),
    }


if __name__ == "__main__":
    results = {}
    quick = (
        train_digits,
        evaluate_and_predict,
        faults,
        statistics,
        noise,
        lose_a_worker_in_training,
    )
    for scenario in [globals()[name] for name in sys.argv[2:]] or quick:
        started = time.monotonic()
        results[scenario.__name__] = scenario()
        print(f"{scenario.__name__}: {time.monotonic() - started:.1f} s", flush=True)
    harness.store(str(OUT), 0, results)
