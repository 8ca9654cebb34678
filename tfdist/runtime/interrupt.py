"""Ctrl-C for commands: the process ends within seconds, and at once on a second one, whatever its main thread does.

Python raises KeyboardInterrupt in the main thread, which may be in TensorFlow for as long as a step or a compilation takes. So
a thread reads the signal from a pipe, as in `preemption.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.runtime import preemption, progress
from tfdist.runtime.log import logger

MESSAGE = "ended by Ctrl-C (SIGINT)"
_ENDING_SECONDS = 2.0  # that the main thread has to end the process
_TAKE_BACK_EVERY = 0.05  # seconds

is_command = False  # whether this process is a command's own, and may be ended


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Returns a command's exit code; after Ctrl-C, or where nobody reads its output (`--help | head`), a shell's for that signal."""
    try:
        code = main(argv)
        if sys.stdout is not None:  # Python's word for one that was closed before the start
            sys.stdout.flush()
    except KeyboardInterrupt:
        logger.error(message())
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def message() -> str:
    """Returns what a command says after Ctrl-C, with what is kept of a training."""
    return MESSAGE + progress.how_to_continue_mine()


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
        timer = threading.Timer(_ENDING_SECONDS, _end)
        timer.daemon = True
        timer.start()


def _end() -> None:
    # In a thread of its own: a terminal that nobody reads must not keep the process.
    report = threading.Thread(target=logger.error, args=(message(),), daemon=True)
    report.start()
    report.join(0.5)
    os._exit(128 + signal.SIGINT)


@contextlib.contextmanager
def signals_end_process() -> Iterator[None]:
    """Has SIGINT and SIGTERM end the process at once while TensorFlow connects inside: with exit code 75 where a `Preemption` listens.

    While TensorFlow connects, Python calls no handler of the main thread. TensorFlow takes SIGTERM for itself before it waits for other
    tasks, and only notes it. It gets the signal back afterwards.
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
        while not over.wait(_TAKE_BACK_EVERY):
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
