"""TensorFlow's profiler on a range of a training's steps."""

from __future__ import annotations

import tensorflow as tf

from tfdist.runtime.log import logger


class StepProfiler:
    """Profiles the executions that hold one of the steps.

    Args:
        steps: The first and the last step of the whole training, counted from 1; None means that nothing is profiled.
    """

    def __init__(self, steps: tuple[int, int] | None):
        self._first, self._last = steps or (1, 0)
        self._runs = False

    @property
    def is_off(self) -> bool:
        """Whether there is nothing to profile."""
        return self._last == 0

    def before_execution(self, folder: str, done: int, steps: int) -> None:
        """Starts the profiler where the next execution has a step of the range.

        Args:
            folder: The folder of a run of TensorBoard.
            done: The steps of the training before it.
            steps: Its steps.
        """
        if not self._runs and done < self._last and done + steps >= self._first:
            try:
                tf.profiler.experimental.start(folder)
                self._runs = True
            except tf.errors.AlreadyExistsError:
                self._give_up()

    def after_execution(self, done: int) -> None:
        """Stops it after the last step of the range."""
        if done >= self._last:
            self.stop()

    def stop(self) -> None:
        """Writes the profile, if one is being taken.

        Raises:
            tf.errors.OpError: It cannot be written.
        """
        runs, self._runs = self._runs, False
        if runs:
            try:
                tf.profiler.experimental.stop()
            except tf.errors.UnavailableError:
                self._give_up()

    def _give_up(self) -> None:
        logger.warning(
            f"TensorBoard: there is no profile of steps {self._first} to {self._last}, as another profiler runs in this process."
        )
        self._last = 0
