"""Ctrl-C in the first moments of a command, while Python imports. Few imports here, because nothing handles Ctrl-C before them."""

from __future__ import annotations

import os
import signal

MESSAGE = "ended by Ctrl-C (SIGINT)"


def end_at_once() -> None:
    """Makes Ctrl-C end this process at once, with one line and exit code 130; for commands, until `process_end.after_imports`.

    A KeyboardInterrupt would print the traceback of an import, and Python drops it within a callback of the import system.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored under nohup
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, after `end_at_once`."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    try:
        os.write(2, f"tfdist: {MESSAGE}\n".encode())
    except OSError:  # standard error is closed
        pass
    os._exit(128 + signal.SIGINT)
