"""Ctrl-C for commands: the process ends within seconds, and of a second one at once, whatever its main thread does.

Python raises KeyboardInterrupt in the main thread, which may be in TensorFlow for as long as a step or a compilation takes. So
a thread reads the signal from a pipe, as in `preemption.py`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from tfdist.runtime import preemption
from tfdist.runtime.log import logger

MESSAGE = "ended by Ctrl-C (SIGINT)"
_SECONDS = 2.0  # that the main thread has to end the process


is_command = False  # whether this process is a command's own, and may be ended


def before_imports() -> None:
    """Has Ctrl-C end this process without a traceback of an import; for commands, until `after_imports`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def after_imports() -> None:
    """Has Ctrl-C raise KeyboardInterrupt again; for commands."""
    global is_command
    is_command = True
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def listen() -> None:
    """Limits from now on how long this process lives after Ctrl-C, if it is a command's own."""
    if not is_command or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    preemption.own_pipes.add(write)
    preemption.on_interrupt.append(notice := _Interrupts().notice)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_read, args=(read, notice), name="interrupt", daemon=True).start()


def _read(pipe: int, notice: Callable[[], object]) -> None:
    while number := os.read(pipe, 1):
        if number[0] == signal.SIGINT:
            notice()


class _Interrupts:
    def __init__(self) -> None:
        self._noticed = False

    def notice(self) -> None:
        if self._noticed:
            _end()
        self._noticed = True
        timer = threading.Timer(_SECONDS, _end)
        timer.daemon = True
        timer.start()


def _end() -> None:
    # In a thread of its own: a terminal that nobody reads must not keep the process.
    said = threading.Thread(target=logger.error, args=(MESSAGE,), daemon=True)
    said.start()
    said.join(0.5)
    os._exit(128 + signal.SIGINT)
