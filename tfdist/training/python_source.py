"""`PythonSource`: data that Python code makes, on several workers.

On each worker a thread reads the data ahead. Before each execution the workers compare what their threads have read: an error, an
early end or another batch on one worker becomes an error on all, before a step has used it.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Data, DataIterator, Spec, Structure
from tfdist.collectives.ranks import Ranks
from tfdist.compat import keras_loops
from tfdist.data.generator_batches import GeneratorReading
from tfdist.data.python_items import ItemError, NamedItems, by_items, unwrapped
from tfdist.data.python_state import checksum
from tfdist.data.source import DataSource
from tfdist.errors import DataError, describe_error
from tfdist.replicas.own_batches import split_among_replicas
from tfdist.training.alike import Alike

# Batches of a pass that are compared: the first ones, and every 100th.
_COMPARED_FIRST = 4
_COMPARED_EVERY = 100
_NONE = -1.0
_REMEDY = (
    "Each worker trains on its share of the same batches: seed what they draw from in the same way on all workers "
    "(keras.utils.set_random_seed), or let each worker take items of its own: tfdist.data.from_pydataset(data, shard='items')."
)
_AHEAD = 8  # batches that are read ahead, at least: workers that are ahead compare less often


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
        self.digests: dict[int, str] = {}
        self._batches = batches
        self._most = most
        self._share = share
        self._skipped = skipped
        self._check = check
        # The thread changes these, and the main thread reads them, with the lock of `_changed`.
        self._error: BaseException | None = None
        self._count = begin  # batches read
        self._has_ended = False
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
                # Before the lock, and before the count below tells the main thread that the digest is there.
                if _is_compared(number):
                    self.digests[number] = f"checksum {checksum(batch):08x}"
                with self._changed:
                    self._changed.wait_for(lambda: len(self._queue) < self._most or self._is_closed)
                    if self._is_closed:
                        return
                    if number % size == part and number // size >= self._skipped:
                        self._queue.append(batch)
                    self._count = number + 1
                    self._changed.notify_all()
        except BaseException as e:  # the main thread raises it, on all workers
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
        self._ranks = ranks
        self._open_batches = open_batches
        self._can_skip = can_skip
        self._name = name
        self._per_step = per_step
        self._most = most
        self._compares = compares
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
        # No earlier pass is replayed: the order is drawn from generators whose states `ready` restores.
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
        ended = _NONE
        if has_ended and error is None:
            ended = float(count)
        # The thread is ahead: the batches before its error are still used.
        has_failed = error is not None and count < needed
        failed, ends, counts = self._ranks.gather(float(has_failed), ended, float(count)).T
        if failed.any():
            reason = _describe(error, count) if error else ""
            reasons = self._ranks.gather_texts(reason)
            rank = int(np.argmax(failed))
            sentence = f"The data of {self._ranks.names[rank]} cannot be read: {reasons[rank]}"
            raise DataError(sentence, is_agreed=True) from error
        begin = self._compared
        most = counts.max()
        # Whole items may end earlier on some workers, which must not make the others compare at each step.
        if not self._compares:
            counts = counts[ends == _NONE]
        # What all have read by now needs no further comparison. The number is the same on all: so they compare at the same steps.
        self._compared = max(needed, int(counts.min(initial=most)))
        if self._compares:
            self._check_alike(self._reader, range(begin, self._compared), ends, needed)

    def _check_alike(self, reader: Reader, batches: range, ends: np.ndarray, needed: int) -> None:
        """Raises DataError, on all workers, if their data end before `needed` batches at different batches, or if a batch differs. A collective."""
        alike = Alike(self._ranks)
        if ((ends != _NONE) & (ends < needed)).any():
            own = ends[self._ranks.rank]
            text = "none yet"
            if own != _NONE:
                text = f"after {own:.0f} batches"
            alike.add(f"The end of the {self._name}", text, "It must yield the same batches on all workers.")
        for number in filter(_is_compared, batches):
            digest = reader.digests.pop(number, "none")
            alike.add(f"Batch {number} of the {self._name}", digest, _REMEDY)
        alike.check(functools.partial(DataError, is_agreed=True))

    def close(self) -> None:
        if self._reader:
            self._reader.close()

    def _begin(self, skipped: int) -> None:
        self.close()
        begin = 0
        # Items that draw random numbers must be made, although they are not used (`makes_skipped`).
        if self._can_skip and not self.makes_skipped:
            begin = skipped * self._per_step[0]
        self._steps = skipped
        self._compared = begin
        batches = self._open_batches(begin)  # draws the order
        self.before_reading()
        self._reader = Reader(batches, self._most, self._per_step, begin, skipped, self.check)


def open_python_source(
    engine: Any, data: Data, shuffle: bool, per_execution: int, class_weight: Any = None
) -> PythonSource:
    """Returns the source of a PyDataset, a generator or the result of `from_generator`, which each of several workers holds.

    `shuffle` applies to a PyDataset that ends.
    """
    ranks = engine.ranks
    whole_items = by_items(data)
    workers = 1
    rank = 0
    if whole_items:
        workers = ranks.size
        rank = ranks.rank
    most = max(_AHEAD, per_execution + 2)
    reading: GeneratorReading | None = None
    if isinstance(data, keras.utils.PyDataset):
        adapter = keras_loops.PyDatasetAdapter(data, class_weight=class_weight, shuffle=shuffle)
        count = adapter.num_batches
        _check_alike(ranks, type(data).__name__, count, whole_items)

        def open_batches(begin: int) -> Iterator[Structure]:
            order: Any = itertools.count(rank + begin * workers, workers)
            if count is not None:
                order = _chief_order(ranks, adapter) if shuffle else range(count)
                order = order[rank::workers][begin:]
            return keras_loops.read_items(adapter, NamedItems(data), order)

        name = f"PyDataset {type(data).__name__}"
        source = PythonSource(ranks, open_batches, True, name, (1, 0), most, not whole_items)
        own = None
        if count is not None:
            own = len(range(rank, count, workers))
    else:
        reading = GeneratorReading(unwrapped(data))
        adapter = keras_loops.generator_adapter(reading.batches)
        count = own = None
        _check_alike(ranks, "generator", None, whole_items)
        read = adapter.generator
        # A generator cannot skip: each worker reads all batches, and keeps its own.
        source = PythonSource(ranks, lambda _: iter(read()), False, "generator", (workers, rank), most, True)
    dataset = keras_loops.dataset_reading(adapter, source.batches)
    source.check = _BatchCheck(dataset.element_spec)
    if whole_items:
        local = dataset
        if own is not None:
            local = dataset.apply(tf.data.experimental.assert_cardinality(own))
        inner = engine.source_from_function(lambda context: split_among_replicas(local, context))
    else:
        inner = engine.source(dataset, count)
    source.distribute(inner, adapter)
    source.generator = reading
    return source


def _check_alike(ranks: Ranks, name: str, count: int | None, whole_items: bool) -> None:
    """Raises ConfigError, on all workers, if they differ in a PyDataset's length or in `shard`. A collective."""
    alike = Alike(ranks)
    length = "unknown" if count is None else count
    shard = "items" if whole_items else "batches"
    compared = f"length {length} and shard={shard!r}"
    alike.add(f"The length and shard of the {name}", compared, "Create it in the same way on all workers.")
    alike.check()


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
    if text.startswith("item "):
        return text
    return f"batch {number}: {text}"
