"""The position of a training in its data, and the passes that resume there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from tfdist.backup import unsaved_randomness
from tfdist.data.generator_batches import GeneratorBatches
from tfdist.data.random_state import DatasetRandomState
from tfdist.data.resume import replay
from tfdist.data.source import DataSource, Passes


@dataclasses.dataclass
class LoopPosition:
    """A position between two steps of a training.

    Attributes:
        step: Steps done since the beginning of the training.
        epoch: The epoch, from 0.
        epoch_step: Steps done in this epoch.
        passes: Passes over the data that have begun: one for each epoch, or, with `steps_per_epoch`, one for several epochs.
        drawn: Steps done in the current pass.
        generator_batches: If the data are a generator, its batches that all loops of the program have used.
        validation_batches: The same for a generator of validation data.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    passes: int = 0
    drawn: int = 0
    generator_batches: int = 0
    validation_batches: int = 0


class TrainingPasses(Passes):
    """The passes of a `fit`, whose position and random state (`state`) backups hold.

    To resume, earlier passes are replayed, and the current pass begins after the steps that are done. Callbacks do not see these steps again.

    Attributes:
        validation_generator: The batches of the generator that the validation data are; None for other data.
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
        self.validation_generator: GeneratorBatches | None = None
        # The random state at the beginning of this pass includes draws of batches that an earlier loop has read ahead.
        self._continues_generator = bool(source.generator and source.generator.shared.used)
        source.before_reading = self.state.begin_items

    def resume(self, position: LoopPosition, own: Mapping[str, Any]) -> None:
        """Makes the next epoch continue from a position; `own` is this rank's part of the backup, which includes the state of the data."""
        self.position = position
        self._resumes = True
        self.state.load(own, in_epoch=position.epoch_step > 0)
        if self.source.generator:
            self.source.generator.shared.used = position.generator_batches
        if self.validation_generator:
            self.validation_generator.used = position.validation_batches

    def epoch(self, first: int = 0) -> Iterator[tuple[int, int, int | None]]:
        """Yields as `Passes.epoch` does, from the first step that is not done."""
        self.state.begin_epoch()
        # A new pass follows, which draws from the state of the backup. To resume within a pass, `_open` restores the state at the beginning
        # of the pass instead: the skipped elements are drawn again.
        if self._resumes and not self._resumes_within_pass:
            self.state.restore("now")
        for execution in super().epoch(self.position.epoch_step):
            self.state.stays = False
            yield execution

    def on_steps_done(self, end_step: int) -> int:
        """Records an execution whose last step in the epoch is `end_step` by Keras' counting. Returns the execution's number of steps."""
        position = self.position
        done = end_step + 1
        if self.steps is not None:
            # Keras counts the last execution of an epoch as a full one, even if fewer steps of the epoch remain.
            done = min(done, self.steps)
        new = done - position.epoch_step
        position.epoch_step = done
        position.step += new
        position.drawn += new
        self._record_generators()
        return new

    def progress(self, epochs: int) -> dict[str, Any]:
        """Returns the position for `progress.write`."""
        position = self.position
        total = 0  # unknown
        if self.steps:
            total = position.step - position.epoch_step + (epochs - position.epoch) * self.steps
        return {"done": position.step, "epoch": min(position.epoch + 1, epochs), "epochs": epochs, "total": total}

    def next_epoch(self, epoch: int) -> None:
        """Records that an epoch, from 0, and its validation have ended."""
        self.position.epoch = epoch + 1
        self.position.epoch_step = 0
        self._record_generators()

    def _record_generators(self) -> None:
        if self.source.generator:
            self.position.generator_batches = self.source.generator.shared.used
        if self.validation_generator:
            self.position.validation_batches = self.validation_generator.used

    def doubts(self, callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[str]:
        """Yields why a resume will not be exact because of the data, and the remedies; callbacks may draw while a thread reads the data."""
        yield from unsaved_randomness.data_doubts(self.source.datasets)
        yield from self.state.doubts(callbacks)

    @property
    def _resumes_within_pass(self) -> bool:
        # Without `steps_per_epoch` a pass ends with its epoch. With it a pass continues in the next epoch, so also a backup that was
        # taken between two epochs is within a pass.
        position = self.position
        return bool(self._resumes and position.passes and (position.epoch_step or self.steps_per_epoch))

    def _open(self, is_read: bool = True) -> None:
        position = self.position
        in_pass = self._resumes_within_pass
        if not in_pass:
            position.passes += 1
            position.drawn = 0
        if not self._resumes:
            if is_read or not self.source.datasets:
                self.state.begin_pass(position.passes)
            super()._open(is_read)
            return
        # Only the first pass after a resume is replayed. Drop the old iterator first: it might read ahead and draw random numbers.
        self.close()
        self._resumes = False
        self._seen = position.drawn
        self._begin_pass()
        batches = self.source.steps
        if in_pass and self.source.datasets and batches is not None and position.drawn >= batches:
            # The backup was taken after the last step of the pass: its elements need not be read again, and a thread that read them
            # ahead would draw random numbers after the state is restored. Only the order of the next pass must be reproduced.
            self.state.restore("first")
            for dataset in self.source.datasets:
                replay(dataset, position.passes)
            self.iterator = iter(())
            return
        self.source.makes_skipped = self.state.items_draw()
        if self.source.generator:  # its next batch is the one after those that the backup counts
            if not self._continues_generator:
                self.state.prepare_replay(position.passes, in_pass)()
            self.iterator = self._open_source()
            return
        ready = self.state.prepare_replay(position.passes, in_pass)
        self.iterator = self.source.open_at(position.passes, position.drawn, ready)
