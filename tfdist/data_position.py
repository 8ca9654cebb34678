"""Where Keras' training loop is in its data, and how to set it there again.

Keras begins each epoch at its first step. Here the loop of an interrupted epoch is begun as ever, on data from which what
was trained on is left out; the steps that were done are counted, but neither run nor shown to callbacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdist.data import replay

# The private names of Keras 3 that this file leans on; tests/test_keras_seams.py watches them.
KERAS_SYMBOLIC_BUILD = "_maybe_symbolic_build"
KERAS_LOGS = "_get_metrics_result_or_logs"
KERAS_ENUMERATE = "_enumerate_iterator"
KERAS_GET_ITERATOR = "_get_iterator"
KERAS_INITIAL_EPOCH = "_initial_epoch"
KERAS_STEPS_SEEN = "_steps_seen"


@dataclasses.dataclass
class Position:
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


class Follower:
    """Follows the loop of one `fit`, and sets its place.

    Args:
        model: The model.

    Attributes:
        position: Where the loop is.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._loop: Any = None  # Keras' EpochIterator
        self._resumes = False
        self._arrive: Callable[[], Any] | None = None
        self.position = Position()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Lets this follow the `fit` that is called inside."""
        setattr(self._model, KERAS_SYMBOLIC_BUILD, self._build)
        try:
            yield
        finally:
            for name in (KERAS_SYMBOLIC_BUILD, KERAS_LOGS):
                vars(self._model).pop(name, None)
            setattr(self._model, KERAS_INITIAL_EPOCH, None)

    def resume(self, position: Position, first_epoch: int, logs: Any, arrive: Callable[[], Any]) -> None:
        """Makes the loop go on from a place. Call it in `on_train_begin`.

        Args:
            position: The place.
            first_epoch: The epoch to begin with, from 0; that of the place, unless no further one is wanted.
            logs: The logs of the last step before it, in case there are no further ones in its epoch.
            arrive: Called there, after all that Keras does to begin an epoch and a pass over the data.
        """
        self.position = position
        self._resumes, self._arrive = True, arrive
        setattr(self._model, KERAS_INITIAL_EPOCH, first_epoch)
        if position.epoch_step:
            setattr(self._model, KERAS_LOGS, functools.partial(self._logs, logs))

    def stepped(self, end_step: int, steps: int | None) -> None:
        """Says that the loop has done an execution of steps.

        Args:
            end_step: The number of the last one in its epoch, by Keras' counting.
            steps: The number of steps of an epoch, if known; Keras counts beyond them.
        """
        place = self.position
        done = min(end_step + 1, steps or end_step + 1)
        new, place.epoch_step = done - place.epoch_step, done
        place.step += new
        place.drawn += new

    def next_epoch(self, epoch: int) -> None:
        """Says that the loop has ended an epoch, and its validation."""
        self.position.epoch, self.position.epoch_step = epoch + 1, 0
        vars(self._model).pop(KERAS_LOGS, None)

    def _build(self, iterator: Any = None, data_batch: Any = None) -> None:
        getattr(type(self._model), KERAS_SYMBOLIC_BUILD)(self._model, iterator=iterator, data_batch=data_batch)
        if self._loop is None:  # the first one is fit's own, later ones evaluate's
            self._loop = iterator
            setattr(iterator, KERAS_ENUMERATE, self._enumerate)
            setattr(iterator, KERAS_GET_ITERATOR, lambda: self)

    def _logs(self, last: Any, logs: Any) -> Any:
        return getattr(type(self._model), KERAS_LOGS)(self._model, logs or last)

    def __iter__(self) -> Any:
        """Begins a pass over the data."""
        data = getattr(type(self._loop), KERAS_GET_ITERATOR)(self._loop)
        place = self.position
        goes_on = self._resumes and place.passes and (place.epoch_step or self._loop.steps_per_epoch)
        if not goes_on:
            place.passes, place.drawn = place.passes + 1, 0
        return starting_at(data, place.passes, place.drawn) if self._resumes else iter(data)

    def _enumerate(self) -> Iterator[Any]:
        loop, place = self._loop, self.position
        steps = getattr(type(loop), KERAS_ENUMERATE)(loop)
        if not self._resumes:
            yield from steps
            return
        done, first = place.epoch_step, True
        for begin, end, data in steps:
            if first:
                # Of earlier epochs, in the same pass.
                setattr(loop, KERAS_STEPS_SEEN, getattr(loop, KERAS_STEPS_SEEN) + place.drawn - done)
                first = self._resumes = False
            if begin < done:
                continue
            self._arrived()
            if self._model.stop_training:
                return
            yield begin, end, data
        self._arrived()

    def _arrived(self) -> None:
        arrive, self._arrive = self._arrive, None
        if arrive:
            arrive()


def starting_at(data: Any, number: int, steps: int) -> Any:
    """Returns an iterator of a pass over data.

    Args:
        data: A dataset, or what a strategy has made of one.
        number: The pass, from 1: a dataset that shuffles does so differently in each.
        steps: Steps of it to leave out.
    """
    if hasattr(data, "starting_at"):
        return data.starting_at(number, steps)
    replay(data, number - 1)
    return iter(data.skip(steps))
