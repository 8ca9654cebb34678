"""What a case must train: a plain loop over whole batches, with losses and optimizers written out.

Keras serves for the layers alone. Gradients are TensorFlow's, made dense.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tests.fuzz import batch_metrics, kept, overrides, uses
from tests.fuzz.cases import ONE_NUMBER, SEVERAL, Case
from tests.fuzz.formulas import NUMBERS, VALUES, State, mask_of
from tests.fuzz.models import make_data
from tests.fuzz.reads import Read

LOSS_WEIGHTS = {"a": 0.5, "b": 2.0}
Arrays = list[np.ndarray]


def reduced(values: tf.Tensor, weights: Any, mask: Any, reduction: str | None) -> tf.Tensor:
    """Returns the loss of a batch: the weighted sum of its values, divided as Keras documents."""
    each = tf.ones_like(values) if weights is None else tf.convert_to_tensor(weights) * tf.ones_like(values)
    valid = tf.ones_like(values) if mask is None else tf.cast(mask, values.dtype)
    total = tf.reduce_sum(values * each * valid)
    if reduction == "mean_with_sample_weight":
        return tf.math.divide_no_nan(total, tf.reduce_sum(each * valid))
    return tf.math.divide_no_nan(total, tf.reduce_sum(valid)) if reduction == "sum_over_batch_size" else total


class Average:
    """Weighted means by name.

    Attributes:
        batches: The targets, outputs and weights of each batch, for metrics that are no means.
    """

    def __init__(self) -> None:
        self.batches: list[batch_metrics.Batch] = []
        self._sums: dict[str, np.ndarray] = {}

    def add(self, name: str, total: Any, count: Any) -> None:
        self._sums[name] = self._sums.get(name, np.zeros(2)) + np.array([float(total), float(count)])

    def means(self, prefix: str = "") -> dict[str, float]:
        return {prefix + name: total / count if count else 0.0 for name, (total, count) in self._sums.items()}

    def result(self, case: Case, prefix: str = "") -> dict[str, float]:
        """Returns the means, the metrics of batches, and what an override adds."""
        output = "b_" if case.model in SEVERAL else ""
        others = batch_metrics.right(case.batch_metrics, self.batches)
        means = self.means(prefix)
        if case.override.startswith("metrics"):
            means[prefix + "two"] = 2 * means[prefix + "loss"]
        return means | {prefix + output + name: value for name, value in others.items()}


def loss_of(
    case: Case, model: keras.Model, batch: tuple[Any, ...], training: bool, logs: Average, state: State
) -> tf.Tensor:
    """Returns the loss of a batch, and adds what is logged of it to `logs`."""
    x, y, weights = (*batch, None)[:3]
    out = model(x, training=training)
    total: Any = tf.constant(0.0, tf.float64)
    for name in "ab" if case.model in SEVERAL else [""]:
        mask = x != 0 if (case.model, name) in (("masked_tokens", ""), ("masked_outputs", "a")) else None
        mine, theirs = (y[name], out[name]) if name else (y, out)
        weight = weights[name] if isinstance(weights, dict) else weights
        kind = case.loss_of(name)
        if kind in ONE_NUMBER:
            loss = NUMBERS[kind](tf.convert_to_tensor(mine), theirs, state)
        else:
            values, own = VALUES[kind](tf.convert_to_tensor(mine), theirs), mask_of(kind, mine)
            valid = own if mask is None else mask if own is None else mask & own
            loss = reduced(values, weight, valid, case.reduction_of(name))
        if name in ("", "b"):
            logs.batches.append((mine, theirs.numpy(), weight))
        if name:
            logs.add(f"{name}_loss", loss * len(x), len(x))
        total += loss * (LOSS_WEIGHTS[name] if name else 1.0)
        if not name and case.loss not in ("sparse", "ignored"):
            errors, each = VALUES["mae"](mine, theirs), 1.0 if weight is None else weight
            valid = np.ones(errors.shape) if mask is None else mask.astype(float)
            logs.add("mae", tf.reduce_sum(errors * valid), valid.sum())
            logs.add("weighted", tf.reduce_sum(errors * valid * each), (valid * each).sum())
    total += sum(tf.reduce_sum(loss) for loss in model.losses)
    if case.override.startswith("loss"):
        total *= overrides.TIMES
    # Keras' step weights the logged loss by the batch; the custom steps give their metric no weight, so each step counts alike.
    examples = 1 if training and case.step != "keras" else len(x)
    logs.add("loss", total * examples, examples)
    return total


def batches(data: tuple[Any, ...], steps: list[list[list[int]]]) -> Iterator[tuple[tuple[Any, ...], list[int]]]:
    """Yields each step's batch, and the examples of each replica."""
    for parts in steps:
        rows = [row for part in parts for row in part]
        batch = tf.nest.map_structure(lambda array, rows=rows: array[rows], data)
        yield batch, [len(part) for part in parts]


def clipped(grads: Arrays, options: dict[str, Any]) -> Arrays:
    norms = [np.sqrt((grad**2).sum()) for grad in grads]
    if limit := options.get("clipnorm"):
        return [grad * min(1, limit / norm) if norm else grad for grad, norm in zip(grads, norms, strict=True)]
    if limit := options.get("global_clipnorm"):
        return [grad * min(1, limit / np.sqrt(sum(norm**2 for norm in norms))) for grad in grads]
    limit = options.get("clipvalue", np.inf)
    return [np.clip(grad, -limit, limit) for grad in grads]


def used(use: str, grads: Arrays) -> Arrays:
    """Returns the gradients that a step applies."""
    limits = {"global norm": {"global_clipnorm": uses.GLOBAL_NORM}, "norm": {"clipnorm": uses.NORM}}
    if use == "sign":
        return [np.sign(grad) for grad in grads]
    return clipped(grads, {"clipvalue": uses.VALUE} if use == "value" else limits.get(use, {}))


class Rule:
    """An optimizer's formula for one variable; `state` keeps its arrays by name."""

    def __init__(self, name: str, options: dict[str, Any]):
        self._name, self._options, self.state = name, options, {}

    def _moving(self, key: str, value: Any, beta: float) -> Any:
        self.state[key] = beta * self.state.get(key, 0.0) + (1 - beta) * value
        return self.state[key]

    def step(self, w: np.ndarray, g: np.ndarray, t: int) -> np.ndarray:
        """Returns the variable after update `t`, counted from 1."""
        given, rate = self._options.get, self._options["learning_rate"]
        w = w - w * rate * given("weight_decay", 0.0)
        return getattr(self, self._name.lower())(w, g, t, rate, given)

    def sgd(self, w: Any, g: Any, t: int, rate: float, given: Any) -> Any:
        momentum = given("momentum", 0.0)
        velocity = self.state["v"] = momentum * self.state.get("v", 0.0) - rate * g
        return w + (momentum * velocity - rate * g if given("nesterov") else velocity)

    def adam(self, w: Any, g: Any, t: int, rate: float, given: Any) -> Any:
        one, two = given("beta_1"), given("beta_2")
        m, v = self._moving("m", g, one), self._moving("v", g**2, two)
        if given("amsgrad"):
            v = self.state["max"] = np.maximum(self.state.get("max", 0.0), v)
        return w - rate * np.sqrt(1 - two**t) / (1 - one**t) * m / (np.sqrt(v) + 1e-7)

    adamw = adam

    def adamax(self, w: Any, g: Any, t: int, rate: float, given: Any) -> Any:
        m = self._moving("m", g, given("beta_1"))
        u = self.state["u"] = np.maximum(given("beta_2") * self.state.get("u", 0.0), np.abs(g))
        return w - rate / (1 - given("beta_1") ** t) * m / (u + 1e-7)

    def nadam(self, w: Any, g: Any, t: int, rate: float, given: Any) -> Any:
        one, two = given("beta_1"), given("beta_2")
        decay = [one * (1 - 0.5 * 0.96**step) for step in range(1, t + 2)]
        m, v = self._moving("m", g, one), self._moving("v", g**2, two) / (1 - two**t)
        m = decay[t] * m / (1 - np.prod(decay)) + (1 - decay[t - 1]) * g / (1 - np.prod(decay[:t]))
        return w - rate * m / (np.sqrt(v) + 1e-7)

    def rmsprop(self, w: Any, g: Any, t: int, rate: float, given: Any) -> Any:
        below = self._moving("v", g**2, given("rho")) + 1e-7
        if given("centered"):
            below = below - self._moving("m", g, given("rho")) ** 2
        step = self.state["s"] = given("momentum", 0.0) * self.state.get("s", 0.0) + rate * g / np.sqrt(below)
        return w - step

    def adagrad(self, w: Any, g: Any, t: int, rate: float, given: Any) -> Any:
        total = self.state["v"] = self.state.get("v", 0.125) + g**2
        return w - rate * g / np.sqrt(total + 1e-7)

    def lion(self, w: Any, g: Any, t: int, rate: float, given: Any) -> Any:
        step = np.sign(given("beta_1") * self.state.get("m", 0.0) + (1 - given("beta_1")) * g)
        self._moving("m", g, given("beta_2"))
        return w - rate * step


class Trained(NamedTuple):
    """Each epoch's logs, the state of the loss, and what a callback reads at the end of each epoch."""

    history: dict[str, list[float]]
    state: State
    reads: list[Read]


def train(case: Case, model: keras.Model) -> Trained:
    """Trains `model`, of float64, as the case says."""
    state, right, reads = State(), kept.Right(model), []
    options, variables = dict(case.options), model.trainable_variables
    rules = [Rule(case.optimizer, options) for _ in variables]
    every = options.get("gradient_accumulation_steps") or 1
    sums: Arrays = []
    averages: Arrays = []
    history: dict[str, list[float]] = {}
    steps = updates = 0

    def end_fit() -> None:
        for variable, average in zip(variables, averages, strict=bool(averages)):
            variable.assign(average)

    evaluated = data = make_data(case, case.rows, 0, case.weights is not None)
    if case.validation:
        evaluated = make_data(case, case.validation[0], 1, case.weights is not None)
    if case.class_weight:
        classes = data[1] if case.loss == "sparse" else data[1].argmax(-1)
        data = (*data, np.vectorize(case.class_weight.get)(classes))
    scale = 1.0  # of the gradients that the step sees
    if case.step == "scaled":
        scale = (2.0**10 if case.scales else 1.0) * (options.get("loss_scale_factor") or 1.0)

    def gradients(batch: tuple[Any, ...], sizes: list[int], logs: Average) -> Arrays:
        with tf.GradientTape() as tape:
            loss = loss_of(case, model, batch, True, logs, state)
        right.step(sizes)
        grads = tape.gradient(loss, [variable.value for variable in variables])
        return [scale * tf.convert_to_tensor(grad).numpy() for grad in grads]

    for parts, evaluated_parts in case.passes():
        logs = Average()
        norm: dict[str, float] = {}
        for batch, sizes in batches(data, parts):
            if case.use == "sharp":
                before = [variable.numpy() for variable in variables]
                grads = gradients(batch, sizes, Average())
                length = np.sqrt(sum((grad**2).sum() for grad in grads)) + uses.TINY
                for variable, value, grad in zip(variables, before, grads, strict=True):
                    variable.assign(value + uses.UPHILL / length * grad)
                grads = gradients(batch, sizes, logs)
                for variable, value in zip(variables, before, strict=True):
                    variable.assign(value)
            else:
                grads = gradients(batch, sizes, logs)
            if case.use == "logged norm":
                norm = {"norm": float(np.sqrt(sum((grad**2).sum() for grad in grads)))}
            dense = [grad / scale for grad in used(case.use, grads)]
            sums, steps = [a + b for a, b in zip(sums, dense, strict=True)] if sums else dense, steps + 1
            if steps % every == 0:
                updates += 1
                final = clipped([total / every for total in sums], options)
                sums = []
                for rule, variable, grad in zip(rules, variables, final, strict=True):
                    variable.assign(rule.step(variable.numpy(), grad, updates))
            if options.get("use_ema"):
                values = [variable.numpy() for variable in variables]
                keep = options["ema_momentum"] if averages else 0.0
                averages = [keep * a + (1 - keep) * v for a, v in zip(averages or values, values, strict=True)]
                if (often := options["ema_overwrite_frequency"]) and steps % often == 0:
                    for variable, average in zip(variables, averages, strict=True):
                        variable.assign(average)
            for average, variable in zip(getattr(model, "averages", []), variables, strict=False):
                average.assign(uses.KEPT * average.numpy() + (1 - uses.KEPT) * variable.numpy())
        found = logs.result(case) | norm
        if case.loop == "generator":  # an evaluation follows each fit
            reads.append(Read(options["learning_rate"], updates, model.get_weights()))
            end_fit()
        if evaluated_parts:
            found |= validate(case, model, state, right, batches(evaluated, evaluated_parts))
        for name, value in found.items():
            history.setdefault(name, []).append(value)
        if not case.loop:
            reads.append(Read(options["learning_rate"], updates, model.get_weights()))
        if case.reads == "halves":
            options["learning_rate"] /= 2
    if not case.loop:
        end_fit()
    return Trained(history, state, reads)


def validate(case: Case, model: keras.Model, state: State, right: kept.Right, steps: Any) -> dict[str, float]:
    logs = Average()
    for batch, sizes in steps:
        loss_of(case, model, batch, False, logs, state)
        right.step(sizes)
    return logs.result(case, "val_")
