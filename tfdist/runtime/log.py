"""Lines for the user through Python's logging: the logger "tfdist" and its filter, which prints. No TensorFlow here.

Levels: info for progress, warning for a possible problem, error for a reason to end the process.
"""

from __future__ import annotations

import logging
import os
import sys

from tfdist.errors import printable_lines

logger = logging.getLogger("tfdist")
# Values of `extra`: print to stderr although it is not an error; print without the prefix "tfdist: ".
TO_STDERR = {"to_stderr": True}
BARE = {"bare": True}

_is_command = False
last_error = ""  # the last message of an error: a process that ends then has ended because of it


def print_always() -> None:
    """Prints lines even if the root logger has handlers; for commands."""
    global _is_command
    _is_command = True
    logger.propagate = False


def is_terminal() -> bool:
    """Returns whether a person reads standard output in a terminal. mpirun gives its tasks a pseudo-terminal."""
    return bool(sys.stdout and sys.stdout.isatty()) and "OMPI_COMM_WORLD_SIZE" not in os.environ


def _print(record: logging.LogRecord) -> bool:
    """Prints a line unless the user's handlers print it, errors to stderr; returns whether to pass it to handlers.

    It is a filter, because a handler could not keep the line from the root logger's handlers.
    """
    global last_error
    if record.levelno >= logging.ERROR:
        last_error = record.getMessage()
    root = logging.root.handlers if logger.propagate else []
    is_handled = bool(logger.handlers) or not all(_is_default(handler, record) for handler in root)
    if _is_command or not is_handled:
        to_stderr = record.levelno >= logging.ERROR or hasattr(record, "to_stderr")
        prefix = "" if hasattr(record, "bare") else "tfdist: "
        print(
            f"{prefix}{printable_lines(record.getMessage())}", file=sys.stderr if to_stderr else sys.stdout, flush=True
        )
    return is_handled


def _is_default(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Returns whether a root handler is the default one of `basicConfig()`, which absl, and through it Keras, installs."""
    return (
        type(handler) is logging.StreamHandler
        and handler.stream in (sys.stderr, sys.__stderr__)
        and logging.root.level == logging.WARNING
        and handler.format(record) == logging.Formatter(logging.BASIC_FORMAT).format(record)
    )


logger.addFilter(_print)
if logger.level == logging.NOTSET:  # the root logger's default is WARNING, which would hide progress
    logger.setLevel(logging.INFO)
