"""The list of calls at the end of this process, and of those in a forked child. No TensorFlow here; no other module uses `atexit`.

The calls run when Python exits, and in `process_end.leave`; not after a fatal signal or `process_end.end`. A forked child starts
without calls at its end: those of its parent would tell other tasks that the parent has ended, and remove the parent's files.
"""

from __future__ import annotations

import atexit
import enum
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any


class Stage(enum.IntEnum):
    """A stage of the end, in this order. Within a stage the last registered call runs first."""

    # The later stages wait for other tasks: until then the supervisor would take this task for one that trains.
    REPORT = 1
    # A wait for tasks that end is no hang.
    WATCH = 2
    # Tasks that have not finished may still read from this one, so no connection is closed before they have been waited for or notified.
    PEERS = 3
    # The next stage may end the process.
    FILES = 4
    # Ends the process at once if TensorFlow's shutdown would wait for a task without limit.
    CONNECTIONS = 5


_at_end: dict[Stage, list[tuple[Callable[..., object], tuple[Any, ...]]]] = {stage: [] for stage in Stage}
_in_child: list[Callable[[], object]] = []
_forking = threading.local()  # the blocked signals of a thread that forks


def at_end(stage: Stage, function: Callable[..., object], *arguments: Any) -> None:
    """Registers a call for the end of this process; a second registration of the same call has no effect.

    The function limits its own waits. An error in it is printed, and the next call runs.
    """
    call = function, arguments
    if call not in _at_end[stage]:
        _at_end[stage].append(call)
    # Python runs the last registered function first: the list must run before the exit functions of libraries imported until now.
    atexit.unregister(_run_at_end)
    atexit.register(_run_at_end)


def in_child(function: Callable[[], object]) -> None:
    """Registers a function that each forked child calls first; its order among the others must not matter."""
    if function not in _in_child:
        _in_child.append(function)


def run_exit_functions() -> None:
    """Runs the calls at the end now, and the exit functions of libraries."""
    atexit._run_exitfuncs()


def _run_at_end() -> None:
    for calls in _at_end.values():
        while calls:  # a call may register another
            function, arguments = calls.pop()
            _run(function, *arguments)


def _run_in_child() -> None:
    for calls in _at_end.values():
        calls.clear()
    for function in _in_child:
        _run(function)
    _deliver_sigterm()


def _hold_sigterm() -> None:
    # Python in a child forgets a SIGTERM that comes before its first instruction, and this package's handler ignores one that comes before
    # `_run_in_child`. `multiprocessing.Pool.terminate` may send one so early, and then waits for the child without limit.
    _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _deliver_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.blocked)


def _run(function: Callable[..., object], *arguments: Any) -> None:
    try:
        function(*arguments)
    except BaseException:  # also SystemExit and KeyboardInterrupt, after which Python, too, runs the next exit function
        traceback.print_exc()


os.register_at_fork(before=_hold_sigterm, after_in_parent=_deliver_sigterm, after_in_child=_run_in_child)
