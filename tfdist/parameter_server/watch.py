"""Watches, on the chief, whether workers and servers answer: the main thread may be in a call that waits for one that does not.

TensorFlow notices a process that ends, but waits for ever for one that is stopped, or whose host has vanished. Here such a
worker is given up after a while: the chief shuts its own connections to it down, and so TensorFlow takes it for lost until it
answers again. A server that is given up ends the job.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time

from tfdist.cluster import ClusterSpec, TaskSpec, connections, greeting, reachability, silent_tasks
from tfdist.compat import tf_cluster
from tfdist.parameter_server import termination
from tfdist.runtime import exit_status
from tfdist.runtime.log import logger

_EVERY = 1.0  # seconds
# Seconds without an answer after which a worker is given up: several questions have gone without one by then.
WORKER_TIMEOUT = 25.0
_LAST_ROUND = 5.0  # seconds that the last question to a server may take
# TensorFlow connects again and again; a call that has found a new connection waits for so many seconds.
_SHUT_DOWN_EVERY = 0.1


class Watch:
    """Asks workers and servers, in a thread, until the process ends.

    Args:
        cluster: The cluster.
        server_timeout: Seconds without an answer within which a server is given up; at least 10.

    Attributes:
        given_up: The tasks that are given up, with the reason: workers until they answer again.
    """

    def __init__(self, cluster: ClusterSpec, server_timeout: float):
        self._cluster = cluster
        self._limits = {"worker": WORKER_TIMEOUT, "ps": max(server_timeout - _LAST_ROUND, silent_tasks.REPORT_EVERY)}
        self._tasks = [task for task in cluster.tasks() if task.type in self._limits]
        self._silent = silent_tasks.SilentTasks(cluster, cluster.chief)
        self.given_up: dict[TaskSpec, str] = {}
        tf_cluster.register_functions_without_lock()  # or these threads would wait with the call
        atexit.register(self._leave)
        threading.Thread(target=self._watch, daemon=True, name="tfdist-watch").start()
        threading.Thread(target=self._shut_down, daemon=True, name="tfdist-shut-down").start()

    @property
    def lost_servers(self) -> dict[TaskSpec, str]:
        """The servers that are given up, with the reason."""
        return {task: reason for task, reason in self.given_up.items() if task.type == "ps"}

    def _watch(self) -> None:
        while True:
            time.sleep(_EVERY)
            absent = reachability.unreachable_tasks(self._cluster, self._tasks, serving=True)
            self._silent.note({task for task, reason in absent.items() if reason not in reachability.ENDED})
            now = {
                task: f"no answer for {seconds:.0f} s"
                for task, seconds in self._silent.seconds.items()
                if seconds >= self._limits[task.type]
            }
            for task in now.keys() - self.given_up.keys():
                if task.type == "worker":
                    logger.warning(
                        f"{task} at {self._cluster.address(task)} is given up after {self._silent.seconds[task]:.0f} s "
                        "without an answer, until it answers again"
                    )
            self.given_up = {**now, **self.lost_servers}

    def _shut_down(self) -> None:
        endpoints = {task: connections.resolve(self._cluster.address(task)) for task in self._tasks}
        before: set[TaskSpec] = set()
        while True:
            time.sleep(_SHUT_DOWN_EVERY)
            now = set(self.given_up)
            for task in now - before:  # its name may stand for another address by now
                endpoints[task] |= connections.resolve(self._cluster.address(task))
            before = now
            for task in now:
                connections.shut_down(endpoints[task])

    def _leave(self) -> None:
        """Ends the process at once if a task does not answer: TensorFlow's own end would wait for it without end."""
        if self.given_up or any(map(self._is_silent, self._tasks)):
            termination.publish_exit_code(self._cluster)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_status.expected_exit_code())

    def _is_silent(self, task: TaskSpec) -> bool:
        greeted = greeting.encode_greeting(self._cluster, task)
        reason = reachability.unreachable_reason(self._cluster.address(task), expected=greeted, serving=True)
        return bool(reason) and reason not in reachability.ENDED
