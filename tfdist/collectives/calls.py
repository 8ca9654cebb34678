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
from tfdist.runtime.phase import main as phases

Result = TypeVar("Result")


class Calls:
    """A thread that makes one call at a time, so that `abort` can end the caller's wait.

    If the thread hangs in a library, it keeps its arguments alive, but it does not prevent the process from exiting.

    Args:
        timeout_seconds: How long a call may take, in a process whose waits are not watched; 0 means without limit.
    """

    def __init__(self, timeout_seconds: float = 0.0):
        self._timeout_seconds = timeout_seconds
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = queue.SimpleQueue()
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._current: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._aborted = ""
        _alive.add(self)
        threading.Thread(target=_work, args=(self._queue,), daemon=True, name="tfdist-transport").start()

    @property
    def ended(self) -> bool:
        """Returns whether a call failed or `abort` was called. The state of the transport is then unknown."""
        return bool(self._aborted)

    def __call__(self, function: Callable[[], Result], timeout_seconds: float = 0.0) -> Result:
        """Calls a function in the thread and returns its result.

        Args:
            function: The function to call.
            timeout_seconds: Limit of this call; 0 means the limit of all calls.

        Raises:
            ClusterError: The call was aborted or took too long.
        """
        with self._turn:
            future: concurrent.futures.Future[Result] = concurrent.futures.Future()
            with self._lock:
                if sentence := self._aborted:
                    raise ClusterError(sentence)
                self._current = future
            self._queue.put((function, future))
            limit = timeout_seconds or (0.0 if phases.watched else self._timeout_seconds)
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


def _work(jobs: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]]]) -> None:
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
    """Makes all collectives of this process fail: TensorFlow's, and those of other transports.

    Args:
        code: TensorFlow's error code.
        message: The error message.
    """
    tf_cluster.abort_collectives(code, message)
    for calls in list(_alive):
        calls.abort(message)
