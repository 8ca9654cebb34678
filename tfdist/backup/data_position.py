"""The position of a training in its data, and the return to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from tfdist.backup import unsaved_randomness
from tfdist.data.random_state import DatasetRandomState
from tfdist.data.resume import replay
from tfdist.data.source import DataSource, Passes


@dataclasses.dataclass
class LoopPosition:
    """A place between two steps.

    Attributes:
        step: Steps done since the training's begin.
        epoch: The epoch, from 0.
        epoch_step: Steps done in it.
        passes: Passes over the data begun; there is one for each epoch, or, with `steps_per_epoch`, one for several.
        drawn: Steps done in the present pass.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    passes: int = 0
    drawn: int = 0


class TrainingPasses(Passes):
    """The passes of a `fit`, whose position and random state (`state`) backups hold.

    To resume, the passes before are replayed, and the present one begins after the steps that are done, which no callback sees again.
    """

    def __init__(
        self,
        source: DataSource,
        steps_per_epoch: int | None,
        steps_per_execution: int,
        begin_pass: Callable[[], None],
        is_backed_up: bool,
    ):
        super().__init__(source, steps_per_epoch, steps_per_execution, begin_pass)
        self.position = LoopPosition()
        reads_on = self.steps_per_epoch is not None
        self.state = DatasetRandomState(source.datasets, source.adapter, is_backed_up, reads_on)
        self._resumes = False

    def resume(self, position: LoopPosition, own: Mapping[str, Any]) -> None:
        """Makes the next epoch continue from a position; `own` is this process's own state there, the state of the data included."""
        self.position, self._resumes = position, True
        self.state.load(own, goes_on=position.epoch_step > 0)

    def epoch(self, first: int = 0) -> Iterator[tuple[int, int, int | None]]:
        """As of `Passes`; begins after the steps that are done."""
        self.state.begin_epoch()
        # A new pass follows, which draws from the state of the backup. Within a pass, `_open` restores the state at its begin instead:
        # the skipped elements are drawn again.
        if self._resumes and not self._resumes_within_pass:
            self.state.restore("now")
        for execution in super().epoch(self.position.epoch_step):
            self.state.stays = False
            yield execution

    def on_steps_done(self, end_step: int) -> int:
        """Says that an execution is done, whose last step in the epoch is `end_step` by Keras' counting. Returns its number of steps."""
        place, steps = self.position, self.steps
        # Keras counts the last execution of an epoch as a full one, even if the epoch has fewer steps left.
        done = end_step + 1 if steps is None else min(end_step + 1, steps)
        new, place.epoch_step = done - place.epoch_step, done
        place.step += new
        place.drawn += new
        return new

    def progress(self, epochs: int) -> dict[str, Any]:
        """Returns the position for `Progress.write`."""
        place, steps = self.position, self.steps
        total = place.step - place.epoch_step + (epochs - place.epoch) * steps if steps else 0
        return {"done": place.step, "epoch": min(place.epoch + 1, epochs), "epochs": epochs, "total": total}

    def next_epoch(self, epoch: int) -> None:
        """Says that an epoch, from 0, and its validation have ended."""
        self.position.epoch, self.position.epoch_step = epoch + 1, 0

    def doubts(self, callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[str]:
        """Yields why a resume will not be exact because of the data, and the remedies; callbacks may draw while a thread reads the data."""
        yield from unsaved_randomness.data_doubts(self.source.datasets)
        yield from self.state.doubts(callbacks)

    @property
    def _resumes_within_pass(self) -> bool:
        # Without `steps_per_epoch` a pass ends with its epoch. With it a pass continues in the next epoch, so also a backup that was
        # taken between two epochs is within a pass.
        place = self.position
        return bool(self._resumes and place.passes and (place.epoch_step or self.steps_per_epoch))

    def _open(self, is_read: bool = True) -> None:
        place, goes_on = self.position, self._resumes_within_pass
        if not goes_on:
            place.passes, place.drawn = place.passes + 1, 0
        if not self._resumes:
            if is_read or not self.source.datasets:
                self.state.begin_pass(place.passes)
            super()._open(is_read)
            return
        # Only the first pass after a resume is replayed. The old iterator must go first: it might read ahead, and draw.
        self._resumes, self.iterator, self._seen = False, None, place.drawn
        self._begin_pass()
        batches = self.source.steps
        if goes_on and self.source.datasets and batches is not None and place.drawn >= batches:
            # The backup was taken after the last step of the pass: its elements need not be read again, and a thread that read them
            # ahead would draw random numbers after the state is restored. Only the order of the next pass must come out the same.
            self.state.restore("first")
            for dataset in self.source.datasets:
                replay(dataset, place.passes)
            self.iterator = iter(())
            return
        ready = self.state.prepare_replay(place.passes, goes_on)
        self.iterator = self.source.open_at(place.passes, place.drawn, ready)
