"""Warnings, on the chief, of state that a backup cannot hold, so that a resume would not be exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist.backup import unsaved_randomness
from tfdist.backup.data_position import LoopTracker
from tfdist.data.python_generators import PROCESS_GENERATORS


class ResumeWarnings:
    """Warns once of each source of unsaved state: of the data before the training, of steps after the second execution.

    Args:
        enabled: Whether this process warns.
    """

    def __init__(self, enabled: bool):
        self._enabled = enabled
        self._executions = 0
        self._generators: Sequence[Any] = ()  # of Python code, which backups hold for steps
        self._watch: unsaved_randomness.StepWatch | None = None

    def on_train_begin(self, tracker: LoopTracker, callbacks: Sequence[Any]) -> None:
        """Warns of data whose random state cannot be saved.

        Args:
            tracker: Of the loop over the data.
            callbacks: The user's, which may draw while a thread reads the data.
        """
        if self._enabled:
            self._generators = () if tracker.state.calls_python else PROCESS_GENERATORS
            unsaved_randomness.warn_if_inexact(list(tracker.doubts(callbacks)))

    def on_execution_end(self, function: Any, known_variables: Callable[[], Sequence[Any]]) -> None:
        """Watches the second execution of steps, and then warns of what it has changed.

        Args:
            function: What Keras calls for each execution of steps.
            known_variables: Returns the variables that backups hold, or that hold no state.
        """
        self._executions += 1
        if self._executions == 1 and self._enabled:
            self._watch = unsaved_randomness.StepWatch(function, known_variables(), self._generators)
        elif self._executions == 2:
            self._warn_of_steps()

    def on_epoch_end(self) -> None:
        """Warns of what has been watched: the epoch may have had one execution."""
        self._warn_of_steps()

    def _warn_of_steps(self) -> None:
        watch, self._watch = self._watch, None
        if watch:
            unsaved_randomness.warn_if_inexact(list(watch.doubts()))
