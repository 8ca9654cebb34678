"""Trains models whose variables live as pieces. Arguments: strategy, output folder, the mesh as `1x2`, and cases. `slots` in place of a mesh
stands for whole variables with split slots.

Stores for each case the losses, the weights, and the elements of this worker's weights and slots. A case of `ERRORS` stores the text of an error.
In one process, it stores what stock Keras computes on one device.
"""

import gc
import os
import pathlib
import sys
import time

os.environ["TF_NUM_INTRAOP_THREADS"] = "1"

import keras

import tfdist
from tests.multiprocess import harness

strategy, out, shape, *chosen = sys.argv[1:]
is_cluster = strategy == "multi_worker_mirrored"
layout_map = None
trainer = None
if shape == "slots":
    trainer = tfdist.Trainer(strategy, shard_optimizer=True, **harness.transport())
elif is_cluster:
    sizes = tuple(map(int, shape.split("x")))
    devices = [f"worker:{rank}" for rank in range(sizes[0] * sizes[1])]
    mesh = keras.distribution.DeviceMesh(sizes, ("batch", "model"), devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    for pattern, layout in {
        r".*(dense|cell)[^/]*/(recurrent_)?kernel": (None, "model"),
        r".*conv2d[^/]*/kernel": (None, None, None, "model"),
        r".*separable.*/depthwise_kernel": (None, "model", None),
        r".*separable.*/pointwise_kernel": (None, None, "model"),
        r".*embedding[^/]*/embeddings": (None, "model"),
        r".*rows/embeddings": ("model", None),
        r".*/gamma": ("model",),
        r".*/(query|key|value)/kernel": (None, "model", None),
        r".*/attention_output/kernel": ("model", None, None),
        r".*up[^/]*/kernel": (None, "model"),
        r".*up/bias": ("model",),
        r".*down[^/]*/kernel": ("model", None),
        r".*columns_first/kernel": (None, "model", None),
        r".*rows_of_two/kernel": ("model", None, None),
    }.items():
        layout_map[pattern] = layout
    layout_map["no_layer/kernel"] = (None, "model")
    layout_map[".*dense[^/]*/out.+"] = (None, "model")  # the outputs of layers
    distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    policy = "skip" if any(case.endswith("-nan") for case in chosen) else "ignore"
    trainer = tfdist.Trainer(strategy, distribution=distribution, nan_policy=policy, **harness.transport())

import numpy as np  # noqa: E402 (the strategy comes first)
import tensorflow as tf  # noqa: E402
from keras import layers, optimizers  # noqa: E402
from tensorflow.python.ops import resource_variable_ops  # noqa: E402

rng = np.random.default_rng(0)
ROWS, STEPS = 16, 20
NUMBERS = rng.standard_normal((ROWS * STEPS, 8)).astype(np.float32)
IMAGES = rng.standard_normal((ROWS * STEPS, 6, 6, 2)).astype(np.float32)
SERIES = rng.standard_normal((ROWS * STEPS, 5, 8)).astype(np.float32)
WORDS = rng.integers(0, 12, (ROWS * STEPS, 5))
TARGETS = rng.standard_normal((ROWS * STEPS, 4)).astype(np.float32)
CLASSES = rng.integers(0, 64, (ROWS * STEPS, 5))
WEIGHTS = rng.uniform(0.5, 1.5, (ROWS * STEPS, 5)).astype(np.float32)


@keras.saving.register_keras_serializable()
class Tied(layers.Layer):
    """Reads words, and compares with all of them, by one table."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows = layers.Embedding(12, 8, name="rows")

    def call(self, words):
        x = keras.ops.mean(self.rows(words), 1)
        return keras.ops.matmul(x, keras.ops.transpose(self.rows.embeddings))


def shared():
    dense = layers.Dense(8, activation="tanh")
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(4)(dense(dense(inputs))))


def nested():
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="tanh"), layers.Dense(8)], name="inner")
    return keras.Sequential([keras.Input((8,)), inner, layers.Dense(4)])


def attention():
    x = inputs = keras.Input((5, 8))
    x = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(x)))


@keras.saving.register_keras_serializable()
class Sometimes(layers.Dense):
    """Reads its kernel in one branch of a condition."""

    def call(self, x):
        return keras.ops.cond(keras.ops.sum(self.bias) >= 0, lambda: super(Sometimes, self).call(x), lambda: x)


class Traced(layers.Dense):
    """Reads its kernel in a tf.function."""

    @tf.function(autograph=False)
    def call(self, x):
        return super().call(x)


def up(units=12, **kwargs):
    return layers.Dense(units, name="up", **kwargs)


def down(units=8, **kwargs):
    return layers.Dense(units, name="down", **kwargs)


def gated():
    inputs = keras.Input((8,))
    gate = layers.Dense(12, activation="silu", name="up_gate")(inputs)
    return keras.Model(inputs, layers.Dense(4)(down()(layers.Multiply()([gate, up()(inputs)]))))


def seen_outside():
    """Returns a model in which a layer other than its partner reads the outputs of a layer by columns."""
    inputs = keras.Input((8,))
    x = up(activation="relu")(inputs)
    return keras.Model(inputs, layers.Dense(4)(layers.Concatenate()([down(4)(x), layers.Softmax()(x)])))


def extracted():
    """Returns a model that reads what stays in parts within another model of the same layers."""
    pair = keras.Sequential([keras.Input((8,)), up(activation="relu"), down()])
    hidden = keras.Model(pair.inputs, pair.layers[0].output)
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(4)(layers.Concatenate()([pair(inputs), hidden(inputs)])))


@keras.saving.register_keras_serializable()
class Block(layers.Layer):
    """Reads and writes whole values, by layers without a graph."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up, self.down = up(activation="softmax"), down()

    def call(self, x):
        return self.down(self.up(x))


def einsums():
    inputs = keras.Input((5, 8))
    x = layers.EinsumDense("abc,cde->abde", (5, 2, 3), bias_axes="e", activation="gelu", name="columns_first")(inputs)
    x = layers.EinsumDense("abde,def->abf", (5, 8), bias_axes="f", name="rows_of_two")(x)
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(x)))


def transformer(dropout=0.0, attend=None, tied=False):
    """Returns a model of two blocks, which predicts the next word; its output table is that of the inputs if `tied`."""
    inputs = keras.Input((5,), dtype="int32")
    kind = layers.ReversibleEmbedding if tied else layers.Embedding
    table = kind(12, 8, name="rows", mask_zero=True)
    x = table(inputs)
    for number in range(2):
        attention = attend() if attend else layers.MultiHeadAttention(2, 4, dropout=dropout)
        x = layers.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
        y = layers.Dense(16, activation="gelu", name=f"up_{number}")(x)
        y = layers.Dense(8, name=f"down_{number}")(layers.Dropout(dropout)(y))
        x = layers.LayerNormalization()(x + y)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(4)(table(x, reverse=True) if tied else x))


def scores():
    """Returns a model that needs the scores of all heads."""
    inputs = keras.Input((5, 8))
    x, scores = layers.MultiHeadAttention(2, 4)(inputs, inputs, return_attention_scores=True)
    return keras.Model(inputs, layers.Dense(4)(layers.Concatenate()([layers.Flatten()(x), layers.Flatten()(scores)])))


def classes():
    """Returns a model with the logits of 64 classes for each word that a mask selects."""
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(12, 8, name="rows", mask_zero=True)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True))
    return keras.Model(inputs, layers.Dense(64, name="up")(x))


def class_of_numbers():
    return keras.Sequential([keras.Input((8,)), layers.Dense(64, name="up")])


def branches():
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Average()([layers.Dense(4, name=f"dense_{n}")(inputs) for n in range(30)]))


def stack(shape, *middle, dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *middle, layers.Flatten(), layers.Dense(4)])


ZOO = {
    "dense": (lambda: stack((8,), layers.Dense(12, activation="tanh")), NUMBERS),
    "conv": (lambda: stack((6, 6, 2), layers.Conv2D(4, 3, activation="tanh")), IMAGES),
    "embedding": (lambda: stack((5,), layers.Embedding(12, 6), dtype="int32"), WORDS),
    "rows": (lambda: stack((5,), layers.Embedding(12, 3, name="rows"), dtype="int32"), WORDS),
    "tied": (lambda: stack((5,), Tied(), dtype="int32"), WORDS),
    "shared": (shared, NUMBERS),
    "nested": (nested, NUMBERS),
    "columns": (lambda: keras.Sequential([keras.Input((8,)), layers.Dense(4, use_bias=False)]), NUMBERS),
    "gru": (lambda: stack((5, 8), layers.GRU(6)), SERIES),
    "lstm": (lambda: stack((5, 8), layers.Bidirectional(layers.LSTM(6))), SERIES),
    "condition": (lambda: stack((8,), Sometimes(8, name="dense_sometimes")), NUMBERS),
    "function": (lambda: stack((8,), Traced(8, name="dense_traced")), NUMBERS),
    "branches": (branches, NUMBERS),
    "conv1d": (lambda: stack((5, 8), layers.SeparableConv1D(4, 3)), SERIES),
    "dropout": (lambda: stack((8,), layers.Dense(8), layers.Dropout(0.5)), NUMBERS),
    "batch_norm": (lambda: stack((8,), layers.Dense(8), layers.BatchNormalization(synchronized=True)), NUMBERS),
    "einsum": (lambda: stack((5, 8), layers.EinsumDense("abc,cd->abd", (5, 6), bias_axes="d")), SERIES),
    "attention": (attention, SERIES),
    "norms": (lambda: stack((5, 8), layers.GroupNormalization(2), layers.RMSNormalization()), SERIES),
    "regularized": (lambda: stack((8,), layers.Dense(12, kernel_regularizer="l2")), NUMBERS),
    "bfloat16": (lambda: stack((8,), layers.Dense(12, activation="tanh", dtype="mixed_bfloat16")), NUMBERS),
    "moments_alone": (lambda: stack((8,), layers.Dense(8), layers.BatchNormalization()), NUMBERS),
    "logits": (classes, WORDS),
    "logits_ignored": (classes, WORDS),
    "logits_smoothed": (class_of_numbers, NUMBERS),
    "probabilities": (
        lambda: keras.Sequential([keras.Input((8,)), layers.Dense(64, "softmax", name="up")]),
        NUMBERS,
    ),
    "pair": (lambda: stack((8,), up(activation="gelu"), down()), NUMBERS),
    "pair_dropout": (lambda: stack((8,), up(activation="gelu"), layers.Dropout(0.5), down()), NUMBERS),
    "deferred": (lambda: keras.Sequential([up(activation="relu"), down(4)]), NUMBERS),
    "large_table": (lambda: stack((5,), layers.Embedding(70_000, 4, name="rows"), dtype="int32"), WORDS),
    "row": (lambda: stack((8,), down(6)), NUMBERS),
    "gated": (gated, NUMBERS),
    "seen_outside": (seen_outside, NUMBERS),
    "extracted": (extracted, NUMBERS),
    "block": (lambda: stack((8,), Block()), NUMBERS),
    "einsums": (einsums, SERIES),
    "transformer": (transformer, WORDS),
    "transformer_dropout": (lambda: transformer(0.2), WORDS),
    "transformer_tied": (lambda: transformer(tied=True), WORDS),
    "transformer_grouped": (lambda: transformer(attend=lambda: layers.GroupQueryAttention(4, 4, 2)), WORDS),
    "scores": (scores, SERIES),
    "large": (lambda: stack((8,), layers.Dense(256), layers.Dense(256)), NUMBERS),
}
# The loss, metrics, labels and weights of some models; others are regressions.
LOSSES = {
    "logits": (
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: ["accuracy"],
        *(CLASSES, WEIGHTS),
    ),
    "logits_ignored": (
        lambda: keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=3, reduction="mean_with_sample_weight"
        ),
        lambda: [keras.metrics.SparseTopKCategoricalAccuracy(3)],
        *(CLASSES % 8, WEIGHTS),
    ),
    "logits_smoothed": (
        lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1, reduction="sum"),
        list,
        *(np.eye(64, dtype=np.float32)[CLASSES[:, 0]], WEIGHTS[:, 0] / ROWS),
    ),
    "probabilities": (lambda: "sparse_categorical_crossentropy", list, CLASSES[:, :1], None),
}
OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.05, 0.9),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipped_later": lambda: optimizers.SGD(0.1, clipvalue=0.05),
    "averages": lambda: optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "accumulation_clipped": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.05),
    "accumulation_constraint": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "constraint": lambda: optimizers.SGD(0.1),
    "constraint_across": lambda: optimizers.SGD(0.1),
    "late": lambda: optimizers.SGD(0.05),
    "nan": lambda: optimizers.Adam(0.01),
}


def scope():
    if trainer:
        return trainer.scope()
    return keras.name_scope("alone")


def build(case):
    """Returns a compiled model, and its data."""
    layer, _, optimizer = case.partition("-")
    make, data = ZOO[layer]
    keras.utils.set_random_seed(1)
    with scope():
        model = make()
        if optimizer.endswith("constraint"):
            model.layers[0].kernel.constraint = keras.constraints.MaxNorm(0.8)
        if optimizer == "constraint_across":  # norms of rows, of which each worker has a part
            model.layers[0].kernel.constraint = keras.constraints.MaxNorm(0.8, axis=1)
        steps = 5 if optimizer == "late" else 1
        updates = OPTIMIZERS[optimizer or "sgd"]()
        loss, metrics, *_ = LOSSES.get(layer, (lambda: "mse", lambda: ["mae"]))
        model.compile(updates, loss(), weighted_metrics=metrics(), jit_compile=False, steps_per_execution=steps)
    return model, data


def delay_pieces(group):
    """Makes each piece wait for up to 2 ms before the group gathers it."""
    gather = group.gather_parts
    delays = np.random.default_rng(trainer.task.index)

    def wait(piece):
        time.sleep(delays.uniform(0, 0.002))
        return piece

    def gather_late(piece, lane=0):
        late = tf.numpy_function(wait, [piece], piece.dtype)
        return gather(tf.ensure_shape(late, piece.shape), lane)

    group.gather_parts = gather_late


def record_exchanges(group):
    """Returns lists to which each exchange of a trace appends its kind, `weight` for the gather of a variable, and its last dimension."""
    kinds, widths = [], []

    def recorded(method, kind):
        def call(*args):
            kinds.append(kind)
            widths.append(tf.nest.flatten(args[0])[0].shape[-1])
            return method(*args)

        return call

    for name, kind in (("gather_parts", "weight"), ("gather", "parts"), ("add", "sum")):
        setattr(group, name, recorded(getattr(group, name), kind))
    return kinds, widths


def train(case):
    model, data = build(case)
    exchanges, widths = record_exchanges(trainer.strategy.mesh.group) if trainer else ([], [])
    epochs = 1
    if case.endswith("late"):
        epochs = 10
        if trainer:
            delay_pieces(trainer.strategy.mesh.group)
    _, _, targets, weights = LOSSES.get(case, (None, None, TARGETS, None))
    if case.endswith("nan"):
        bad = slice(5 * ROWS, 6 * ROWS)
        targets = TARGETS.copy()
        targets[bad, 3] = np.nan  # only the last column's gradient is not finite: that of one worker's piece
        if trainer is None:
            data, targets = np.delete(data, bad, 0), np.delete(targets, bad, 0)
    options = {"sample_weight": weights, "verbose": 0}
    if case.endswith("clipped_later"):
        model.fit(data, targets, batch_size=ROWS, shuffle=False, **options)
        model.optimizer.clipvalue, model.optimizer.global_clipnorm = None, 0.1
        with scope():
            model.compile(model.optimizer, "mse", weighted_metrics=["mae"], jit_compile=False)
    history = model.fit(data, targets, batch_size=ROWS, epochs=epochs, shuffle=False, **options)
    result = {
        "exchanges": list(exchanges),
        "widths": list(widths),
        "losses": history.history,
        "weights": model.get_weights(),
        "evaluated": model.evaluate(data, targets, **options),
    }
    if trainer:
        local = trainer.strategy.experimental_local_results
        held = [*model.trainable_variables, *model.optimizer.variables]
        result["elements"] = [int(np.prod(local(v._value)[0].shape)) for v in held]
        if case == "extracted":  # Keras loads no file of layers that two nested models share
            return result
        path = os.path.join(out, f"{case}.keras")
        trainer.save(model, path)
        plain = keras.saving.load_model(path)
        result["saved"] = plain.get_weights(), [np.array(v) for v in plain.optimizer.variables]
        result["predicted"] = trainer.predict(model, data[:24], verbose=0), plain.predict(data[:24], verbose=0)
    else:
        result["saved"] = model.get_weights(), [np.array(v) for v in model.optimizer.variables]
    return result


def continued(path):
    """Trains a model from a file, and loads its weights into another model."""
    keras.utils.set_random_seed(1)
    with scope():
        model = keras.saving.load_model(path, compile=False)
        model.compile(OPTIMIZERS["adamw"](), "mse", jit_compile=False)
    loaded = model.get_weights()
    model.fit(NUMBERS, TARGETS, batch_size=ROWS, verbose=0, shuffle=False)
    held = [*model.trainable_variables, *model.optimizer.variables]
    other, _ = build("dense-adamw")
    other.load_weights(path)
    return {
        "elements": sum(int(np.prod(v._value.shape)) for v in held),
        "loaded": loaded,
        "weights": model.get_weights(),
        "slots": [np.array(v) for v in model.optimizer.variables],
        "other": other.get_weights(),
    }


def loaded(path):
    """Trains a model from a file on, with the optimizer of the file."""
    with scope():
        model = keras.saving.load_model(path)
    slots = [np.array(v) for v in model.optimizer.variables]
    case = pathlib.Path(path).stem
    model.fit(ZOO[case.partition("-")[0]][1], TARGETS, batch_size=ROWS, verbose=0, shuffle=False)
    held = [*model.trainable_variables, *model.optimizer.variables]
    return {
        "elements": sum(int(np.prod(v._value.shape)) for v in held),
        "loaded": slots,
        "weights": model.get_weights(),
        "slots": [np.array(v) for v in model.optimizer.variables],
    }


def exported(case):
    model, data = build(case)
    path = os.path.join(out, f"{case}.export")
    trainer.export(model, path, verbose=False)
    loaded = tf.saved_model.load(path)
    return loaded.serve(data[:8]).numpy(), trainer.predict(model, data[:8], verbose=0)


def result_of(case):
    kind, _, rest = case.partition("=")
    if kind == "continued":
        return continued(rest)
    if kind == "loaded":
        return loaded(rest)
    if kind == "exported":
        return exported(rest)
    if kind == "written":
        return written(rest)
    if kind == "live":
        return live_bytes(rest)
    return error_of(case) if case in ERRORS else train(case)


def live_bytes(case):
    """Returns the bytes of all variables of TensorFlow that this process holds after a training."""
    model, data = build(case)
    model.fit(data, TARGETS, batch_size=ROWS, verbose=0)
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, resource_variable_ops.BaseResourceVariable) and each.shape.is_fully_defined():
            found[id(each.handle)] = each.shape.num_elements() * each.dtype.size
    return sum(found.values())


def with_layout(pattern, layout):
    def fault():
        layout_map[pattern] = layout
        try:
            train("dense")
        finally:
            del layout_map[pattern]

    return fault


def written(case):
    """Returns the weights and slots that plain Keras loads of each file that all workers write together, and of that of `trainer.save`."""
    model, data = build(case)
    kinds = (
        ("best.keras", {"monitor": "loss", "save_best_only": True}),
        ("last.weights.h5", {"save_weights_only": True}),
    )
    callbacks = [keras.callbacks.ModelCheckpoint(os.path.join(out, file), **options) for file, options in kinds]
    model.fit(data, TARGETS, batch_size=ROWS, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    model.save_weights(os.path.join(out, "saved.weights.h5"))
    model.save(os.path.join(out, "saved.keras"))
    path = os.path.join(out, "trainer.keras")
    trainer.save(model, path)
    found = {}
    for file in ("trainer.keras", "best.keras", "saved.keras", "last.weights.h5", "saved.weights.h5"):
        plain = keras.saving.load_model(path)
        if file.endswith(".keras"):
            plain = keras.saving.load_model(os.path.join(out, file))
        else:
            for variable in (*plain.weights, *plain.optimizer.variables):
                variable.assign(keras.ops.zeros_like(variable))
            plain.load_weights(os.path.join(out, file))
        found[file] = [np.array(value) for value in (*plain.weights, *plain.optimizer.variables)]
    return found


def saved_alone():
    """Saves by a callback that the chief alone has; raises its error on all workers."""
    model, data = build("dense")
    said = pathlib.Path(out, "alone.txt")

    def save(epoch, logs):
        try:
            model.save(os.path.join(out, "alone.keras"))
        except tfdist.ConfigError as e:
            said.write_text(str(e))

    callbacks = [] if trainer.task.index else [keras.callbacks.LambdaCallback(on_epoch_end=save)]
    model.fit(data, TARGETS, batch_size=ROWS, verbose=0, callbacks=callbacks)
    raise tfdist.ConfigError(said.read_text())  # all workers have ended `fit`


def read_alone():
    model = build("dense")[0]
    if trainer.is_chief:
        model.get_weights()


def evaluated_alone():
    model, data = build("dense")
    if trainer.is_chief:
        model.evaluate(data, TARGETS, verbose=0)


def with_optimizer(optimizer):
    def fault():
        OPTIMIZERS["other"] = optimizer
        train("dense-other")

    return fault


ERRORS = {
    "two": with_layout(".*dense.*", (None, "model")),
    "rank": with_layout(".*bias", (None, "model")),
    "batch": with_layout(".*bias", ("batch",)),
    "parts": lambda: ZOO["parts"][0](),
    "saved_alone": saved_alone,
    "read_alone": read_alone,
    "evaluated_alone": evaluated_alone,
    "function": lambda: train("function"),
    "scaled": with_optimizer(lambda: optimizers.LossScaleOptimizer(optimizers.SGD())),
    "sharded": lambda: tfdist.Trainer(strategy, distribution=distribution, shard_optimizer=True),
    "local": lambda: tfdist.Trainer(strategy, distribution=distribution, sync_every=5),
    "shares": lambda: tfdist.Trainer(strategy, distribution=distribution, batch_shares="by_speed"),
    "mirrored": lambda: tfdist.Trainer("mirrored", distribution=distribution),
    "servers": lambda: tfdist.Trainer("parameter_server", distribution=distribution),
    "axis": with_layout(".*bias", ("rows",)),
    "lamb": with_optimizer(lambda: optimizers.Lamb(0.01)),
    "compressed": lambda: tfdist.Trainer(strategy, distribution=distribution, compression="int8"),
    "mesh": lambda: tfdist.Trainer(
        strategy,
        distribution=keras.distribution.ModelParallel(
            layout_map=keras.distribution.LayoutMap(
                keras.distribution.DeviceMesh((1, 3), ("batch", "model"), ["a", "b", "c"])
            )
        ),
    ),
}


def parts():
    with scope():
        return stack((8,), layers.Dense(3))


ZOO["parts"] = parts, NUMBERS


def error_of(case):
    try:
        ERRORS[case]()
    except (tfdist.ConfigError, tfdist.ClusterError, ValueError) as e:  # Keras' own of an axis
        return str(e)
    return ""


if __name__ == "__main__":
    results = {case: result_of(case) for case in chosen}
    harness.store(out, trainer.task.index if trainer else 0, results)
