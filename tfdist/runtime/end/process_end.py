"""The end of this process: exit codes, SIGTERM and Ctrl-C, and user code that ends a training too early. No TensorFlow here.

Python calls a signal's handler in the main thread, which may wait in TensorFlow for a peer, or run a step or a compilation. With
several workers, TensorFlow also installs its own SIGTERM handler. Therefore a thread reads the signals from a pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from tfdist.runtime.end import hooks, interrupts
from tfdist.runtime.log import logger

PREEMPTED = 75  # the exit code after SIGTERM, once the state is saved: EX_TEMPFAIL, a request for a restart
FAULTY_CONFIG = 2  # the exit code of an invalid command line or configuration, which a restart does not fix
GRACE_SECONDS = 25.0

_SHARE = 0.9  # of the grace period, after which an unfinished save is abandoned
_ONE_SIGNAL = 1.0  # seconds within which signals count as one: a task gets a signal directly and through its supervisor
_ENDING_SECONDS = 2.0  # limit for the main thread to end the process after Ctrl-C
_TAKE_BACK_EVERY = 0.05  # seconds
PACKAGE = f"{pathlib.Path(__file__).parents[2]}{os.sep}"
_QUITTERS = "sitebuiltins"  # the module of `exit()` and `quit()`, which call sys.exit
_leave = os._exit  # `run_to_the_end` replaces it for user code

exit_code = 0  # of this process at its end, as far as it is known; other tasks read it
amid_training = False  # whether sys.exit was called within a training
note_end: Callable[[int], object] = (
    bool  # tells the supervisor an exit code other than 0, and its cause; `ending` sets it
)
advice: Callable[[], str] = str  # returns how to continue the training, after a full stop; `progress` sets it
_is_command = False  # whether this process is a command's own, and may be ended


def expected_exit_code() -> int:
    """Returns the exit code of this process during its shutdown: `exit_code`, or 1 after an exception."""
    return exit_code or int(getattr(sys, "last_value", None) is not None)


def end(code: int, flush: bool = True) -> NoReturn:
    """Ends this process at once, without Python's and TensorFlow's shutdown.

    `flush` writes buffered output first; a terminal that nobody reads could block this.
    """
    if flush:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # the stream is closed, or its reader has ended
                pass
    note_end(code)
    _leave(code)
    raise AssertionError


def leave(code: int) -> NoReturn:
    """Ends this process after its registered exit functions, without TensorFlow's shutdown; only for `tfdist train`.

    The shutdown takes a second, on a busy machine many seconds. Meanwhile other tasks would report this task as lost ("stopped
    sending heartbeats").
    """
    hooks.run_exit_functions()
    end(code)


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Runs a command and returns its exit code; after Ctrl-C or a closed pipe (`--help | head`), 128 plus the signal's number."""
    global exit_code
    try:
        exit_code = main(argv)
        if sys.stdout is not None:  # it is None if it was closed before the start
            sys.stdout.flush()
    except KeyboardInterrupt:
        logger.error(interrupt_message())
        exit_code = 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_code = 128 + signal.SIGPIPE
    return exit_code


class _Signals:
    """Dispatcher of signals: a thread reads them from a pipe and calls their handlers."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[], object]] = {}
        self.foreign_descriptor = -1  # an event loop's wakeup descriptor, which gets each signal, too
        self._write = -1

    def listen(self, number: int, handler: Callable[[], object]) -> None:
        """Registers a handler for a signal, and makes the pipe the wakeup descriptor again. Only the main thread may call it."""
        self.handlers[number] = handler
        if self._write < 0:
            read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            hooks.in_child(_restore_default_in_child)
            threading.Thread(target=self._read, args=(read,), name="tfdist-signals-pipe", daemon=True).start()
        descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if descriptor != self._write:
            self.foreign_descriptor = descriptor

    def _read(self, pipe: int) -> None:
        while received := os.read(pipe, 1):
            if self.foreign_descriptor >= 0:
                try:
                    os.write(self.foreign_descriptor, received)
                except OSError:  # the event loop has ended
                    pass
            self.handlers.get(received[0], _ignore)()


_signals = _Signals()


class Preemption:
    """Handler of SIGTERM, by which clusters announce that a task must end.

    Outside of a training the first SIGTERM ends the process at once, with exit code 75. During a training it sets `requested`, and the
    process ends with that code at 90 % of the grace period, if it still runs. A second SIGTERM, a second or more later, ends it at once.

    Args:
        grace_seconds: Seconds that the process may take to end.

    Attributes:
        requested: Whether SIGTERM was received.
        training: Whether a training checks `requested` between its steps.
        on_exit: Called before this class ends the process with exit code 75.
    """

    _foreign_handler: Any = None  # the replaced handler; on the class, because it belongs to the process

    def __init__(self, grace_seconds: float = GRACE_SECONDS):
        self.grace_seconds = grace_seconds
        self.requested = False
        self.training = False
        self.on_exit: Callable[[], object] = lambda: None
        self._first = 0.0

    def listen(self) -> None:
        """Takes over SIGTERM, again if other code has replaced the handler since. Does nothing outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        _signals.listen(signal.SIGTERM, self._notice)
        # The handler itself does nothing, because the thread reads the signal from the pipe.
        handler = signal.signal(signal.SIGTERM, _ignore)
        if handler is not _ignore:
            Preemption._foreign_handler = handler

    def give_back(self) -> None:
        """Restores the SIGTERM handler, or the event loop's wakeup descriptor, that `listen` has replaced."""
        if threading.current_thread() is not threading.main_thread() or signal.SIGTERM not in _signals.handlers:
            return
        handler = Preemption._foreign_handler
        foreign = callable(handler) and handler is not end_at_once
        if foreign or _signals.foreign_descriptor >= 0:
            signal.set_wakeup_fd(_signals.foreign_descriptor)
            signal.signal(signal.SIGTERM, handler if foreign else signal.SIG_DFL)

    def _notice(self) -> None:
        now = time.monotonic()
        # The supervisor passes the signal on, which the task may have received itself: only a later one is a second request.
        if self.requested:
            if now - self._first >= _ONE_SIGNAL:
                end(128 + signal.SIGTERM, flush=False)
            return
        self.requested = True
        self._first = now
        if not self.training:
            self._end()
        # The training may be in a step or a compilation for longer than the grace period.
        _after(_SHARE * self.grace_seconds, self._end_unsaved)

    def _end_unsaved(self) -> None:
        _briefly(self._tell_unsaved if self.training else self._tell_late)
        self._end()

    def _tell_unsaved(self) -> None:
        logger.error(
            f"received SIGTERM, and no backup was completed within {_SHARE * self.grace_seconds:g} s: steps after the last backup are "
            f"lost{advice()}"
        )

    def _tell_late(self) -> None:
        # Without this line, a process that has caught the training's SystemExit would vanish in silence.
        logger.error(
            f"this process received SIGTERM {_SHARE * self.grace_seconds:g} s ago, its training has ended, and it still runs: ending it. If its "
            f"work takes longer, raise BackupAndRestore(grace_seconds={self.grace_seconds:g})."
        )

    def _end(self) -> None:
        global exit_code
        exit_code = PREEMPTED
        try:
            self.on_exit()
        finally:
            end(PREEMPTED, flush=False)


def end_at_once(*_: object) -> None:
    """Ends the process with exit code 75: the SIGTERM handler until a `Preemption` exists."""
    end(PREEMPTED, flush=False)


def _preemption_listens() -> bool:
    return signal.getsignal(signal.SIGTERM) is _ignore


def _ignore(*_: object) -> None:
    pass


def _after(seconds: float, call: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()


def _restore_default_in_child() -> None:
    """Restores SIGTERM's default in a forked process, which shares the pipe but has no reading thread; it may call `listen` again.

    A process of `multiprocessing.Pool` is ended by SIGTERM, and TensorFlow's handler, of which Python does not know, would only record it.
    """
    global _signals
    _signals = _Signals()
    # The child must not write to the pipe, from which the parent's thread reads.
    signal.set_wakeup_fd(-1)
    if _preemption_listens() or signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def after_imports() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again; for commands."""
    global _is_command
    _is_command = True
    interrupts.raise_again()


def limit_interrupts() -> None:
    """Limits the life of a command's process after Ctrl-C to 2 s; a second Ctrl-C ends it at once. Does nothing in other processes."""
    if not _is_command or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return

    def notice() -> None:
        _signals.handlers[signal.SIGINT] = _end_interrupted
        _after(_ENDING_SECONDS, _end_interrupted)

    _signals.listen(signal.SIGINT, notice)


def interrupt_message() -> str:
    """Returns the message after Ctrl-C, with the step from which training can continue."""
    return interrupts.MESSAGE + advice()


def _end_interrupted() -> None:
    _briefly(lambda: logger.error(interrupt_message()))
    end(128 + signal.SIGINT, flush=False)


def _briefly(log: Callable[[], object]) -> None:
    # In a separate thread, because a terminal that nobody reads must not block the end.
    thread = threading.Thread(target=log, daemon=True)
    thread.start()
    thread.join(0.5)


@contextlib.contextmanager
def signals_end_process() -> Iterator[None]:
    """Makes SIGINT and SIGTERM end the process at once within the context, in which TensorFlow connects. A `Preemption` that listens gives exit code 75.

    While TensorFlow connects, Python does not call handlers of the main thread. Before TensorFlow waits for other tasks it installs a
    SIGTERM handler that only records the signal. That handler is restored afterwards.
    """
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        if _preemption_listens():  # its thread reads SIGTERM, and needs no handler
            del handlers[signal.SIGTERM]
        handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    hooks.in_child(_restore_default_in_child)
    keep = _action()
    over = threading.Event()
    taken: list[int | None] = []

    def take_back() -> None:
        while not over.wait(_TAKE_BACK_EVERY):
            if _action() != keep:
                taken.append(set_action(keep))

    thread = threading.Thread(target=take_back, daemon=True, name="tfdist-signals")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if taken and not _preemption_listens():
            set_action(taken[-1])


# Unlike `signal.signal`, these functions work in any thread, and see the handler that TensorFlow has set. None stands for SIG_DFL.


def _action() -> int | None:
    """Returns the address of the C function that handles SIGTERM."""
    get = ctypes.pythonapi.PyOS_getsig
    get.argtypes = [ctypes.c_int]
    get.restype = ctypes.c_void_p
    address: int | None = get(signal.SIGTERM)
    return address


def set_action(address: int | None) -> int | None:
    """Sets the C function that handles SIGTERM, and returns the previous one."""
    put = ctypes.pythonapi.PyOS_setsig
    put.argtypes = [ctypes.c_int, ctypes.c_void_p]
    put.restype = ctypes.c_void_p
    before: int | None = put(signal.SIGTERM, address)
    return before


def run_to_the_end(train: Callable[[], object]) -> int:
    """Runs a training in this process, and keeps user code from ending it with exit code 0 before it has finished.

    `sys.exit(0)` in a callback, a task, a model or its data, or `os._exit(0)`, would end `tfdist train` as if it had trained.
    Returns 0 once `train` has returned; if user code ends the process earlier, its exit code, or 1 instead of 0.

    Raises:
        SystemExit: The package itself ends the process, as after SIGTERM.
    """
    process = os.getpid()

    def leave_checked(code: int) -> None:
        if os.getpid() == process:  # forked children, such as multiprocessing's, end with `os._exit`
            code = _unfinished(traceback.extract_stack()[-2], "os._exit", code)
        _leave(code)

    os._exit = leave_checked  # type: ignore[assignment]
    try:
        train()
    except SystemExit as e:
        caller = [frame for frame in traceback.extract_tb(e.__traceback__) if _QUITTERS not in frame.filename][-1]
        if caller.filename.startswith(PACKAGE):
            raise
        return _unfinished(caller, "sys.exit", e.code)
    finally:
        os._exit = _leave
    return 0


def _unfinished(caller: traceback.FrameSummary, function: str, code: object) -> int:
    """Logs the line that has ended the training; returns the process's exit code."""
    global exit_code
    argument = "" if code is None else repr(code)
    logger.error(
        f"{caller.filename}:{caller.lineno} called {function}({argument}) before the training has "
        "finished. To end a training early, set model.stop_training = True in a callback; for an error, raise one."
    )
    sys.stdout.flush()
    sys.stderr.flush()
    exit_code = code if isinstance(code, int) and code else 1
    note_end(exit_code)
    return exit_code
