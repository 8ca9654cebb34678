"""Writes to a stream in a thread, so that a reader that stalls holds up nobody else. No TensorFlow here."""

from __future__ import annotations

import os
import select
import threading
import time
from typing import IO

_PIECE = 4096  # bytes of one write: a blocking write of more returns only when the reader has taken nearly all of it


class BackgroundWriter:
    """Writes one chunk at a time. The stream's own mode is left alone: other programs share a terminal.

    Args:
        stream: Where to write. None means nowhere: standard output is closed.

    Attributes:
        is_broken: Whether a write has failed: the reader has gone, or the disk is full.
        moved_at: When the reader has last taken something, by `time.monotonic()`.
    """

    def __init__(self, stream: IO[bytes] | None):
        self._stream = stream
        self._descriptor: int | None = None
        self._thread: threading.Thread | None = None
        self.is_broken = stream is None
        self.moved_at = 0.0
        try:
            if stream is not None:
                stream.flush()
                self._descriptor = stream.fileno()  # a thread that is stuck in the stream itself would hold its lock
        except (OSError, ValueError):  # a stream in memory, or one that is closed
            pass

    @property
    def is_idle(self) -> bool:
        """Whether all that was to be written has been."""
        return self._thread is None or not self._thread.is_alive()

    def write(self, chunk: bytes) -> None:
        """Begins to write a chunk; only when idle."""
        if chunk and not self.is_broken:
            self.moved_at = time.monotonic()
            # Daemonic: the process may end while the thread waits for the reader.
            self._thread = threading.Thread(target=self._write, args=(chunk,), name="output", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> None:
        """Waits until the writer is idle, for some seconds at most."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _write(self, chunk: bytes) -> None:
        try:
            if self._descriptor is None:
                assert self._stream is not None  # noqa: S101 (for the type checker: else it is broken)
                self._stream.write(chunk)
                self._stream.flush()
                return
            rest = memoryview(chunk)
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest[:_PIECE]) :]
                except BlockingIOError:  # another program has made the terminal non-blocking
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    poll.poll()
                self.moved_at = time.monotonic()
        except (OSError, ValueError):
            self.is_broken = True
