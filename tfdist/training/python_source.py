"""`PythonSource`: data that Python code makes, on several workers.

On each worker a thread reads the data ahead. Before each execution the workers compare what their threads have read: an error, an
early end or another batch on one worker becomes an error on all, before a step has used it.
"""

from __future__ import annotations

import collections
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Data, DataIterator, Spec, Structure
from tfdist.collectives.ranks import Ranks
from tfdist.compat import keras_loops
from tfdist.data.generator_batches import GeneratorReading
from tfdist.data.python_items import GeneratorItems, ItemError, NamedItems, by_items
from tfdist.data.source import DataSource
from tfdist.errors import ConfigError, DataError, describe_error
from tfdist.replicas.own_batches import split_own_batches

_COMPARED_FIRST, _COMPARED_EVERY = 4, 100  # batches of a pass that are compared: the first ones, and every 100th
_NONE = -1.0
_AHEAD = 8  # batches that are read ahead, at least: workers that are ahead compare less often

DatasetFunction = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class Reader:
    """A thread that reads the batches of one pass ahead, and the batches that it has read.

    Args:
        batches: The batches, in an iterator that only the thread uses.
        most: The number of batches that are kept ahead.
        share: The number of batches of a step, and the number of this worker's batch among them.
        begin: The number of the first batch in `batches`.
        skipped: The number of first steps that are not to be returned.
        check: Called with each batch; raises ItemError if it cannot be used.
    """

    def __init__(
        self,
        batches: Iterator[Structure],
        most: int,
        share: tuple[int, int],
        begin: int,
        skipped: int,
        check: Callable[[Structure], None],
    ):
        self.digests: dict[int, float] = {}
        self._error: BaseException | None = None
        self._count = begin  # batches read
        self._has_ended = False
        self._batches, self._most, self._share, self._skipped, self._check = batches, most, share, skipped, check
        self._queue: collections.deque[Structure] = collections.deque()
        self._changed = threading.Condition()
        self._is_closed = False
        threading.Thread(target=self._run, daemon=True, name="tfdist-data").start()

    def __iter__(self) -> Iterator[Structure]:
        """Yields the batches of this worker. Ends at an error, too, which the main thread raises."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._has_ended or self._is_closed)
                if self._is_closed or not self._queue:
                    return
                batch = self._queue.popleft()
                self._changed.notify_all()
            yield batch

    def wait_for(self, count: int) -> None:
        """Waits until `count` batches are read, or the data have ended or failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._count >= count or self._has_ended)

    def progress(self) -> tuple[BaseException | None, int, bool]:
        """Returns the error, if any, the number of batches that were read, and whether there are no more."""
        with self._changed:
            return self._error, self._count, self._has_ended

    def close(self) -> None:
        """Ends the iteration, and the thread after the batch that it makes now."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            size, part = self._share
            for number, batch in enumerate(self._batches, self._count):
                self._check(batch)
                digest = _digest(batch) if _is_compared(number) else None
                with self._changed:
                    self._changed.wait_for(lambda: len(self._queue) < self._most or self._is_closed)
                    if self._is_closed:
                        return
                    if digest is not None:
                        self.digests[number] = digest
                    if number % size == part and number // size >= self._skipped:
                        self._queue.append(batch)
                    self._count = number + 1
                    self._changed.notify_all()
        except BaseException as e:
            self._error = e
        finally:
            getattr(self._batches, "close", lambda: None)()  # ends the workers of a PyDataset
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()


class PythonSource(DataSource):
    """The source of data that Python code makes on each of several workers.

    Args:
        ranks: The workers.
        open_batches: Returns the batches of a new pass, in an iterator; called on all workers at once. Takes the number of first
            batches to leave out, unless `can_skip` is false.
        can_skip: Whether `open_batches` can leave out batches.
        name: The kind of the data, for messages.
        per_step: The number of batches of a step that this worker reads, and the number of its own among them.
        most: The number of batches to read ahead.
        compares: Whether all workers must read the same batches.

    Attributes:
        check: Raises ItemError for a batch that cannot be used.
    """

    def __init__(
        self,
        ranks: Ranks,
        open_batches: Callable[[int], Iterator[Structure]],
        can_skip: bool,
        name: str,
        per_step: tuple[int, int],
        most: int,
        compares: bool,
    ):
        self._ranks, self._open_batches, self._can_skip, self._name = ranks, open_batches, can_skip, name
        self._per_step, self._most, self._compares = per_step, most, compares
        self._reader: Reader | None = None
        self._steps = 0  # steps of this pass that were prepared
        self._compared = 0  # batches of this pass that all workers have read
        self.check: Callable[[Structure], None] = lambda batch: None

    def distribute(self, inner: DataSource, adapter: Any) -> None:
        """Takes over the distributed data, which read `batches`."""
        super().__init__(inner.data, inner.datasets, inner.steps, inner.parts)
        self.adapter = adapter

    def batches(self) -> Iterator[Structure]:
        """Yields the batches of this worker in the current pass."""
        return iter(self._reader or ())

    def open(self) -> DataIterator:
        self._begin(0)
        return super().open()

    def open_at(self, number: int, steps: int, ready: Callable[[], None]) -> DataIterator:
        ready()
        self._begin(steps)
        return super().open()

    def prepare(self, steps: int) -> None:
        """Waits for the batches of the next `steps` steps, and compares them with the other workers'. A collective.

        Raises:
            DataError: On all workers: a worker's data have failed, have ended early, or differ.
        """
        if self.generator:
            self.generator.use(steps * self._per_step[0])
        self._steps += steps
        needed = self._steps * self._per_step[0]
        if self._reader is None or needed <= self._compared:
            return
        self._reader.wait_for(needed)
        error, count, has_ended = self._reader.progress()
        ended = float(count) if has_ended and error is None else _NONE
        failed, ends, counts = self._ranks.gather(float(error is not None and count < needed), ended, float(count)).T
        if failed.any():
            reasons = self._ranks.gather_texts(_describe(error, count) if error else "")
            rank = int(np.argmax(failed))
            sentence = f"The data of {self._ranks.names[rank]} cannot be read: {reasons[rank]}"
            raise DataError(sentence, is_agreed=True) from error
        # What all have read by now needs no further comparison. Whole items may end earlier on some workers.
        goes_on = counts if self._compares else counts[ends == _NONE]
        ahead = int(goes_on.min(initial=counts.max()))
        begin, self._compared = self._compared, max(needed, ahead)
        if self._compares:
            self._compare([number for number in range(begin, self._compared) if _is_compared(number)])
            if (ends != _NONE).any() and ends[ends != _NONE].min() < needed and len({*ends}) > 1:
                raise self._unequal_ends(ends)

    def _compare(self, numbers: Sequence[int]) -> None:
        """Raises DataError, on all workers, if one of these batches differs between workers. A collective if there are any."""
        if not numbers or self._reader is None:
            return
        columns = self._ranks.gather(*(self._reader.digests.pop(number, _NONE) for number in numbers)).T
        for number, column in zip(numbers, columns, strict=True):
            unlike = np.flatnonzero((column != _NONE) & (column != column[0]))
            if unlike.size and column[0] != _NONE:
                raise self._difference(number, int(unlike[0]))

    def close(self) -> None:
        if self._reader:
            self._reader.close()

    def _begin(self, skipped: int) -> None:
        self.close()
        begin = skipped * self._per_step[0] if self._can_skip and not self.makes_skipped else 0
        self._steps, self._compared = skipped, begin
        batches = self._open_batches(begin)  # draws the order
        self.before_reading()
        self._reader = Reader(batches, self._most, self._per_step, begin, skipped, self.check)

    def _difference(self, number: int, rank: int) -> DataError:
        first, other = self._ranks.names[0], self._ranks.names[rank]
        return DataError(
            f"Batch {number} of the {self._name} differs between {first} and {other}, but each worker trains on its share of the same batches. "
            "Seed what it draws from in the same way on all workers (keras.utils.set_random_seed), or let each worker take items of its "
            "own: tfdist.data.from_pydataset(data, shard='items').",
            is_agreed=True,
        )

    def _unequal_ends(self, ends: np.ndarray) -> DataError:
        texts = [
            f"{'goes on' if end == _NONE else f'ends after {end:.0f}'} on {name}"
            for name, end in zip(self._ranks.names, ends, strict=True)
        ]
        return DataError(
            f"The {self._name} must yield the same batches on all workers, but it {', '.join(texts)}.", is_agreed=True
        )


def open_python_source(
    engine: Any, data: Data, shuffle: bool, per_execution: int, class_weight: Any = None
) -> PythonSource:
    """Returns the source of a PyDataset or a generator that each of several workers holds.

    Args:
        engine: The engine.
        data: The PyDataset, the generator, or the result of `from_generator`.
        shuffle: Whether to shuffle the items of a PyDataset that ends.
        per_execution: The number of steps of an execution.
        class_weight: As for `fit`.
    """
    ranks, whole_items = engine.ranks, by_items(data)
    workers, rank = (ranks.size, ranks.rank) if whole_items else (1, 0)
    reading: GeneratorReading | None = None
    if isinstance(data, keras.utils.PyDataset):
        adapter = keras_loops.PyDatasetAdapter(data, class_weight=class_weight, shuffle=shuffle)
        count = adapter.num_batches
        _check_alike(ranks, type(data).__name__, count, whole_items)

        def open_batches(begin: int) -> Iterator[Structure]:
            order: Any = itertools.count(rank + begin * workers, workers)
            if count is not None:
                order = (_chief_order(ranks, adapter) if shuffle else range(count))[rank::workers][begin:]
            return keras_loops.read_items(adapter, NamedItems(data), order)

        source = PythonSource(
            ranks,
            open_batches,
            True,
            f"PyDataset {type(data).__name__}",
            (1, 0),
            max(_AHEAD, per_execution + 2),
            not whole_items,
        )
        own = count if count is None else len(range(rank, count, workers))
    else:
        generator = data.generator if isinstance(data, GeneratorItems) else data
        reading = GeneratorReading(generator)
        adapter = keras_loops.generator_adapter(reading.batches)
        count = own = None
        _check_alike(ranks, "generator", None, whole_items)
        read = adapter.generator
        source = PythonSource(
            ranks, lambda _: iter(read()), False, "generator", (workers, rank), max(_AHEAD, per_execution + 2), True
        )
    dataset = keras_loops.dataset_reading(adapter, source.batches)
    source.check = _BatchCheck(dataset.element_spec)
    by_item = _own_items(dataset, own)
    inner = engine.source_from_function(by_item) if whole_items else engine.source(dataset, count)
    source.distribute(inner, adapter)
    source.generator = reading
    return source


def _own_items(dataset: tf.data.Dataset, count: int | None) -> DatasetFunction:
    """Returns the dataset function of a worker's own items; `count` is their number, or None if unknown."""

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = context.num_replicas_in_sync // context.num_input_pipelines
        local = dataset if count is None else dataset.apply(tf.data.experimental.assert_cardinality(count))
        return local if replicas == 1 else split_own_batches(local, None, 1, replicas, int(local.cardinality()))

    return make


def _check_alike(ranks: Ranks, name: str, count: int | None, whole_items: bool) -> None:
    """Raises ConfigError, on all workers, if they differ in a PyDataset's length or in `shard`. A collective."""
    counts, shards = ranks.gather(_NONE if count is None else count, float(whole_items)).T
    if len({*counts}) > 1 or len({*shards}) > 1:
        received = [
            f"length {'unknown' if count == _NONE else f'{count:g}'} and shard={'items' if shard else 'batches'!r} on {worker}"
            for worker, count, shard in zip(ranks.names, counts, shards, strict=True)
        ]
        raise ConfigError(
            f"The {name} must have the same length and shard on all workers. Received: {', '.join(received)}."
        )


def _chief_order(ranks: Ranks, adapter: Any) -> Sequence[int]:
    """Returns the order of a PyDataset's items in a new pass, drawn by the chief as Keras draws it. A collective."""
    order = np.zeros(adapter.num_batches, np.int64)
    if ranks.is_chief:
        order[:] = keras_loops.shuffle_items(adapter)
    return ranks.broadcast(tf.constant(order)).numpy().tolist()


class _BatchCheck:
    """Compares a batch with the form of the first batches, before TensorFlow would fail on this worker alone.

    Args:
        spec: The form.
    """

    def __init__(self, spec: Spec):
        self._spec = spec

    def __call__(self, batch: Structure) -> None:
        specs = tf.nest.flatten(self._spec)
        leaves = tf.nest.flatten(batch)
        if len(specs) != len(leaves):
            raise ItemError(f"it has {len(leaves)} arrays, and the first batches have {len(specs)}")
        for leaf, spec in zip(leaves, specs, strict=True):
            shape = getattr(leaf, "shape", None)
            if isinstance(spec, tf.TensorSpec) and shape is not None and not spec.shape.is_compatible_with(shape):
                raise ItemError(f"an array has the shape {tuple(shape)}, and those of the first batches {spec.shape}")


def _is_compared(number: int) -> bool:
    return number < _COMPARED_FIRST or number % _COMPARED_EVERY == 0


def _describe(error: BaseException, number: int) -> str:
    text = str(error) if isinstance(error, ItemError) else describe_error(error)
    return text if text.startswith("item ") else f"batch {number}: {text}"


def _digest(batch: Structure) -> float:
    """Returns a checksum of the values of a batch."""
    checksum = 0
    for value in tf.nest.flatten(batch):
        if value is None:
            continue
        array = np.ascontiguousarray(value.toarray() if hasattr(value, "toarray") else value)
        # The bytes of object arrays are addresses.
        checksum = zlib.crc32(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes(), checksum)
    return float(checksum)
