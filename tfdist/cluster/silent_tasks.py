"""Which tasks have not answered for how long. No TensorFlow here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tfdist.cluster.spec import ClusterSpec, TaskSpec
from tfdist.runtime.log import logger

REPORT_AFTER = 5.0  # seconds without an answer, after which it is logged
REPORT_EVERY = 10.0  # and again
_LONGEST_ROUND = 5.0  # seconds that count for a round: this process itself may have been stopped


class SilentTasks:
    """Tasks that do not answer, and are not known to have ended.

    Args:
        cluster: The cluster.
        task: This process's task.
        clock: Returns seconds. Injected, so that tests need not wait.

    Attributes:
        seconds: For how long each of them has not answered.
    """

    def __init__(self, cluster: ClusterSpec, task: TaskSpec, clock: Callable[[], float] = time.monotonic):
        self._cluster = cluster
        self._task = task
        self._clock = clock
        self.seconds: dict[TaskSpec, float] = {}
        self._noted = clock()
        self._logged = -REPORT_EVERY

    def note(self, silent: Iterable[TaskSpec]) -> None:
        """Takes which tasks do not answer now, and logs those that have not for long."""
        now = self._clock()
        passed = min(now - self._noted, _LONGEST_ROUND)
        self.seconds = {task: self.seconds.get(task, 0.0) + passed for task in silent}
        self._noted = now
        if now - self._logged >= REPORT_EVERY and (sentence := self.sentence()):
            logger.warning(sentence)
            self._logged = now

    def sentence(self) -> str:
        """Returns who has not answered for how long, or an empty text."""
        long = {task: seconds for task, seconds in self.seconds.items() if seconds >= REPORT_AFTER}
        if not long:
            return ""
        names = ", ".join(f"{task} at {self._cluster.address(task)}" for task in sorted(long, key=str))
        return (
            f"{self._task} waits for {names}: no answer for {max(long.values()):.0f} s. Is the process stopped, its host "
            "overloaded, or the network down?"
        )
