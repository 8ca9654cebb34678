"""What plain Keras must train in the cases of `fit_program`: a loop over batches, with losses, metrics and optimizers written out.

Keras serves for the layers alone, and to say what was compiled. Gradients are TensorFlow's, made dense.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.fuzz.arithmetic import Average, Rule, clipped, reduced
from tests.fuzz.formulas import VALUES

Rows = list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # targets, outputs and weights of an epoch, mask included
THRESHOLDS = [-1e-7, *(i / 199 for i in range(1, 199)), 1 + 1e-7]  # of AUC


def binary(y: tf.Tensor, out: tf.Tensor) -> tf.Tensor:
    out = tf.clip_by_value(out, 1e-7, 1 - 1e-7)
    return -tf.reduce_mean(y * tf.math.log(out) + (1 - y) * tf.math.log(1 - out), -1)


def squares(y: tf.Tensor, out: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean((out - tf.one_hot(tf.cast(y, tf.int32), out.shape[-1])) ** 2, -1)


def values_of(loss: Any) -> tuple[Callable[..., tf.Tensor], str | None]:
    """Returns a loss's formula and its reduction."""
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        return VALUES["sparse"], loss.reduction
    formula = {"mse": VALUES["mse"], "binary_crossentropy": binary}.get(loss, squares)
    return formula, "sum_over_batch_size"


# --- metrics, of all rows of an epoch ---


def positives(y: np.ndarray, out: np.ndarray, threshold: float) -> tuple[float, float, float]:
    """Returns how many are found rightly, found wrongly, and overlooked."""
    found = out > threshold
    return (found & (y > 0)).sum(), (found & (y == 0)).sum(), (~found & (y > 0)).sum()


def area(y: np.ndarray, out: np.ndarray) -> float:
    points = [positives(y, out, threshold) for threshold in THRESHOLDS]
    rates = [(wrong / (y == 0).sum(), right / (y > 0).sum()) for right, wrong, _ in points]
    return sum((x0 - x1) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(rates))


def precision(y: np.ndarray, out: np.ndarray) -> float:
    right, wrong, _ = positives(y, out, 0.5)
    return right / (right + wrong)


def f1(y: np.ndarray, out: np.ndarray) -> np.ndarray:
    right, wrong, overlooked = positives(y, out, 0.5)
    return np.array([2 * right / (2 * right + wrong + overlooked)])


WHOLE = {"auc": area, "p": precision, "f1_score": f1, "count": lambda y, out: len(y)}


def metric(kind: Any, rows: Rows, weighted: bool) -> Any:
    """Returns a metric of an epoch."""
    y, out, weights = (np.concatenate([each[number] for each in rows]) for number in range(3))
    if not isinstance(kind, str):
        return WHOLE[kind.name](y, out)
    values = out.argmax(-1) == y if kind == "accuracy" else np.abs(y - out).mean(-1)
    weights = weights if weighted else weights != 0
    return (values * weights).sum() / weights.sum()


class Objective:
    """What a model is compiled with: the loss of a batch, and what is logged of an epoch."""

    def __init__(self, model: keras.Model, compiled: dict[str, Any]):
        self.model, self._weights = model, compiled.get("loss_weights") or {}
        several = len(getattr(model, "outputs", None) or [0]) > 1
        named = model.output_names if several else [""]
        by_name = [
            value if isinstance(value, dict) else dict(zip(named, value if several else [value], strict=True))
            for value in (compiled["loss"], compiled.get("metrics") or [])
        ]
        self.losses, self._metrics = by_name
        self._weighted = compiled.get("weighted_metrics") or []
        self.begin()

    def begin(self) -> None:
        self._logs, self._rows = Average(), {name: [] for name in self.losses}

    def loss(self, x: Any, y: Any, weights: Any, training: bool) -> tf.Tensor:
        """Returns the loss of a batch; notes what is logged of it."""
        out = self.model(x, training=training)
        names = list(self.losses)
        y, out = (
            each if isinstance(each, dict) else dict(zip(names, each if len(names) > 1 else [each], strict=True))
            for each in (y, out)
        )
        total, count = tf.constant(0.0), len(next(iter(y.values())))
        for name, loss in self.losses.items():
            formula, reduction = values_of(loss)
            mask = (np.asarray(x) != 0) if self._masks() else None
            values = formula(tf.convert_to_tensor(y[name]), out[name])
            mine = reduced(values, weights, mask, "sum" if reduction in (None, "none") else reduction)
            total += mine * self._weights.get(name, 1.0)
            if name:
                self._logs.add(f"{name}_loss", mine * count, count)
            each = np.ones(values.shape) if weights is None else np.asarray(weights) * np.ones(values.shape)
            shown = each if mask is None else each * mask
            self._rows[name].append((np.asarray(y[name]), out[name].numpy(), shown))
        total += sum(self.model.losses)
        if any(values_of(loss)[1] in (None, "none") for loss in self.losses.values()):
            self._logs.add("loss", total, count)  # of a vector the mean is logged, and its sum descended on
        else:
            self._logs.add("loss", total * count, count)
        return total

    def _masks(self) -> bool:
        """Whether the outputs are one for each step, and steps of 0 are masked."""
        layers = getattr(self.model, "layers", [])
        return bool(layers) and getattr(layers[0], "mask_zero", False) and len(self.model.output_shape) == 3

    def logs(self) -> dict[str, Any]:
        found: dict[str, Any] = self._logs.means()
        for name, kinds in self._metrics.items():
            for kind in kinds:
                key = f"{name}_{kind}" if name else getattr(kind, "name", kind)
                found[key] = metric(kind, self._rows[name], False)
        for kind in self._weighted:
            found[f"weighted_{kind}"] = metric(kind, self._rows[""], True)
        return found


class OwnObjective(Objective):
    """Of the models that bring a `train_step`."""

    def begin(self) -> None:
        self._logs = Average()

    def loss(self, x: Any, y: Any, weights: Any, training: bool) -> tf.Tensor:
        own = type(self.model).__name__ == "OwnLoss"
        formula = squares if own else VALUES["sparse"]
        value = tf.reduce_mean(formula(tf.convert_to_tensor(y), self.model(x, training=training)))
        self._logs.add("mine", value * len(y), len(y))
        self._trains = training and type(self.model).__name__ == "Own"
        return value

    def logs(self) -> dict[str, Any]:
        fixed = {"rate": 0.5, "steps": 3, "pair": np.array([1.0, 2.0])} if self._trains else {}
        return self._logs.means() | fixed


class Descent:
    """An optimizer, by its config."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, variables: list[Any]):
        self._scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        inner = optimizer.inner_optimizer if self._scales else optimizer
        config = inner.get_config()
        self._schedule = inner._learning_rate if isinstance(config["learning_rate"], dict) else None
        self._options = {key: value for key, value in config.items() if value is not None}
        self._rules = [Rule(type(inner).__name__, self._options) for _ in variables]
        self._every = config["gradient_accumulation_steps"] or 1
        self._variables, self._sums, self._averages = variables, [], []
        self._steps = self._updates = 0

    def step(self, grads: list[np.ndarray]) -> None:
        if self._scales and not all(np.isfinite(grad).all() for grad in grads):
            return
        self._sums = [a + b for a, b in zip(self._sums, grads, strict=True)] if self._sums else grads
        self._steps += 1
        if self._steps % self._every == 0:
            self._update(clipped([total / self._every for total in self._sums], self._options))
            self._sums = []
        if self._options.get("use_ema"):
            self._average()

    def _update(self, grads: list[np.ndarray]) -> None:
        if self._schedule is not None:  # a cosine
            done = min(self._updates / self._schedule.decay_steps, 1)
            self._options["learning_rate"] = self._schedule.initial_learning_rate * (1 + np.cos(np.pi * done)) / 2
        self._updates += 1
        for rule, variable, grad in zip(self._rules, self._variables, grads, strict=True):
            value = rule.step(variable.numpy().astype(np.float64), grad, self._updates)
            if variable.constraint is not None:  # of norm 2 at most
                norms = np.sqrt((value**2).sum(0, keepdims=True))
                value = value * np.clip(norms, 0, 2) / (norms + 1e-7)
            variable.assign(value)

    def _average(self) -> None:
        """Keras averages at each step, and counts updates: within those of one accumulation it does the same twice."""
        values, done = [variable.numpy() for variable in self._variables], (self._steps - 1) // self._every
        keep = self._options["ema_momentum"] if done else 0.0
        old = self._averages or values
        self._averages = [keep * a + (1 - keep) * v for a, v in zip(old, values, strict=True)]
        often = self._options.get("ema_overwrite_frequency")
        if often and (done + 1) % often == 0:
            self.end()

    def end(self) -> None:
        for variable, average in zip(self._variables, self._averages, strict=bool(self._averages)):
            variable.assign(average)


def batches(data: Any, size: int) -> Iterable[tuple[Any, ...]]:
    """Returns what can be gone through for each epoch: of a dataset, a generator, a `PyDataset`, or arrays."""
    if isinstance(data, keras.utils.PyDataset):
        return [data[number] for number in range(len(data))]
    if not isinstance(data, tuple):
        return data
    rows = len(tf.nest.flatten(data)[0])
    cut = lambda first: tf.nest.map_structure(lambda array: array[first : first + size], data)  # noqa: E731
    return [cut(first) for first in range(0, rows, size)]


def run(objective: Objective, data: Iterable[Any], training: bool, steps: int | None = None) -> Iterator[tf.Tensor]:
    """Yields the loss of each batch."""
    for x, y, weights in ((*batch, None)[:3] for batch in itertools.islice(data, steps)):
        yield objective.loss(x, y, None if weights is None else tf.cast(weights, tf.float32), training)


def fit(
    model: keras.Model, data: tuple[Any, ...], compiled: dict[str, Any], epochs: int, **given: Any
) -> dict[str, Any]:
    """Trains as `fit` should; returns the history."""
    size, validation = given.get("batch_size", 32), given.get("validation_data")
    if given.get("sample_weight") is not None:
        data = (*data, given["sample_weight"])
    if part := given.get("validation_split"):
        rows = int(len(data[0]) * (1 - part))
        data, validation = ([each[use] for each in data] for use in (slice(rows), slice(rows, None)))
        data, validation = tuple(data), tuple(validation)
    source = batches(data if len(data) > 1 else data[0], size)
    if classes := given.get("class_weight"):
        source = [(x, y, np.vectorize(classes.get)(np.asarray(y)).astype(np.float32)) for x, y in source]
    first = next(iter(source)) if not isinstance(source, Iterator) else None
    if first is not None:
        model(first[0])  # which builds it
    own = type(model).train_step is not keras.Model.train_step
    objective = (OwnObjective if own else Objective)(model, compiled)
    halves = getattr(model, "halves", None)
    variables = [*itertools.chain(*halves)] if halves else model.trainable_variables
    if halves:
        descents = [Descent(model.first, halves[0]), Descent(model.second, halves[1])]
    else:
        descents = [Descent(model.optimizer, variables)]
    steps, endless, watched = given.get("steps_per_epoch"), None, None
    endless = iter(source) if steps else None
    history: dict[str, list[Any]] = {}
    for _ in range(epochs):
        objective.begin()
        pass_ = run(objective, endless if endless is not None else source, True, steps)
        while True:
            with tf.GradientTape() as tape:
                loss = next(pass_, None)
            if loss is None:
                break
            grads = [tf.convert_to_tensor(grad).numpy() for grad in tape.gradient(loss, [v.value for v in variables])]
            for descent, own_variables in zip(descents, halves or [variables], strict=True):
                descent.step(grads[: len(own_variables)])
                grads = grads[len(own_variables) :]
        found = objective.logs()
        if validation is not None:
            if given.get("validation_steps") and watched is None:
                watched = batches(validation, size)
            objective.begin()
            for _ in run(objective, watched or batches(validation, size), False, given.get("validation_steps")):
                pass
            found |= {f"val_{name}": value for name, value in objective.logs().items()}
        for name, value in found.items():
            history.setdefault(name, []).append(value)
    if not halves:
        descents[0].end()
    return history


def evaluate(model: keras.Model, data: tuple[Any, ...], compiled: dict[str, Any]) -> tuple[list[float], np.ndarray]:
    """Returns loss and metrics, and the outputs."""
    objective = Objective(model, compiled)
    for _ in run(objective, batches(data, 32), False):
        pass
    return [float(value) for value in objective.logs().values()], model(data[0], training=False).numpy()
