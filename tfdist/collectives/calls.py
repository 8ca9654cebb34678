"""Calls of a transport that can be aborted when a worker is lost; the transport itself would wait without limit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from tfdist.compat import tf_cluster
from tfdist.errors import ClusterError
from tfdist.runtime.report.phase import main as phases

Result = TypeVar("Result")
_Job = tuple[Callable[[], Any], concurrent.futures.Future[Any]]


class Calls:
    """A thread that makes one call at a time, so that `abort` can end the caller's wait.

    If the thread hangs in a library, it keeps its arguments alive, but it does not prevent the process from exiting. In a process whose
    waits are not watched, a call may take `timeout_seconds`; 0 means no limit.
    """

    def __init__(self, timeout_seconds: float = 0.0):
        self._timeout_seconds = timeout_seconds
        self._queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._turn = threading.Lock()  # held during a call
        self._lock = threading.Lock()  # held while the two attributes below are read or written, never during a wait
        self._current: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._aborted = ""
        _alive.add(self)
        threading.Thread(target=_work, args=(self._queue,), daemon=True, name="tfdist-transport").start()

    @property
    def ended(self) -> bool:
        """Returns whether a call failed or `abort` was called. The state of the transport is then unknown."""
        return bool(self._aborted)

    def __call__(self, function: Callable[[], Result], timeout_seconds: float = 0.0) -> Result:
        """Calls a function in the thread and returns its result. 0 seconds mean the limit of all calls.

        Raises:
            ClusterError: The call was aborted or took too long.
        """
        with self._turn:
            future: concurrent.futures.Future[Result] = concurrent.futures.Future()
            with self._lock:
                sentence = self._aborted
                if sentence:
                    raise ClusterError(sentence)
                self._current = future
            self._queue.put((function, future))
            limit = timeout_seconds
            if not limit and not phases.watched:
                limit = self._timeout_seconds
            try:
                return future.result(limit or None)
            except concurrent.futures.TimeoutError:
                text = f"the workers' exchange took longer than {limit:g} s (strategy.timeout_seconds)."
                self.abort(text)
                raise ClusterError(text) from None
            except Exception as e:
                self.abort(str(e))
                raise

    def abort(self, sentence: str) -> None:
        """Makes the current call and all later calls raise ClusterError."""
        with self._lock:
            self._aborted = self._aborted or sentence or "a call has failed"
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self._current.set_exception(ClusterError(sentence))


def _work(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        function, future = jobs.get()
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # aborted in the meantime
            try:
                future.set_result(function())
            except Exception as e:
                future.set_exception(e)
        del function, future  # they would hold a tensor until the next job


_alive: weakref.WeakSet[Calls] = weakref.WeakSet()


def have_failed() -> bool:
    """Returns whether a call of any transport of this process failed or was aborted."""
    return any(calls.ended for calls in list(_alive))


def abort_collectives(code: int, message: str) -> None:
    """Makes all collectives of this process fail, TensorFlow's with its error code, and those of other transports."""
    tf_cluster.abort_collectives(code, message)
    for calls in list(_alive):
        calls.abort(message)
