"""`LockLender`: releases the interpreter's lock for other threads while TensorFlow waits for other tasks and holds the lock.

Some of TensorFlow's bindings hold the lock until all tasks answer. Meanwhile no other Python thread runs: none can report the
missing task, shut down a connection, or end the process after a signal. Only a signal's handler still runs, in the waiting
thread itself. So a small process, this file run as a program, watches the threads that are in such a call. While a thread
sleeps, the process sends it a signal every tenth of a second, and the handler releases the lock for half of that time.

A handler may interrupt code in which the interpreter or `malloc` must not be entered again. Therefore the process signals only a
sleeping thread, and the handler is a C function that runs no bytecode. Only Linux shows the state of threads: on other systems
the lock is not released.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

_SIGNAL = signal.SIGURG if hasattr(signal, "SIGURG") else 0  # ignored by default, so a late signal does no harm
_LOOK_EVERY = 0.05  # seconds; a thread is signalled if it sleeps at two checks and has not run between them
_LEND_MICROSECONDS = 50_000
_SLOTS = 64  # calls that may wait at the same time; further calls keep the lock
# Numbers of the system call `tgkill`, for which old C libraries have no function.
_TGKILL = {
    "x86_64": 234,
    "aarch64": 131,
}


class LockLender:
    """Context manager in which functions that hold the interpreter's lock release it for other threads while they wait.

    Args:
        module: The module through which the functions are called; they are replaced in it until `stop`.
        names: The functions' names.
    """

    def __init__(self, module: Any, names: Sequence[str]):
        self._module = module
        self._originals = {name: getattr(module, name) for name in names}
        self._stop = contextlib.ExitStack()

    def start(self) -> LockLender:
        """Starts the process and replaces the functions; does nothing on other systems than Linux or unknown processors."""
        if sys.platform != "linux" or os.uname().machine not in _TGKILL or not sys.executable:
            return self
        import subprocess

        with contextlib.suppress(OSError), contextlib.ExitStack() as started:  # for example, no process may be started
            memory = os.memfd_create("tfdist")
            started.callback(os.close, memory)
            os.ftruncate(memory, mmap.PAGESIZE)
            waiting = memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("q")
            started.callback(_take_signal())
            words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(memory)]
            quiet = subprocess.DEVNULL
            # In a separate process group, so that Ctrl-C at the terminal does not end it before this process.
            process = subprocess.Popen(
                words, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=[memory], process_group=0
            )
            started.callback(process.wait)
            started.callback(process.kill)
            free = list(range(_SLOTS))
            for name, original in self._originals.items():
                setattr(self._module, name, _marked(original, waiting, free))
                started.callback(setattr, self._module, name, original)
            self._stop = started.pop_all()
        return self

    def stop(self) -> None:
        """Restores the functions and ends the process."""
        self._stop.close()

    def __enter__(self) -> LockLender:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _marked(function: Callable[..., Any], waiting: memoryview, free: list[int]) -> Callable[..., Any]:
    """Wraps a function so that the calling thread's id is in `waiting` during the call."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not free:
            return function(*args)
        slot = free.pop()
        waiting[slot] = threading.get_native_id()
        try:
            return function(*args)
        finally:
            waiting[slot] = 0
            free.append(slot)

    return call


def _take_signal() -> Callable[[], object]:
    """Installs a handler that releases the interpreter's lock for a while. Returns a function that restores the previous handler."""
    libc = ctypes.CDLL(None)
    # `libc.usleep` releases the lock as every function of `ctypes.CDLL` does. Python's own waiting functions would check for
    # signals afterwards, and could raise KeyboardInterrupt where no code handles it.
    handler = ctypes.CFUNCTYPE(None)(functools.partial(libc.usleep, _LEND_MICROSECONDS))
    # Not Python's `sigaction`, which uses the signal stack of faulthandler: that stack is too small for this handler.
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    before = libc.signal(_SIGNAL, ctypes.cast(handler, ctypes.c_void_p))

    def restore(_handler: object = handler) -> None:  # the default keeps the handler alive as long as it may be called
        libc.signal(_SIGNAL, before)

    return restore


def _switches_of_sleeping(process: int, thread: int) -> str | None:
    """Returns the number of context switches of a sleeping thread, or None for a running or ended thread."""
    try:
        with open(f"/proc/{process}/task/{thread}/status", encoding="ascii", errors="replace") as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except OSError:  # the thread has ended
        return None
    is_sleeping = fields["State"].split()[0] == "S"
    return fields["voluntary_ctxt_switches"] if is_sleeping else None


def _signal_sleepers(parent: int, memory: int) -> None:
    """Signals the parent's threads that sleep in a call, until the parent ends."""
    libc = ctypes.CDLL(None)
    waiting = memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("q")
    before: dict[int, str | None] = {}
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
        now = {thread: _switches_of_sleeping(parent, thread) for thread in waiting[:_SLOTS].tolist() if thread}
        for thread, switches in now.items():
            if switches is not None and before.get(thread) == switches:
                libc.syscall(_TGKILL[os.uname().machine], parent, thread, int(_SIGNAL))
        before = now


if __name__ == "__main__":
    _signal_sleepers(int(sys.argv[1]), int(sys.argv[2]))
