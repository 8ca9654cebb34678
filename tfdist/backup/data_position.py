"""The position of Keras' training loop in its data, and the return to it.

Keras begins each epoch at its first step. To resume within an epoch, Keras' loop starts normally on a dataset without the examples
already used. Completed steps are counted, but not run or shown to callbacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backup import unsaved_randomness
from tfdist.compat import keras_loops
from tfdist.data.random_state import DatasetRandomState
from tfdist.data.resume import iterator_from_step, replay


@dataclasses.dataclass
class LoopPosition:
    """A place between two steps.

    Attributes:
        step: Steps done since the training's begin.
        epoch: The epoch, from 0.
        epoch_step: Steps done in it.
        passes: Passes over the data begun; Keras makes one for each epoch, or one for all where it has `steps_per_epoch`.
        drawn: Steps done in the present pass.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    passes: int = 0
    drawn: int = 0


class LoopTracker:
    """Follows the loop of one `fit`, and sets its place.

    Args:
        model: The model.
        is_backed_up: Whether backups are taken of the `fit`.

    Attributes:
        position: Where the loop is.
        state: The random state of the data, once Keras has begun to build the model.
    """

    state: DatasetRandomState

    def __init__(self, model: keras.Model, is_backed_up: bool = True):
        self._model = model
        self._is_backed_up = is_backed_up
        self._loop: Any = None  # Keras' EpochIterator
        self._resumes = False
        self._sources: list[tf.data.Dataset] = []
        self._resumes_within_epoch = False  # an epoch's steps have begun
        self._arrive: Callable[[], Any] | None = None
        self._results: Callable[[Any], Any] | None = None  # the model's, where it stands back
        self.position = LoopPosition()

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        """Lets this follow the `fit` that is called inside."""
        build = keras_loops.build_method(self._model)
        keras_loops.replace_build(self._model, functools.partial(self._build, build))
        try:
            yield
        finally:
            if self._loop is not None:
                keras_loops.drop_iterators(self._loop)
            keras_loops.replace_build(self._model, build)
            self._take_logs_back()
            keras_loops.set_initial_epoch(self._model, None)

    def resume(
        self, position: LoopPosition, first_epoch: int, logs: Any, own: Mapping[str, Any], arrive: Callable[[], Any]
    ) -> None:
        """Makes the loop go on from a place. Call it in `on_train_begin`.

        Args:
            position: The place.
            first_epoch: The epoch to begin with, from 0; that of the place, unless no further one is wanted.
            logs: The logs of the last step before it, in case there are no further ones in its epoch.
            own: What this process had of its own there, the state of the data included.
            arrive: Called there, after all that Keras does to begin an epoch and a pass over the data.
        """
        self.position = position
        self._resumes, self._arrive = True, arrive
        self.state.load(own, goes_on=position.epoch_step > 0)
        keras_loops.set_initial_epoch(self._model, first_epoch)
        if position.epoch_step:
            self._results = results = keras_loops.logs_method(self._model)
            keras_loops.replace_logs(self._model, lambda own: results(own or logs))

    def on_execution_end(self, end_step: int, steps: int | None) -> None:
        """Says that the loop has done an execution of steps.

        Args:
            end_step: The number of the last one in its epoch, by Keras' counting.
            steps: The number of steps of an epoch, if known; Keras counts beyond them.
        """
        place = self.position
        done = end_step + 1 if steps is None else min(end_step + 1, steps)
        new, place.epoch_step = done - place.epoch_step, done
        place.step += new
        place.drawn += new

    def next_epoch(self, epoch: int) -> None:
        """Says that the loop has ended an epoch, and its validation."""
        self.position.epoch, self.position.epoch_step = epoch + 1, 0
        self._take_logs_back()

    def doubts(self, callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[str]:
        """Yields why a resume will not be exact because of the data, and the remedies.

        Args:
            callbacks: The user's, which may draw while a thread reads the data.
        """
        yield from unsaved_randomness.data_doubts(self._sources)
        yield from self.state.doubts(callbacks)

    def _build(self, build: Callable[..., None], iterator: Any = None, data_batch: Any = None) -> None:
        if self._loop is not None:  # the first one is fit's own, later ones evaluate's
            build(iterator=iterator, data_batch=data_batch)
            return
        self._sources = getattr(keras_loops.distributed_dataset(iterator), "sources", [])
        self.state = DatasetRandomState(
            self._sources, iterator.data_adapter, self._is_backed_up, reads_on=iterator.steps_per_epoch is not None
        )
        with self.state.preserve_seed_generators():
            build(iterator=iterator, data_batch=data_batch)
        self._loop = iterator
        keras_loops.replace_enumeration(iterator, self._enumerate, lambda: self)

    def _take_logs_back(self) -> None:
        if self._results is not None:
            keras_loops.replace_logs(self._model, self._results)
            self._results = None

    def __iter__(self) -> Any:
        """Begins a pass over the data."""
        data = keras_loops.pass_data(self._loop)
        place, goes_on = self.position, self._resumes_within_pass
        keras_loops.drop_iterator(self._loop)  # or the pass before might read ahead, and draw random numbers
        if not goes_on:
            place.passes, place.drawn = place.passes + 1, 0
        if self._resumes and goes_on and self._sources and keras_loops.is_pass_over(self._loop, place.drawn):
            # Of this pass, too, nothing is read: a thread that read ahead would draw after the state is restored.
            self.state.restore("first")
            for source in self._sources:
                replay(source, place.passes)
            return iter(())
        if self._resumes:
            return iterator_from_step(data, place.passes, place.drawn, self.state.prepare_replay(place.passes, goes_on))
        if self._resumes_within_epoch and self._loop.steps_per_epoch is None and self._sources:
            # Keras throws this pass away. It would read ahead and draw random numbers until then; shuffles count it all the same.
            self._model.distribute_strategy.statistics.synchronize()
            for source in self._sources:
                replay(source, 1, reads=False)
            return iter(())
        self.state.begin_pass(place.passes)
        return iter(data)

    @property
    def _resumes_within_pass(self) -> bool:
        place = self.position
        return bool(self._resumes and place.passes and (place.epoch_step or self._loop.steps_per_epoch))

    def _enumerate(self) -> Iterator[Any]:
        loop, place = self._loop, self.position
        self._resumes_within_epoch = False
        self.state.begin_epoch()
        if self._resumes and not self._resumes_within_pass:
            self.state.restore("now")
        done, resumes = place.epoch_step, self._resumes
        for begin, end, data in keras_loops.enumerate_steps(loop):
            self._resumes_within_epoch = True
            if self._resumes:
                # Of earlier epochs, in the same pass.
                keras_loops.add_steps_seen(loop, place.drawn - done)
                self._resumes = False
            if resumes:
                if begin < done:
                    continue
                self._arrived()
                if self._model.stop_training:
                    return
            self.state.stays = False
            yield begin, end, data
        if resumes:
            self._arrived()

    def _arrived(self) -> None:
        arrive, self._arrive = self._arrive, None
        if arrive:
            arrive()
