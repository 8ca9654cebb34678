"""What `fit` takes under parameter servers with one worker, whose steps are in order: it must equal plain Keras.

Arguments: a folder for the results, names of cases. Each case is run here, and by plain Keras in the same process.
"""

import pathlib
import sys

import tfdist
from tests.multiprocess import harness

OUT = pathlib.Path(sys.argv[1])
trainer = tfdist.Trainer("parameter_server", placement="by_bytes")

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfdist.data  # noqa: E402

OUT.mkdir(parents=True, exist_ok=True)
rng = np.random.default_rng(0)
X, Y = rng.standard_normal((70, 8), np.float32), rng.integers(0, 3, 70).astype(np.int32)
WEIGHT = rng.uniform(0.5, 2, 70).astype(np.float32)
LOSS = "sparse_categorical_crossentropy"


class Mine:
    """Builds in the trainer's scope and runs on the worker."""

    scope = staticmethod(trainer.scope)
    fit, evaluate, predict = trainer.fit, trainer.evaluate, trainer.predict


class Plain:
    """Plain Keras on the chief."""

    @staticmethod
    def scope():
        return tf.device("/job:chief/replica:0/task:0/device:CPU:0")

    @staticmethod
    def fit(model, *args, **kwargs):
        return model.fit(*args, **kwargs)

    @staticmethod
    def evaluate(model, *args, **kwargs):
        return model.evaluate(*args, **kwargs)

    @staticmethod
    def predict(model, *args, **kwargs):
        return model.predict(*args, **kwargs)


def build(how, optimizer=lambda: "adam", extra=(), metrics=lambda: ["accuracy"], statistics=False, **options):
    keras.utils.set_random_seed(3)
    with how.scope():
        norm = [keras.layers.BatchNormalization()] if statistics else []
        layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), *norm, *extra]
        model = keras.Sequential([*layers, keras.layers.Dense(3, "softmax", kernel_regularizer="l2")])
        model.compile(optimizer(), LOSS, metrics=metrics(), **options)
    return model


def run(how, model, *args, **options):
    callbacks = options.pop("callbacks", list)()
    history = how.fit(model, *args, **{"verbose": 0, "batch_size": 16, "epochs": 3, "callbacks": callbacks, **options})
    variables = {v.path: v.numpy() for v in (*model.weights, *model.optimizer.variables)}
    return {"history": history.history, "epoch": history.epoch, "variables": variables}


def fit(how, *args, build_options=None, **options):
    return run(how, build(how, **(build_options or {})), *(args or (X, Y)), **options)


def batches(size=16, repeat=1):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size).repeat(repeat)


def several(how, *_):
    """Dict inputs, two outputs, losses and weights of each."""
    keras.utils.set_random_seed(3)
    with how.scope():
        a, b = keras.Input((8,), name="a"), keras.Input((2,), name="b")
        hidden = keras.layers.Dense(8, "relu")(keras.layers.Concatenate()([a, b]))
        outputs = {
            "kind": keras.layers.Dense(3, "softmax", name="kind")(hidden),
            "size": keras.layers.Dense(1, name="size")(hidden),
        }
        model = keras.Model({"a": a, "b": b}, outputs)
        losses = {"kind": LOSS, "size": "mse"}
        model.compile("rmsprop", losses, loss_weights={"kind": 1.0, "size": 0.3}, metrics={"kind": ["accuracy"]})
    full = slice(0, 64)  # Keras' logs of single outputs do not weigh a short batch by its examples
    x = {"a": X[full], "b": X[full, :2]}
    result = run(how, model, x, {"kind": Y[full], "size": X[full, :1]}, **SHUFFLED)
    result["predictions"] = how.predict(model, {"a": X, "b": X[:, :2]}, batch_size=16, verbose=0)
    return result


def texts(how):
    """Strings, through a table in the model."""
    words = np.array([["a b"], ["b c c"], ["d"]] * 10)
    keras.utils.set_random_seed(3)
    with how.scope():
        vectorize = keras.layers.TextVectorization(vocabulary=["a", "b", "c"], output_sequence_length=3)
        layers = [keras.Input((1,), dtype="string"), vectorize, keras.layers.Embedding(5, 4), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(3, "softmax")])
        model.compile("sgd", LOSS)
    return run(how, model, tf.data.Dataset.from_tensor_slices((words, Y[:30])).batch(8), batch_size=None)


class Summing(keras.optimizers.Adam):
    """Of the reference: Keras squares each row of an id by itself."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.convert_to_tensor(grad) for grad in grads], trainable_variables)


def rows(how):
    """Words that come several times in a batch."""
    keras.utils.set_random_seed(3)
    with how.scope():
        layers = [keras.Input((4,), dtype="int32"), keras.layers.Embedding(6, 4), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(3, "softmax")])
        model.compile((keras.optimizers.Adam if how is Mine else Summing)(0.01, name="adam"), LOSS)
    return run(how, model, np.abs(X[:, :4] * 3).astype(np.int32) % 6, Y, **SHUFFLED)


class Adds(keras.layers.Layer):
    """Adds a loss and regularises its output."""

    def call(self, x):
        self.add_loss(0.1 * tf.reduce_mean(x**2))
        return x


class OwnStep(keras.Model):
    """A train_step of its own, with a metric and a log of its own."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(8, "relu"), keras.layers.Dense(1)
        self.seen = keras.metrics.Sum(name="seen")

    def build(self, shape):
        self.hidden.build(shape)
        self.out.build((None, 8))
        self.built = True

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, batch):
        x, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.seen.update_state(tf.ones([tf.shape(x)[0]]))
        return {"seen": self.seen.result(), "own": loss, "rate": tf.convert_to_tensor(self.optimizer.learning_rate)}


def own_step(how):
    keras.utils.set_random_seed(3)
    with how.scope():
        model = OwnStep()
        model.build((None, 8))
        model.compile("adam")
    return run(how, model, X, Y, **SHUFFLED)


class Two(keras.Model):
    """Two optimizers, one of which steps twice."""

    def __init__(self):
        super().__init__()
        self.one, self.two = keras.layers.Dense(1), keras.layers.Dense(1)

    def build(self, shape):
        for layer in (self.one, self.two):
            layer.build(shape)
        self.built = True

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second
        first.build(self.one.trainable_weights)
        second.build(self.two.trainable_weights)

    def train_step(self, batch):
        for layer, optimizer in ((self.one, self.first), (self.two, self.second), (self.two, self.second)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((layer(batch[0]) - 1) ** 2)
            optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
        return {"loss": loss}


def two_optimizers(how):
    keras.utils.set_random_seed(3)
    with how.scope():
        model = Two()
        model.build((None, 8))
        model.compile(keras.optimizers.Adam(0.1), schedule())
    how.fit(model, X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    optimizers = (model.first, model.second)
    return {
        "history": {},
        "epoch": [],
        "variables": {v.path: v.numpy() for v in model.weights},
        "iterations": [int(optimizer.iterations.numpy()) for optimizer in optimizers],
    }


def schedule():
    return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.5))


def adamw():
    return keras.optimizers.AdamW(weight_decay=0.1, global_clipnorm=0.1, use_ema=True)


def stopping():
    return [keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10, restore_best_weights=True)]


def rates():
    changing = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    return [changing, keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=10)]


def generator():
    for start in range(0, 64, 16):
        yield X[start : start + 16], Y[start : start + 16]


class Inside(keras.callbacks.Callback):
    """Evaluates and predicts amid a fit, by the model's own methods and by the trainer's."""

    def __init__(self, how):
        super().__init__()
        self.how, self.found = how, []

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            self.found.append(self.model.predict(X[:40], batch_size=8, verbose=0))

    def on_epoch_end(self, epoch, logs=None):
        self.found.append(np.array(self.model.evaluate(X[:40], Y[:40], batch_size=8, verbose=0)))
        self.found.append(np.array(self.how.evaluate(self.model, X[:40], Y[:40], batch_size=8, verbose=0)))
        self.found.append(self.how.predict(self.model, X[:40], batch_size=8, verbose=0))


def inside(how):
    callback = Inside(how)
    given = {"validation_data": (X[:20], Y[:20]), "build_options": {"statistics": True}}
    result = fit(how, callbacks=lambda: [callback], **given, **SHUFFLED)
    result["predictions"] = dict(enumerate(callback.found))
    return result


def on_batches(how):
    model = build(how)
    how.evaluate(model, X[:16], Y[:16], verbose=0)  # from here on it is the trainer's
    logs = [model.train_on_batch(X[:16], Y[:16], return_dict=True) for _ in range(3)]
    logs.append(model.test_on_batch(X[:16], Y[:16], return_dict=True))
    return {
        "history": {name: [each[name] for each in logs] for name in logs[0]},
        "epoch": [],
        "variables": {v.path: v.numpy() for v in model.weights},
        "predictions": {"batch": model.predict_on_batch(X[:16])},
    }


class Amid(keras.callbacks.Callback):
    """Evaluates and saves amid an epoch; keeps the logs of each epoch's last step."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.found = folder, []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            self.found.append(np.array([logs[name] for name in sorted(logs)]))
        if batch == 2:
            self.model.save(self.folder / "amid.keras")
            self.found.append(keras.models.load_model(self.folder / "amid.keras").optimizer.iterations.numpy())
            self.found.append(np.array(self.model.evaluate(X[:40], Y[:40], batch_size=8, verbose=0)))


def amid(how):
    callback = Amid(OUT)
    result = fit(how, callbacks=lambda: [callback], build_options={"statistics": True}, **SHUFFLED)
    result["predictions"] = dict(enumerate(callback.found))
    return result


def predict_first(how):
    model = build(how, statistics=True)
    found = [how.predict(model, ((X[start : start + 16],) for start in range(0, 64, 16)), verbose=0)]
    model.layers[0].activation = keras.activations.tanh
    with how.scope():
        model.compile("adam", LOSS, metrics=["accuracy"])
    found.append(how.predict(model, X, batch_size=16, verbose=0))
    result = run(how, model, X, Y, **SHUFFLED)
    found.append(how.predict(model, X[:5], batch_size=2, verbose=0))
    return {**result, "predictions": dict(enumerate(found))}


class Both(keras.metrics.Metric):
    """Two results."""

    def __init__(self):
        super().__init__(name="both")
        self.a, self.b = (self.add_weight(name=name, initializer="zeros") for name in "ab")

    def update_state(self, y, p, sample_weight=None):
        self.a.assign_add(tf.reduce_sum(p))
        self.b.assign_add(tf.cast(tf.shape(p)[0], tf.float32))

    def result(self):
        return {"first": self.a, "second": self.a / self.b}


class OwnLoss(OwnStep):
    """Returns its loss without a metric."""

    def train_step(self, batch):
        super().train_step(batch)
        return {"loss": tf.reduce_mean(self(batch[0]) ** 2), "seen": self.seen.result()}


def own_loss(how):
    keras.utils.set_random_seed(3)
    with how.scope():
        model = OwnLoss()
        model.build((None, 8))
        model.compile("adam")
    logs = []

    def keep(batch, logs=None, kept=logs):
        kept.append((batch, dict(logs)))

    keep = keras.callbacks.LambdaCallback(on_train_batch_end=keep)
    result = run(how, model, X, Y, callbacks=lambda: [keep], **SHUFFLED)
    result["predictions"] = {
        name: np.array([each[name] for batch, each in logs if batch == 4]) for name in ("loss", "seen")
    }
    return result


def nan(how):
    x = X.copy()
    x[20] = np.nan
    result = fit(how, x, Y, callbacks=lambda: [keras.callbacks.TerminateOnNaN()], **SHUFFLED)
    return {"history": {}, "epoch": result["epoch"], "variables": {}}  # steps on their way go on


SHUFFLED = {"shuffle": False}


def stored(how):
    """Arrays in files, with a map, in fit, evaluate and predict."""
    model = build(how)
    files = OUT / how.__name__
    files.mkdir(exist_ok=True)
    np.savez(files / "0.npz", x=X[:30], y=Y[:30])
    np.savez(files / "1.npz", x=X[30:], y=Y[30:])
    data = tfdist.data.arrays_from(files, 16, seed=4, map=lambda x, y: (x * 2, y))
    if how is Mine:
        result = run(how, model, data, batch_size=None, validation_data=data)
    else:
        in_order = data.in_order().dataset()
        endless = data.dataset(None)
        steps = {"steps_per_epoch": data.steps_per_epoch}
        result = run(how, model, endless, batch_size=None, validation_data=in_order, **steps)
        data = in_order
    evaluated = np.array(how.evaluate(model, data, verbose=0))
    return {**result, "predictions": {"evaluated": evaluated, "all": how.predict(model, data, verbose=0)}}


CASES = {
    "stored": stored,
    "arrays": lambda how: fit(how, build_options={"statistics": True}, **SHUFFLED),
    "validation_split_nadam": lambda how: fit(
        how, build_options={"optimizer": keras.optimizers.Nadam}, validation_split=0.25, **SHUFFLED
    ),
    "validation_data_both": lambda how: fit(
        how,
        build_options={"metrics": lambda: [Both()], "statistics": True},
        validation_data=(X[:33], Y[:33]),
        validation_freq=2,
        **SHUFFLED,
    ),
    "dataset": lambda how: fit(how, batches(), batch_size=None),
    "steps": lambda how: fit(how, batches(16, -1), batch_size=None, steps_per_epoch=3),
    "runs_out": lambda how: fit(how, batches(16, 1), batch_size=None, steps_per_epoch=3),
    "initial_epoch_sample_weight": lambda how: fit(how, initial_epoch=1, sample_weight=WEIGHT, **SHUFFLED),
    "executions": lambda how: fit(how, build_options={"steps_per_execution": 3, "statistics": True}, **SHUFFLED),
    "generator": lambda how: fit(how, generator(), batch_size=None, epochs=1),
    "class_weight": lambda how: fit(how, class_weight={0: 1.0, 1: 3.0, 2: 0.5}, **SHUFFLED),
    "added_losses_momentum": lambda how: fit(
        how, build_options={"extra": (Adds(),), "optimizer": lambda: keras.optimizers.SGD(0.1, 0.9)}, **SHUFFLED
    ),
    "schedule": lambda how: fit(how, build_options={"optimizer": schedule}, **SHUFFLED),
    "adamw_clip_ema": lambda how: fit(how, build_options={"optimizer": adamw, "statistics": True}, **SHUFFLED),
    "stopping": lambda how: fit(how, callbacks=stopping, **SHUFFLED),
    "rates": lambda how: fit(how, callbacks=rates, **SHUFFLED),
    "several": several,
    "texts": texts,
    "rows": rows,
    "own_step": own_step,
    "two_optimizers": two_optimizers,
    "inside": inside,
    "amid": amid,
    "predict_first": predict_first,
    "own_loss": own_loss,
    "nan": nan,
    "on_batches": on_batches,
}


def failing(case, how):
    try:
        return case(how)
    except Exception as e:  # one case must not hide the others
        import traceback

        traceback.print_exc()
        return f"{type(e).__name__}: {e}"


def placement():
    """Variables go where the fewest bytes are: (bytes of each variable in order, its server)."""
    with trainer.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(64), keras.layers.Dense(2)]
        )
    return [(v.numpy().nbytes, int(tf.DeviceSpec.from_string(v.value.device).task)) for v in model.weights]


def masks():
    """What dropout lets through, for two passes over the same data, and for the same steps again."""
    found = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        with trainer.scope():
            model = keras.Sequential([keras.Input((50,)), Seen(0.5)])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        ones = np.ones((4, 50), np.float32)
        trainer.fit(model, ones, ones, batch_size=1, epochs=2, verbose=0, callbacks=[(keep := Keep())])
        found.append(keep.seen)
    return found


def output_losses():
    """The logs of single outputs over batches of several sizes, of a model that does not learn, and the means of its losses."""
    with trainer.scope():
        x = keras.Input((8,))
        model = keras.Model(x, [keras.layers.Dense(3, name="a")(x), keras.layers.Dense(1, name="b")(x)])
        model.compile(keras.optimizers.SGD(0.0), ["mse", "mae"])
    targets = [np.roll(X[:, :3], 1, 0) * 3, X[:, 3:4] ** 2]
    history = trainer.fit(model, X, targets, batch_size=32, verbose=0).history
    a, b = trainer.predict(model, X, verbose=0)
    means = [((a - targets[0]) ** 2).mean(), np.abs(b - targets[1]).mean()]
    return [history["a_loss"][0], history["b_loss"][0], history["loss"][0]], [*means, sum(means)]


class Seen(keras.layers.Dropout):
    """Shows its last mask as a non-trainable variable."""

    def build(self, shape):
        self.kept = self.add_weight(shape=(50,), trainable=False, initializer="zeros", name="kept")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x, training=False):
        x = super().call(x, training=training)
        self.kept.assign(tf.reduce_max(x, axis=0))
        return x * self.scale


class Keep(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.model.train_function.drain()
        self.seen.append(self.model.layers[0].kept.numpy())


if __name__ == "__main__":
    alone = {"placement": placement, "masks": masks, "output_losses": output_losses}
    results = {
        name: alone[name]() if name in alone else (failing(CASES[name], Mine), failing(CASES[name], Plain))
        for name in sys.argv[2:]
    }
    results["known"] = {*alone, *CASES}
    harness.store(str(OUT), 0, results)
