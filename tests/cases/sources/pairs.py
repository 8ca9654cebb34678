"""Pairs of features: a small model trains with them what a plain loop trains, or an error names both.

`FEATURES` has the values of each feature, `REFUSED` the pairs that are errors. Each other pair is in one of the rows that
`covering` makes, and each row is a case.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases import covering
from tests.cases.arms import (
    GRPC,
    MIRRORED,
    ON_GPUS,
    PIECES,
    PIECES_ON_GPUS,
    SERVERS,
    TWO_EACH,
    TWO_GPUS_EACH,
    WORKERS,
    Arm,
)
from tests.cases.case import case
from tests.fuzz.arithmetic import Rule, clipped
from tests.helpers.options import options_set
from tfdist.compression import TopK
from tfdist.errors import ConfigError
from tfdist.layers.table import MIN_ROWS
from tfdist.strategies import mesh

ARMS = {arm.name: arm for arm in (WORKERS, MIRRORED, TWO_EACH, SERVERS, GRPC, PIECES)}
ON_STAND_INS = {"workers": ON_GPUS, "two_each": TWO_GPUS_EACH, "pieces": PIECES_ON_GPUS}
FEATURES: dict[str, list[Any]] = {
    "strategy": list(ARMS),
    "compression": ["none", "topk", "fp16"],
    "shard_optimizer": [False, True],
    "sync_every": [0, 2],
    "accumulation": [1, 2],
    "precision": ["float32", "mixed_float16", "mixed_bfloat16"],
    "clip": ["none", "clipnorm", "global_clipnorm", "clipvalue"],
    "use_ema": [False, True],
    "layer": ["dense", "embedding", "shards", "large embedding"],
    "optimizer": ["SGD", "momentum", "Adam", "Lion", "AdamW"],
    "batch_shares": ["even", "by_speed"],
    "nan_policy": ["ignore", "skip", "stop"],
    "row_updates": ["auto", "lazy", "off"],
    "step": ["keras", "clips"],
    "steps_per_execution": [1, 3],
}
DEFAULTS = {name: values[0] for name, values in FEATURES.items()}

# Values that do not go together, and the sentence that says so.
_SERVERS, _MIRRORED, _TWO_EACH, _PIECES = ({"strategy": name} for name in ("servers", "mirrored", "two_each", "pieces"))
_ONE_DEVICE = r"strategy.(sync_every|batch_shares=by_speed) is not possible with (strategy.devices|several devices)"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        (_SERVERS | {"compression": name}, r"compression is not possible with \w*ParameterServer")
        for name in ("topk", "fp16")
    ),
    (_SERVERS | {"shard_optimizer": True}, r"strategy.shard_optimizer is not possible with parameter_server"),
    (_SERVERS | {"sync_every": 2}, r"strategy.sync_every is not possible with parameter_server"),
    (_SERVERS | {"batch_shares": "by_speed"}, r"batch_shares=by_speed is not possible with parameter_server"),
    (_SERVERS | {"accumulation": 2}, r"gradient_accumulation_steps is not possible with parameter_server"),
    (_SERVERS | {"precision": "mixed_float16"}, r"mixed_float16 .*is not possible with parameter_server"),
    (_SERVERS | {"nan_policy": "skip"}, r"nan_policy 'skip' is not possible with parameter_server"),
    (_MIRRORED | {"sync_every": 2}, r"strategy.sync_every is not possible with mirrored"),
    (_MIRRORED | {"batch_shares": "by_speed"}, r"batch_shares=by_speed is not possible with mirrored"),
    (_TWO_EACH | {"sync_every": 2}, _ONE_DEVICE),
    (_TWO_EACH | {"batch_shares": "by_speed"}, _ONE_DEVICE),
    *(
        (_PIECES | {"compression": name}, r"ModelParallel is not possible with compression")
        for name in ("topk", "fp16")
    ),
    (_PIECES | {"shard_optimizer": True}, r"ModelParallel is not possible with strategy.shard_optimizer"),
    (_PIECES | {"sync_every": 2}, r"ModelParallel is not possible with strategy.sync_every"),
    (_PIECES | {"batch_shares": "by_speed"}, r"ModelParallel is not possible with strategy.batch_shares"),
    (_PIECES | {"precision": "mixed_float16"}, r"ModelParallel is not possible with .*LossScaleOptimizer"),
    (_PIECES | {"layer": "shards"}, r"ModelParallel is not possible with .* 2 shards"),
    (
        {"shard_optimizer": True, "sync_every": 2},
        r"strategy.sync_every is not possible with strategy.shard_optimizer",
    ),
    ({"shard_optimizer": True, "layer": "shards"}, r"2 shards is not possible with strategy.shard_optimizer"),
    ({"sync_every": 2, "use_ema": True}, r"sync_every is not possible with use_ema=True"),
    ({"sync_every": 2, "layer": "shards"}, r"rows on the workers is not possible with strategy.sync_every"),
    *(
        (
            {"strategy": name, "layer": "shards", "step": "clips"},
            r"uses the gradient of .*only the gradient of the rows",
        )
        for name in ("workers", "two_each", "grpc")
    ),
    ({"layer": "large embedding", "row_updates": "lazy", "use_ema": True}, r"row_updates='lazy' .*use_ema"),
    ({"layer": "large embedding", "row_updates": "lazy", "optimizer": "AdamW"}, r"row_updates='lazy' .*weight_decay"),
]
# A step has the gradients of the worker's own pieces (docs/limits.md).
LIMITS: list[dict[str, Any]] = [_PIECES | {"step": "clips"}]

SIZE, EPOCHS, SHARES = 8, 2, (5, 2)
CLIPS = {"clipnorm": 0.03125, "global_clipnorm": 0.0625, "clipvalue": 2**-9}
STEP_LIMIT = 0.03125  # of the clip in a step
WIDTH, OUTPUTS, ROWS, WORDS = 40, 32, 32, 3
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"learning_rate": 0.5}),
    "momentum": ("SGD", {"learning_rate": 0.5, "momentum": 0.75}),
    "Adam": ("Adam", {"learning_rate": 2**-5, "beta_1": 0.875, "beta_2": 1 - 2**-6}),
    "Lion": ("Lion", {"learning_rate": 2**-8, "beta_1": 0.875, "beta_2": 1 - 2**-6}),
    "AdamW": ("AdamW", {"learning_rate": 2**-5, "beta_1": 0.875, "beta_2": 1 - 2**-6, "weight_decay": 0.125}),
}
LOSSY = 0.05  # the mean error of 16 bits, as a part of the mean move
rng = np.random.default_rng(5)
COUNT = 29  # three batches of 8, and one of 5
NUMBERS = rng.standard_normal((COUNT, WIDTH)).astype("float32")
DRAWN = rng.integers(0, MIN_ROWS, (COUNT, WORDS))
Y = rng.standard_normal((COUNT, OUTPUTS)).astype("float32")
Row = dict[str, Any]


def describe(row: Row) -> str:
    """Returns the values of a row that are not the defaults."""
    return ", ".join(f"{name}={value}" for name, value in row.items() if value != DEFAULTS[name]) or "defaults"


def options_of(row: Row) -> dict[str, Any]:
    options = dict(OPTIMIZERS[row["optimizer"]][1])
    if row["clip"] != "none":
        options[row["clip"]] = CLIPS[row["clip"]]
    if row["accumulation"] > 1:
        options["gradient_accumulation_steps"] = row["accumulation"]
    if row["use_ema"]:
        options |= {"use_ema": True, "ema_momentum": 0.75}
    return options


def inputs_of(row: Row) -> np.ndarray:
    return {"dense": NUMBERS, "large embedding": DRAWN}.get(row["layer"], DRAWN % ROWS)


class Clips(keras.Model):
    """A model whose step clips the gradient of the loss, scaled if the optimizer scales it."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(self(x, training=True), tf.float32) - y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        grads = [tf.convert_to_tensor(grad) for grad in tape.gradient(scaled, self.trainable_variables)]
        scale = scaled / loss
        grads = tf.clip_by_global_norm(grads, tf.stop_gradient(STEP_LIMIT * scale))[0]
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


class Sum(keras.layers.Layer):
    def call(self, rows: Any) -> Any:
        return keras.ops.sum(rows, -2)


def build(row: Row) -> keras.Model:
    """Returns the model: a layer, whose output is the sum of rows of a table, or its input, and a dense layer."""
    if row["layer"] == "dense":
        x = entry = keras.Input((WIDTH,))
    else:
        rows = MIN_ROWS if row["layer"] == "large embedding" else ROWS
        kinds = {"shards": functools.partial(tfdist.layers.Embedding, shards=2)}
        entry = keras.Input((WORDS,), dtype="int32")
        x = Sum()(kinds.get(row["layer"], keras.layers.Embedding)(rows, width_of(row))(entry))
    kind = Clips if row["step"] == "clips" else keras.Model
    model = kind(entry, keras.layers.Dense(OUTPUTS, dtype=None)(x))
    optimizer = getattr(keras.optimizers, OPTIMIZERS[row["optimizer"]][0])(**options_of(row))
    model.compile(optimizer, "mse", steps_per_execution=row["steps_per_execution"])
    return model


def width_of(row: Row) -> int:
    return 4 if row["layer"] == "large embedding" else WIDTH


def weights_of(row: Row) -> list[np.ndarray]:
    """Returns the first values of the table, of the kernel and of the bias."""
    numbers = np.random.default_rng(6)
    width = width_of(row)
    shapes = [(width, OUTPUTS), (OUTPUTS,)]
    if row["layer"] != "dense":
        shapes = [(MIN_ROWS if row["layer"] == "large embedding" else ROWS, width), *shapes]
    return [numbers.standard_normal(shape).astype("float32") / 4 for shape in shapes]


def gradients(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Returns the gradient of the mean squared error of a batch."""
    *tables, kernel, bias = weights
    rows = tables[0][x].sum(1) if tables else x
    slope = 2 * (rows @ kernel + bias - y) / y.size
    grads = [rows.T @ slope, slope.sum(0)]
    if tables:
        grad = np.zeros_like(tables[0])
        np.add.at(grad, x, np.repeat((slope @ kernel.T)[:, None], WORDS, 1))
        grads = [grad, *grads]
    return grads


class Alone:
    """One worker's weights and optimizer, in float64."""

    def __init__(self, row: Row, weights: list[np.ndarray]):
        self.weights, self.examples = weights, 0
        self._row, self._options = row, options_of(row)
        name = OPTIMIZERS[row["optimizer"]][0]
        self._rules = [Rule(name, self._options) for _ in weights]
        self._sums: list[np.ndarray] = []
        self._steps = self.updates = 0
        self.averages: list[np.ndarray] = []

    def step(self, x: np.ndarray, y: np.ndarray) -> None:
        grads = gradients(self.weights, x, y) if len(x) else [np.zeros_like(w) for w in self.weights]
        self.examples += len(x)
        if self._row["step"] == "clips":
            grads = clipped(grads, {"global_clipnorm": STEP_LIMIT})
        self._sums = [a + b for a, b in zip(self._sums, grads, strict=True)] if self._sums else grads
        self._steps += 1
        every = self._row["accumulation"]
        if self._steps % every == 0:
            self.updates += 1
            means = clipped([total / every for total in self._sums], self._options)
            self._sums = []
            self.weights = [self._updated(*each) for each in zip(self._rules, self.weights, means, strict=True)]
        if self._row["use_ema"]:
            keep = 0.75 if self._steps > every else 0.0  # until the first update Keras keeps no average
            pairs = zip(self.averages or self.weights, self.weights, strict=True)
            self.averages = [keep * average + (1 - keep) * weight for average, weight in pairs]

    def _updated(self, rule: Rule, weight: np.ndarray, grad: np.ndarray) -> np.ndarray:
        before = dict(rule.state)
        after = rule.step(weight, grad, self.updates)
        if not (is_lazy(self._row) and len(weight) == MIN_ROWS):
            return after
        touched = np.abs(grad).sum(1, keepdims=True) > 0
        for key, value in rule.state.items():
            rule.state[key] = np.where(touched, value, before.get(key, 0.0))
        return np.where(touched, after, weight)


def is_lazy(row: Row) -> bool:
    """Returns whether slots and weights of a large table move only where their row has a gradient: those of a sparse one."""
    is_sparse = row["accumulation"] == 1 and not row["shard_optimizer"] and row["step"] == "keras"
    return row["row_updates"] == "lazy" and row["layer"] == "large embedding" and is_sparse


def descend(row: Row, arm: Arm) -> list[np.ndarray]:
    """Returns the weights of a plain loop; with `sync_every`, of two workers that train alone and exchange the means of their weights."""
    anchor = [weight.astype("float64") for weight in weights_of(row)]
    alone = [Alone(row, anchor) for _ in range(arm.workers if row["sync_every"] else 1)]
    shares = SHARES if row["batch_shares"] == "by_speed" else (1,) * arm.workers
    x, y = inputs_of(row), Y.astype("float64")
    if row["layer"] == "dense":
        x = x.astype("float64")
    begins = [*range(0, COUNT, SIZE)] * EPOCHS
    for number, begin in enumerate(begins, 1):
        rows = np.arange(begin, min(begin + SIZE, COUNT))
        if len(alone) == 1:
            alone[0].step(x[rows], y[rows])
            continue
        ends = [0, *(len(rows) * np.cumsum(shares) // sum(shares))]
        if row["batch_shares"] == "even":
            ends[1] = -(-len(rows) // 2)
        before = alone[0].updates
        for worker, first, last in zip(alone, ends, ends[1:], strict=False):
            worker.step(x[rows[first:last]], y[rows[first:last]])
        is_due = alone[0].updates > before and alone[0].updates % row["sync_every"] == 0
        if is_due or number == len(begins):
            counts = np.array([worker.examples for worker in alone])
            for index in range(len(anchor)):
                values = [worker.weights[index] for worker in alone]
                anchor[index] = sum(n * w for n, w in zip(counts, values, strict=True)) / counts.sum()
            for worker in alone:
                worker.weights, worker.examples = list(anchor), 0
    if len(alone) > 1:
        return anchor
    return alone[0].averages if row["use_ema"] else alone[0].weights


@contextlib.contextmanager
def chosen(world: Any, row: Row) -> Iterator[Any]:
    """Sets the options of a row, and yields a Trainer with them; raises ConfigError as a Trainer does that is created with them."""
    arm, strategy = world.arm, world.trainer.strategy
    options = {name: row[name] for name in ("shard_optimizer", "sync_every", "batch_shares", "row_updates")}
    devices = str(arm.devices) if arm.devices > 1 else ""
    faults = list(tfdist.StrategyConfig(arm.strategy, devices=devices, **options).faults())
    if faults:
        raise ConfigError(faults)
    if strategy.mesh:  # which the strategy was created with
        given: dict[str, Any] = {"config": tfdist.StrategyConfig(arm.strategy, **options)}
        given["batch_shares"] = row["batch_shares"] == "by_speed"
        given |= dict.fromkeys(("num_workers", "num_replicas_in_sync"), arm.workers)
        mesh.check(mock.MagicMock(**given), strategy.mesh.grid)
    compression = {"none": None, "topk": TopK(compress_ratio=1.0)}.get(row["compression"], row["compression"])
    logger = logging.getLogger("tfdist")
    level = logger.level
    logger.setLevel(logging.ERROR)  # a warning is no error here
    keras.config.set_dtype_policy(row["precision"])
    try:
        trainer = tfdist.Trainer(strategy, compression=compression, nan_policy=row["nan_policy"])
        with options_set(strategy, **options):
            if row["batch_shares"] == "by_speed":
                strategy.batch_shares.assign(SHARES)
                strategy.batch_shares.is_settled = True
            yield trainer
    finally:
        logger.setLevel(level)
        keras.config.set_dtype_policy("float32")
        strategy.batch_shares = None
        if strategy.engine is not None:
            strategy.engine.nan_policy = "ignore"


def train(world: Any, row: Row) -> list[np.ndarray]:
    """Returns the weights of a training."""
    with chosen(world, row) as trainer:
        with trainer.scope():
            model = build(row)
        first = weights_of(row)
        tables = [layer.table for layer in model.layers if hasattr(layer, "table")]
        if tables:
            tables[0].assign(first.pop(0))
            model.layers[-1].set_weights(first)
        else:
            model.set_weights(first)
        trainer.fit(model, inputs_of(row), Y, batch_size=SIZE, epochs=EPOCHS, shuffle=False, verbose=0)
        if tables:
            return [rows_here(tables[0]), *model.layers[-1].get_weights()]
        return model.get_weights()


def rows_here(table: Any) -> np.ndarray:
    """Returns a table with the rows that this worker holds, and NaN for the others."""
    values = np.full(table.shape, np.nan)
    for part, rows in table.own(range(table.shape[0])):
        values[part] = rows
    return values


def run(world: Any, row: Row) -> dict[str, Any]:
    """Trains a row, and compares how far each weight is off."""
    found, right, first = train(world, row), descend(row, world.arm), weights_of(row)
    is_lossy = row["precision"] != "float32" or row["compression"] == "fp16"
    pairs = {}
    for name, mine, theirs, start in zip(("table", "kernel", "bias")[-len(first) :], found, right, first, strict=True):
        moved = np.abs(theirs - start)
        held = ~np.isnan(mine) if row["layer"] == "shards" else np.full(mine.shape, True)
        off = np.abs(mine - theirs)[held]
        part = off.mean() / moved.mean() if is_lossy else off.max() / moved.max()
        limit = LOSSY if is_lossy else 1e-4
        pairs[f"{name} with {describe(row)} is off by {part:.2g}"] = (bool(part < limit), True)
    return pairs


def register() -> None:
    """Makes a case of each row, and of each set of values that is an error."""
    excluded = {frozenset(values.items()) for values in (*(values for values, _ in REFUSED), *LIMITS)}
    for number, row in enumerate(covering.rows(FEATURES, excluded)):
        run_row = functools.partial(run, row=row)
        run_row.__module__ = __name__  # type: ignore[attr-defined]
        case(ARMS[row["strategy"]], full=(), name=f"row_{number}")(run_row)
        if row["strategy"] in ON_STAND_INS:
            is_split = row["shard_optimizer"] or row["layer"] == "shards"
            error = "with several GPUs of one of several workers" if is_split and row["strategy"] == "two_each" else ""
            case(ON_STAND_INS[row["strategy"]], full=True, error=error, name=f"row_{number}_on_gpus")(run_row)
    for values, sentence in REFUSED:
        row = {**DEFAULTS, **values}
        run_row = functools.partial(run, row=row)
        run_row.__module__ = __name__  # type: ignore[attr-defined]
        name = "_and_".join(f"{feature}_{value}" for feature, value in values.items())
        case(ARMS[row["strategy"]], full=True, error=sentence, name=f"refused_{name}")(run_row)


register()
