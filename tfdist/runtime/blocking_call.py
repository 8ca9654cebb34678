"""SIGINT and SIGTERM while TensorFlow connects, where Python calls no handler of the main thread. No TensorFlow here."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator
from typing import Any

from tfdist.runtime import preemption

_EVERY = 0.05  # seconds


@contextlib.contextmanager
def signals_end_process() -> Iterator[None]:
    """Has SIGINT and SIGTERM end the process at once while TensorFlow connects inside: with exit code 75 where a `Preemption` listens.

    TensorFlow takes SIGTERM for itself before it waits for other tasks, and only notes it. It gets the signal back afterwards.
    """
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        if preemption.is_listening():  # in a thread, which needs no handler
            del handlers[signal.SIGTERM]
        handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    keep, over = _action(), threading.Event()
    taken: list[int | None] = []

    def take_back() -> None:
        while not over.wait(_EVERY):
            if _action() != keep:
                taken.append(_set_action(keep))

    thread = threading.Thread(target=take_back, daemon=True, name="tfdist-signals")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if taken and not preemption.is_listening():
            _set_action(taken[-1])


# Other threads than the main one may call these, and they see what TensorFlow has set. None stands for SIG_DFL.


def _action() -> int | None:
    """Returns the address of the C function that the system calls upon SIGTERM."""
    get = ctypes.pythonapi.PyOS_getsig
    get.argtypes, get.restype = [ctypes.c_int], ctypes.c_void_p
    address: int | None = get(signal.SIGTERM)
    return address


def _set_action(address: int | None) -> int | None:
    """Sets what `_action` returns, and returns what it was."""
    put = ctypes.pythonapi.PyOS_setsig
    put.argtypes, put.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before: int | None = put(signal.SIGTERM, address)
    return before
