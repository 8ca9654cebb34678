"""The distribution of data to a strategy's replicas, and the start of a pass over the data."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.aliases import Data, DataIterator, Function, Structure
from tfdist.collectives.ranks import Ranks
from tfdist.compat.tf_internals import num_replicas
from tfdist.data import arrays, resume, worker_rows
from tfdist.data.graph import walk
from tfdist.data.random_state import python_functions
from tfdist.data.source import DataSource
from tfdist.data.stored import StoredData
from tfdist.errors import ConfigError
from tfdist.replicas import batch_splitting, own_batches
from tfdist.replicas.batch_shares import BatchShares
from tfdist.replicas.moving_statistics import MovingStatistics

SOURCE = "_tfdist_source"  # attribute of a distributed dataset with its `DataSource`


class DataDistribution(tf.distribute.Strategy):
    """The data distribution of a strategy.

    - Data are sharded by batches, in order, never by files (which would permute `predict`'s results).
    - For a loop, batches are split evenly into `batch_splitting.SplitBatch`es, so that every replica has an example.
    """

    statistics: MovingStatistics
    batch_shares: BatchShares | None = None

    @functools.cached_property
    def local_replicas(self) -> list[int]:
        """The numbers of this process's replicas among all replicas."""
        numbers = self.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        return [int(number) for number in self.experimental_local_results(numbers)]

    def begin_pass(self) -> None:
        """Makes statistics equal on all replicas, before a loop passes over data. A collective.

        Otherwise `evaluate` and `predict` would use each replica's own statistics, and their results would differ from the saved model's.
        """
        self.statistics.synchronize()
        self.statistics.mark_possibly_changed()

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> tf.distribute.DistributedDataset:
        """Splits each (global) batch of `dataset` over the replicas, in order.

        TensorFlow's AUTO policy shards by files where it can, which permutes the results of `predict`
        and gives workers unequal shares; here AUTO means DATA. An explicit policy is kept.

        Raises:
            ConfigError: The policy is FILE, and TensorFlow cannot share the dataset's files.
        """
        dataset = _by_data(dataset)
        distributed = self._share(copy_python_data(dataset), options)
        batches = int(dataset.cardinality())
        steps = batches if batches >= 0 else None
        distribute = functools.partial(self._share, options=options)
        setattr(distributed, SOURCE, self._source(dataset, distributed, distribute, steps))
        return distributed

    def source(self, dataset: tf.data.Dataset, steps: int | None) -> DataSource:
        """Returns the source of a loop over a dataset of (global) batches.

        With AutoShardPolicy.OFF each worker reads its entire own dataset, and each step takes from it the global batch size divided by
        the number of workers, or a batch if `batches_are_parts`. `steps` is the number of the dataset's batches, or None if unknown.

        Raises:
            ConfigError: As `experimental_distribute_dataset`.
        """
        if hasattr(dataset, SOURCE):
            data_source: DataSource = getattr(dataset, SOURCE)
            return data_source
        if not isinstance(dataset, tf.data.Dataset):  # distributed by TensorFlow
            return DataSource(dataset, steps=steps)
        dataset = _by_data(dataset)
        if worker_rows.is_own(dataset) and self._has_peers():
            return self._own_source(dataset)
        distribute: Function = self._share
        if self.batch_shares and batch_splitting.is_splittable(dataset.element_spec):
            distribute = self._pass_whole
        elif self._splits_batches(dataset):
            distribute = self._split
        return self._source(dataset, distribute(copy_python_data(dataset)), distribute, steps)

    def _source(
        self, dataset: tf.data.Dataset, distributed: Data, distribute: Function, steps: int | None
    ) -> DataSource:
        """Returns the source of a dataset that `distribute` has distributed, with the number of its batches, or None if unknown."""

        def open_at(number: int, done: int, ready: Callable[[], None]) -> DataIterator:
            resume.replay(dataset, number - 1)
            ready()
            return iter(distribute(copy_python_data(dataset.skip(done))))

        return DataSource(distributed, [dataset], steps, num_replicas(self), open_at)

    def _has_peers(self) -> bool:
        """Returns whether there are several workers."""
        return num_replicas(self) > len(self.extended.worker_devices)

    def _share(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> tf.distribute.DistributedDataset:
        """Calls TensorFlow's own `experimental_distribute_dataset`, and explains its errors about files."""
        try:
            return super().experimental_distribute_dataset(dataset, options)
        except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as e:
            policy = dataset.options().experimental_distribute.auto_shard_policy
            if policy != tf.data.experimental.AutoShardPolicy.FILE:
                raise
            raise ConfigError(
                "AutoShardPolicy.FILE gives each worker whole files, and TensorFlow finds no files that this dataset reads "
                f"({str(e).partition(':')[0]}). Leave the policy out, and each worker trains on its share of every batch, or set "
                "AutoShardPolicy.OFF if each worker makes a dataset of its own files."
            ) from e

    def _own_source(self, dataset: tf.data.Dataset) -> DataSource:
        """Returns the source of this worker's own dataset of batches, each of the global size or a worker's part. A collective."""
        replicas = len(self.extended.worker_devices)
        workers = 1 if self.batches_are_parts else num_replicas(self) // replicas
        size = arrays.batch_size(dataset)
        pieces = worker_rows.count_pieces(dataset, workers)

        def local_dataset(_: tf.distribute.InputContext) -> tf.data.Dataset:
            return own_batches.split_own_batches(dataset, size, workers, replicas, pieces)

        return self._source_from_function(local_dataset, None, deals=True, counts=True)

    def _splits_batches(self, dataset: tf.data.Dataset) -> bool:
        """Returns whether tfdist must split the batches: TensorFlow would not split them evenly, and workers do not read their own data."""
        replicas = num_replicas(self)
        if replicas == 1 or not batch_splitting.is_splittable(dataset.element_spec):
            return False
        policy = dataset.options().experimental_distribute.auto_shard_policy
        if self._has_peers():
            if policy != tf.data.experimental.AutoShardPolicy.DATA:
                return False
            # TensorFlow would train on parts of a batch that one worker's data lack, gives a worker with several replicas parts
            # that are not neighbors, and asks all workers before each step whether their data have ended.
            if int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY or len(self.extended.worker_devices) > 1:
                return True
        size = batch_splitting.static_batch_size(dataset.element_spec)
        return size is None or size % replicas > 0

    def _split(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
        replicas = num_replicas(self)

        def local_dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
            local = replicas // context.num_input_pipelines
            first = context.input_pipeline_id * local
            dealt = batch_splitting.split_batches(dataset, replicas, range(first, first + local))
            return batch_splitting.with_empty_parts_at_end(dealt) if self._has_peers() else dealt

        return super().distribute_datasets_from_function(local_dataset)

    def _pass_whole(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
        return super().distribute_datasets_from_function(lambda _: batch_splitting.whole_batches(dataset))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[..., tf.data.Dataset], options: tf.distribute.InputOptions | None = None
    ) -> tf.distribute.DistributedDataset:
        """Distributes `dataset_fn(InputContext)`, one dataset of per-replica batches for each worker."""
        source = self._source_from_function(dataset_fn, options, deals=False)
        setattr(source.data, SOURCE, source)
        return source.data

    def source_from_function(self, dataset_fn: Callable[..., tf.data.Dataset]) -> DataSource:
        """Returns the source of a loop over the datasets that a function makes, in which every replica has an example.

        A worker whose dataset has ended continues with a padding example that does not count, until all datasets have ended.
        """
        return self._source_from_function(dataset_fn, None, deals=True)

    def source_from_stored(self, data: StoredData, start: int, steps: int | None) -> DataSource:
        """Returns the source of a loop over stored data, of which each worker reads only its replicas' parts.

        Args:
            data: The data.
            start: The first step, counted over all epochs.
            steps: The number of steps; None means endless epochs, for training.
        """
        replicas = num_replicas(self)
        distribute = super().distribute_datasets_from_function
        make = None if data.splits_equally(replicas) else batch_splitting.SplitBatch

        def distributed(first_step: int) -> tf.distribute.DistributedDataset:
            def local_dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
                local = replicas // context.num_input_pipelines
                first = context.input_pipeline_id * local
                if self.batch_shares:
                    return data.parts(1, [0], first_step, make=lambda batch, _: batch_splitting.WholeBatch(batch))
                # Endless, also if the loop ends: else TensorFlow checks before each step, by a collective, whether all workers have data.
                return data.parts(replicas, range(first, first + local), first_step, make=make)

            return distribute(local_dataset)

        def open_at(number: int, done: int, ready: Callable[[], None]) -> DataIterator:
            ready()
            return iter(distributed(start + done))

        per_epoch = data.steps_per_epoch if steps is None else None
        return DataSource(distributed(start), [data.specimen()], steps, replicas, open_at, per_epoch)

    def _source_from_function(
        self,
        dataset_fn: Callable[..., tf.data.Dataset],
        options: tf.distribute.InputOptions | None,
        deals: bool,
        counts: bool = False,
    ) -> DataSource:
        """Returns the source of the datasets that a function makes for each worker.

        Args:
            dataset_fn: The function.
            options: TensorFlow's input options.
            deals: Whether every replica must have an example.
            counts: Whether batches of infinite datasets may be empty, too.
        """
        elements = len(self.extended.worker_devices)  # number of a step's elements
        datasets: dict[int, tf.data.Dataset] = {}  # each is made once, because a second one would shuffle differently
        steps: list[int | None] = []

        def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
            dataset = datasets[context.input_pipeline_id] = dataset_fn(context)
            sizes, batches = self._gather_batch_sizes(dataset)
            is_known = (batches >= 0).all()
            steps.append(math.ceil(batches.max() / elements) if is_known else None)
            return self._with_equal_steps(dataset, sizes, batches, deals, counts)

        def open_at(number: int, done: int, ready: Callable[[], None]) -> DataIterator:
            def remaining(context: tf.distribute.InputContext) -> tf.data.Dataset:
                dataset = datasets[context.input_pipeline_id]
                resume.replay(dataset, number - 1)
                sizes, batches = self._gather_batch_sizes(dataset)
                # This worker's data may have ended before the other workers' data.
                if deals and (batches != tf.data.INFINITE_CARDINALITY).any():
                    return self._with_equal_steps(dataset, sizes, batches, deals, counts).skip(done * elements)
                return self._with_equal_steps(resume.skip(dataset, done * elements), sizes, batches, deals, counts)

            distributed = distribute(remaining, options)
            ready()
            return iter(distributed)

        distribute = super().distribute_datasets_from_function
        distributed = distribute(make, options)
        return DataSource(distributed, list(datasets.values()), steps[0], 1, open_at)

    def _gather_batch_sizes(self, dataset: tf.data.Dataset) -> tuple[np.ndarray, np.ndarray]:
        """Returns each worker's batch size, -1 if unknown, and its number of batches. A collective of several workers."""
        size = None
        if batch_splitting.is_splittable(dataset.element_spec):
            size = batch_splitting.static_batch_size(dataset.element_spec)
        if size is None:
            size = -1
        local = len(self.extended.worker_devices)
        workers = Ranks(self, self.local_replicas[0] // local, list(map(str, range(num_replicas(self) // local))))
        sizes, batches = workers.gather(size, int(dataset.cardinality())).astype(np.int64).T
        return sizes, batches

    @staticmethod
    def _with_equal_steps(
        dataset: tf.data.Dataset, sizes: np.ndarray, batches: np.ndarray, deals: bool, counts: bool
    ) -> tf.data.Dataset:
        """Returns a worker's dataset with as many steps as all other workers' datasets."""
        dataset = copy_python_data(dataset)
        is_infinite = (batches == tf.data.INFINITE_CARDINALITY).all()
        are_equal = len(sizes) == 1 or (sizes[0] >= 0 and (sizes == sizes[0]).all())
        if is_infinite and not counts and are_equal:  # no worker ends before another one, and no batch differs
            return dataset
        # A worker whose data have ended continues with padding examples, which do not count.
        if (counts or not is_infinite) and deals and batch_splitting.is_splittable(dataset.element_spec):
            return batch_splitting.repeat_empty_batches(dataset)
        if (batches != batches[0]).any():
            # Hides the number of batches: all workers end when the last one does.
            dataset = dataset.filter(lambda *_: True)
        return batch_splitting.relax_batch_size(dataset)


def _by_data(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset with the sharding policy DATA in place of AUTO; keeps any other policy."""
    policy = tf.data.experimental.AutoShardPolicy
    if dataset.options().experimental_distribute.auto_shard_policy != policy.AUTO:
        return dataset
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy.DATA
    return dataset.with_options(options)


def copy_python_data(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset whose elements share no memory with the arrays of Python code that makes them.

    TensorFlow uses an aligned NumPy array in place (tensorflow/python/lib/core/py_func.cc) and counts only its own
    references. The operation that holds the last of these references may write its result into the array, such as a slice that a
    `PyDataset` keeps.
    """
    if not any(True for node in walk(dataset) for _ in python_functions(node)):
        return dataset

    @tf.autograph.experimental.do_not_convert
    def copy(*element: Structure) -> Structure:
        batch = element if isinstance(dataset.element_spec, tuple) else element[0]
        return tf.nest.map_structure(_deep_copy, batch, expand_composites=True)

    return dataset.map(copy)


def _deep_copy(tensor: tf.Tensor) -> tf.Tensor:
    dtype = tensor.dtype
    if dtype.is_integer or dtype.is_floating or dtype.is_complex or dtype.is_bool:
        return tf.raw_ops.DeepCopy(x=tensor)
    return tensor  # TensorFlow copies strings
