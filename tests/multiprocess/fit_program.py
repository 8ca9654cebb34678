"""Everything that `fit` takes. Arguments: strategy, output folder, names of cases (without any, all). In `bare CASE` the model's own
`fit` is called under the strategy.

`multi_worker_mirrored:2` gives each worker two replicas. `stock` is the reference: plain Keras on one device, without tfdist. `arithmetic` is what it must train, without Keras' `fit`.
Elsewhere the same cases go through the Trainer.
"""

import contextlib
import functools
import sys
import warnings

from tests.multiprocess import harness

name, out, *chosen = sys.argv[1:]
trainer = None
if name not in ("stock", "arithmetic"):
    import tfdist

    strategy, _, devices = name.partition(":")
    options = {"devices": 2} if strategy in ("mirrored", "central_storage") else harness.transport()
    options |= {"devices": int(devices)} if devices else {}
    trainer = tfdist.Trainer(strategy, **options)
RANK = trainer.task.index if trainer else 0

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tests.multiprocess import fit_arithmetic  # noqa: E402

rng = np.random.default_rng(0)
KERAS_COUNTS_THE_END = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 16)
SIZE, BATCH = 77, 16  # the last batch has 13: 7 and 6
X = rng.standard_normal((SIZE, 12)).astype(np.float32)
Y = rng.integers(0, 3, SIZE).astype(np.int32)
FULL = slice(0, 64)
WORDS = np.array(list("abcdefgh"))
TEXT = np.array([" ".join(rng.choice(WORDS, rng.integers(1, 6))) for _ in range(SIZE)])[:, None]
LENGTHS = rng.integers(1, 6, SIZE)
RAGGED = tf.RaggedTensor.from_row_lengths(rng.integers(0, 10, LENGTHS.sum()), LENGTHS)
VIDEO = rng.standard_normal((40, 3, 6, 6, 1)).astype(np.float32)
PAIR = {"a": X[:, :5], "b": X[:, 5:]}

CASES = {}
bare = False  # whether the model's own fit is called under the strategy


def case(function):
    CASES[function.__name__] = function
    return function


def loss(**arguments):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def scope():
    return trainer.scope() if trainer else contextlib.nullcontext()


def batches(*arrays, size=BATCH):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size)


def dense():
    hidden = keras.layers.Dense(24, activation="tanh")
    return keras.Sequential([keras.Input((12,)), hidden, keras.layers.Dense(3, dtype="float32")])


def train(build=dense, data=(X, Y), fit=None, evaluate=None, epochs=1, optimizer=None, policy="float32", **compiled):
    """Returns the losses, weights and optimizer variables of a training."""
    keras.config.set_dtype_policy(policy if name != "arithmetic" else "float32")
    keras.utils.set_random_seed(3)
    with scope():
        model = build()
        compiled_with = {"loss": loss(), "metrics": ["accuracy"], **compiled}
        if callable(compiled_with["metrics"]):
            compiled_with["metrics"] = compiled_with["metrics"]()
        made = (optimizer or (lambda: keras.optimizers.SGD(0.1, momentum=0.9)))()
        if name == "arithmetic" and policy == "mixed_float16":  # where Keras does so
            made = keras.optimizers.LossScaleOptimizer(made)
        model.compile(made, **compiled_with)
    keras.config.set_dtype_policy("float32")
    sized = {"batch_size": BATCH} if len(data) > 1 else {}  # what has no targets beside it has batches of its own
    arguments = {"epochs": epochs, "shuffle": False, "verbose": 0, **sized, **(fit or {})}
    if name == "arithmetic":
        history = fit_arithmetic.fit(model, data, compiled_with, **arguments)
        if evaluate:
            found = fit_arithmetic.evaluate(model, evaluate, compiled_with)
            history |= dict(zip(("evaluation", "predictions"), found, strict=True))
        return {"history": history, "weights": [w for w in model.get_weights() if w.dtype.kind == "f"], "slots": [0]}
    fitted = trainer.fit(model, *data, **arguments) if trainer and not bare else model.fit(*data, **arguments)
    results = dict(fitted.history)
    if evaluate:
        evaluation = trainer.evaluate(model, *evaluate, verbose=0) if trainer else model.evaluate(*evaluate, verbose=0)
        predict = (
            (lambda x: trainer.predict(model, x, verbose=0)) if trainer else (lambda x: model.predict(x, verbose=0))
        )
        results |= {"evaluation": evaluation, "predictions": predict(evaluate[0])}
    optimizer = model.optimizer
    state = {"weights": [w for w in model.get_weights() if w.dtype.kind == "f"]}
    state["slots"] = [v.numpy() for v in optimizer.variables]
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        names = ("dynamic_scale", "step_counter", "iterations")
        state["scale"] = {each: int(getattr(optimizer, each).numpy()) for each in names}
    return {"history": results, **state}


# --- inputs ---


def two_inputs():
    a, b = keras.Input((5,), name="a"), keras.Input((7,), name="b")
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Concatenate()([a, b]))
    return a, b, keras.layers.Dense(3, name="c")(hidden), keras.layers.Dense(1, name="r")(hidden)


def by_name():
    a, b, c, r = two_inputs()
    return keras.Model({"a": a, "b": b}, {"c": c, "r": r})


def by_place():
    a, b, c, r = two_inputs()
    return keras.Model([a, b], [c, r])


OUTPUTS = {"loss_weights": {"c": 1.0, "r": 0.5}, "metrics": {"c": ["accuracy"], "r": ["mae"]}}
OUTPUTS["loss"] = {"c": loss(), "r": "mse"}


@case
def dict_arrays():
    x = {key: value[FULL] for key, value in PAIR.items()}
    return train(by_name, (x, {"c": Y[FULL], "r": X[FULL, :1]}), **OUTPUTS)


@case
def dict_dataset():
    data = batches(PAIR, {"c": Y, "r": X[:, :1]}).take(4)
    return train(by_name, (data,), **OUTPUTS)


@case
def tuple_arrays():
    data = ((X[FULL, :5], X[FULL, 5:]), (Y[FULL], X[FULL, :1]))
    return train(by_place, data, loss=[loss(), "mse"], metrics=[["accuracy"], ["mae"]])


@case
def text_vectorization():
    def build():
        vectorize = keras.layers.TextVectorization(max_tokens=20, output_sequence_length=6)
        vectorize.adapt(TEXT)
        text = keras.Input((1,), dtype="string")
        hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 4)(vectorize(text)))
        return keras.Model(text, keras.layers.Dense(3)(hidden))

    data = (tf.constant(TEXT[FULL]), tf.constant(Y[FULL]))
    return train(build, (batches(*data),), evaluate=(data[0], data[1]))


@case
def string_lookup():
    def build():
        look_up = keras.layers.StringLookup(vocabulary=list(WORDS))
        letters = keras.Input((1,), dtype="string")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(10, 4)(look_up(letters)))
        return keras.Model(letters, keras.layers.Dense(3)(hidden))

    return train(build, (tf.constant([[text[0][0]] for text in TEXT]), tf.constant(Y)))


class Bag(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(10, 4)
        self.classify = keras.layers.Dense(3)

    def call(self, x):
        if isinstance(x, tf.RaggedTensor):
            x = x.to_tensor(shape=[None, 6])
        return self.classify(keras.ops.mean(self.embedding(x), axis=1))


@case
def ragged():
    return train(Bag, (batches(RAGGED, Y),))


@case
def five_dimensions():
    def build():
        layers = [keras.layers.Conv3D(4, 2), keras.layers.Flatten(), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((3, 6, 6, 1)), *layers])

    return train(build, (VIDEO, Y[:40]), fit={"batch_size": 8})


@case
def odd_first_batch():
    return train(
        lambda: keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(3)]), (batches(X[:35], Y[:35], size=7),)
    )


@case
def short_last_batch():
    return train(evaluate=(X, Y), epochs=2)


def seeing_dense(optimizer):
    """Makes an optimizer of the reference see dense gradients: Keras squares each row of an id by itself."""

    def make():
        made = optimizer()
        if trainer is None:
            apply = made.apply
            made.apply = lambda grads, variables: apply([tf.convert_to_tensor(grad) for grad in grads], variables)
        return made

    return make


@case
def short_last_batch_of_masked_words():
    def build():
        words = [keras.layers.Embedding(30, 4, mask_zero=True), keras.layers.LSTM(5), keras.layers.Dense(3)]
        return keras.Sequential(words)

    return train(build, (np.abs(X * 5).astype(np.int32) % 30, Y), optimizer=seeing_dense(adam(clipnorm=0.05)))


def generate():
    for start in range(0, SIZE, BATCH):
        yield X[start : start + BATCH], Y[start : start + BATCH]


@case
def generator():
    def endless():
        while True:
            yield from generate()

    return train(data=(endless(),), fit={"steps_per_epoch": 5}, epochs=2)


def counted_right(results):
    """Before 3.16, plain Keras counts one step more at the end of data of unknown size, for which there were none."""
    results["slots"][0] = results["slots"][0] - (trainer is None and KERAS_COUNTS_THE_END)
    return results


@case
def finite_generator():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has run out
        return counted_right(train(data=(generate(),)))


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-SIZE // BATCH)

    def __getitem__(self, index):
        return tuple(a[index * BATCH : (index + 1) * BATCH] for a in (X, Y))


class Count(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(keras.ops.ones_like(y_true))


@case
def validation_generator():
    """How many examples each validation sees; which, is up to how far Keras had read ahead of the one before."""

    def endless():
        while True:
            yield X[:BATCH], Y[:BATCH]

    validation = {"validation_data": endless(), "validation_steps": 5}
    return train(data=(X, Y), fit=validation, epochs=3, metrics=lambda: [Count(name="count")])


@case
def py_dataset():
    return train(data=(Batches(),), fit={"validation_data": Batches()}, epochs=2)


# --- losses, weights, steps ---


@case
def sample_weight_and_validation_split():
    given = {"sample_weight": np.linspace(0.1, 2, SIZE), "validation_split": 0.3}
    return train(fit=given, weighted_metrics=["accuracy"])


@case
def class_weight():
    return train(fit={"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}})


@case
def class_weight_dataset():
    return train(data=(batches(X, Y),), fit={"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}})


@case
def class_weight_function():
    """Through the Trainer data may be a function of one pipeline's batches."""
    weights = {0: 1.0, 1: 2.0, 2: 0.5}

    def dataset(context):
        mine = (
            X[FULL].reshape(4, context.num_input_pipelines, -1, 12),
            Y[FULL].reshape(4, context.num_input_pipelines, -1),
        )
        flat = [a[:, context.input_pipeline_id].reshape(-1, *a.shape[3:]) for a in mine]
        return batches(*flat, size=BATCH // context.num_replicas_in_sync)

    return train(data=(dataset,) if trainer else (batches(X[FULL], Y[FULL]),), fit={"class_weight": weights}, epochs=2)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = dense()
        self.mine = keras.metrics.Mean(name="mine")

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            value = self.compute_loss(x=x, y=y, y_pred=predictions)
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {**self.observe(y, predictions), "rate": 0.5, "steps": tf.constant(3), "pair": tf.constant([1.0, 2.0])}

    def test_step(self, data):
        return self.observe(data[1], self(data[0]))

    def observe(self, y, predictions):
        self.mine.update_state(keras.losses.sparse_categorical_crossentropy(y, predictions, from_logits=True))
        return {"mine": self.mine.result()}

    @property
    def metrics(self):
        return [self.mine]


@case
def own_steps():
    return train(Own, (X[FULL], Y[FULL]), fit={"validation_data": (X, Y)}, metrics=None, epochs=2)


@case
def loss_of_one_number():
    def mean_of_squares(y, predictions):
        return tf.reduce_mean((predictions - tf.one_hot(tf.cast(y, tf.int32), 3)) ** 2)

    return train(loss=mean_of_squares, evaluate=(X, Y))


class OwnLoss(Own):
    """As Keras' guides have it: a loss of your own, of one number, which is logged."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            value = tf.reduce_mean((self(x, training=True) - tf.one_hot(y, 3)) ** 2)
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.mine.update_state(value, sample_weight=tf.shape(x)[0])
        return {"mine": self.mine.result()}


@case
def own_loss():
    return train(OwnLoss, metrics=None)


class TwoOptimizers(Own):
    """Each half of the model has an optimizer that clips and accumulates."""

    def __init__(self):
        super().__init__()
        self.inner.build((None, 12))
        self.halves = [layer.trainable_variables for layer in self.inner.layers]
        self.first = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.1)
        self.second = keras.optimizers.SGD(0.1, clipnorm=0.05, use_ema=True, ema_overwrite_frequency=3)
        self.first.build(self.halves[0])
        self.second.build(self.halves[1])

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            predictions = self(x, training=True)
            value = self.compute_loss(x=x, y=y, y_pred=predictions)
        for optimizer, variables in zip((self.first, self.second), self.halves, strict=True):
            optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        return self.observe(y, predictions)


@case
def two_optimizers():
    return {**train(TwoOptimizers, metrics=None, epochs=2), "slots": [0]}  # of the optimizer that is not used


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * keras.ops.mean(x**2))
        return x


@case
def added_losses():
    def build():
        hidden = keras.layers.Dense(8, kernel_regularizer="l2", kernel_constraint="max_norm")
        return keras.Sequential([keras.Input((12,)), hidden, Penalty(), keras.layers.Dense(3)])

    return train(build)


@case
def summed_loss():
    """The weights of short batches are right, too; Keras' average of their losses is not."""
    results = train(loss=loss(reduction="sum"), optimizer=lambda: keras.optimizers.SGD(0.01))
    return {**results, "history": {"accuracy": results["history"]["accuracy"]}}


@case
def unreduced_loss():
    return train(loss=loss(reduction="none"), optimizer=lambda: keras.optimizers.SGD(0.01))


@case
def metrics_with_state():
    def build():
        return keras.Sequential([keras.Input((12,)), keras.layers.Dense(1, activation="sigmoid")])

    def metrics():
        return [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="p"), keras.metrics.F1Score(threshold=0.5)]

    return train(build, (X, (Y > 0).astype(np.float32)[:, None]), loss="binary_crossentropy", metrics=metrics)


# --- executions ---


def executed(steps, reference=1, epochs=2, **arguments):
    # Stock Keras trains on to the next multiple of the steps, so that one step each is the reference.
    return train(steps_per_execution=steps if trainer else reference, epochs=epochs, **arguments)


@case
def executions_of_4():
    return executed(4, evaluate=(X, Y))


@case
def executions_of_16():
    return executed(16)


@case
def executions_cut_by_the_epoch():
    validation = {"validation_data": batches(X, Y).repeat(), "validation_steps": 3}
    return executed(4, data=(batches(X, Y).repeat(),), fit={"steps_per_epoch": 6, **validation})


@case
def executions_cut_by_epochs_of_finite_data():
    """Of 50 batches: Keras would count 8 for each of the epochs of 6, and end before the last."""
    return executed(4, data=(batches(X, Y).repeat(10),), fit={"steps_per_epoch": 6}, epochs=8)


@case
def executions_of_unknown_data():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has run out
        return counted_right(executed(4, data=(batches(X, Y, size=8).filter(lambda *_: True),), epochs=1))


@case
def compiled():
    return train(jit_compile=True, evaluate=(X, Y), epochs=2)


@case
def compiled_executions():
    return executed(4, jit_compile=True)


@case
def eager():
    return train(run_eagerly=True, evaluate=(X, Y), epochs=2)


@case
def eager_executions():
    return executed(3, run_eagerly=True)


# --- optimizers ---


def adam(**arguments):
    return lambda: keras.optimizers.Adam(0.01, **arguments)


@case
def clipnorm():
    return train(optimizer=lambda: keras.optimizers.SGD(0.1, clipnorm=0.05), epochs=2)


@case
def global_clipnorm():
    return train(optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05), epochs=2)


@case
def clipvalue():
    return train(optimizer=lambda: keras.optimizers.SGD(0.1, clipvalue=0.01), epochs=2)


@case
def schedule_and_moving_average():
    return train(
        optimizer=lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(0.01, 10), use_ema=True, ema_momentum=0.5
        ),
        epochs=2,
    )


@case
def moving_average_overwrites():
    return train(optimizer=adam(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3), epochs=2)


@case
def accumulation():
    """An update each third step, and two epochs of 5."""
    return train(optimizer=adam(gradient_accumulation_steps=3), epochs=2)


@case
def accumulation_with_everything():
    arguments = {
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 3,
        "weight_decay": 0.1,
        "clipnorm": 0.1,
    }
    return executed(2, optimizer=adam(gradient_accumulation_steps=2, **arguments))


@case
def accumulation_of_embeddings():
    def build():
        return keras.Sequential([keras.layers.Embedding(30, 4), keras.layers.Flatten(), keras.layers.Dense(3)])

    return train(
        build, (np.abs(X * 5).astype(np.int32) % 30, Y), optimizer=adam(gradient_accumulation_steps=2), epochs=2
    )


def of_two_sizes(*arrays):
    """Each replica's size is known when its step is traced, and another one's is another."""
    parts = [tf.data.Dataset.from_tensors(tuple(a[rows] for a in arrays)) for rows in (slice(0, 50), slice(50, None))]

    def mine(context):
        if context.num_input_pipelines == 2:
            return parts[context.input_pipeline_id].repeat()
        return parts[0].concatenate(parts[1]).repeat()

    return mine if trainer else tf.data.Dataset.from_tensors(arrays).repeat()


@case
def endless_batches_of_two_sizes():
    return train(data=(of_two_sizes(X, Y),), fit={"steps_per_epoch": 3})


@case
def functions_of_unequal_length():
    """The second replica's data end a step earlier, and the epoch does when there are none left."""
    shares = [[(X[i : i + 8], Y[i : i + 8]) for i in range(first, end, 8)] for first, end in ((0, 32), (32, 56))]
    steps = [share[number] for number in range(4) for share in shares if number < len(share)]

    def dataset(batches):
        made = [tf.data.Dataset.from_tensors(batch) for batch in batches]
        return functools.reduce(tf.data.Dataset.concatenate, made)

    def mine(context):
        return dataset(steps if context.num_input_pipelines == 1 else shares[context.input_pipeline_id])

    whole = [tuple(map(np.concatenate, zip(*steps[i : i + 2], strict=True))) for i in range(0, 7, 2)]
    return train(data=(mine if trainer else dataset(whole),), epochs=2)


def tagger():
    words = keras.layers.Embedding(4, 5, mask_zero=True)
    return keras.Sequential([keras.Input((12,)), words, keras.layers.LSTM(3, return_sequences=True)])


TAGGED = np.abs(X * 3).astype(np.int32) % 4


@case
def masked_steps():
    """Each replica has another number of unmasked steps; the last batch leaves more for the first."""
    tags, weights = TAGGED % 3, np.abs(X)
    fit = {"sample_weight": weights, "validation_data": (TAGGED[:9], tags[:9], weights[:9])}
    return train(tagger, (TAGGED, tags), fit, optimizer=seeing_dense(lambda: keras.optimizers.SGD(0.1, momentum=0.9)))


@case
def endless_masked_batches_of_two_sizes():
    data = of_two_sizes(TAGGED, TAGGED % 3, np.abs(X))
    sgd = seeing_dense(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    return train(tagger, (data,), {"steps_per_epoch": 3}, optimizer=sgd)


@case
def rows_of_words():
    """Words that come several times on a replica, and on both."""
    words = np.abs(X * 3).astype(np.int32) % 6
    return train(Bag, (words, Y), optimizer=seeing_dense(adam(global_clipnorm=0.1)), epochs=2)


# --- 16 bits ---


def scaled(**arguments):
    return lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, **arguments), initial_scale=64.0, dynamic_growth_steps=3
    )


@case
def loss_scale():
    return train(optimizer=scaled(), epochs=2)


@case
def loss_scale_and_accumulation():
    return train(optimizer=scaled(gradient_accumulation_steps=3), steps_per_execution=1, epochs=2)


@case
def mixed_bfloat16():
    return train(policy="mixed_bfloat16", epochs=2)


@case
def mixed_float16():
    return train(policy="mixed_float16", epochs=2)


@case
def inf_on_one_replica():
    """In the first batch on the first replica, in the third on the second; each halves the scale once."""
    x = X[FULL].copy()
    x[1] = x[2 * BATCH + 12] = np.inf
    return train(data=(x, Y[FULL]), policy="mixed_float16", optimizer=lambda: keras.optimizers.SGD(0.1))


if __name__ == "__main__":
    results = {}
    for each in chosen or CASES:
        bare, function = each.startswith("bare "), CASES[each.removeprefix("bare ")]
        results[each] = function()
        print(each, flush=True)
    harness.store(out, RANK, results)
