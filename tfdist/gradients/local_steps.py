"""Steps that each worker makes alone, and the exchange of the workers' weights after a number of them (`sync_every`).

The *anchor* is the weights after the last exchange, equal on all workers. A worker's own weights differ from it until the next one. While
training steps run, the model holds the worker's own weights. All others (callbacks, validations, files, backups) see the anchor: before they
read, `MovingStatistics.show_shared` exchanges the two in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Structure, Variables
from tfdist.collectives.communicator import communicator_for
from tfdist.compat import keras_internals, model_features, optimizer_search
from tfdist.compat.tf_internals import regroup
from tfdist.compression.base import NONE, Compressor
from tfdist.config import relations
from tfdist.feature import Feature, RunningStep
from tfdist.gradients.optimizer import update_of
from tfdist.gradients.reduction import Reduction
from tfdist.layers.table import is_own
from tfdist.replicas import declared_weights
from tfdist.strategy import Strategy

_ATTRIBUTE = "local_steps"  # of the optimizer: TensorFlow tracks it, so that backups hold its variables


class LocalTraining(Feature):
    """`sync_every`: each worker trains alone, and exchanges its weights by `LocalSteps`."""

    after = ("gradient_sums",)
    trains_alone = True

    @classmethod
    def asks(cls, strategy: Strategy) -> bool:
        return bool(strategy.config.sync_intervals)

    def attach_model(self, model: keras.Model, engine: Any) -> None:
        relations.check({"sync_every": "", **model_features.of_model(model)}, "sync_every")

    def needs_assigned(self, model: keras.Model) -> bool:
        return all(local.averaged is None for local in of_model(model))

    def set_assigned(self, model: keras.Model, weights: Sequence[keras.Variable]) -> None:
        average_assigned(model, weights)

    def needs_update(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, engine: Any) -> bool:
        return True

    def attach(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, engine: Any) -> None:
        leaf = getattr(optimizer, "inner_optimizer", optimizer)
        if not hasattr(leaf, _ATTRIBUTE):
            install(leaf, self.strategy, engine.compressor)

    def execute(self, execution: Any, run: Callable[[], Structure]) -> Structure:
        if execution.trains:
            for local in of_model(execution.model):
                local.show(anchor=False)
        return run()

    def step(self, step: RunningStep, run: Callable[[], None]) -> None:
        run()
        if step.trains:
            for local in of_model(step.model):
                local.after_step(step.examples())


class LocalSteps(tf.Module):
    """The weights of a worker that steps alone, and their exchange with the other workers. It assumes one device per worker.

    Attributes:
        weights: The variables of the optimizer; then the weights that steps assign and no optimizer has (see `average_assigned`).
        averaged: The ids of the weights to which an exchange applies no outer optimizer; None if no trace has found them yet.
        hidden: For each weight the value that the model does not hold: the anchor while steps run, else this worker's own weight.
        velocity: For each weight the momentum of the outer optimizer, equal on all workers; empty without momentum.
        steps: The number of this worker's steps since the last exchange, equal on all workers.
        all_steps: The number of this worker's steps, equal on all workers.
        examples: The number of this worker's examples since the last exchange.
        exchanges: The number of exchanges.
        skipped: The number of updates and exchanges that were skipped on any worker until the last exchange, because a number was not finite.
        reduction: The sum over the workers, through the compressor.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        strategy: Strategy,
        compressor: Compressor | None,
        own_skipped: Callable[[], tf.Variable | None],
        variables: Variables,
    ):
        super().__init__(name="local_steps")
        self._strategy = strategy
        self._outer = strategy.config.outer
        self._intervals = strategy.config.sync_intervals
        self._steps_per_update = optimizer.gradient_accumulation_steps or 1
        self._own_skipped = own_skipped
        self.is_hidden_anchor = False
        self.weights = [variable.value for variable in variables]
        self.hidden = [self._variable(weight, weight.dtype, is_own=True) for weight in self.weights]
        self.velocity = []
        if self._outer.momentum:
            self.velocity = [self._variable(tf.zeros_like(weight), weight.dtype) for weight in self.weights]
        self.steps = self._variable(0, tf.int64)
        self.all_steps = self._variable(0, tf.int64)
        self.examples = self._variable(0, tf.float64, is_own=True)
        self.exchanges = self._variable(0, tf.int64)
        self.skipped = self._variable(0, tf.float64)
        self._reduction_with = lambda more: Reduction(compressor or NONE, [*variables, *more])
        self.reduction = self._reduction_with([])
        self.averaged: frozenset[int] | None = None
        self._exchange_now = tf.function(self._exchange, autograph=False)
        strategy.statistics.add_local(self)

    def _variable(self, value: Any, dtype: tf.DType, is_own: bool = False) -> tf.Variable:
        """Creates a variable that is equal on all workers, or that differs between them. Another number of workers starts from the mean."""
        synchronization = tf.VariableSynchronization.AUTO
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        if is_own:
            synchronization = tf.VariableSynchronization.ON_READ
            aggregation = tf.VariableAggregation.MEAN
        with self._strategy.scope(), tf.init_scope():
            return tf.Variable(
                tf.cast(value, dtype), trainable=False, synchronization=synchronization, aggregation=aggregation
            )

    def add(self, variables: Variables) -> None:
        """Adds weights that the optimizer does not have, before the first step."""
        self.weights += [variable.value for variable in variables]
        self.hidden += [self._variable(variable.value, variable.value.dtype, is_own=True) for variable in variables]
        self.reduction = self._reduction_with(variables)

    def show(self, anchor: bool) -> None:
        """Makes the model hold the anchor, or this worker's own weights. Not a collective."""
        if self.is_hidden_anchor != anchor:
            return
        self.is_hidden_anchor = not anchor
        for weight, hidden in zip(map(self._local, self.weights), map(self._local, self.hidden), strict=True):
            shown = weight.read_value()
            weight.assign(hidden.read_value())
            hidden.assign(shown)

    def begin(self) -> None:
        """Begins a training: this worker's weights are the model's, which may have been loaded, unless it has made steps since the last exchange."""
        self.show(anchor=True)
        if int(self.steps.numpy()) == 0:
            for weight, hidden in zip(map(self._local, self.weights), map(self._local, self.hidden), strict=True):
                hidden.assign(weight.read_value())

    def end(self) -> None:
        """Ends a training: exchanges the weights, if there were steps since the last exchange. A collective."""
        if int(self.steps.numpy()) > 0:
            self.show(anchor=False)
            self._exchange_now()
        self.show(anchor=True)

    def after_step(self, examples: tf.Tensor | int) -> None:
        """Counts a step on a number of this worker's examples, and exchanges the weights if it is time. In cross-replica context."""
        self._local(self.steps).assign_add(1)
        self._local(self.all_steps).assign_add(1)
        self._local(self.examples).assign_add(tf.cast(examples, tf.float64))
        interval = tf.constant(0, tf.int64)
        for begin, updates in self._intervals:
            has_begun = self._local(self.all_steps).read_value() > begin * self._steps_per_update
            interval = tf.where(has_begun, tf.constant(updates * self._steps_per_update, tf.int64), interval)
        is_due = self._local(self.steps).read_value() >= interval
        communicator_for(self._strategy).cond(is_due, self._exchange, lambda: None)

    def _exchange(self) -> None:
        """Moves the anchor by the mean of the workers' moves, weighted by their examples, and continues from it. A collective."""
        own = self._local(self.examples).read_value()
        skipped = tf.constant(0.0, tf.float64)
        count = self._own_skipped()
        if count is not None:
            skipped = tf.cast(self._local(count).read_value(), tf.float64)
        group = communicator_for(self._strategy)
        ((totals,),) = group.all_reduce([[tf.stack([own, skipped])]])
        share = tf.math.divide_no_nan(own, totals[0])
        weights = list(map(self._local, self.weights))
        anchors = list(map(self._local, self.hidden))
        deltas = []
        for weight, anchor in zip(weights, anchors, strict=True):
            delta = (anchor.read_value() - weight.read_value()) * tf.cast(share, weight.dtype)
            deltas.append(regroup((delta,)))
        number = self._local(self.exchanges).read_value()
        sums, finite = self.reduction(deltas, range(len(deltas)), number)
        moves = [self._strategy.experimental_local_results(total)[0] for total in sums]

        def move() -> tf.Tensor:
            for index, anchor in enumerate(anchors):
                step = moves[index]
                if id(self.weights[index]) not in (self.averaged or ()):
                    step = self._outer.learning_rate * self._with_momentum(index, step)
                anchor.assign_sub(step)
            return tf.constant(True)

        # If a worker's weights are not finite, all return to the anchor.
        moved = tf.cond(finite, move, lambda: tf.constant(False))
        with tf.control_dependencies([moved]):
            for weight, anchor in zip(weights, anchors, strict=True):
                weight.assign(anchor.read_value())
        self._local(self.steps).assign(0)
        self._local(self.examples).assign(0.0)
        self._local(self.exchanges).assign_add(1)
        with tf.control_dependencies([moved]):
            failed = self._local(self.reduction.left_out).read_value()
        self._local(self.skipped).assign(totals[1] + tf.cast(failed, tf.float64))

    def _with_momentum(self, index: int, move: tf.Tensor) -> tf.Tensor:
        """Updates the velocity of a weight; returns the direction in which the outer optimizer moves."""
        if not self.velocity:
            return move
        velocity = self._local(self.velocity[index])
        velocity.assign(self._outer.momentum * velocity + move)
        if not self._outer.nesterov:
            return velocity.read_value()
        return move + self._outer.momentum * velocity

    def _local(self, variable: tf.Variable) -> tf.Variable:
        """Returns this worker's component of a variable."""
        return self._strategy.experimental_local_results(variable)[0]


def install(leaf: keras.optimizers.Optimizer, strategy: Strategy, compressor: Compressor | None) -> None:
    """Creates the `LocalSteps` of a distributed optimizer, which no other one wraps, once it is built."""
    update: Any = update_of(leaf)
    setattr(leaf, _ATTRIBUTE, None)

    def own_skipped() -> tf.Variable | None:
        return update.finite.skipped if update.finite else None

    def create(variables: Variables) -> None:
        if any(map(is_own, variables)):
            relations.check(("worker_table", "sync_every"))
        local = LocalSteps(leaf, strategy, compressor, own_skipped, variables)
        update.exchange = local
        setattr(leaf, _ATTRIBUTE, local)

    def build(original: Callable[..., None], variables: Variables) -> None:
        original(variables)
        create(variables)

    if leaf.built:
        create(keras_internals.trainable_variables(leaf))
    leaf.build = functools.partial(build, leaf.build)


def average_assigned(model: keras.Model, assigned: Variables) -> None:
    """Makes exchanges average the weights that a model's step assigns and no optimizer updates, such as those of a mean teacher.

    Statistics are averaged where they are read, and weights with a declared aggregation after each step.
    """
    values = {id(variable.value): variable for variable in assigned if _is_plain(variable.value)}
    held = {id(weight) for local in of_model(model) for weight in local.weights}
    for local in of_model(model):
        local.averaged = frozenset(values)
        new = values.keys() - held
        if new:
            local.add([variable for key, variable in values.items() if key in new])
        held |= new


def _is_plain(value: tf.Variable) -> bool:
    is_declared = value.aggregation != tf.VariableAggregation.NONE or declared_weights.declared(value) is not None
    return value.dtype.is_floating and not is_declared


def of_optimizer(optimizer: keras.optimizers.Optimizer) -> LocalSteps | None:
    """Returns the `LocalSteps` of an optimizer, or None."""
    return getattr(getattr(optimizer, "inner_optimizer", optimizer), _ATTRIBUTE, None)


def of_model(model: keras.Model) -> Iterator[LocalSteps]:
    """Yields the `LocalSteps` of a model's optimizers."""
    for optimizer in optimizer_search.optimizers(model):
        found = of_optimizer(optimizer)
        if found:
            yield found
