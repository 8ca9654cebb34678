"""`DataSource`: the data of a loop. `Passes`: the passes over it, and the steps of each epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Data, DataIterator, Spec, Structure
from tfdist.compat import keras_loops
from tfdist.data import resume
from tfdist.data.generator_batches import GeneratorReading

OpenAt = Callable[[int, int, Callable[[], None]], Any]

_RAN_OUT = (
    "Your input ran out of data; interrupting training. Make sure that your dataset or generator can generate at least "
    "`steps_per_epoch * epochs` batches. You may need to use the `.repeat()` function when building your dataset."
)


class DataSource:
    """Data that a loop passes over, distributed to the replicas.

    Args:
        data: The distributed data.
        datasets: This process's datasets, from which the data are made; empty if unknown.
        steps: The number of steps of a pass; None if it is unknown or infinite.
        parts: The number of replicas among which an element of the datasets is split.
        steps_per_epoch: The number of steps of an epoch if a pass continues in the next epoch; None means one pass.
        open_at: Returns a pass that begins at a step; called as `open_at(number, steps, ready)` (see `DataSource.open_at`).

    Attributes:
        adapter: Keras' data adapter, with hooks for the beginning and the end of an epoch.
        before_reading: Called in a new pass over Python data, before the first item is made.
        generator: The passes over a Python generator; None for other data.
        makes_skipped: Whether `open_at` makes the items of skipped steps, because items draw random numbers.
    """

    def __init__(
        self,
        data: Data,
        datasets: Sequence[tf.data.Dataset] = (),
        steps: int | None = None,
        parts: int = 1,
        open_at: OpenAt | None = None,
        steps_per_epoch: int | None = None,
    ):
        self.data = data
        self.datasets = datasets
        self.steps = steps
        self.parts = parts
        self.steps_per_epoch = steps_per_epoch
        self.adapter: Any = keras_loops.DataAdapter()
        self._open_at = open_at
        self.before_reading: Callable[[], None] = lambda: None
        self.makes_skipped = True
        self.generator: GeneratorReading | None = None

    def open(self) -> DataIterator:
        """Returns an iterator of a new pass."""
        return iter(self.data)

    def open_at(self, number: int, steps: int, ready: Callable[[], None]) -> DataIterator:
        """Returns an iterator of a pass that begins at a step.

        Args:
            number: The number of the pass, from 1; a dataset that shuffles has a different order in each pass.
            steps: The number of steps to skip.
            ready: Called after the earlier passes are replayed, and before the iterator is created.
        """
        if self._open_at:
            return self._open_at(number, steps, ready)
        resume.replay(self.data, number - 1)
        ready()
        return iter(self.data.skip(steps))

    def prepare(self, steps: int) -> None:
        """Prepares the next execution, of up to `steps` steps. May be a collective."""
        if self.generator:
            self.generator.use(steps)

    def close(self) -> None:
        """Ends the current pass."""

    @property
    def form(self) -> Structure:
        """The specification of the elements of the first dataset; the first element itself, if their shapes are not known."""
        data = self.data
        if self.datasets:
            data = self.datasets[0]
        form = data.element_spec
        if keras_loops.reads_python(self.adapter) or all(_is_known(leaf) for leaf in tf.nest.flatten(form)):
            return form
        if isinstance(data, tf.data.Dataset):
            data = data.take(1)
        return next(iter(data))


def _is_known(spec: Spec) -> bool:
    shape = getattr(spec, "shape", None)
    return shape is None or (shape.rank is not None and None not in shape[1:])


class Passes:
    """The passes of a loop over a source, opened when Keras opens them, and the steps of each epoch.

    Without `steps_per_epoch`, also of the source, each epoch is one pass. At its end Keras opens a further pass and does not read it; for data that
    shuffle, this pass counts. With `steps_per_epoch` a pass continues in the next epoch.

    Args:
        source: The data.
        steps_per_epoch: The number of steps of an epoch; None means that of the source.
        steps_per_execution: The number of steps between two hooks.
        begin_pass: Called before each pass is opened.

    Attributes:
        iterator: The iterator of the current pass.
        steps: The number of steps of an epoch; None while it is unknown.
    """

    def __init__(
        self, source: DataSource, steps_per_epoch: int | None, steps_per_execution: int, begin_pass: Callable[[], None]
    ):
        self.source = source
        self.steps_per_epoch = limited_steps(steps_per_epoch or source.steps_per_epoch)
        self.iterator: Any = None
        self._per_execution = steps_per_execution
        self._begin_pass = begin_pass
        self._num_batches = source.steps
        self._seen = 0  # steps of the current pass

    @property
    def steps(self) -> int | None:
        return self.steps_per_epoch or self._num_batches

    def reset(self) -> None:
        """Drops the current pass, before a loop."""
        self.close()
        self._seen = 0
        self._num_batches = self.source.steps
        self.source.adapter.on_epoch_end()

    def epoch(self, first: int = 0) -> Iterator[tuple[int, int, int | None]]:
        """Yields, for each execution, its first step, its last step by Keras' counting, and the remaining steps of the epoch.

        Keras counts an execution as `steps_per_execution` steps, also at the end of the epoch. `first` is the first step to run.
        """
        self.source.adapter.on_epoch_begin()
        total = self.steps or None
        size = self._per_execution
        # Only with `steps_per_epoch` the pass of the last epoch goes on.
        if total is None or self.iterator is None or self.steps_per_epoch is None:
            self._open()
        begin = first
        while total is None or begin < total:
            # A validation may have read the same generator, which ends this pass.
            if self.source.generator and self.source.generator.is_interrupted:
                self._open()
            if total is not None and self._num_batches and self._seen >= self._num_batches:
                if self.steps_per_epoch:
                    warnings.warn(_RAN_OUT, stacklevel=2)
                break
            remaining_steps = None
            planned = size
            if total is not None:
                remaining_steps = total - begin
                planned = min(size, remaining_steps)
            # Steps that the epoch does not run remain for the next one, if the pass goes on.
            self._seen += planned if self.steps_per_epoch else size
            self.source.prepare(planned)
            yield begin, begin + size - 1, remaining_steps
            begin += size
        # As Keras, which opens the next pass at the end of this one.
        if self._num_batches and self._seen >= self._num_batches:
            self._open(is_read=self.steps_per_epoch is not None)
        self.source.adapter.on_epoch_end()

    def end_early(self) -> None:
        """Ends the current pass and the epoch, because the data have ended."""
        if self._num_batches is None:
            self._num_batches = self._seen
        if self.steps_per_epoch or keras_loops.WARNS_OF_UNKNOWN_END:
            warnings.warn(_RAN_OUT, stacklevel=2)
        self.close()
        self.source.adapter.on_epoch_end()

    def close(self) -> None:
        """Drops the iterator, which might read ahead without limit while an error's traceback holds it, and draw random numbers."""
        self.source.close()
        self.iterator = None

    def _open(self, is_read: bool = True) -> None:
        """Opens a pass; `is_read` tells whether a step will read it."""
        self.close()
        self._seen = 0
        self._begin_pass()
        if is_read or not self.source.datasets:
            self.iterator = self._open_source()
            return
        # An iterator would read ahead for nothing. Only the order of datasets that shuffle advances.
        for dataset in self.source.datasets:
            resume.replay(dataset, 1, reads=False)
        self.iterator = iter(())

    def _open_source(self) -> DataIterator:
        if self.source.generator:
            self.source.generator.begin()
        return self.source.open()


def limited_steps(steps: int | None) -> int | None:
    """Returns the number of steps of an epoch, which `keras.config.set_max_steps_per_epoch` may limit."""
    most = keras.config.max_steps_per_epoch()
    if most and (not steps or most < steps):
        warnings.warn(f"Limiting steps_per_epoch to {most}", stacklevel=2)
        return int(most)
    return steps


def run_to_end(function: Callable[[Any], Any], iterator: DataIterator) -> Any:
    """Returns `function(iterator)`, or None if the iterator has no further element."""
    try:
        return function(iterator)
    except (StopIteration, tf.errors.OutOfRangeError):
        return None
