"""`create_strategy`: the `tf.distribute` strategies, made right for Keras 3.

Each class is a thin subclass of TensorFlow's own (so `isinstance` holds, which Keras relies on). What
stock Keras 3 gets wrong is cured in two places, `reduce` and the creation of variables in `scope()`; no
module is patched. See `_KerasStrategy` for the list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values  # for central storage alone
from tensorflow.python.eager import context as eager_context

from tfdist.cluster import ClusterSpec, TaskSpec, from_environment
from tfdist.config import StrategyConfig
from tfdist.errors import ConfigError, unknown

# The private names of Keras 3 that this file leans on; tests/test_keras_seams.py watches them.
KERAS_SYMBOLIC_BUILD = "_maybe_symbolic_build"
KERAS_SEED_VARIABLE = "seed_generator_state"

# Added to a dropout seed once per replica. Odd and large, so that the seeds of two layers, which Keras draws
# below 1e9, do not meet by being counted up.
_SEED_STRIDE = 0x5851F42D


class _KerasStrategy:
    """What every strategy here adds to TensorFlow's own, so that stock `model.fit` is right under it.

    - `reduce` takes the structures and the scalars with `axis=0` that Keras 3 gives it (keras#20585).
    - Non-trainable floating-point model variables (BatchNorm's moving statistics) average over the replicas.
      Keras creates them without aggregation, so that every replica keeps its own and they drift apart.
    - Each replica draws its own dropout masks: its seed generators start from a seed of its own.
    - Whole batches are dealt out in their order, never whole files (which permutes `predict`'s results).
    """

    # Whether the statistics are one variable (central storage) rather than one for each replica.
    _shared_variables = False

    def __init__(self, *args: Any, **kwargs: Any):
        self._statistics: dict[int, weakref.ref[tf.Variable]] = {}
        self._numbers = itertools.count()
        self._synchronized = False
        self._averaged: tuple[int, ...] = ()  # what `_average` was compiled for
        self._average: Callable[[], None] = self._average_statistics
        super().__init__(*args, **kwargs)

    # -- variable creation

    def scope(self) -> Any:
        """Returns TensorFlow's scope, with the creator that gives Keras' variables what they need."""
        # Keras enters the scope again inside fit: one creator is enough.
        return super().scope() if tf.distribute.get_strategy() is self else self._creating_scope()  # type: ignore[misc]

    @contextlib.contextmanager
    def _creating_scope(self) -> Iterator[Any]:
        with super().scope(), tf.variable_creator_scope(self._create_variable):  # type: ignore[misc]
            yield self

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        if kwargs.get("name") == KERAS_SEED_VARIABLE:
            return self._create_seed(next_creator, **kwargs)
        if not _is_statistic(kwargs):
            return next_creator(**kwargs)
        kwargs["aggregation"] = tf.VariableAggregation.MEAN
        if self._shared_variables:
            return next_creator(**kwargs)
        # Written by each replica for itself, averaged when read outside of one: no traffic in the step.
        variable = next_creator(**{**kwargs, "synchronization": tf.VariableSynchronization.ON_READ})
        self._statistics[next(self._numbers)] = weakref.ref(variable)
        return variable

    def _create_seed(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        """Creates a seed generator's state, `[seed, counter]`, with another seed on each replica."""
        variable = next_creator(**kwargs)
        ids = self.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)  # type: ignore[attr-defined]
        components = self.experimental_local_results(variable)  # type: ignore[attr-defined]
        for replica, component in zip(self.experimental_local_results(ids), components, strict=True):  # type: ignore[attr-defined]
            component.assign_add(tf.constant([int(replica) * _SEED_STRIDE, 0], component.dtype))
        return variable

    # -- moving statistics

    @property
    def statistics(self) -> list[tf.Variable]:
        """The variables of which each replica keeps its own value between two calls of `synchronize`."""
        return [variable for ref in self._statistics.values() if (variable := ref()) is not None]

    @property
    def synchronized(self) -> bool:
        """Whether every replica is known to hold the same statistics, so that reading them needs no peer."""
        return self._synchronized

    def synchronize(self) -> None:
        """Sets every replica's statistics to their mean over all replicas.

        A collective: under several workers, every worker must call it. From then until `desynchronize` (or the
        next pass over data) reading a statistic is local, so that one worker alone may save the model.
        """
        if self._statistics and not self._synchronized:
            living = self.statistics  # held, so that none dies on one worker alone before this is over
            self._forget_the_dead()
            names = tuple(self._statistics)
            if self._averaged != names:
                self._averaged, self._average = names, tf.function(self._average_statistics, autograph=False)
            if names:
                self._average()
            del living
        self._synchronized = True

    def _average_statistics(self) -> None:
        statistics = self.statistics
        means = self.extended.batch_reduce_to(  # type: ignore[attr-defined]
            tf.distribute.ReduceOp.MEAN, [(variable, variable) for variable in statistics]
        )
        for variable, mean in zip(statistics, means, strict=True):
            components = self.experimental_local_results(variable)  # type: ignore[attr-defined]
            for component, value in zip(components, self.experimental_local_results(mean), strict=True):  # type: ignore[attr-defined]
                component.assign(value)

    def _forget_the_dead(self) -> None:
        """Drops the statistics of models that are gone."""
        alive = self._alive_everywhere([ref() is not None for ref in self._statistics.values()])
        self._statistics = {
            number: ref for (number, ref), lives in zip(self._statistics.items(), alive, strict=True) if lives
        }

    def _alive_everywhere(self, alive: Sequence[bool]) -> Sequence[bool]:
        return alive

    def desynchronize(self) -> None:
        """Says that replicas may have changed their statistics since `synchronize`."""
        self._synchronized = False

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on each replica, as TensorFlow's own `run`."""
        self.desynchronize()
        return super().run(fn, args, kwargs, options)  # type: ignore[misc]

    # -- reductions and data

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Reduces over replicas as TensorFlow's own `reduce`, also for what Keras 3 gives it.

        Args:
            reduce_op: `tf.distribute.ReduceOp` or its name, `"SUM"` or `"MEAN"`.
            value: A value per replica, or a structure of such values, of which each is reduced.
            axis: The axis also reduced within each replica, or None. On scalars 0 means None.
        """
        if tf.nest.is_nested(value):
            if sys._getframe(1).f_code.co_name == KERAS_SYMBOLIC_BUILD:
                # Keras wants one batch to learn its shapes from: a local one will do, and needs neither
                # numbers nor equal shapes on all replicas.
                return tf.nest.map_structure(lambda v: self.experimental_local_results(v)[0], value)  # type: ignore[attr-defined]
            return tf.nest.map_structure(lambda v: self.reduce(reduce_op, v, axis), value)
        if self._synchronized and any(ref() is value for ref in self._statistics.values()):
            return tf.convert_to_tensor(self.experimental_local_results(value)[0])  # type: ignore[attr-defined]
        if axis == 0 and all(v.shape.rank == 0 for v in self.experimental_local_results(value)):  # type: ignore[attr-defined]
            axis = None
        return super().reduce(reduce_op, value, axis)  # type: ignore[misc]

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any = None) -> Any:
        """Splits each (global) batch of `dataset` over the replicas, in order.

        TensorFlow's AUTO sharding deals out whole files where it can, which permutes the results of `predict`
        and gives workers unequal shares; here AUTO means DATA. An explicit policy is kept.
        """
        policy = tf.data.experimental.AutoShardPolicy
        if dataset.options().experimental_distribute.auto_shard_policy == policy.AUTO:
            by_data = tf.data.Options()
            by_data.experimental_distribute.auto_shard_policy = policy.DATA
            dataset = dataset.with_options(by_data)
        return self._synchronizing(super().experimental_distribute_dataset(dataset, options))  # type: ignore[misc]

    def distribute_datasets_from_function(self, dataset_fn: Callable[..., tf.data.Dataset], options: Any = None) -> Any:
        """Distributes `dataset_fn(InputContext)`, one dataset of per-replica batches for each worker."""
        return self._synchronizing(super().distribute_datasets_from_function(dataset_fn, options))  # type: ignore[misc]

    def _synchronizing(self, dataset: Any) -> Any:
        """Makes each pass over `dataset` begin with equal statistics on all replicas.

        Without it `evaluate` and `predict` would use each replica's own, and give another result than the saved
        model does. A pass is the one moment that Keras lets a strategy see before its test steps.
        """
        kind = type(dataset)
        if "_tfdist" in kind.__dict__:
            return dataset

        def begin(distributed: Any) -> Any:
            if tf.executing_eagerly():
                self.synchronize()
                self.desynchronize()
            return kind.__iter__(distributed)

        dataset.__class__ = type(kind.__name__, (kind,), {"__iter__": begin, "_tfdist": True})
        return dataset


class OneDeviceStrategy(_KerasStrategy, tf.distribute.OneDeviceStrategy):
    """Trains on one device."""

    _shared_variables = True


class MirroredStrategy(_KerasStrategy, tf.distribute.MirroredStrategy):
    """Trains on several devices of one machine, each with a copy of the variables."""


class MultiWorkerMirroredStrategy(_KerasStrategy, tf.distribute.MultiWorkerMirroredStrategy):
    """Trains on the devices of several workers, each with a copy of the variables."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._sum = tf.function(lambda values: self.reduce(tf.distribute.ReduceOp.SUM, values))

    def _alive_everywhere(self, alive: Sequence[bool]) -> Sequence[bool]:
        # Python's garbage collector frees a model on one worker earlier than on another, but all must average the
        # same variables. Variables are created, and so listed, alike on all.
        mine = tf.constant(alive, tf.int32)
        counts = self._sum(self.experimental_distribute_values_from_function(lambda _: mine))
        return [count == self.num_replicas_in_sync for count in counts.numpy()]


class CentralStorageStrategy(_KerasStrategy, tf.distribute.experimental.CentralStorageStrategy):
    """Trains on several devices of one machine, with one copy of the variables."""

    _shared_variables = True

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        # Keras' metrics and seed generators add to themselves by `assign(self + value)`. TensorFlow would sum that
        # over the replicas into one variable and so count the old value once per replica.
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return self._create_per_replica(next_creator, **kwargs)
        return super()._create_variable(next_creator, **kwargs)

    def _create_seed(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return super()._create_seed(functools.partial(self._create_per_replica, next_creator), **kwargs)

    def _create_per_replica(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        components = [next_creator(**kwargs) for _ in range(self.num_replicas_in_sync)]
        if len(components) == 1:
            return components[0]
        return values.SyncOnReadVariable(self, [component.get() for component in components], kwargs["aggregation"])


class TPUStrategy(_KerasStrategy, tf.distribute.TPUStrategy):
    """Trains on the cores of a TPU. Never run by tfdist's own tests."""


def _is_statistic(kwargs: dict[str, Any]) -> bool:
    """Whether a creator's arguments describe a BatchNorm-like statistic.

    Optimizer slots pass through the same creator; Keras colocates each with its model variable.
    """
    value = kwargs.get("initial_value")
    dtype = kwargs.get("dtype") or getattr(value, "dtype", None)
    return (
        not kwargs.get("trainable", True)
        and dtype is not None
        and tf.as_dtype(dtype).is_floating
        and kwargs.get("aggregation") in (None, tf.VariableAggregation.NONE)
        and kwargs.get("synchronization") in (None, tf.VariableSynchronization.AUTO)
        and kwargs.get("colocate_with") is None
    )


def create_strategy(
    strategy: str | StrategyConfig = "mirrored",
    cluster: tuple[ClusterSpec, TaskSpec] | None = None,
    **options: Any,
) -> tf.distribute.Strategy:
    """Creates a `tf.distribute` strategy under which stock Keras 3 `model.fit` is right.

    Call it before anything else of TensorFlow: a multi-worker strategy starts the server of this process, and virtual
    CPUs can only be made before TensorFlow has looked at its devices.

    Args:
        strategy: `"one_device"`, `"mirrored"`, `"multi_worker_mirrored"`, `"central_storage"` or `"tpu"`, or a
            `StrategyConfig`.
        cluster: For `multi_worker_mirrored`: the cluster and this process's task in it. None means TF_CONFIG, and
            without TF_CONFIG a cluster of this process alone.
        **options: Fields of `StrategyConfig`, such as `devices=2` (virtual CPUs), `devices="GPU:0,GPU:1"`,
            `implementation="ring"`, `bytes_per_pack=8_000_000`, `timeout_seconds=600`.

    Returns:
        The strategy: use its `scope()` to build and compile the model, then call `model.fit`.

    Raises:
        ConfigError: A name or option is unknown or does not fit, TF_CONFIG is faulty, TensorFlow was already in use,
            or there is no TPU.
    """
    if isinstance(strategy, str):
        known = {field.name for field in dataclasses.fields(StrategyConfig)} - {"name"}
        if faults := [unknown("option of create_strategy", name, known) for name in options if name not in known]:
            raise ConfigError(faults)
        strategy = StrategyConfig(strategy, **options)
    if faults := list(strategy.faults()):
        raise ConfigError(faults)
    if strategy.virtual_cpus:
        _make_virtual_cpus(strategy.virtual_cpus)
    return _FACTORIES[strategy.name](strategy, cluster)


def _one_device(config: StrategyConfig, _: Any) -> tf.distribute.Strategy:
    default = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    return OneDeviceStrategy((config.device_names or [default])[0])


def _mirrored(config: StrategyConfig, _: Any) -> tf.distribute.Strategy:
    # NCCL is TensorFlow's choice wherever there are GPUs. On CPUs it copies through one device, which has no packs.
    operations = {
        "auto": lambda: None,
        "ring": tf.distribute.ReductionToOneDevice,
        "nccl": lambda: tf.distribute.NcclAllReduce(num_packs=1),
    }[config.implementation]()
    return MirroredStrategy(config.device_names or None, operations)


def _central_storage(config: StrategyConfig, _: Any) -> tf.distribute.Strategy:
    return CentralStorageStrategy(config.device_names or None)


def _multi_worker_mirrored(
    config: StrategyConfig, cluster: tuple[ClusterSpec, TaskSpec] | None
) -> tf.distribute.Strategy:
    cluster = cluster or from_environment()
    resolver = None
    if cluster is not None:
        spec, task = cluster
        if spec.jobs.get("ps"):
            raise ConfigError("multi_worker_mirrored has no parameter servers: take job 'ps' out of the cluster.")
        if task.type == "evaluator":
            raise ConfigError("An evaluator does not train: use strategy one_device in its process.")
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({job: list(addresses) for job, addresses in spec.jobs.items()}),
            task_type=task.type,
            task_id=task.index,
            rpc_layer="grpc",
        )
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=config.bytes_per_pack,
        timeout_seconds=config.timeout_seconds or None,
        implementation=tf.distribute.experimental.CommunicationImplementation[config.implementation.upper()],
    )
    try:
        strategy = MultiWorkerMirroredStrategy(resolver, options)
    except RuntimeError as e:
        if "program startup" not in str(e):
            raise
        raise ConfigError(
            "TensorFlow was already in use when multi_worker_mirrored was created. Create the strategy (or the "
            "tfdist.Trainer) first, before any tensor, variable, model or dataset."
        ) from e
    _agree_on_seed(strategy)
    return strategy


def _tpu(config: StrategyConfig, _: Any) -> tf.distribute.Strategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=config.devices)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, tf.errors.OpError) as e:
        raise ConfigError(
            f"No TPU was found for strategy.devices={config.devices!r} (a TPU's name or address; empty means this "
            f"host's): {str(e).splitlines()[0]}"
        ) from e
    return TPUStrategy(resolver)


_FACTORIES: dict[str, Callable[..., tf.distribute.Strategy]] = {
    "one_device": _one_device,
    "mirrored": _mirrored,
    "multi_worker_mirrored": _multi_worker_mirrored,
    "central_storage": _central_storage,
    "tpu": _tpu,
}


def _make_virtual_cpus(count: int) -> None:
    """Splits this process's CPU into `count` virtual devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as e:
        # In use already: fine where it was for the same number.
        if (found := len(tf.config.list_logical_devices("CPU"))) != count:
            raise ConfigError(
                f"strategy.devices={count} virtual CPUs cannot be made: TensorFlow was already in use, with {found}. "
                "Create the strategy (or the tfdist.Trainer) first, before any tensor, variable, model or dataset."
            ) from e


def _agree_on_seed(strategy: tf.distribute.Strategy) -> None:
    """Gives every worker the chief's random seed, where the user has set none.

    Each worker takes its share of what it has shuffled itself: unless all shuffle alike, some examples are trained
    on twice in an epoch and others not at all.
    """
    seed = random.SystemRandom().randrange(2**31)
    seeds = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(seed if context.replica_id_in_sync_group == 0 else 0, tf.int64)
    )
    agreed = int(strategy.reduce("SUM", seeds))
    if eager_context.global_seed() is None:
        tf.random.set_seed(agreed)
