"""The interface of a strategy: the attributes of tfdist that packages share, and the members of `tf.distribute.Strategy` that they use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from tfdist.aliases import Data, Function, Structure
from tfdist.cluster.spec import ClusterSpec, ClusterTask
from tfdist.config import StrategyConfig, StrategyTraits
from tfdist.feature import Feature

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class Trains(Protocol):
    """The part of a Trainer that the models of its scope call."""

    @property
    def is_at_work(self) -> bool:
        """Returns whether a loop of the Trainer runs."""

    def call(self, name: str, method: Function, model: keras.Model, args: Sequence[Any], kwargs: Any) -> Any:
        """Runs the Trainer's counterpart of Keras' `method` for `model`."""

    def write_together(self, saveable: Any, path: str, write: Callable[[], None]) -> bool:
        """Writes a file of a model or layer whose state is in parts on the workers, on the chief. A collective, if it returns True.

        Returns False, on all workers, if no state is in parts, or if callbacks that not all workers have may be running.
        """

    def on_model_saved(self, model: keras.Model) -> None:
        """Removes the backups of the finished training runs of `model`, after `Model.save` or `Model.export`."""


class Attaches(Protocol):
    """The part of an `Engine` that a model without a Trainer calls."""

    def attach(self, model: keras.Model) -> None:
        """Installs the engine's step functions in a model."""


class Statistics(Protocol):
    """The part of `MovingStatistics` that other packages use."""

    synchronized: bool
    undeclared: dict[str, bool]

    def __contains__(self, variable: object) -> bool: ...
    def add_local(self, local_steps: Any) -> None: ...
    def show_shared(self) -> None: ...
    def synchronize(self) -> None: ...
    def desynchronize(self) -> None: ...
    def mark_possibly_changed(self) -> None: ...
    def average(self, variables: Sequence[tf.Variable]) -> None: ...
    def caller_marks_changes(self) -> contextlib.AbstractContextManager[None]: ...


class Strategy(Protocol):
    """A strategy of tfdist, as `KerasStrategy` implements it. For TensorFlow's own strategies `as_ours` returns None.

    Attributes:
        config: The options with which `create_strategy` created the strategy, the only place of their values. Read-only.
        features: The features that they ask for, in order.
        traits: The traits that other packages test instead of the strategy's type.
        cluster: The cluster of `parameter_server`, for which this process is the chief; else None.
        cluster_task: The cluster and this process's task in it, if the replicas are in several processes; else None.
        batch_shares: The `BatchShares` of the workers; None if batches are divided evenly.
        batches_are_parts: Whether a batch of a worker's own dataset is this worker's part of the global batch; else it has the global size.
        transport: The name of the transport of gradients; empty if all replicas are in one process.
        transport_reason: Why gradients use this transport.
        communicator: The `Communicator` of the replicas, once `communicator_for` has created it.
        mesh: The `Mesh` of a model whose variables live as pieces, of which this strategy connects the workers with equal pieces; else None.
        unlike_processors: Each worker's number of threads if the workers' processors differ; else empty.
        num_workers: The number of processes with replicas, this one included.
        local_replicas: The numbers of this process's replicas among all replicas.
        trainer: The Trainer of the models that are created in the strategy's scope, or None.
        engine: The engine of models that are trained without a Trainer, or None.
        statistics: The variables with a separate value on each replica between steps.
        combined_weights: The ids of the variables whose copies are combined after the running step (see `declared_weights`).
        flags: What the ranks agree on at a step: this rank's flags, which the next step averages over all ranks, `[n]` float32; or None.
        gauges: Variables of measurements in steps, which backups do not contain.
        own_time: The `OwnTime` of this task's steps, which an execution creates; None if there is no other task to wait for.
        batch_record: The `BatchRecord` of the examples of training steps, for `tfdist verify`; else None.
        executions: The number of executions of models' functions so far; equal on all tasks between two executions.
    """

    config: StrategyConfig
    features: Sequence[Feature]
    traits: StrategyTraits
    cluster: ClusterSpec | None
    cluster_task: ClusterTask | None
    batch_shares: Any
    batches_are_parts: bool
    transport: str
    transport_reason: str
    communicator: Any
    mesh: Any
    unlike_processors: tuple[int, ...]
    trainer: Trains | None
    engine: Attaches | None
    combined_weights: set[int]
    flags: tf.Variable | None
    gauges: Sequence[tf.Variable]
    own_time: Any
    batch_record: Any
    executions: int

    @property
    def trains_alone(self) -> bool: ...
    @property
    def splits_state(self) -> bool: ...
    @property
    def statistics(self) -> Statistics: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def local_replicas(self) -> list[int]: ...
    @property
    def num_replicas_in_sync(self) -> int: ...
    @property
    def extended(self) -> tf.distribute.StrategyExtended: ...

    def begin_pass(self) -> None:
        """Makes statistics equal on all replicas, before a loop passes over data. A collective."""

    def source(self, dataset: Data, steps: int | None) -> Any:
        """Returns the `DataSource` of a loop over a dataset of batches of the global size."""

    def source_from_stored(self, data: Data, start: int, steps: int | None) -> Any:
        """Returns the `DataSource` of a loop over data that are read from storage."""

    def source_from_function(self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> Any:
        """Returns the `DataSource` of a loop over the datasets that a function makes."""

    def as_one_replica(self) -> contextlib.AbstractContextManager[None]:
        """Lets this replica's step compute its loss as if there were no other replica."""

    def as_it_is(self) -> contextlib.AbstractContextManager[None]:
        """Suspends `as_one_replica` within the context."""

    def only_known_optimizers(self) -> contextlib.AbstractContextManager[None]:
        """Raises, with several replicas, for optimizers whose gradients the Trainer does not reduce."""

    def decorrelate_random_numbers(self) -> None:
        """Lets this replica's next random numbers differ from the other replicas'."""

    def configure(self, config: StrategyConfig) -> None:
        """Sets the options, and creates the features that they ask for."""

    def sum_over_pieces(self, value: Any) -> Any:
        """Returns the sum of a value over the workers that hold other pieces of the model than this one. A collective."""

    # Of tf.distribute.Strategy.
    def scope(self) -> contextlib.AbstractContextManager[Any]: ...
    def run(self, fn: Function, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Structure: ...
    def reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: Structure, axis: int | None = None
    ) -> Structure: ...
    def experimental_local_results(self, value: Structure) -> tuple[Structure, ...]: ...
    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> Data: ...
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[tf.distribute.ValueContext], tf.Tensor]
    ) -> Structure: ...
    def distribute_datasets_from_function(
        self, dataset_fn: Function, options: tf.distribute.InputOptions | None = None
    ) -> Data: ...


def as_ours(strategy: object) -> Strategy | None:
    """Returns a strategy with tfdist's attributes; None for one of TensorFlow's own, such as its default one.

    Args:
        strategy: The strategy of a model, or `tf.distribute.get_strategy()`.
    """
    return cast(Strategy, strategy) if hasattr(strategy, "statistics") else None
