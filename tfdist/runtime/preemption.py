"""Handles SIGTERM, by which clusters announce that a task must go, in a thread: wherever the main thread is.

Python runs a signal's handler in the main thread, which may be waiting in TensorFlow for a peer; and TensorFlow, under
several workers, takes SIGTERM for itself. So the signal is read from a pipe, by a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdist.runtime import exit_status

GRACE_SECONDS = 25.0
_SHARE = 0.9  # of the grace, after which a save that has not come to an end is given up
_ONE_SIGNAL = 1.0  # seconds in which several count as one, as they reach a task directly and through its supervisor


@dataclasses.dataclass
class _Before:
    """The SIGTERM handler and the wakeup descriptor that were replaced."""

    handler: Any = None
    descriptor: int = -1


_before = _Before()
own_pipes: set[int] = set()  # write ends of pipes from which the package itself reads signals
on_interrupt: list[Callable[[], object]] = []  # called in a thread on SIGINT; for `interrupt.py`


class Preemption:
    """Whether this process has been told to go.

    Outside of a training the first SIGTERM ends the process at once, with exit code 75. In one it is noted, and the process
    ends with that code when the grace is nearly over, unless it has ended by then. A second SIGTERM, a second or more later, ends it at once.

    Args:
        grace_seconds: How long the process may take to end.

    Attributes:
        requested: Whether SIGTERM has come.
        training: Whether a training looks at `requested` between its steps.
        on_exit: Called before this process is ended with exit code 75 in this way.
    """

    def __init__(self, grace_seconds: float = GRACE_SECONDS):
        self.grace_seconds = grace_seconds
        self.requested = False
        self.training = False
        self.on_exit: Callable[[], object] = lambda: None
        self._pipe: tuple[int, int] | None = None

    def listen(self) -> None:
        """Takes SIGTERM over, again if somebody else has taken it meanwhile. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            own_pipes.add(self._pipe[1])
            os.register_at_fork(after_in_child=_restore_default_in_child)
            threading.Thread(target=self._read_signals, args=(self._pipe[0],), name="preemption", daemon=True).start()
        # The handler itself does nothing: by the time that Python calls it, the thread has read the signal.
        handler = signal.signal(signal.SIGTERM, _ignore)
        descriptor = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if descriptor not in own_pipes:
            _before.descriptor = descriptor
        if handler is not _ignore:
            _before.handler = handler

    def give_back(self) -> None:
        """Gives SIGTERM and the wakeup descriptor back to whom they were, if they were anybody's: an event loop, or a handler."""
        if threading.current_thread() is not threading.main_thread() or self._pipe is None:
            return
        foreign = callable(_before.handler) and _before.handler is not end_at_once
        if foreign or _before.descriptor >= 0:
            signal.set_wakeup_fd(_before.descriptor)
            signal.signal(signal.SIGTERM, _before.handler if foreign else signal.SIG_DFL)

    def _read_signals(self, pipe: int) -> None:
        first = 0.0
        while True:
            signals = os.read(pipe, 1)
            if _before.descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.write(_before.descriptor, signals)
            if signals[0] == signal.SIGINT:
                for call in on_interrupt:
                    call()
            if signals[0] != signal.SIGTERM:
                continue
            now = time.monotonic()
            if self.requested and now - first < _ONE_SIGNAL:
                continue
            if self.requested:
                os._exit(128 + signal.SIGTERM)
            self.requested, first = True, now
            if not self.training:
                self._end()
            timer = threading.Timer(_SHARE * self.grace_seconds, self._end)
            timer.daemon = True
            timer.start()

    def _end(self) -> None:
        exit_status.exit_code = exit_status.PREEMPTED
        try:
            self.on_exit()
        finally:
            os._exit(exit_status.PREEMPTED)


def end_at_once(*_: object) -> None:
    """A handler of SIGTERM for the seconds before there is a `Preemption`."""
    os._exit(exit_status.PREEMPTED)


def is_listening() -> bool:
    """Whether a thread of a `Preemption` hears SIGTERM."""
    return signal.getsignal(signal.SIGTERM) is _ignore


def _ignore(*_: object) -> None:
    pass


def _restore_default_in_child() -> None:
    """Lets a forked process, which shares the pipe, die of SIGTERM itself."""
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
