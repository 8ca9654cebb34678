"""Calls of a transport that end when a worker is lost, though the transport itself would wait without limit."""

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

Result = TypeVar("Result")


class Calls:
    """Makes calls in a thread of its own, one at a time, so that who waits for one can be told to go on without it.

    A thread that hangs in a library keeps its arguments alive, but does not keep the process from ending.

    Args:
        timeout_seconds: How long a call may take; 0 means without limit.
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
        """Returns whether a call has failed or been given up, so that the transport is in no known state; or it was ended."""
        return bool(self._aborted)

    def __call__(self, function: Callable[[], Result], timeout_seconds: float = 0.0) -> Result:
        """Returns the result of the function.

        Args:
            function: The function to call.
            timeout_seconds: Instead of that of all calls.

        Raises:
            ClusterError: It was given up, or took too long.
        """
        with self._turn:
            future: concurrent.futures.Future[Result] = concurrent.futures.Future()
            with self._lock:
                if sentence := self._aborted:
                    raise ClusterError(sentence)
                self._current = future
            self._queue.put((function, future))
            limit = timeout_seconds or self._timeout_seconds
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
        """Makes the call that is on its way, and all further ones, fail."""
        with self._lock:
            self._aborted = self._aborted or sentence or "a call has failed"
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self._current.set_exception(ClusterError(sentence))


def _work(jobs: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]]]) -> None:
    while True:
        function, future = jobs.get()
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # given up meanwhile
            try:
                future.set_result(function())
            except Exception as e:
                future.set_exception(e)
        del function, future  # which hold a tensor


_alive: weakref.WeakSet[Calls] = weakref.WeakSet()


def have_failed() -> bool:
    """Returns whether a call of any transport of this process has failed, been given up or been ended."""
    return any(calls.ended for calls in list(_alive))


def abort_collectives(code: int, message: str) -> None:
    """Makes all collectives of this process fail: TensorFlow's, and those of other transports.

    Args:
        code: TensorFlow's code of the error.
        message: Why.
    """
    tf_cluster.abort_collectives(code, message)
    for calls in list(_alive):
        calls.abort(message)
