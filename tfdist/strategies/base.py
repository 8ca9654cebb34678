"""Base classes of the strategies: additions to TensorFlow's own under which stock Keras 3 computes correct results.

The classes are thin subclasses of TensorFlow's, so that Keras' `isinstance` checks hold. Errors of stock Keras 3 are corrected in two places,
`reduce` and the creation of variables in `scope()`; no module is patched. See `KerasStrategy` for the list.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.aliases import Function, Structure
from tfdist.cluster.spec import ClusterSpec, ClusterTask
from tfdist.collectives import own_time
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.own_time import OwnTime
from tfdist.compat import call_stack, keras_internals, tf_internals, unsupported
from tfdist.config import StrategyConfig, StrategyTraits, features
from tfdist.feature import Feature
from tfdist.replicas import declared_weights, random_seeds
from tfdist.replicas.moving_statistics import MovingStatistics
from tfdist.strategies import distributed_data
from tfdist.strategy import Attaches, Trains

_KEYS = 100_000  # number of collective keys reserved for one strategy
_GROUP_KEYS = 10  # number of group keys reserved for one group of its workers


class KerasStrategy(distributed_data.DataDistribution, tf.distribute.Strategy):
    """Base class of the strategies, under which stock `model.fit` computes correct results.

    - `reduce` takes the structures and the scalars with `axis=0` that Keras 3 gives it (keras#20585).
    - Non-trainable floating-point model variables (BatchNorm's moving statistics) average over the replicas.
      Keras creates them without aggregation, so that every replica keeps its own and they drift apart.
    - A weight with `aggregation="sum"` or `"only_first_replica"` is combined over the replicas at the end of each step (see `declared_weights`).
    - Each replica draws its own dropout masks: its seed generators start from a different seed.
    - Each replica draws its own numbers from `tf.random.*`, `tf.nn.dropout` and `keras.random.*` without a seed.
    - `float`, `int` and NumPy read a variable, as they do without a strategy.
    - Batches are split evenly and in order (see `DataDistribution`).
    """

    # `create_strategy` sets these, which `Strategy` describes.
    traits = StrategyTraits()
    config = StrategyConfig("")
    features: Sequence[Feature] = ()
    batch_shares: Any = None
    cluster: ClusterSpec | None = None
    cluster_task: ClusterTask | None = None
    transport = transport_reason = ""
    communicator: Communicator | None = None
    mesh: Any = None
    unlike_processors: tuple[int, ...] = ()
    # The Trainer and its loops set these.
    batches_are_parts = False
    engine: Attaches | None = None
    trainer: Trains | None = None
    flags: tf.Variable | None = None
    gauges: Sequence[tf.Variable] = ()
    own_time: OwnTime | None = None
    batch_record: Any = None

    def __init__(self, *args: Any, **kwargs: Any):
        self.statistics = MovingStatistics(self)
        self.combined_weights: set[int] = set()
        self._view = threading.local()  # each replica runs in a thread of its own
        self._steps = 0  # number of the Trainer's steps that are running or being traced
        self.executions = 0
        super().__init__(*args, **kwargs)
        unsupported.explain_builds(super().extended)

    def configure(self, config: StrategyConfig) -> None:
        """Sets the options, and creates the features that they ask for. Models that are compiled later follow them."""
        self.config = config
        self.features = features.make(self)

    @property
    def trains_alone(self) -> bool:
        """True if each worker applies the gradients of its own examples."""
        return any(feature.trains_alone for feature in self.features)

    @property
    def splits_state(self) -> bool:
        """True if workers hold parts of the weights or of the optimizer's state."""
        return any(feature.splits_state for feature in self.features)

    def sum_over_pieces(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a value over the workers that hold other pieces of the model than this one. A collective."""
        for feature in self.features:
            value = feature.sum_over_pieces(value)
        return value

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over all workers; 1 within `as_one_replica`."""
        return 1 if getattr(self._view, "one", False) else super().num_replicas_in_sync

    @contextlib.contextmanager
    def as_one_replica(self) -> Iterator[None]:
        """Lets this replica's step compute its loss as if there were no other.

        Keras divides a loss by the number of replicas, but only if it reduces the loss itself. It does not if a function
        returns one number, nor in a `train_step` with a custom loss. So the caller divides, for any loss.
        """
        with self._seen_as(True):
            yield

    def as_it_is(self) -> contextlib.AbstractContextManager[None]:
        """Suspends `as_one_replica` within the context, for example for a variable that a step creates."""
        return self._seen_as(False)

    @contextlib.contextmanager
    def _seen_as(self, one: bool) -> Iterator[None]:
        before = getattr(self._view, "one", False)
        self._view.one = one
        try:
            yield
        finally:
            self._view.one = before

    @property
    def extended(self) -> tf.distribute.StrategyExtended:
        """TensorFlow's `extended`. Raises in a Trainer's step for an optimizer whose gradients the Trainer does not reduce."""
        if self._steps:
            optimizer = call_stack.applying_optimizer()
            if optimizer is not None:
                unsupported.check_applied(optimizer)
        return super().extended

    @contextlib.contextmanager
    def only_known_optimizers(self) -> Iterator[None]:
        """Raises, with several replicas, for optimizers whose gradients the Trainer does not reduce."""
        several = int(self.num_replicas_in_sync > 1)
        self._steps += several
        try:
            yield
        finally:
            self._steps -= several

    @property
    def num_workers(self) -> int:
        """The number of processes with replicas, this one included."""
        return 1

    def scope(self) -> Any:
        """Returns TensorFlow's scope, with a creator that configures Keras' variables."""
        if tf.distribute.get_strategy() is self:  # Keras enters the scope again inside fit: one creator is enough
            return super().scope()
        return self._creating_scope()

    @contextlib.contextmanager
    def _creating_scope(self) -> Iterator[Any]:
        def create(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
            return tf_internals.make_readable_as_number(self._create_variable(next_creator, **kwargs))

        with super().scope(), tf.variable_creator_scope(create):
            yield self

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        if kwargs.get("name") == keras_internals.SEED_STATE:
            return self._create_seed(next_creator, **kwargs)
        kind = _declared_aggregation(kwargs)
        if kind in ("sum", "only_first_replica") and super().num_replicas_in_sync > 1:
            variable = self._create_copies(next_creator, **kwargs)
            declared_weights.declare(self, variable, kind, kwargs.get("name") or "")
            return variable
        if kind != "mean" and not _is_statistic(kwargs):
            variable = next_creator(**kwargs)
            if _is_integer_sum(variable):
                self._assign_once(variable)
            return variable
        kwargs["aggregation"] = tf.VariableAggregation.MEAN
        if self.traits.shared_variables:  # one statistic, rather than one for each replica
            return next_creator(**kwargs)
        # Each replica writes its own copy, and reads outside of replicas average them: steps need no communication.
        variable = next_creator(**{**kwargs, "synchronization": tf.VariableSynchronization.ON_READ})
        # The sum of accumulators may be averaged; where workers train alone, each continues with the gradients of its own.
        if not (self.trains_alone and kwargs.get("colocate_with") is not None):
            self.statistics.add(variable)
        if kind is not None:
            declared_weights.declare(self, variable, kind, kwargs.get("name") or "")
        return variable

    def _create_copies(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        """Creates a variable whose copies the replicas assign separately; reading it outside of replicas is local."""
        return next_creator(**{**kwargs, "aggregation": tf.VariableAggregation.NONE})

    def _assign_once(self, variable: tf.Variable) -> None:
        """Makes replica 0 hold a value that is assigned outside of replicas to a sum of integers, and the others 0.

        TensorFlow divides the value by the number of replicas, and truncates. Metrics have such variables.
        """
        components = self.experimental_local_results(variable)

        def assign_components(value: Structure) -> None:
            for replica, component in zip(self.local_replicas, components, strict=True):
                with tf.device(component.device):
                    component.assign(value if replica == 0 else tf.zeros_like(component))

        self._replace_assign(variable, assign_components)

    def _replace_assign(self, variable: tf.Variable, assign_components: Callable[[Structure], None]) -> None:
        """Makes an assignment outside of replicas call `assign_components`. Within replicas TensorFlow's own assigns the replica's copy."""
        original_assign = variable.assign

        def assign(value: Structure, *args: Any, **kwargs: Any) -> Any:
            if tf.distribute.get_strategy() is self and not tf.distribute.in_cross_replica_context():
                return original_assign(value, *args, **kwargs)
            assign_components(value)
            return variable

        variable.assign = assign

    def _create_seed(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        """Creates a seed generator's state, `[seed, counter]`, with a different seed on each replica."""
        variable = next_creator(**kwargs)
        components = self.experimental_local_results(variable)
        for replica, component in zip(self.local_replicas, components, strict=True):
            component.assign_add(tf.constant([replica * random_seeds.SEED_STRIDE, 0], component.dtype))
        if super().num_replicas_in_sync > 1:
            # Model.set_state_tree assigns one value for all replicas.
            self._replace_assign(
                variable, lambda value: random_seeds.assign_seed(components, self.local_replicas, value)
            )
        return variable

    def decorrelate_random_numbers(self) -> None:
        """Makes the next random numbers of this replica's step differ from those of the others.

        Replicas of one process are traced in turn: a replica that has waited for another one must call this again.
        """
        move = getattr(self._view, "move", None)
        if move is not None:
            move()

    def _drawing(self, fn: Function, move: Callable[[int], None]) -> Function:
        """Wraps `fn` so that each replica draws its own random numbers."""
        converted = tf_internals.convert_as_caller(fn)
        generator = random_seeds.GlobalSeedGenerator.for_current_thread(self)

        def replica(*args: Any, **kwargs: Any) -> Structure:
            context = tf.distribute.get_replica_context()
            number = tf.get_static_value(context.replica_id_in_sync_group)
            self._view.move = lambda: move(int(number))
            self.decorrelate_random_numbers()
            generator.install()
            try:
                return converted(*args, **kwargs)
            finally:
                self._view.move = None

        return tf.autograph.experimental.do_not_convert(replica)

    def run(
        self, fn: Function, args: Any = (), kwargs: Any = None, options: tf.distribute.RunOptions | None = None
    ) -> Structure:
        """Runs `fn` on each replica, as TensorFlow's own `run`."""
        self.statistics.mark_possibly_changed()
        several = super().num_replicas_in_sync > 1
        with random_seeds.replica_seed(self.local_replicas[0] if several else 0) as move:
            if several and not isinstance(fn, tf.types.experimental.PolymorphicFunction):
                fn = self._drawing(fn, move)
            return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: Structure, axis: int | None = None) -> Structure:
        """Reduces over replicas as TensorFlow's own `reduce`, also for the values that Keras 3 passes.

        Args:
            reduce_op: `tf.distribute.ReduceOp` or its name, `"SUM"` or `"MEAN"`.
            value: A value per replica, or a structure of such values; each is reduced.
            axis: The axis also reduced within each replica, or None. On scalars 0 means None.
        """
        local = self.experimental_local_results
        if tf.nest.is_nested(value):
            return tf.nest.map_structure(lambda v: self.reduce(reduce_op, v, axis), value)
        if isinstance(value, (bool, int, float)):  # a log of a custom train_step
            value = tf.convert_to_tensor(value)
        if self.statistics.synchronized and value in self.statistics:  # all copies are equal to their mean
            return tf.convert_to_tensor(local(value)[0])
        # Keras passes axis=0 for scalars, too, which have no axis.
        if axis == 0 and all(v.shape.rank == 0 for v in local(value)):
            axis = None
        return own_time.leave_out_wait(self, value, lambda: super(KerasStrategy, self).reduce(reduce_op, value, axis))


class UniqueCollectiveKeys:
    """A mixin that reserves collective keys for each strategy of a process; all workers create their strategies in the same order."""

    _number = itertools.count(1)

    def __init__(self, *args: Any, first_member: int = 0, **kwargs: Any):
        # As in TensorFlow's tests: two strategies with equal keys would mix up their collectives. Several groups of workers create
        # their strategies at the same time.
        tf_internals.set_collective_keys(self, next(self._number) * _KEYS + first_member * _GROUP_KEYS)
        super().__init__(*args, **kwargs)


def _declared_aggregation(kwargs: dict[str, Any]) -> declared_weights.Kind | None:
    """Returns the declared aggregation of a Keras weight that replicas assign; None for other variables.

    TensorFlow itself handles `tf.Variable(aggregation=...)`, an optimizer's variables and means of integers.
    """
    kind = declared_weights.KINDS.get(kwargs.get("aggregation"))
    if (
        kind is None
        or kwargs.get("trainable", True)
        or kwargs.get("colocate_with") is not None
        or kwargs.get("synchronization") not in (None, tf.VariableSynchronization.AUTO)
        or not call_stack.is_creating_keras_weight()
    ):
        return None
    dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
    allowed = {"sum": not dtype.is_bool, "mean": dtype.is_floating, "only_first_replica": True}
    if dtype == tf.string or not allowed[kind]:
        return None
    return kind


def _is_integer_sum(variable: tf.Variable) -> bool:
    """Returns whether a variable has a copy on each replica, of integers, and is read as their sum."""
    return (
        isinstance(variable, tf_internals.SyncOnReadVariable)
        and variable.aggregation == tf.VariableAggregation.SUM
        and variable.dtype.is_integer
    )


def _is_statistic(kwargs: dict[str, Any]) -> bool:
    """Returns whether a creator's arguments describe a BatchNorm-like statistic.

    Optimizer slots pass through the same creator; Keras colocates each with its model variable. Among the slots
    gradient accumulators are statistics, too: each replica accumulates its own gradients.
    """
    value = kwargs.get("initial_value")
    dtype = kwargs.get("dtype") or getattr(value, "dtype", None)
    return (
        not kwargs.get("trainable", True)
        and dtype is not None
        and tf.as_dtype(dtype).is_floating
        and kwargs.get("aggregation") in (None, tf.VariableAggregation.NONE)
        and kwargs.get("synchronization") in (None, tf.VariableSynchronization.AUTO)
        and (kwargs.get("colocate_with") is None or keras_internals.GRADIENT_ACCUMULATOR in (kwargs.get("name") or ""))
    )
