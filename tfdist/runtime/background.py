"""One piece of work at a time, beside the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs what it is given in a thread, and raises what that raises in the main thread, later.

    The thread does not keep the process from ending: a task whose peers have died must not wait for their files.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Starts some work; what was started before must have been finished."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="backup", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the work has ended, well or not, or for some seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def finish(self) -> None:
        """Waits until the work has ended, and raises what it has raised."""
        self.wait()
        self._thread = None
        self.check()

    def check(self) -> None:
        """Raises what the work has raised, if it has ended."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self._error = e
