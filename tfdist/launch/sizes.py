"""`Sizes`: the number of workers of an elastic job. No TensorFlow here."""

from __future__ import annotations

import time
from collections.abc import Callable

JOIN_SECONDS = 30.0


class Sizes:
    """The number of workers of a job that continues with fewer after a loss, and with more again after a backup.

    Every size divides the number of replicas, so that each worker has equally many.

    Args:
        fewest: The smallest number of workers.
        most: The number of workers at the start.
        replicas: The number of replicas of all workers together; 0 means `most`.
        join_seconds: Seconds after a loss during which the job starts again with as many workers, if restarts are left.
        clock: Returns the time in seconds. Tests replace it, so that they need not wait.

    Attributes:
        workers: The number of workers now.
        fewest: The smallest number of workers.
        most: The largest number of workers.
        replicas: The number of replicas.
        available: Returns the number of workers that have a place now. By default all of them have.
    """

    def __init__(
        self,
        fewest: int,
        most: int,
        replicas: int = 0,
        join_seconds: float = JOIN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.replicas = replicas or most
        self._sizes = [number for number in range(fewest, most + 1) if self.replicas % number == 0]
        self.fewest = self._sizes[0]
        self.workers = self.most = self._sizes[-1]
        self.available: Callable[[], int] = lambda: self.most
        self._join_seconds = join_seconds
        self._clock = clock
        self._step: int | None = None  # of the last loss
        self._since = 0.0  # time of the first loss in a series without progress
        self._saved: int | None = None  # the step of the newest backup of the current tasks
        self._backups = 0  # of the current tasks
        self._patience = 1  # backups to wait for before the job grows
        self._has_grown = False  # without a new step since

    @property
    def is_full(self) -> bool:
        """Returns whether the job has all its workers."""
        return self.workers == self.most

    def started(self) -> None:
        """Notes a start of the tasks, with `workers` workers."""
        self._saved = None
        self._backups = 0

    def lost(self, step: int | None, may_restart: bool) -> bool:
        """Notes the loss of a worker. Returns whether the job continues with fewer workers; `workers` is then their number.

        Args:
            step: The training steps completed before the loss, or None before the first step.
            may_restart: Whether the job may start again with as many workers.
        """
        now = self._clock()
        progressed = step is not None and (self._step is None or step > self._step)
        if progressed or self._step is None:
            self._since = now
        # A worker that is lost again right after the job has grown is likely to be lost the next time, too.
        if self._has_grown and progressed:
            self._patience = 1
        elif self._has_grown:
            self._patience *= 2
        self._has_grown = False
        if step is not None:
            self._step = step
        elif self._step is None:
            self._step = 0
        smaller = [size for size in self._sizes if size < self.workers]
        if not smaller or (may_restart and now - self._since < self._join_seconds):
            return False
        self.workers = smaller[-1]
        return True

    def should_grow(self, saved: int) -> bool:
        """Notes the step of the last backup, and returns whether the job should start again with more workers."""
        if self._saved is not None and saved > self._saved:
            self._backups += 1
        self._saved = saved
        return not self.is_full and self._backups >= self._patience and self._largest(self.available()) > self.workers

    def grow(self) -> None:
        """Sets `workers` to the largest number that has a place."""
        self.workers = self._largest(self.available())
        self._has_grown = True

    def fit(self, available: int) -> None:
        """Lowers `workers` to a number that is available, or to the smallest number."""
        self.workers = min(self.workers, self._largest(available))

    def _largest(self, available: int) -> int:
        return max((size for size in self._sizes if size <= available), default=self.fewest)
